"""PEFT's adapters on a compressed base: trained, saved, loaded and run with the bits of the BF16 base."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import (
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

import samebits
from samebits.errors import InputError
from samebits.nn.packed_module import PackedModule
from tests.df11.checkpoints import VECTORS
from tests.nn.modules import watch_decoding

MIN_WEIGHTS = 1024
TOKENS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
EAGER = {"attn_implementation": "eager"}  # on a GPU the others' backward passes may not give the same twice
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "DoRA": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "all layers, dropout": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "DoRA on the embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
}


SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **EAGER,
}


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def tied() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).to(torch.bfloat16)


def pair(base: LlamaForCausalLM, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """The BF16 model, and a compressed copy of it with every matrix packed."""
    dense, packed = copy.deepcopy(base).to(device), copy.deepcopy(base).to(device)
    names = samebits.compress(packed, min_weights=MIN_WEIGHTS).packed
    assert len(names) == 2 + 2 * 7
    return dense, packed


def adapted(model: nn.Module, seed: int = 2, **options: Any) -> PeftModel:
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, **options))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(model: PeftModel, steps: int = 2) -> None:
    tokens = TOKENS.to(model.device)
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    torch.manual_seed(3)  # for dropout
    for _ in range(steps):
        optimizer.zero_grad()
        model.train()(tokens, labels=tokens).loss.backward()
        optimizer.step()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS.to(model.device)).logits


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert torch.equal(left.detach().contiguous().view(torch.uint8), right.detach().contiguous().view(torch.uint8))


def assert_trained_alike(dense: nn.Module, packed: nn.Module) -> None:
    expected, found = trainable(dense), trainable(packed)
    assert expected.keys() == found.keys()
    for key, parameter in found.items():
        assert_same(parameter.grad, expected[key].grad)
        assert_same(parameter, expected[key])
    assert_same(logits(packed), logits(dense))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_training(name: str, device: str, base: LlamaForCausalLM, tmp_path: Path) -> None:
    dense, packed = (adapted(model, **OPTIONS[name]) for model in pair(base, device))
    for model in (dense, packed):
        train(model)
    assert_trained_alike(dense, packed)
    with packed.disable_adapter(), dense.disable_adapter():
        assert_same(logits(packed), logits(dense))

    packed.save_pretrained(tmp_path)
    for model in pair(base, device):
        loaded = PeftModel.from_pretrained(model, tmp_path)
        assert_same(logits(loaded), logits(dense))


TIED: dict[str, Callable[[], Any]] = {
    "trained tokens": lambda: LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "trained tokens of both": lambda: LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [3, 5]}
    ),
    "nothing but trained tokens": lambda: TrainableTokensConfig(token_indices=[3, 5]),
    "a kept tie of copies": lambda: LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "a kept tie of adapters": lambda: LoraConfig(target_modules=["lm_head", "q_proj"], ensure_weight_tying=True),
}


def kinds(model: nn.Module) -> list[tuple[str, str]]:
    """Names and classes of all modules, the packed ones' as if they were plain."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name, type(module).__name__.removeprefix("Packed")) for name, module in modules]


@pytest.mark.parametrize("name", TIED)
def test_ties_of_embedding_and_head(name: str, tied: LlamaForCausalLM, tmp_path: Path) -> None:
    """PEFT adapts one as it adapts the other."""
    compressed = copy.deepcopy(tied)
    samebits.compress(compressed, min_weights=MIN_WEIGHTS)
    assert compressed.lm_head.sb_packed is compressed.model.embed_tokens.sb_packed
    models = []
    for model in (copy.deepcopy(tied), copy.deepcopy(compressed)):
        torch.manual_seed(2)
        models.append(get_peft_model(model, TIED[name]()))
        train(models[-1])
        assert "named_parameters" not in vars(model)
    dense, packed = models
    assert kinds(packed) == kinds(dense)
    assert_trained_alike(dense, packed)

    packed.save_pretrained(tmp_path)
    for model in (copy.deepcopy(tied), compressed):
        assert_same(logits(PeftModel.from_pretrained(model, tmp_path)), logits(dense))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["LoRA", "DoRA"])
