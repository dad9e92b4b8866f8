"""generate and bench on the example model, compressed and plain."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from samebits.cli import bench, generate
from samebits.cli.generate import default_model, running
from samebits.errors import InputError
from tests.cli.conftest import Command

PROMPT = "And the king said"
EXAMPLE = default_model()


@pytest.fixture(scope="module")
def example() -> Path:
    return Path(EXAMPLE)


@pytest.fixture
def packed_example(samebits: Command, example: Path, tmp_path: Path) -> Path:
    assert samebits("compress", example, tmp_path / "packed").code == 0
    return tmp_path / "packed"


def generated(samebits: Command, *arguments: object) -> dict[str, Any]:
    return samebits(
        "generate", *arguments, "--prompt", PROMPT, "--max-new-tokens", 12, "--device", "cpu", "--json"
    ).json


@pytest.mark.parametrize("options", [("--greedy",), ("--temperature", "1.5", "--seed", "7"), ("--greedy", "--graphs")])
def test_the_same_text_from_compressed_and_plain(
    samebits: Command, example: Path, packed_example: Path, options: tuple[str, ...]
) -> None:
    plain, compressed = (generated(samebits, path, *options) for path in (example, packed_example))
    assert len(plain["tokens"]) == 12
    assert plain["text"].startswith(PROMPT)
    assert (compressed["tokens"], compressed["text"]) == (plain["tokens"], plain["text"])


def test_graphs_change_nothing_on_a_cpu(samebits: Command, example: Path) -> None:
    options = ("generate", example, "--max-new-tokens", 1, "--device", "cpu")
    assert "--graphs is for GPUs" in samebits(*options, "--graphs").err
    assert "--graphs" not in samebits(*options).err


def test_the_seed_decides_what_is_sampled(samebits: Command, example: Path) -> None:
    options = ("--temperature", 2.0, "--seed")
    texts = [generated(samebits, example, *options, seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_example_is_the_default(samebits: Command, example: Path) -> None:
    outcome = samebits("generate", "--prompt", PROMPT, "--max-new-tokens", 5, "--greedy", "--device", "cpu")
    assert (outcome.code, outcome.out.startswith(PROMPT)) == (0, True)
    assert outcome.err.startswith("5 tokens in ")


def test_more_tokens_than_the_model_has_positions(samebits: Command, example: Path, tmp_path: Path) -> None:
    """One line, not a traceback; and figures of coding are not lost for it."""
    config = GPT2Config(vocab_size=3072, n_positions=32, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path / "gpt2")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / file, tmp_path / "gpt2")
    assert samebits("generate", tmp_path / "gpt2", "--max-new-tokens", 4, "--device", "cpu").code == 0
    outcome = samebits("generate", tmp_path / "gpt2", "--max-new-tokens", 60, "--greedy", "--device", "cpu")
    assert outcome.code == 2
    assert "gpt2: the model cannot be run (index out of range in self); give fewer tokens than it has" in outcome.error
    assert "Traceback" not in outcome.error
    outcome = samebits("bench", tmp_path / "gpt2", "--device", "cpu", "--json")
    assert outcome.code == 0
    assert "note: no model was run" in outcome.err
    assert outcome.json["coding"]
    assert (outcome.json["models"], outcome.json["same_tokens"]) == ({}, None)
    assert outcome.err == f"note: no model was run: {outcome.json['not_run']}\n"


def test_what_is_wrong_in_samebits_is_not_the_models() -> None:
    with pytest.raises(TypeError, match="not callable"), running("a model"):
        bench._seconds(None, "cpu")
    with pytest.raises(InputError, match="a model: the model cannot be run \\(one\\); give fewer"), running("a model"):
        raise ValueError("one\ntwo")


def test_a_damaged_model_does_not_generate(samebits: Command, packed_example: Path) -> None:
    (path,) = packed_example.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    outcome = samebits("generate", packed_example, "--prompt", PROMPT)
    assert outcome.code == 2
    assert "not a valid safetensors file" in outcome.error or "cannot load it" in outcome.error


@pytest.fixture
def copied_example(example: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(example, tmp_path / "copied"))


@pytest.fixture
def without_a_norm(copied_example: Path) -> Path:
    """The example without a weight that its class needs, and which transformers would make up."""
    tensors = load_file(copied_example / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copied_example / "model.safetensors", metadata={"format": "pt"})
    return copied_example


@pytest.mark.parametrize("command", [("generate",), ("verify", "--logits", "--against", EXAMPLE)])
def test_weights_that_are_missing(samebits: Command, without_a_norm: Path, command: tuple[object, ...]) -> None:
    outcome = samebits(*command, without_a_norm, "--device", "cpu")
    assert outcome.code == 2
    assert f"{without_a_norm}: LlamaForCausalLM needs weights that are missing: model.norm.weight; " in outcome.error


@pytest.mark.parametrize("command", [("generate",), ("verify", "--logits", "--against", EXAMPLE)])
@pytest.mark.parametrize("pack", [False, True])
def test_weights_of_other_shapes(
    samebits: Command, copied_example: Path, tmp_path: Path, command: tuple[object, ...], pack: bool
) -> None:
    path = copied_example / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name] = tensors[name][:-8].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    folder = tmp_path / "packed" if pack else copied_example
    if pack:
        assert samebits("compress", copied_example, folder).code == 0
    outcome = samebits(*command, folder, "--device", "cpu")
    assert (outcome.code, outcome.error) == (
        2,
        f"samebits: {folder}: LlamaForCausalLM needs weights of other shapes: model.layers.1.mlp.up_proj.weight as "
        "[832, 320], not [824, 320] and 1 more; these weights do not belong to this config.json; fetch both again\n",
    )


def test_experts_of_other_shapes(samebits: Command, tmp_path: Path) -> None:
    """Which transformers cannot put together, and says so where nobody sees it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, num_experts=4, **sizes)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors[name] = tensors[name][:-8].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    outcome = samebits("verify", "--logits", tmp_path, "--against", tmp_path, "--device", "cpu")
    message = "transformers cannot convert the weights of model.layers.0.mlp.experts.down_proj; these weights do not"
    assert (outcome.code, f"{tmp_path}: {message}" in outcome.error) == (2, True)
    assert logging.getLogger("transformers.modeling_utils").getEffectiveLevel() == logging.ERROR


