"""vLLM's engine with packed weights beside vLLM's without: tokens and log-probabilities, as bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, OPTConfig

from samebits.format.container import Checkpoint
from samebits.jobs.compress import Compression
from samebits.jobs.options import RunOptions
from tests.serving.conftest import HAS_GPU, KING_JAMES, Gave, refusal, run, save

EAGER = {"dtype": "bfloat16", "enforce_eager": True}
COMPILED = {"dtype": "bfloat16", "enforce_eager": False}
INDUCTOR = {"deterministic": True, "emulate_precision_casts": True}
if HAS_GPU:
    INDUCTOR |= {"combo_kernels": True, "benchmark_combo_kernel": False}  # docs/vllm.md
FIXED = COMPILED | {"compilation_config": {"inductor_compile_config": INDUCTOR}}
PACKED = {"quantization": "samebits"}
Plain = Callable[..., Gave]
DF11 = KING_JAMES.parents[2] / "tests" / "vectors" / "df11" / "tiny-llama"
needs_two = pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")


def compress(source: Path, folder: Path) -> Path:
    Compression(Checkpoint.open(source), folder, None, RunOptions(device="cpu")).run()
    return folder


def assert_smaller(gave: Gave) -> None:
    """All that is packed can be read as BF16, and takes less than seven tenths of that, on each rank."""
    for weights, read in zip(gave["weights"], gave["read_weights"], strict=True):
        packed = {
            name.removesuffix(".sb_packed"): size for name, (dtype, size) in weights.items() if dtype == "torch.uint8"
        }
        assert read.keys() - packed.keys() <= {"lm_head"}  # whose bytes may be the embedding's
        assert sum(packed.values()) < 0.7 * 2 * sum(read[name] for name in packed)


def packed_names(gave: Gave, rank: int = 0) -> set[str]:
    return {name for name, (dtype, _) in gave["weights"][rank].items() if dtype == "torch.uint8"}


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compress(KING_JAMES, tmp_path_factory.mktemp("king-james") / "packed")


def test_compressed_while_loading(plain: Plain) -> None:
    expected, gave = plain(KING_JAMES, **EAGER), run(KING_JAMES, **EAGER, **PACKED)
    assert gave["outputs"] == expected["outputs"]
    assert "model.embed_tokens.sb_packed" in packed_names(gave)
    assert "model.layers.3.self_attn.qkv_proj.sb_packed" in packed_names(gave)
    assert_smaller(gave)


def test_compressed_folder(plain: Plain, compressed: Path) -> None:
    gave = run(compressed, **EAGER)
    assert gave["outputs"] == plain(KING_JAMES, **EAGER)["outputs"]
    assert "model.layers.0.mlp.gate_up_proj.sb_packed" in packed_names(gave)


def test_compressed_folder_of_which_nothing_stays_packed(plain: Plain, compressed: Path) -> None:
    choices = {"quant_method": "samebits", "version": 1, "exclude": ["*"]}
    gave = run(compressed, **EAGER, hf_overrides={"quantization_config": choices})
    assert gave["outputs"] == plain(KING_JAMES, **EAGER)["outputs"]
    assert not packed_names(gave)


def test_compiled(plain: Plain) -> None:
    """The embedding stays plain: Inductor makes other sums where it is not."""
    expected, gave = plain(KING_JAMES, **COMPILED), run(KING_JAMES, **COMPILED, **PACKED)
    assert gave["outputs"] == expected["outputs"]
    assert "model.layers.0.mlp.down_proj.sb_packed" in packed_names(gave)
    assert "model.embed_tokens.weight" in gave["weights"][0]


def test_compiled_with_fixed_sums(plain: Plain, deep: Path) -> None:
    """All is packed where Inductor is told how to add up and round."""
    many = {"prompts": torch.randint(512, (24, 60), generator=torch.Generator().manual_seed(0)).tolist()}
    gave = run(deep, **FIXED, **PACKED, **many)
    assert gave["outputs"] == plain(deep, **FIXED, **many)["outputs"]
    assert {"model.embed_tokens.sb_packed", "lm_head.sb_packed"} <= packed_names(gave)
    assert_smaller(gave)


@needs_two
@pytest.mark.parametrize(
    "way",
    [
        EAGER | {"tensor_parallel_size": 2},
        pytest.param(COMPILED | {"tensor_parallel_size": 2}, marks=pytest.mark.gpu),
        pytest.param(COMPILED | {"pipeline_parallel_size": 2}, marks=pytest.mark.gpu),
    ],
)
def test_two_ranks(plain: Plain, untied: Path, way: dict[str, Any]) -> None:
    """Each holds its own part, packed; the head is a matrix of its own."""
    two = way | {"rank_cores": (0, 1)}
    expected, gave = plain(untied, **two), run(untied, **two, **PACKED)
    assert gave["outputs"] == expected["outputs"]
    assert len(gave["weights"]) == 2
    assert any("lm_head.sb_packed" in names for names in gave["weights"])
    assert_smaller(gave)


@needs_two
@pytest.mark.gpu
@pytest.mark.parametrize("is_by_expert", [False, True])
def test_experts_of_two_ranks(plain: Plain, mixture: Path, is_by_expert: bool) -> None:
    """Each has a part of every expert, or all of half of them."""
    two = COMPILED | {"tensor_parallel_size": 2, "enable_expert_parallel": is_by_expert, "rank_cores": (0, 1)}
    expected, gave = plain(mixture, **two), run(mixture, **two, **PACKED)
    assert gave["outputs"] == expected["outputs"]
    assert all(any("experts" in name for name in packed_names(gave, rank)) for rank in range(2))
    assert all(bool(tokens) != is_by_expert for tokens in gave["fused_experts"])


@pytest.mark.parametrize("way", [EAGER, pytest.param(COMPILED, marks=pytest.mark.gpu)])
def test_mixture_of_experts(plain: Plain, mixture: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    """Its experts stay plain on a CPU, for which vLLM puts them into an order of its own."""
    expected = plain(mixture, **way)["outputs"]
    for gave in (run(mixture, **way, **PACKED), run(compress(mixture, tmp_path / "packed"), **way)):
        assert gave["outputs"] == expected
        assert "model.layers.0.self_attn.o_proj.sb_packed" in packed_names(gave)
        assert any("experts" in name for name in packed_names(gave)) == HAS_GPU
        assert any(gave["fused_experts"]) == HAS_GPU


def test_choices(plain: Plain) -> None:
    """A fused projection of which a part is left alone is plain."""
    choices = {"quant_method": "samebits", "version": 1, "exclude": ["*.k_proj.weight", "model.embed_tokens.weight"]}
    gave = run(KING_JAMES, **EAGER, **PACKED, hf_overrides={"quantization_config": choices})
    assert gave["outputs"] == plain(KING_JAMES, **EAGER)["outputs"]
    assert {name.rsplit(".", 2)[1] for name in packed_names(gave)} == {"o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("choices", [{}, {"exclude": ["model.embed_tokens.weight"]}])
def test_a_head_that_is_there_twice(plain: Plain, tmp_path: Path, choices: dict[str, Any]) -> None:
    """vLLM ties it where it is the embedding after all; it is not packed beside one that stays plain."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    file = save(config, tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, file, metadata={"format": "pt"})
    quantization = {"quant_method": "samebits", "version": 1, **choices}
    gave = run(file.parent, **EAGER, **PACKED, hf_overrides={"quantization_config": quantization})
    assert gave["outputs"] == plain(file.parent, **EAGER)["outputs"]
    assert sum("embed_tokens" in name or "lm_head" in name for name in gave["weights"][0]) == 1


