"""samebits.PackedCache holds and gives what transformers' DynamicCache does, bit for bit."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import samebits
from samebits.errors import InputError
from samebits.format.geometry import Code
from samebits.integrations.transformers.cache import PackedLayer
from samebits.nn import packed_states
from samebits.nn.packed_states import LATEST_TOKENS, default_block_tokens

HEADS, CHANNELS = 3, 8
BLOCK = 8  # tokens
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def states(sequences: int, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Keys and values as a model gives them: views of tensors in another order."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, sequences, tokens, HEADS, CHANNELS)
    return tuple(torch.randn(shape, generator=generator).to(dtype).transpose(2, 3))


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int16)


def assert_same(found: Any, expected: Any) -> None:
    """Layers of both kinds of cache."""
    assert found.get_seq_length() == expected.get_seq_length()
    for name in ("keys", "values"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert mine.is_contiguous()
        assert torch.equal(words(mine), words(theirs))


def layer_of(tokens: int, sequences: int = 2) -> tuple[PackedLayer, Any]:
    """A layer, and transformers' own."""
    packed, plain = samebits.PackedCache(block_tokens=BLOCK), DynamicCache()
    for cache in (packed, plain):
        cache.update(*states(sequences, tokens, 0), 0)
    return packed.layers[0], plain.layers[0]


def blocks_of(layer: PackedLayer) -> list[Any]:
    return layer._keys._blocks


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.just("update"), st.integers(1, 40))
    | st.tuples(st.just("update"), st.just(1))
    | st.tuples(
        st.sampled_from(["crop", "reorder", "repeat", "select", "deepcopy", "pickle", "reset"]), st.integers(0, 50)
    ),
    max_size=25,
)


def take(step: Step, number: int, caches: dict[str, Any], sequences: int) -> int:
    """A step of both; how many sequences there are then."""
    what, size = step
    held = caches["plain"].get_seq_length()
    if what == "update":
        pair = states(sequences, size, number)
        mine, theirs = caches["packed"].update(*pair, 0), caches["plain"].update(*pair, 0)
        for found, expected in zip(mine, theirs, strict=True):
            assert torch.equal(words(found), words(expected))
            assert found.stride() == expected.stride()
    elif what == "reset" and size < 5:
        caches["packed"].reset()
        caches["plain"] = DynamicCache()
    elif what in ("deepcopy", "pickle"):
        made = copy.deepcopy(caches["packed"]) if what == "deepcopy" else pickle.loads(pickle.dumps(caches["packed"]))
        caches["packed"].update(*states(sequences, BLOCK + LATEST_TOKENS, 99), 0)  # which the copy does not know of
        caches["packed"] = made
    elif held and what == "crop":
        for cache in caches.values():
            cache.crop(-min(size, held - 1))
    elif held and what == "reorder":
        order = torch.randint(sequences, (sequences,), generator=torch.Generator().manual_seed(size))
        for cache in caches.values():
            cache.reorder_cache(order)
    elif held and what == "repeat" and sequences < 8:
        for cache in caches.values():
            cache.batch_repeat_interleave(2)
        return 2 * sequences
    elif held and what == "select" and sequences > 1:
        indices = torch.arange(sequences)[size % 2 :: 2]
        for cache in caches.values():
            cache.batch_select_indices(indices)
        return len(indices)
    return sequences


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), STEPS)
def test_whatever_is_done(sequences: int, steps: list[Step]) -> None:
    caches: dict[str, Any] = {"packed": samebits.PackedCache(block_tokens=BLOCK), "plain": DynamicCache()}
    for number, step in enumerate(steps):
        sequences = take(step, number, caches, sequences)
        if caches["plain"].get_seq_length():
            assert_same(caches["packed"].layers[0], caches["plain"].layers[0])
        else:
            assert caches["packed"].get_seq_length() == 0


def test_all_but_the_latest_are_packed() -> None:
    layer, plain = layer_of(5 * BLOCK + LATEST_TOKENS + 3)
    assert [block.tokens for block in blocks_of(layer)] == [5 * BLOCK]
    assert layer._keys.latest is not None
    assert layer._keys.latest.shape[2] == LATEST_TOKENS + 3
    for number in range(BLOCK):
        pair = states(2, 1, number)
        layer.update(*pair), plain.update(*pair)
    assert [block.tokens for block in blocks_of(layer)] == [5 * BLOCK, BLOCK]
    assert_same(layer, plain)
    for _ in range(3):  # as assisted generation does, between steps that take in no more
        layer.crop(-5), plain.crop(-5)
        pair = states(2, 5, 9)
        layer.update(*pair), plain.update(*pair)
    assert len(blocks_of(layer)) == 2
    assert_same(layer, plain)