def test_models_of_another_kind(samebits: Command, tmp_path: Path) -> None:
    """They may have no tokenizer either."""
    config = T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path)
    message = f"{tmp_path}: T5 is no causal language model; {generate._MEND}\n"
    for command in (("generate",), ("verify", "--logits", "--against", tmp_path)):
        outcome = samebits(*command, tmp_path, "--device", "cpu")
        assert (outcome.code, outcome.error) == (2, f"samebits: {message}")
    outcome = samebits("bench", tmp_path, "--device", "cpu")
    assert (outcome.code, outcome.err) == (0, f"note: no model was run: {message}")


def test_bench_that_finds_a_difference(samebits: Command, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "same_words", lambda *_: False)
    outcome = samebits("bench", example, "--device", "cpu", "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["kind"] == "MismatchError"
    assert outcome.json["error"]["what"] in outcome.error


def test_bench_of_what_cannot_run_measures_its_tensors(samebits: Command, without_a_norm: Path) -> None:
    outcome = samebits("bench", without_a_norm, "--device", "cpu")
    assert outcome.code == 0
    assert "29 tensors measured, 10." in outcome.out
    assert outcome.err.startswith(f"note: no model was run: {without_a_norm}: LlamaForCausalLM needs weights")


@pytest.mark.parametrize("command", [("generate",), ("verify", "--logits", "--against", EXAMPLE), ("bench",)])
def test_a_model_with_code_of_its_own(
    samebits: Command, copied_example: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run, and nobody is asked whether it is to be."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    path, ran = copied_example / "config.json", copied_example / "ran"
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "own", "auto_map": code}))
    (copied_example / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    outcome = samebits(*command, copied_example, "--device", "cpu", "--json")
    message = f"{copied_example}: transformers would have to run code of it; samebits runs no code of a model"
    assert message in outcome.err
    assert outcome.code == (0 if command == ("bench",) else 2)
    assert isinstance(json.loads(outcome.out), dict)
    assert not ran.exists()


@pytest.mark.parametrize("command", [("generate",), ("verify", "--logits", "--against", EXAMPLE)])
def test_weights_that_a_model_does_not_use(samebits: Command, copied_example: Path, command: tuple[str, ...]) -> None:
    path = copied_example / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    outcome = samebits(*command, copied_example, "--device", "cpu")
    unused = "LlamaForCausalLM does not use model.layers.3.input_layernorm.weight and 8 more of the weights"
    assert f"note: {unused} in {copied_example}\n" in outcome.err


def test_a_model_of_more_layers_than_any(samebits: Command, copied_example: Path) -> None:
    path = copied_example / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**9}))
    outcome = samebits("generate", copied_example)
    assert (outcome.code, f"{path}: num_hidden_layers is 1000000000; fetch" in outcome.error) == (2, True)