def test_a_model_that_does_not_tell_its_embedding_anything(plain: Plain, tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=512, hidden_size=256, word_embed_proj_dim=256, ffn_dim=512, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model = save(config, tmp_path / "model")
    gave = run(model, **EAGER, **PACKED)
    assert gave["outputs"] == plain(model, **EAGER)["outputs"]
    assert "model.decoder.embed_tokens.sb_packed" in packed_names(gave)


@pytest.mark.parametrize("way", [EAGER, pytest.param(COMPILED, marks=pytest.mark.gpu)])
def test_adapters(plain: Plain, tmp_path: Path, way: dict[str, Any]) -> None:
    """The layers that adapters wrap are asked for their weights, also a head that is tied."""
    lora = {"enable_lora": True, "max_lora_rank": 8, "adapter": adapter(tmp_path / "adapter")}
    lora["prompt_logprobs"] = None  # which vLLM 0.32 on a CPU fails over
    gave, without = run(KING_JAMES, **way, **PACKED, **lora), plain(KING_JAMES, **way)["outputs"]
    assert gave["outputs"] == plain(KING_JAMES, **way, **lora)["outputs"]
    assert packed_names(gave)
    assert [tokens for tokens, *_ in gave["outputs"]] != [tokens for tokens, *_ in without]


def adapter(folder: Path) -> Path:
    """A LoRA of king-james, of random matrices."""
    config = json.loads((KING_JAMES / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.v_proj": (groups, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            for part, shape in (("lora_A", (8, columns)), ("lora_B", (rows, 8))):
                values = torch.randn(shape, generator=generator).mul(0.05).to(torch.bfloat16)
                tensors[f"base_model.model.model.layers.{layer}.{name}.{part}.weight"] = values
    targets = sorted(name.rpartition(".")[2] for name in shapes)
    peft = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets, "task_type": "CAUSAL_LM"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("way", [EAGER, COMPILED])
def test_sleep(plain: Plain, untied: Path, way: dict[str, Any]) -> None:
    """Weights go to the host and come back to where graphs know them."""
    gave = run(untied, **way, **PACKED, enable_sleep_mode=True, sleep=True)
    assert gave["outputs"] == gave["again"] == plain(untied, **way)["outputs"]


def damaged(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    file = folder / "samebits.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    return folder


def unfinished(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    (folder / ".samebits-job" / "publishing").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [(damaged, "the bytes differ from their digest"), (unfinished, "a job has not finished this folder")],
)
def test_bad_folders_are_refused(
    make: Callable[[Path, Path], Path], said: str, compressed: Path, tmp_path: Path
) -> None:
    told = refusal(make(compressed, tmp_path / "bad"), **EAGER)
    assert said in told, told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "float16"}, "samebits"),
        ({"hf_overrides": {"quantization_config": {"quant_method": "samebits", "version": 2}}}, "upgrade it"),
        ({"hf_overrides": {"quantization_config": {"quant_method": "samebits"}}}, "has no version"),
        ({"reload": True}, "packed weights cannot be loaded anew"),
        ({"update": True}, "packed weights cannot be loaded anew"),
        ({"load_format": "sharded_state"}, "use load_format auto"),
        ({"cpu_offload_gb": 1}, "offloading cannot move packed weights"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, Any], said: str) -> None:
    told = refusal(KING_JAMES, **EAGER | PACKED | arguments)
    assert said in told, told


def test_folders_of_dfloat11_are_refused() -> None:
    assert "the folder is in DFloat11's layout" in refusal(DF11, **EAGER, **PACKED)


def test_tensors_that_two_files_have(plain: Plain, untied: Path, tmp_path: Path) -> None:
    """The last one counts, as without samebits; and each layer is packed as soon as it is there, biases or not."""
    folder = tmp_path / "model"
    shutil.copytree(untied, folder)
    tensors = load_file(folder / "model.safetensors")
    twice = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items() if "_proj" in name}
    save_file(twice, folder / "model_more.safetensors")
    packed, expected = run(folder, **EAGER, **PACKED), plain(folder, **EAGER)
    assert packed["outputs"] == expected["outputs"]
    assert packed["outputs"] != plain(untied, **EAGER)["outputs"]
    assert packed["waiting"] == []
    [stored] = packed["weights"]  # of each worker
    assert sum("proj.sb_packed" in name for name in stored) == 8


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("1.self_attn.o_proj", "model.layers.1.self_attn.o_proj: no weights were loaded into this layer"),
        ("1.input_layernorm", "not initialized from checkpoint: {'model.layers.1.input_layernorm.weight'}"),  # vLLM's
    ],
)
def test_layers_without_weights_are_refused(lacks: str, said: str, untied: Path, tmp_path: Path) -> None:
    shutil.copytree(untied, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if lacks not in name}, file)
    told = refusal(tmp_path / "model", **EAGER, **PACKED)
    assert said in told, told