def test_nothing_dense_is_kept(
    name: str, checkpointing: bool, base: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the forward and the backward pass no decoded weight has memory; then they are decoded again."""
    model = adapted(pair(base)[1], **OPTIONS[name]).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    seen = watch_decoding(monkeypatch)
    loss = model(TOKENS, labels=TOKENS).loss
    gc.collect()
    count = len(seen)
    assert count >= 2 * 7
    assert not [ref for ref in seen if ref() is not None]
    loss.backward()
    assert len(seen) >= count + 2 * 7
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


MERGES = {
    "merge_adapter": lambda model: model.merge_adapter(),
    "safe merge_adapter": lambda model: model.merge_adapter(safe_merge=True),
    "merge_and_unload": lambda model: model.merge_and_unload(),
}


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("name", ["LoRA", "DoRA"])
def test_merging_is_refused(name: str, merge: str, base: LlamaForCausalLM) -> None:
    """Before anything is merged, also where the first layers are plain."""
    packed = copy.deepcopy(base)
    samebits.compress(packed, min_weights=MIN_WEIGHTS, exclude=["model.layers.0.*"])
    model = adapted(packed, init_lora_weights=False, **OPTIONS[name])
    expected = logits(model)
    with pytest.raises(InputError, match=r"layers\.1\..*: an adapter cannot be merged.*samebits\.decompress"):
        MERGES[merge](model)
    assert_same(logits(model), expected)


@pytest.mark.parametrize("head", ["tied", "trained"])
def test_merged_into_plain_layers_of_a_model_with_a_packed_embedding(head: str, tied: LlamaForCausalLM) -> None:
    """A head that was trained is no longer the embedding, and the configuration says so; else it is as before."""
    dense, packed = copy.deepcopy(tied), copy.deepcopy(tied)
    assert [*samebits.compress(packed, min_weights=MIN_WEIGHTS, include=["*embed_tokens*"]).packed]
    options = {"modules_to_save": ["lm_head"]} if head == "trained" else {}
    merged = []
    for model in (dense, packed):
        with_adapter = adapted(model, init_lora_weights=False, target_modules=["q_proj"], **options)
        merged.append(with_adapter.merge_and_unload())
        assert merged[-1].config.tie_word_embeddings == (head == "tied")
        assert "get_output_embeddings" not in vars(merged[-1])
    assert not any(hasattr(module, "lora_A") for module in merged[1].modules())
    assert isinstance(merged[1].model.embed_tokens, PackedModule)
    assert_same(logits(merged[1]), logits(merged[0]))


@pytest.mark.parametrize("merge", MERGES)
def test_merging_of_mixed_adapters_is_refused(merge: str, base: LlamaForCausalLM) -> None:
    """Before anything is merged, as with adapters of one kind."""
    packed = copy.deepcopy(base)
    samebits.compress(packed, min_weights=MIN_WEIGHTS, exclude=["model.layers.0.*"])
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(packed, config, adapter_name="first", mixed=True)
    model.add_adapter("second", LoHaConfig(r=4, target_modules=["v_proj"], init_weights=False))
    model.set_adapter(["first", "second"])
    expected = logits(model)
    with pytest.raises(InputError, match=r"layers\.1\..*: an adapter cannot be merged.*samebits\.decompress"):
        MERGES[merge](model)
    assert_same(logits(model), expected)
    attention = model.unload().model.layers[1].self_attn
    assert isinstance(attention.q_proj, PackedModule)
    assert isinstance(attention.v_proj, PackedModule)


def test_merging_and_unmerging_of_single_layers_are_refused(base: LlamaForCausalLM) -> None:
    model = adapted(pair(base)[1], init_lora_weights=False, **OPTIONS["LoRA"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with pytest.raises(InputError, match="a packed weight cannot be changed"):
        layer.merge()
    assert not layer.merged
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer.unmerge()
    samebits.decompress(layer)
    layer.merge()
    samebits.compress(layer, min_weights=MIN_WEIGHTS)
    expected = logits(model)
    with pytest.raises(InputError, match=r"cannot be unmerged from a packed weight.*samebits\.decompress"):
        layer.unmerge()
    with pytest.raises(InputError, match="cannot be unmerged"), model.disable_adapter():
        logits(model)
    assert_same(logits(model), expected)


def test_merged_after_decompressing(base: LlamaForCausalLM) -> None:
    dense, packed = (adapted(model, init_lora_weights=False, **OPTIONS["LoRA"]) for model in pair(base))
    samebits.decompress(packed)
    assert trainable(packed).keys() == trainable(dense).keys()  # the base stays frozen
    merged, expected = packed.merge_and_unload(), dense.merge_and_unload()
    for key, value in expected.state_dict().items():
        assert_same(merged.state_dict()[key], value)
    samebits.compress(merged, min_weights=MIN_WEIGHTS)
    assert_same(logits(merged), logits(expected))


@pytest.mark.parametrize("part", ["adapted", "base_model"])
def test_decompressed_around_what_was_compressed_while_loading(
    part: str, base: LlamaForCausalLM, tmp_path: Path
) -> None:
    """A model that wraps another answers for it when it is asked for attributes."""
    base.save_pretrained(tmp_path)
    config = samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)
    packed = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, **EAGER)
    dense, wrapped = (adapted(model, init_lora_weights=False, **OPTIONS["LoRA"]) for model in (pair(base)[0], packed))
    samebits.decompress(wrapped if part == "adapted" else wrapped.base_model)
    assert not packed.is_quantized
    assert not hasattr(packed.config, "quantization_config")
    merged, expected = wrapped.merge_and_unload(), dense.merge_and_unload()
    for key, value in expected.state_dict().items():
        assert_same(merged.state_dict()[key], value)


def test_unloading_gives_the_base_back(base: LlamaForCausalLM) -> None:
    _, packed = pair(base)
    expected = logits(packed)
    model = adapted(packed, init_lora_weights=False, **OPTIONS["LoRA"])
    assert not torch.equal(logits(model), expected)
    unloaded = model.unload()
    assert isinstance(unloaded.model.layers[0].self_attn.q_proj, PackedModule)
    assert_same(logits(unloaded), expected)


@pytest.mark.parametrize("initialisation", ["pissa", "olora"])
def test_initialisations_that_change_the_base_are_refused(initialisation: str, base: LlamaForCausalLM) -> None:
    _, packed = pair(base)
    with pytest.raises(InputError, match="a packed weight cannot be changed"):
        adapted(packed, init_lora_weights=initialisation, **OPTIONS["LoRA"])


WAYS_IN = {
    "get_peft_model": lambda model, folder: adapted(model, **OPTIONS["LoRA"]),
    "add_adapter": lambda model, folder: model.add_adapter(LoraConfig(r=4, **OPTIONS["LoRA"])),
    "from_pretrained": lambda model, folder: PeftModel.from_pretrained(model, folder),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_models_that_keep_dfloat11s_layout_are_refused(way: str, base: LlamaForCausalLM, tmp_path: Path) -> None:
    """They are as they were then."""
    adapted(copy.deepcopy(base), **OPTIONS["LoRA"]).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(VECTORS / "tiny-llama", keep_format=True)
    expected = logits(model)
    with pytest.raises(InputError, match=r"DFloat11's layout.*load it without keep_format"):
        WAYS_IN[way](model, tmp_path)
    assert not hasattr(model.model.layers[0].self_attn.q_proj, "lora_A")
    assert_same(logits(model), expected)


def test_adapters_of_packed_parameters_are_refused(base: LlamaForCausalLM) -> None:
    """PEFT finds no such parameter, and would leave it out with a warning."""
    dense, packed = pair(base)
    options: dict[str, Any] = {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]}
    with pytest.raises(
        InputError, match=r"layers\.0\.self_attn\.q_proj\.weight: PEFT cannot put an adapter on a packed"
    ):
        adapted(packed, **options)
    assert not hasattr(packed.model.layers[0].self_attn.v_proj, "lora_A")
    partly = copy.deepcopy(base)
    samebits.compress(partly, min_weights=MIN_WEIGHTS, exclude=["*.q_proj.weight"])
    left, right = (adapted(model, init_lora_weights=False, **options) for model in (dense, partly))
    assert trainable(left).keys() == trainable(right).keys()
    assert_same(logits(right), logits(left))


def test_adapters_of_packed_parameters_of_any_module_are_refused() -> None:
    """By their whole names, of which another's may be the end."""
    module = nn.Sequential(OrderedDict(up=nn.Linear(64, 64), down=nn.Linear(64, 64))).to(torch.bfloat16)
    samebits.compress(module)
    with pytest.raises(InputError, match=r"up\.weight: PEFT cannot put an adapter on a packed parameter"):
        adapted(copy.deepcopy(module), target_modules=["down"], target_parameters=["up.weight"])
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        model = adapted(module, target_modules=["down"], target_parameters=["p.weight"])
    assert len(trainable(model)) == 2


def test_a_module_to_save_is_copied_once(base: LlamaForCausalLM) -> None:
    model = adapted(pair(base)[1], target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapper = model.base_model.model.lm_head
    trained = wrapper.modules_to_save["default"]
    wrapper.update("default")
    assert wrapper.modules_to_save["default"] is trained


EXPERTS: dict[str, Any] = {
    "all layers": "all-linear",
    "by name": ["q_proj", "w1", "w2", "w3"],
    "by pattern": r".*\.(q_proj|w1|w2|w3)",
}


@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_of_packed_experts_are_refused(name: str, mixture: MixtralForCausalLM) -> None:
    """PEFT makes parameters of these targets; the error names what to exclude, and model and targets are as before."""
    packed = copy.deepcopy(mixture)
    samebits.compress(packed, min_weights=MIN_WEIGHTS)
    expected, config = logits(packed), LoraConfig(r=4, target_modules=EXPERTS[name])
    before = copy.deepcopy((config.target_modules, config.target_parameters, config.rank_pattern, config.alpha_pattern))
    what = r"layers\.0\.mlp\.experts\.down_proj: PEFT cannot put an adapter on a packed parameter"
    mend = r"exclude=\['\*\.down_proj', '\*\.gate_up_proj'\]\), or list other target_modules"
    with pytest.raises(InputError, match=f"{what}; .*{mend}"):
        get_peft_model(packed, config)
    assert before == (config.target_modules, config.target_parameters, config.rank_pattern, config.alpha_pattern)
    assert not [key for key, _ in packed.named_modules() if "lora" in key]
    assert "named_parameters" not in vars(packed)
    assert_same(logits(packed), expected)

    partly = copy.deepcopy(mixture)
    samebits.compress(partly, min_weights=MIN_WEIGHTS, exclude=["*.down_proj", "*.gate_up_proj"])
    assert isinstance(partly.model.layers[0].self_attn.q_proj, PackedModule)
    models = [adapted(model, target_modules=EXPERTS[name]) for model in (copy.deepcopy(mixture), partly)]
    for model in models:
        train(model)
    assert_trained_alike(*models)


def test_adapters_beside_packed_experts(mixture: MixtralForCausalLM) -> None:
    packed = copy.deepcopy(mixture)
    samebits.compress(packed, min_weights=MIN_WEIGHTS)
    assert isinstance(packed.model.layers[0].mlp.experts, PackedModule)
    models = [adapted(model, target_modules=["q_proj", "v_proj"]) for model in (copy.deepcopy(mixture), packed)]
    for model in models:
        train(model)
    assert_trained_alike(*models)


def test_a_second_adapter_of_packed_experts_is_refused(mixture: MixtralForCausalLM) -> None:
    """Below the first, which is on a plain parameter of the same module."""
    partly = copy.deepcopy(mixture)
    samebits.compress(partly, min_weights=MIN_WEIGHTS, exclude=["*.gate_up_proj"])
    model = adapted(partly, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(InputError, match=r"experts\.base_layer\.down_proj: PEFT cannot put an adapter on a packed"):
        model.add_adapter("other", LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"]))
    assert list(model.peft_config) == ["default"]


def test_prompt_tuning(base: LlamaForCausalLM) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, tokenizer_name_or_path=None)
    models = []
    for model in pair(base):
        torch.manual_seed(4)
        models.append(get_peft_model(model, config))
    dense, packed = models
    assert_same(logits(packed), logits(dense))
    assert "get_submodule" not in vars(packed.base_model)
    for model in models:
        model.train()(TOKENS, labels=TOKENS).loss.backward()
    assert_same(*(next(iter(trainable(model).values())).grad for model in models))


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("auto", [True, False], ids=["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_an_adapters_folder_names_its_compressed_base(
    base: LlamaForCausalLM, auto: bool, shards: dict[str, str], tmp_path: Path
) -> None:
    """Which is loaded with the adapter, whatever it is that loads it."""
    _, packed = pair(base)
    packed.save_pretrained(tmp_path / "base", **shards)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    loaded = (AutoModelForCausalLM if auto else LlamaForCausalLM).from_pretrained(tmp_path / "adapter")
    assert len([module for module in loaded.modules() if isinstance(module, PackedModule)]) == 2 + 2 * 7
    expected = logits(model)
    assert_same(logits(loaded), expected)
    assert not torch.equal(logits(packed), expected)


def test_several_adapters(base: LlamaForCausalLM) -> None:
    dense, packed = (adapted(model, init_lora_weights=False, **OPTIONS["LoRA"]) for model in pair(base))
    for model in (dense, packed):
        torch.manual_seed(4)
        model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False, **OPTIONS["LoRA"]))
    first = logits(packed)
    assert_same(first, logits(dense))
    for model in (dense, packed):
        model.set_adapter("other")
    assert_same(logits(packed), logits(dense))
    assert not torch.equal(logits(packed), first)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_compressed_while_loading(device: str, base: LlamaForCausalLM, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path)
    config = samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)
    packed = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map=device, **EAGER)
    dense = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map=device, **EAGER)
    models = [adapted(model, **OPTIONS["LoRA"]) for model in (dense, packed)]
    for model in models:
        train(model, steps=1)
    expected, found = (trainable(model) for model in models)
    assert all(torch.equal(found[key].grad, expected[key].grad) for key in expected)
    tokens = [model.eval().generate(TOKENS.to(device), max_new_tokens=8, do_sample=False) for model in models]
    assert torch.equal(*tokens)