def test_two_thirds_of_the_bytes() -> None:
    """Blocks as they are by default: the quad code, and rows of a head's 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn(1, 8, 40960 + LATEST_TOKENS, 64, generator=generator).bfloat16() for _ in range(2)]
    cache, plain = samebits.PackedCache(), DynamicCache()
    for each in (cache, plain):
        each.update(*pair, 0)
        each.update(*(state[:, :, :9] for state in pair), 0)
    [block] = blocks_of(cache.layers[0])
    assert block.tokens > 38000
    assert block.packed.shape == (8 * block.tokens // 64, 64 * 64)
    assert block.packed.code is Code.QUAD
    assert_same(cache.layers[0], plain.layers[0])
    assert cache.nbytes < 0.71 * sum(state.nbytes for state in (plain.layers[0].keys, plain.layers[0].values))


def test_never_more_bytes() -> None:
    """Not even behind the first block, beside which there is room for another."""
    cache, plain = samebits.PackedCache(), DynamicCache()
    for step in [99] * 43 + [1] * 200 + [99] * 15:
        pair = torch.randn(2, 1, 8, step, 64).bfloat16()
        for each in (cache, plain):
            each.update(*pair, 0)
        layer = plain.layers[0]
        assert cache.nbytes <= layer.keys.nbytes + layer.values.nbytes
    assert len(blocks_of(cache.layers[0])) > 1
    assert_same(cache.layers[0], plain.layers[0])


@pytest.mark.parametrize(
    ("words", "tokens"), [(1024, 1024), (8192, 128), (65536, 64), (64, 16384), (480, 4096), (0, 1 << 20)]
)
def test_blocks_are_large(words: int, tokens: int) -> None:
    assert default_block_tokens(words) == tokens


def test_a_long_prompt_makes_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_states, "MOST_WORDS", 4 * 2 * HEADS * CHANNELS * BLOCK)
    layer, plain = layer_of(10 * BLOCK + LATEST_TOKENS)
    assert [block.tokens // BLOCK for block in blocks_of(layer)] == [4, 4, 2]
    assert_same(layer, plain)


def test_layers_pack_at_different_steps() -> None:
    """And every token but the latest is packed in whole rows."""
    heads, channels, unit, layers = 8, 16, 8192, 8
    cache, plain = samebits.PackedCache(), DynamicCache()
    ends: set[int] = set()
    for number in range(layers):
        keys, values = torch.randn(2, 1, heads, 3 * unit, channels).bfloat16()
        for each in (cache, plain):
            each.update(keys, values, number)
        assert_same(cache.layers[number], plain.layers[number])
        for states in (cache.layers[number]._keys, cache.layers[number]._values):
            assert states.latest is not None
            assert LATEST_TOKENS <= states.latest.shape[2] < unit + LATEST_TOKENS
            [block] = states._blocks
            assert unit <= block.tokens < 3 * unit
            assert block.packed.shape[0] == heads * block.tokens // 64
            ends.add(block.tokens % unit)
    assert len(ends) == 2 * layers
    longest = sorted(ends)
    assert all(later - earlier < unit / layers for earlier, later in pairwise(longest))


@pytest.mark.parametrize(
    ("sequences", "heads", "channels"), [(1, 8, 128), (3, 4, 64), (1, 5, 96), (1, 1, 64), (2, 2, 256), (40, 8, 64)]
)
def test_one_launch_can_decode_blocks(sequences: int, heads: int, channels: int) -> None:
    """Whatever the number of heads they have whole rows and row groups, of which each piece knows its place."""
    unit = default_block_tokens(sequences * heads * channels)
    cache, plain = samebits.PackedCache(), DynamicCache()
    for tokens in (2 * unit + LATEST_TOKENS, unit, 5):
        pair = torch.randn(2, sequences, heads, tokens, channels).bfloat16()
        for each in (cache, plain):
            each.update(*pair, 0)
    expected = plain.layers[0].keys.view(sequences * heads, -1)
    output, start = torch.zeros_like(expected), 0
    assert len(blocks_of(cache.layers[0])) == 2
    for block in blocks_of(cache.layers[0]):
        piece = block.piece(start)
        assert piece is not None
        assert piece.rows * len(output) == block.packed.header.geometry.rows
        output[:, piece.start : piece.start + piece.words] = samebits.decode(piece.packed).view(len(output), -1)
        start += block.tokens
    assert torch.equal(words(output[:, : start * channels]), words(expected[:, : start * channels]))


def test_other_dtypes_stay_as_they_are() -> None:
    cache = samebits.PackedCache(block_tokens=BLOCK)
    for dtype in (torch.float32, torch.float16):
        cache.reset()
        keys, values = states(1, 100, 0, dtype)
        found = cache.update(keys, values, 0)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        assert not blocks_of(cache.layers[0])


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, HEADS, 1, CHANNELS), (2, 1, 1, CHANNELS), (2, HEADS, 1, 1), (2, HEADS, 1)], ids=str
)
def test_other_shapes_are_refused(shape: tuple[int, ...], room: bool) -> None:
    """As by DynamicCache, which broadcasts nothing; what was there stays."""
    layer, plain = layer_of(60)
    if room:
        pair = states(2, 1, 1)
        layer.update(*pair), plain.update(*pair)
    for each in (layer, plain):
        with pytest.raises((RuntimeError, IndexError)):
            each.update(torch.ones(shape, dtype=torch.bfloat16), torch.ones(shape, dtype=torch.bfloat16))
    assert_same(layer, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_another_dtype_behind_packed_states(dtype: torch.dtype) -> None:
    """Nothing is rounded: the layer has both dtypes' common one from there on, as DynamicCache's."""
    layer, plain = layer_of(60)
    for number, kind in enumerate((torch.bfloat16, dtype, torch.bfloat16)):
        pair = states(2, 50, number, kind)
        for found, expected in zip(layer.update(*pair), plain.update(*pair), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(words(found), words(expected))
    assert layer.keys.dtype == torch.promote_types(torch.bfloat16, dtype)
    assert_same(layer, plain)


def test_gradients() -> None:
    """Of states that came before, and packed ones beside them."""
    first, second = states(1, 50, 0), states(1, 50, 1)
    found = []
    for cache in (samebits.PackedCache(block_tokens=BLOCK), DynamicCache()):
        cache.update(*first, 0)
        leaves = [state.detach().clone().requires_grad_() for state in second]
        keys, values = cache.update(*leaves, 0)
        (keys.float().square().sum() + values.float().sum()).backward()
        found.append([words(leaf.grad) for leaf in leaves])
        cache.update(*states(1, 1, 2), 0)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_made_in_inference_mode() -> None:
    cache, plain = samebits.PackedCache(block_tokens=BLOCK), DynamicCache()
    for each in (cache, plain):
        with torch.inference_mode():
            each.update(*states(1, 50, 0), 0)
        with torch.no_grad():
            each.update(*states(1, 50, 1), 0)
    assert_same(cache.layers[0], plain.layers[0])


def test_reset_forgets() -> None:
    layer, _ = layer_of(60)
    layer.reset()
    assert (layer.get_seq_length(), layer.keys, layer.values, layer.nbytes) == (0, None, None, 0)
    layer.reorder_cache(torch.tensor([0]))
    layer.crop(-3)
    assert layer.get_seq_length() == 0


def test_states_can_be_replaced() -> None:
    """As DynamicCache's can, by whoever does."""
    layer, plain = layer_of(60)
    for each in (layer, plain):
        each.keys, each.values = each.keys[:, :, 20:], each.values[:, :, 20:]
    pair = states(2, 3, 5)
    layer.update(*pair), plain.update(*pair)
    assert_same(layer, plain)


