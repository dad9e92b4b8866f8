"""generate that runs ahead says what it says when it waits; a CPU stands for a GPU that the host would wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, StaticCache, StoppingCriteria
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

import samebits
from samebits.integrations.transformers import ahead
from samebits.integrations.transformers.ahead import RunAhead
from samebits.integrations.transformers.graphs import decoding_steps

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
PROMPT = 12  # tokens
LONGEST = 30  # new tokens


def made(kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **TINY, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


class EndsAt(StoppingCriteria):
    """Each sequence has a last token of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)
        self.eos_token_id = 0  # or generate would not put padding behind it

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= PROMPT + self.lengths.to(input_ids.device)


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.is_closed = False

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.is_closed = True


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each generate that ran ahead had to undo."""
    found: list[int] = []

    def finish(self: Any) -> int:
        found.append(done(self))
        return found[-1]

    done = RunAhead.finish
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(RunAhead, "finish", finish)
    monkeypatch.setattr(ahead, "_WAITS", ("cpu",))
    monkeypatch.setattr(torch, "Event", lambda **_: event)
    return found


def written(model: Any, lengths: list[int], **options: Any) -> Any:
    """With a static cache, which rounds as it does in steps, unless that would compile the model."""
    if model.device.type == "cpu" and "past_key_values" not in options:
        options["cache_implementation"] = "static"
    torch.manual_seed(1)
    prompt = torch.arange(len(lengths) * PROMPT, device=model.device).reshape(-1, PROMPT) % 127 + 1
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LONGEST, stopping_criteria=[EndsAt(lengths)],
        **options,
    )  # fmt: skip


def in_steps(model: Any, lengths: list[int], **options: Any) -> Any:
    options["compile_config"] = CompileConfig()
    options["compile_config"]._compile_all_devices = True  # a CPU too
    with decoding_steps(model, lambda run: run):
        return written(model, lengths, **options)


LENGTHS = ([9], [5, 20], [LONGEST], [1], [2, 1])
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma3_text": WINDOWS, "lfm2": {"layer_types": ["conv", "full_attention"]}
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [*(("llama", lengths) for lengths in LENGTHS), ("gemma3_text", [5, 20]), ("lfm2", [6])],
    ids=str,
)
@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_tokens_and_random_numbers(kind: str, lengths: list[int], sampled: bool, reports: list[int]) -> None:
    model = made(kind, **KINDS[kind])
    expected, after = written(model, lengths, do_sample=sampled), torch.rand(3)
    assert not reports
    found = in_steps(model, lengths, do_sample=sampled)
    assert torch.equal(found, expected)
    assert torch.equal(torch.rand(3), after)
    assert reports == [int(max(lengths) < LONGEST)]
    assert torch.equal(in_steps(model, lengths, do_sample=sampled), expected)  # with generate's own cache again


@pytest.mark.parametrize("length", [7, LONGEST])
def test_what_is_returned(length: int, reports: list[int]) -> None:
    """Scores and logits of as many tokens; a cache that goes on where it was."""
    model = made()
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    expected, found = (way(model, [length], **options) for way in (written, in_steps))
    assert reports == [int(length < LONGEST)]
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("logits", "scores"):
        assert torch.equal(torch.stack(found[name]), torch.stack(expected[name]))
    assert int(found.past_key_values.get_seq_length()) == int(expected.past_key_values.get_seq_length())


def test_a_cache_of_ones_own_goes_on(reports: list[int]) -> None:
    model = made()
    texts = []
    for way in (written, in_steps):
        cache = StaticCache(config=model.config, max_cache_len=128)
        text = way(model, [7], past_key_values=cache)
        assert int(cache.get_seq_length()) == PROMPT + 6
        more = torch.cat((text, text[:, :3] + 1), dim=1)
        texts.append(model.generate(more, attention_mask=torch.ones_like(more), max_new_tokens=5, do_sample=False,
                                    past_key_values=cache))  # fmt: skip
    assert torch.equal(*texts)
    assert reports == [1]


def test_a_window_of_ones_own_waits(reports: list[int]) -> None:
    """What it has forgotten cannot come back."""
    model = made("gemma3_text", **WINDOWS)
    for options in ({"return_dict_in_generate": True}, {"past_key_values": StaticCache(model.config, 64)}):
        in_steps(model, [7], **options)
    assert not reports


@pytest.mark.parametrize("length", [6, LONGEST])
def test_tokens_are_streamed_once(length: int, reports: list[int]) -> None:
    model, streamers = made(), [Streamer(), Streamer()]
    written(model, [length], streamer=streamers[0])
    in_steps(model, [length], streamer=streamers[1])
    assert streamers[0].seen == streamers[1].seen
    assert all(streamer.is_closed for streamer in streamers)
    assert len(reports) == 1


def test_only_where_it_was_asked(reports: list[int]) -> None:
    """Not by other calls of generate inside, nor afterwards, nor by one before that did not look, as beam search does
    not; and transformers is left as it was."""
    model, before = made(), utils.DeferredStopCheck
    prompt = torch.arange(PROMPT)[None] + 1
    ahead.ask()
    with decoding_steps(model, lambda run: run):
        with decoding_steps(made(), lambda run: run):
            pass
        assert utils.DeferredStopCheck is RunAhead
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    assert utils.DeferredStopCheck is before
    assert not reports


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("lengths", [[9], [5, 20], [LONGEST]], ids=str)
def test_the_same_on_a_gpu(lengths: list[int], sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and replayed, and not once has the host waited for the GPU to say what it has computed."""
    model = made().cuda()
    waited: list[int] = []
    ask = utils.StopCheck.__call__

    def waits(self: Any, unfinished: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        waited.append(length)
        return ask(self, unfinished, tokens, length)

    monkeypatch.setattr(utils.StopCheck, "__call__", waits)
    found = []
    for devices in ((), ("cuda",)):
        monkeypatch.setattr(ahead, "_WAITS", devices)
        with samebits.cuda_graphs(model):
            tokens = written(model, lengths, do_sample=sampled, cache_implementation="static")
        found.append((tokens.tolist(), torch.rand(3, device="cuda").tolist()))
        assert len(waited) == max(lengths)  # of the first one
    assert found[0] == found[1]
