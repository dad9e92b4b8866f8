"""verify --logits: a model against its original, compared through what it says."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from samebits.cli import generate, logits
from samebits.cli.generate import default_model
from samebits.format.container import Checkpoint
from samebits.jobs.compress import Compression
from samebits.jobs.options import CompressOptions, RunOptions
from tests.cli.conftest import Command, Outcome

VOCABULARY = 3072


@pytest.fixture
def example() -> Path:
    return Path(default_model())


@pytest.fixture(scope="module")
def packed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "packed"
    Compression(Checkpoint.open(Path(default_model())), folder, CompressOptions(), RunOptions(device="cpu")).run()
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("And the evening and the morning were the sixth day. " * 40)
    return path


@pytest.fixture
def other(example: Path, tmp_path: Path) -> Path:
    """The same model with one weight of its last norm another number by one bit."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in example.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int16)[5] ^= 64
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_identical_over_a_text(samebits: Command, example: Path, packed_example: Path, text: Path) -> None:
    arguments = ("verify", "--logits", packed_example, "--against", example, "--text", text, "--device", "cpu")
    report = samebits(*arguments, "--json").json
    assert report["identical"] is True
    assert report["positions"] > logits.WINDOW
    assert report["logits"] == report["positions"] * VOCABULARY
    assert samebits(*arguments).out == (
        f"{packed_example}: the logits are identical to those of {example}, "
        f"{report['positions']:,} tokens, {report['logits']:,} logits on cpu\n"
    )