@pytest.mark.parametrize("tokens", [0, -8, 2.5, "many"])
def test_blocks_of_no_tokens(tokens: Any) -> None:
    with pytest.raises(InputError, match=f"blocks of {tokens!r} tokens"):
        samebits.PackedCache(block_tokens=tokens)


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **TINY | FAMILIES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def written(model: Any, cache: Any, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    torch.manual_seed(1)
    prompt = torch.arange(60).reshape(2, 30) + 1
    prompt = prompt[:1] if "prompt_lookup_num_tokens" in options else prompt
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, past_key_values=cache, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return output.sequences.tolist(), torch.stack(output.logits).view(torch.int32)


def assert_generates_the_same(model: Any, packed_layers: int, **options: Any) -> None:
    (tokens, logits) = written(model, DynamicCache(config=model.config), **options)
    cache = samebits.PackedCache(model.config, block_tokens=BLOCK)
    found, found_logits = written(model, cache, **options)
    assert found == tokens
    assert torch.equal(found_logits, logits)
    packed = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
    assert len(packed) == packed_layers
    assert all(len(blocks_of(layer)) > 1 for layer in packed)


@pytest.mark.parametrize("kind", FAMILIES)
def test_generates_the_same(kind: str) -> None:
    """Layers with a window or a state are left alone."""
    assert_generates_the_same(made(kind), 1 if kind in ("gemma3_text", "lfm2") else 2)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 3},
        {"num_beams": 4, "do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 4},
    ],
    ids=str,
)
def test_generates_the_same_in_other_ways(options: dict[str, Any]) -> None:
    assert_generates_the_same(made("llama"), 2, **options)