class Calls(nn.Module):
    """A layer and how it is called."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


LAYERS = {
    "conv1d": lambda: Calls(nn.Conv1d(16, 64, 3), lambda layer, x: layer(x.flatten(2))),
    "conv2d": lambda: Calls(nn.Conv2d(16, 64, 3), lambda layer, x: layer(x)),
    "conv3d": lambda: Calls(nn.Conv3d(4, 64, 3), lambda layer, x: layer(x.reshape(2, 4, 4, 8, 8))),
    "embedding": lambda: Calls(nn.Embedding(64, 32), lambda layer, x: layer(x.abs().mul(10).long().clamp(max=63))),
    "GPT-2's linear": lambda: Calls(Conv1D(64, 64), lambda layer, x: layer(x.flatten(2))),
}


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_other_kinds(name: str, use_dora: bool) -> None:
    torch.manual_seed(0)
    dense = LAYERS[name]().to(torch.bfloat16)
    packed = copy.deepcopy(dense)
    assert samebits.compress(packed, min_weights=MIN_WEIGHTS).packed.keys() == {"layer.weight"}
    options = {"target_modules": ["layer"], "use_dora": use_dora, "init_lora_weights": False}
    dense, packed = (adapted(model, **options) for model in (dense, packed))
    x = torch.randn(2, 16, 8, 8).to(torch.bfloat16)
    for model in (dense, packed):
        model(x).float().square().sum().backward()
    assert_same(packed(x), dense(x))
    expected = trainable(dense)
    assert len(expected) == 2 + use_dora
    for key, parameter in trainable(packed).items():
        assert_same(parameter.grad, expected[key].grad)


def test_torchs_attention_is_refused() -> None:
    """PEFT merges into it at each run."""
    module = Calls(nn.MultiheadAttention(64, 4), lambda layer, x: layer(x, x, x)[0]).to(torch.bfloat16)
    x = torch.randn(3, 2, 64).to(torch.bfloat16)
    samebits.compress(module)
    expected = module(x)
    with pytest.raises(InputError, match=r"cannot put an adapter on a packed nn\.MultiheadAttention; exclude it"):
        adapted(module, target_modules=["layer"])
    assert_same(module(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1024), (2, 3, 1024), (7, 64, 1024)], ids=str)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_layers_as_large_as_fused_products_take(shape: tuple[int, ...], is_contiguous: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).to("cuda", torch.bfloat16)
    packed = copy.deepcopy(dense)
    assert len(samebits.compress(packed).packed) == 2
    dense, packed = (adapted(model, target_modules=["0", "2"], init_lora_weights=False) for model in (dense, packed))
    x = torch.randn(shape, device="cuda").to(torch.bfloat16)
    x = x if is_contiguous else x.transpose(0, -2).contiguous().transpose(0, -2)
    with torch.no_grad():
        assert_same(packed(x), dense(x))
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    for model, leaf in zip((dense, packed), leaves, strict=True):
        model(leaf).float().square().sum().backward()
    assert_same(leaves[1].grad, leaves[0].grad)
    for key, parameter in trainable(packed).items():
        assert_same(parameter.grad, trainable(dense)[key].grad)


def test_adapters_are_not_packed_with_the_base(base: LlamaForCausalLM, tmp_path: Path) -> None:
    """In BF16 they could be; but PEFT trains, switches and saves them."""
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False}
    dense = adapted(copy.deepcopy(base), **options).to(torch.bfloat16)
    packed = copy.deepcopy(dense)
    report = samebits.compress(packed, min_weights=64)
    assert not any("lora" in name or "modules_to_save" in name for name in report.packed)
    assert {reason for name, reason in report.raw.items() if "lora" in name} == {"belongs to an adapter"}
    packed.set_adapter("default")
    assert_same(logits(packed), logits(dense))
    for model, name in ((dense, "dense"), (packed, "packed")):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("dense", "packed")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[1][key], tensor) for key, tensor in files[0].items())


@pytest.mark.parametrize("trained_on", ["dense", "packed"])
def test_an_adapted_embedding_is_saved_plain(base: LlamaForCausalLM, trained_on: str, tmp_path: Path) -> None:
    """PEFT saves the embedding with its adapter, and puts it into any base."""
    models = dict(zip(("dense", "packed"), pair(base), strict=True))
    trained = adapted(models[trained_on], target_modules=["embed_tokens"], init_lora_weights=False)
    trained.save_pretrained(tmp_path)
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.base_layer.weight" in file
    others = copy.deepcopy(base)
    with torch.no_grad():
        others.get_input_embeddings().weight.mul_(2)
    for dtype in (torch.bfloat16, torch.float32):
        wide = {key: tensor.to(dtype) if "embed_tokens.base_layer" in key else tensor for key, tensor in file.items()}
        save_file(wide, tmp_path / "adapter_model.safetensors")
        for other in pair(others):
            assert_same(logits(PeftModel.from_pretrained(other, tmp_path)), logits(trained))


def test_weights_are_counted(base: LlamaForCausalLM) -> None:
    dense, packed = (adapted(model, **OPTIONS["LoRA"]) for model in pair(base))
    assert packed.get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()


def test_not_prepared_for_float32(base: LlamaForCausalLM) -> None:
    dense, packed = pair(base)
    with pytest.raises(InputError, match=r"trains in BF16.*leave it out"):
        peft.prepare_model_for_kbit_training(packed)
    assert_same(logits(packed), logits(base))
    assert peft.prepare_model_for_kbit_training(dense).dtype == torch.float32


def test_trained_prompts_are_not_packed(base: LlamaForCausalLM) -> None:
    model = get_peft_model(copy.deepcopy(base), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20))
    report = samebits.compress(model.to(torch.bfloat16), min_weights=MIN_WEIGHTS)
    assert len(report.packed) == 2 + 2 * 7
    assert report.raw["prompt_encoder.default.embedding.weight"] == "belongs to an adapter"


def test_what_an_adapter_had_is_packed_once_it_is_merged(base: LlamaForCausalLM) -> None:
    model = adapted(copy.deepcopy(base), target_modules=["q_proj"], modules_to_save=["lm_head"])
    samebits.compress(model, min_weights=MIN_WEIGHTS)
    samebits.decompress(model)
    merged = model.merge_and_unload()
    assert "lm_head.weight" in samebits.compress(merged, min_weights=MIN_WEIGHTS).packed


def test_an_adapters_embedding_that_gets_no_smaller(base: LlamaForCausalLM) -> None:
    _, packed = pair(base)
    model = adapted(packed, target_modules=["embed_tokens"])
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    noise = torch.randint(-32768, 32767, model.get_input_embeddings().weight.shape, dtype=torch.int16)
    state = get_peft_model_state_dict(model) | {name: noise.view(torch.bfloat16)}
    before = logits(model)
    with pytest.raises(InputError, match=r"embed_tokens.*gets no smaller.*exclude it"):
        set_peft_model_state_dict(model, state)
    assert_same(logits(model), before)


def test_casts_of_all_frozen_parameters_are_refused(base: LlamaForCausalLM) -> None:
    dense, packed = (adapted(model, target_modules=["q_proj"]) for model in pair(base))
    before = logits(packed)
    with pytest.raises(InputError, match="packed bytes cannot be cast"):
        peft.cast_mixed_precision_params(packed, torch.bfloat16)
    assert_same(logits(packed), before)
    peft.cast_mixed_precision_params(dense, torch.bfloat16)