def test_both_run_with_attention_that_repeats_itself(
    samebits: Command, example: Path, packed_example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = [], logits._logits

    def watched(model: Any, windows: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return run(model, windows)

    monkeypatch.setattr(logits, "_logits", watched)
    assert samebits("verify", "--logits", packed_example, "--against", example, "--device", "cpu").code == 0
    assert seen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_random_tokens_without_a_text(samebits: Command, example: Path, packed_example: Path) -> None:
    outcome = samebits("verify", "--logits", packed_example, "--against", example, "--device", "cpu", "--json")
    assert outcome.json["positions"] == logits.RANDOM_TOKENS


def test_the_first_difference_is_named(samebits: Command, other: Path, packed_example: Path, text: Path) -> None:
    arguments = ("verify", "--logits", packed_example, "--against", other, "--text", text, "--device", "cpu")
    outcome = samebits(*arguments, "--json")
    assert outcome.code == 1
    found = outcome.json["mismatch"]
    both = torch.tensor([int(found[key], 16) for key in ("found", "expected")], dtype=torch.int32)
    values = (both << 16).view(torch.float32)
    assert values[0] != values[1]
    assert abs(values[0] - values[1]) < 1
    assert samebits(*arguments).error == (
        f"samebits: {packed_example}: not identical: at position {found['position']} the logit of token "
        f"{found['token']} is {found['found']} instead of {found['expected']}; "
        f"`samebits verify {packed_example} --against {other}` tells whether the weights differ\n"
    )


def test_position_and_token_of_a_mismatch() -> None:
    expected = torch.zeros(6, 10, dtype=torch.bfloat16)
    found = expected.clone()
    found[4, 7] = -0.0
    mismatch = logits._first_mismatch(found, expected, 100)
    assert mismatch == logits.LogitMismatch(104, 7, "0x8000", "0x0000")
    assert logits._first_mismatch(expected, expected.clone(), 0) is None


def test_a_mismatch_behind_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [[torch.zeros(256, 4), torch.zeros(44, 4)] for _ in range(2)]
    runs[1][1][3, 2] = 1
    left = iter(runs)
    monkeypatch.setattr(logits, "_load", lambda path, device: None)
    monkeypatch.setattr(logits, "_logits", lambda model, windows: iter(next(left)))
    windows = torch.zeros(300, dtype=torch.int64).split(logits.WINDOW)
    verdict = logits.compare("a", "b", windows, "cpu", lambda done, total: None)
    assert verdict.mismatch == logits.LogitMismatch(259, 2, "0x3f800000", "0x00000000")


def test_unusable_input(samebits: Command, example: Path, packed_example: Path, tmp_path: Path) -> None:
    both = ("verify", packed_example, "--against", example, "--device", "cpu")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not a text in UTF-8" in samebits(*both, "--logits", "--text", tmp_path / "binary").error
    assert "the text has no tokens" in samebits(*both, "--logits", "--text", tmp_path / "empty").error
    assert "No such file" in samebits(*both, "--logits", "--text", tmp_path / "none").error
    assert "--text goes with --logits" in samebits(*both, "--text", tmp_path / "empty").error
    assert "--logits needs --against" in samebits("verify", packed_example, "--logits").error
    (tmp_path / "model.safetensors").write_bytes((example / "model.safetensors").read_bytes())
    assert "cannot load it" in samebits("verify", packed_example, "--logits", "--against", tmp_path).error


def test_a_model_that_was_rounded_is_not_compared(samebits: Command, example: Path, tmp_path: Path) -> None:
    """Unasked: its original would be rounded as well when it is loaded, and give the same logits."""
    wide, packed = tmp_path / "wide", tmp_path / "packed"
    shutil.copytree(example, wide)
    tensors = {name: tensor.float() * 1.001 for name, tensor in load_file(wide / "model.safetensors").items()}
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    assert samebits("compress", wide, packed, "--cast", "bf16").code == 0
    outcome = samebits("verify", "--logits", packed, "--against", wide, "--device", "cpu")
    assert outcome.code == 2
    assert (
        "samebits.safetensors: model.embed_tokens.weight: BF16 instead of F32, and both would run in BF16; "
        "give --cast bf16 if it was made so\n" in outcome.error
    )
    outcome = samebits("verify", "--logits", packed, "--against", wide, "--cast", "bf16", "--device", "cpu")
    assert outcome.out.startswith(f"{packed}: the logits are identical to those of {wide} cast to BF16, ")
    outcome = samebits("verify", "--logits", wide, "--against", packed, "--cast", "bf16", "--device", "cpu")
    assert (outcome.code, "F32 instead of BF16, and both would run in BF16; compare" in outcome.error) == (2, True)


def test_too_little_space(
    samebits: Command, example: Path, packed_example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> torch.Tensor:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/full")

    monkeypatch.setattr(logits, "scratch", full)
    outcome = samebits("verify", "--logits", packed_example, "--against", example, "--device", "cpu")
    assert outcome.code == 2
    assert "/tmp/full: no space for 6.29 MB of logits; give a shorter --text" in outcome.error


def test_no_place_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not for want of space."""

    def refused(nbytes: int) -> torch.Tensor:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/tmp")

    monkeypatch.setattr(logits, "scratch", refused)
    with pytest.raises(PermissionError):
        logits._space(3, torch.zeros(1, 5))


def test_against_weights_in_another_format(samebits: Command, example: Path, tmp_path: Path) -> None:
    """transformers reads them."""
    folder = shutil.copytree(example, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(example / "model.safetensors"), folder / "pytorch_model.bin")
    arguments = ("verify", "--logits", example, "--against", folder, "--device", "cpu")
    assert samebits(*arguments, "--json").json["identical"] is True


def test_windows_are_no_longer_than_a_model_takes(samebits: Command, tmp_path: Path) -> None:
    """One that has learned where each token is."""
    models = [write_gpt2(tmp_path / str(positions), positions=positions) for positions in (20, 30)]
    for pair in (models, models[::-1]):  # the weights of neither are in the other, but both run
        outcome = samebits("verify", "--logits", pair[0], "--against", pair[1], "--device", "cpu")
        assert (outcome.code, "not identical: at position 0 the logit of token 0" in outcome.error) == (1, True)
    arguments = ("verify", "--logits", models[0], "--against", models[0], "--device", "cpu")
    assert samebits(*arguments, "--json").json["positions"] == logits.RANDOM_TOKENS


def write_gpt2(folder: Path, *, positions: int = 20, vocabulary: int = 128) -> Path:
    torch.manual_seed(positions)
    config = GPT2Config(n_embd=64, n_head=4, n_layer=1, n_positions=positions, vocab_size=vocabulary)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def refused(outcome: Outcome) -> str:
    """What one line and, for --json, one object say of unusable input."""
    found = json.loads(outcome.out)["error"]
    assert (outcome.code, found["kind"]) == (2, "InputError")
    where = f"{found['where']}: " if found["where"] else ""
    assert outcome.err == f"samebits: {where}{found['what']}; {found['mend']}\n"
    return outcome.err


def test_tokens_that_the_model_does_not_know(samebits: Command, example: Path, text: Path, tmp_path: Path) -> None:
    """Its tokenizer is another model's."""
    folder = write_gpt2(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, folder)
    arguments = ("verify", "--logits", folder, "--against", folder, "--device", "cpu", "--json")
    assert f", which its tokenizer makes of {text}, is not in its vocabulary of 128; " in refused(
        samebits(*arguments, "--text", text)
    )


def test_models_of_other_vocabularies(samebits: Command, tmp_path: Path) -> None:
    folders = [write_gpt2(tmp_path / str(vocabulary), vocabulary=vocabulary) for vocabulary in (128, 200)]
    error = refused(samebits("verify", "--logits", folders[0], "--against", folders[1], "--json"))
    message = f"{folders[0]}: its vocabulary is of 128 tokens, that of {folders[1]} of 200; compare two forms of one"
    assert message in error


def test_logits_of_another_shape(samebits: Command, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = iter((4, 5))
    monkeypatch.setattr(logits, "_logits", lambda model, windows: iter([torch.zeros(1024, next(widths))]))
    error = refused(samebits("verify", "--logits", example, "--against", example, "--device", "cpu", "--json"))
    assert "logits torch.float32 [1024, 5] instead of torch.float32 [1024, 4]; compare two forms of one" in error


def test_a_model_that_cannot_be_run(samebits: Command, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
    monkeypatch.setattr(generate, "_SOURCES", Path("/nothing"))  # where that went wrong would be here
    error = refused(samebits("verify", "--logits", example, "--against", example, "--device", "cpu", "--json"))
    assert f"{example}: the model cannot be run (" in error