@pytest.mark.parametrize("content", [b"x" * 100, b""], ids=["damaged", "empty"])
def test_weights_of_torch_that_are_damaged(samebits: Command, copied_example: Path, content: bytes) -> None:
    (copied_example / "model.safetensors").unlink()
    (copied_example / "pytorch_model.bin").write_bytes(content)
    outcome = samebits("generate", copied_example)
    message = f"{copied_example}: its weights are damaged, or of another kind than tensors; fetch them again"
    assert (outcome.code, message in outcome.error) == (2, True)


def test_a_plain_model_that_is_cut_off(samebits: Command, copied_example: Path) -> None:
    path = copied_example / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    outcome = samebits("generate", copied_example)
    assert (outcome.code, f"{copied_example}: transformers cannot load it (" in outcome.error) == (2, True)


@pytest.mark.parametrize(
    "wrong", [{"num_attention_heads": 0}, {"hidden_size": "160"}, {"hidden_size": 325}, {"pad_token_id": 10**6}]
)
def test_a_config_that_does_not_fit(samebits: Command, copied_example: Path, wrong: dict[str, Any]) -> None:
    path = copied_example / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    outcome = samebits("generate", copied_example)
    assert (outcome.code, f"{copied_example}: transformers cannot load it (" in outcome.error) == (2, True)


@pytest.mark.parametrize("command", [("generate",), ("bench",), ("verify", "--logits", "--against", EXAMPLE)])
@pytest.mark.parametrize(
    "path", ["./nothere", "../no/there", "/nothere", "no/there.safetensors", "unfinished", "empty"]
)
def test_paths_of_no_model(
    samebits: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, command: tuple[str, ...]
) -> None:
    """All commands say the same of them, and the hub is not asked."""
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unfinished" / ".samebits-job").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    expected = samebits("inspect", path)
    messages = {"unfinished": "a job has not finished", "empty": "no safetensors files in this folder"}
    assert messages.get(path, "no such file or folder") in expected.error
    outcome = samebits(*command, path)
    assert (outcome.code, outcome.error) == (2, expected.error)


def test_unusable_arguments(samebits: Command, example: Path) -> None:
    cases: list[tuple[tuple[object, ...], str]] = [
        ((example / "model.safetensors",), "model.safetensors: a file, not a model folder; give a folder"),
        ((example, "--seed", 2**64), "Invalid value for '--seed'"),
        ((example, "--prompt", "\udcff"), "--prompt: not a text in UTF-8; convert it"),
        (("",), "it is empty"),
    ]
    for arguments, message in cases:
        outcome = samebits("generate", *arguments)
        assert (outcome.code, message in outcome.error) == (2, True), arguments
    assert samebits("generate", example, "--seed", 2**64 - 1, "--max-new-tokens", 1, "--device", "cpu").code == 0


@pytest.mark.parametrize("compressed", [True, False])
def test_bench(
    samebits: Command, example: Path, packed_example: Path, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_NEW_TOKENS", 3)
    report = samebits("bench", packed_example if compressed else example, "--device", "cpu", "--json").json
    assert report["device"] == "cpu"
    assert report["coding"]["tensors"] == 29
    assert 10 < report["coding"]["bits_per_weight"] < 11
    models = report["models"]
    assert models["samebits"]["resident_bytes"] < 0.7 * models["BF16"]["resident_bytes"]
    assert all(figure > 0 for model in models.values() for figure in model.values())
    assert (report["same_tokens"], report["not_run"]) == (True, None)


def test_bench_of_a_file_measures_its_tensors(samebits: Command, example: Path) -> None:
    outcome = samebits("bench", example / "model.safetensors", "--device", "cpu")
    assert outcome.code == 0
    assert "29 tensors measured, 10." in outcome.out
    assert outcome.err.startswith("note: no model was run: ")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--graphs",)])
def test_the_same_text_on_a_gpu(
    samebits: Command, example: Path, packed_example: Path, options: tuple[str, ...], graphs: list[Any]
) -> None:
    options = ("--prompt", PROMPT, "--greedy", "--device", "cuda", "--json", *options)
    plain, compressed = (samebits("generate", path, *options).json for path in (example, packed_example))
    assert compressed["tokens"] == plain["tokens"]
    assert len(graphs) == (2 if "--graphs" in options else 0)