def test_beside_a_compressed_model() -> None:
    model = made("llama")
    tokens, logits = written(model, DynamicCache(config=model.config))
    samebits.compress(model, min_weights=1024)
    found, found_logits = written(model, samebits.PackedCache(model.config, block_tokens=BLOCK))
    assert found == tokens
    assert torch.equal(found_logits, logits)


def test_in_a_compiled_function() -> None:
    """Dynamo leaves the cache alone."""
    cache, plain = samebits.PackedCache(block_tokens=BLOCK), DynamicCache()

    @torch.compile(backend="eager")
    def update(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(keys, values, 0)
        return torch.cat((keys, -values), dim=-1)

    for number in range(3):
        keys, values = plain.update(*states(1, 30, number), 0)
        assert torch.equal(words(update(*states(1, 30, number))), words(torch.cat((keys, -values), dim=-1)))
    assert len(blocks_of(cache.layers[0])) > 1


class NotedStream:
    """Only notes for whom it waits."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: NotedStream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


def test_a_layer_is_brought_behind_those_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    cache = samebits.PackedCache(offloading=True)
    cache.prefetch_stream = NotedStream("prefetch", notes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NotedStream("current", notes))
    monkeypatch.setattr(DynamicCache, "prefetch", lambda _, layer: notes.append(f"layer {layer} is brought"))
    cache.prefetch(1)
    assert notes == ["current waits for prefetch", "prefetch waits for current", "layer 1 is brought"]


@pytest.mark.gpu
@pytest.mark.parametrize("offloading", [False, True])
def test_generates_the_same_on_a_gpu(offloading: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are brought from main memory are packed there, and wait for copies that take long."""
    offload = PackedLayer.offload

    def late(layer: PackedLayer) -> None:
        torch.cuda._sleep(2_000_000)  # cycles
        offload(layer)

    monkeypatch.setattr(PackedLayer, "offload", late)
    model, prompt = made("llama").cuda(), torch.arange(60, device="cuda").reshape(2, 30) + 1
    found = []
    packed = samebits.PackedCache(model.config, offloading=offloading, block_tokens=BLOCK)
    for cache in (DynamicCache(config=model.config), packed):
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, past_key_values=cache, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        found.append(torch.stack(output.logits).view(torch.int32))
    assert torch.equal(*found)
    assert len(blocks_of(packed.layers[0])) > 1


@pytest.mark.gpu
def test_blocks_lie_apart_from_what_comes_and_goes() -> None:
    """One behind the other, also those made in inference mode; what nobody needs is free."""
    layers = 4
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    cache, plain = samebits.PackedCache(), DynamicCache()
    for number in range(24):
        with torch.inference_mode(number % 3 == 1):
            for layer in range(layers):
                pair = torch.randn(2, 1, 8, 1500 if number else 9000, 64, device="cuda").bfloat16()
                for each in (cache, plain):
                    each.update(*pair, layer)
    for layer in range(layers):
        assert_same(cache.layers[layer], plain.layers[layer])
    blocks = [block for layer in cache.layers for block in blocks_of(layer)]
    assert len(blocks) > 40
    assert len({block.packed.data.untyped_storage().data_ptr() for block in blocks}) < len(blocks) / 2
    del pair, plain, each, blocks
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - reserved < 2 * cache.nbytes
    copied = copy.deepcopy(cache)
    assert_same(copied.layers[0], cache.layers[0])
    del cache, copied
    assert torch.cuda.memory_allocated() == before
