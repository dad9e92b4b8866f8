"""Byte comparison and digests: what differs is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits import bf16, verify
from samebits.errors import DigestError
from samebits.format.container import Checkpoint, Entry
from samebits.jobs.options import CompressOptions
from samebits.verify import (
    Mismatch,
    Verdict,
    first_difference,
    original_bytes,
    repeatable_attention,
    verify_against,
    verify_digests,
)
from tests.jobs.checkpoints import Tensors, tensors, write_file, write_folder
from tests.jobs.test_jobs import compress, in_planes

HEAD = "lm_head.weight"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    compress(write_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def entry_of(path: Path, name: str) -> Entry:
    return Checkpoint.open(path).entries[name]


def against(packed: Path, original: Tensors) -> Mismatch | None:
    """What differs between a compressed file and these tensors."""
    path = write_file(packed.with_name("other.safetensors"), original)
    return first_of(verify_against(Checkpoint.open(packed), Checkpoint.open(path)))


def first_of(verdict: Verdict) -> Mismatch | None:
    return next(iter(verdict.mismatches), None)


def test_identical(packed: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint, original = Checkpoint.open(packed), Checkpoint.open(tmp_path / "a.safetensors")
    total = sum(tensor.nbytes for tensor in tensors().values())
    for left, right in ((checkpoint, original), (original, checkpoint), (checkpoint, checkpoint)):
        verdict = verify_against(left, right, progress=lambda done, total: seen.append((done, total)))
        assert (verdict.identical, verdict.tensors, verdict.nbytes) == (True, len(tensors()), total)
    verdict = verify_digests(checkpoint)
    assert (verdict.identical, verdict.unchecked, verdict.nbytes) == (True, 0, total)
    assert seen[-1] == (total, total)


def test_several_values_in_a_byte(tmp_path: Path) -> None:
    """Which of them differs is not said."""
    header = json.dumps({"z": {"dtype": "F4", "shape": [8, 8], "data_offsets": [0, 32]}}).encode()
    checkpoints = []
    for number, byte in enumerate((0x10, 0)):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([0, 0, 0, byte]) + bytes(28))
        checkpoints.append(Checkpoint.open(path))
    [mismatch] = verify_against(*checkpoints).mismatches
    assert mismatch == Mismatch("z", None, "0x10 in byte 3", "0x00 in byte 3")


@pytest.mark.parametrize("index", [(0, 0), (3, 7), (499, 127)])
def test_one_bit_of_one_word(packed: Path, index: tuple[int, int]) -> None:
    content = tensors()
    word = int(content[HEAD].view(torch.int16)[index]) & 0xFFFF
    content[HEAD].view(torch.int16)[index] ^= 1
    assert against(packed, content) == Mismatch(HEAD, index, f"0x{word:04x}", f"0x{word ^ 1:04x}")


def test_more_dimensions_than_numpy_has(tmp_path: Path) -> None:
    shape = (*[1] * 63, 2, 1, 3)
    checkpoints = []
    for changed in (0, 1):
        words = torch.zeros(6, dtype=torch.int16)
        words[5] = changed
        path = tmp_path / f"{changed}.safetensors"
        save_file({"z": words.view(torch.bfloat16).view(shape)}, path)
        checkpoints.append(Checkpoint.open(path))
    [mismatch] = verify_against(*checkpoints).mismatches
    assert mismatch == Mismatch("z", (*[0] * 63, 1, 0, 2), "0x0000", "0x0001")


def test_signs_of_zero_and_payloads_of_nan_count(tmp_path: Path) -> None:
    words = torch.zeros(64, 128, dtype=torch.int16)
    words[:, 1] = 0x7FC0
    save_file({"a": words.view(torch.bfloat16)}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    for index, other in (((2, 0), -0x8000), ((2, 1), 0x7FC1)):
        changed = words.clone()
        changed[index] = other
        mismatch = against(tmp_path / "b.safetensors", {"a": changed.view(torch.bfloat16)})
        assert mismatch
        assert mismatch.index == index


def test_other_dtypes_report_whole_values(packed: Path) -> None:
    content = tensors()
    content["model.layers.0.steps"][4] = 0x0102030405060708
    assert against(packed, content) == Mismatch(
        "model.layers.0.steps", (4,), "0x0000000000000004", "0x0102030405060708"
    )
    content = tensors()
    content["model.layers.0.scale"] = torch.tensor(0.25)
    assert against(packed, content) == Mismatch("model.layers.0.scale", (), "0x3f000000", "0x3e800000")


def test_names_shapes_and_dtypes(packed: Path) -> None:
    content = tensors()
    content["extra"] = content.pop(HEAD)
    assert against(packed, content) == Mismatch("extra", None, "missing", "present")
    content[HEAD] = tensors()[HEAD]
    del content["extra"], content["model.norm.weight"]
    assert against(packed, content) == Mismatch("model.norm.weight", None, "present", "missing")
    content = tensors()
    content[HEAD] = content[HEAD].reshape(250, 256)
    assert against(packed, content) == Mismatch(HEAD, None, "BF16 [500, 128]", "BF16 [250, 256]")
    content[HEAD] = tensors()[HEAD].view(torch.float16)
    assert against(packed, content) == Mismatch(HEAD, None, "BF16 [500, 128]", "F16 [500, 128]")


def test_all_that_differ_are_named(packed: Path) -> None:
    """Those that are on one side alone, and of the others those that are not the same."""
    content = tensors()
    content["extra"] = content.pop(HEAD)
    content["model.norm.weight"] *= 2
    path = write_file(packed.with_name("other.safetensors"), content)
    verdict = verify_against(Checkpoint.open(packed), Checkpoint.open(path))
    assert [mismatch.tensor for mismatch in verdict.mismatches] == ["extra", HEAD, "model.norm.weight"]
    assert verdict.tensors == len(content) - 1


def test_a_flipped_bit_of_a_packed_tensor(packed: Path, tmp_path: Path) -> None:
    entry = entry_of(packed, HEAD)
    flip(packed, in_planes(entry))
    mismatch = first_of(verify_digests(Checkpoint.open(packed)))
    assert mismatch
    assert (mismatch.tensor, mismatch.index) == (HEAD, None)
    assert mismatch.found.endswith("of the stored bytes")
    plain = Checkpoint.open(tmp_path / "a.safetensors")
    mismatch = first_of(verify_against(Checkpoint.open(packed), plain))
    assert mismatch
    assert (mismatch.tensor, mismatch.found) == (HEAD, "decoded words with another digest")
    with pytest.raises(DigestError, match=HEAD):
        verify_against(plain, Checkpoint.open(packed))


def test_a_flipped_bit_that_no_word_depends_on(packed: Path, tmp_path: Path) -> None:
    """A tensor is padded at its end: its file cannot be loaded then, so it is not as good as the original."""
    flip(packed, entry_of(packed, HEAD).spec.stop - 1)
    for verdict in (
        verify_digests(Checkpoint.open(packed)),
        verify_against(Checkpoint.open(packed), Checkpoint.open(tmp_path / "a.safetensors")),
    ):
        [mismatch] = verdict.mismatches
        assert (mismatch.tensor, mismatch.index) == (HEAD, None)
        assert "of the stored bytes" in mismatch.found


def test_every_damaged_tensor_is_named(packed: Path, tmp_path: Path) -> None:
    names = [HEAD, "model.norm.weight"]
    for name in names:
        flip(packed, in_planes(entry_of(packed, name)))
    checkpoint, plain = Checkpoint.open(packed), Checkpoint.open(tmp_path / "a.safetensors")
    for verdict in (verify_digests(checkpoint), verify_against(checkpoint, plain)):
        assert [mismatch.tensor for mismatch in verdict.mismatches] == names
        assert verdict.tensors == len(tensors())


def test_a_flipped_bit_of_the_original_digest(packed: Path) -> None:
    """The stored digest does not see the first 16 bytes, but it covers the digest of the original words."""
    flip(packed, entry_of(packed, HEAD).spec.start + 16)
    assert not verify_digests(Checkpoint.open(packed)).identical


def test_decoded_words_are_checked_themselves(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that goes wrong on sound bytes is found too."""

    def decode_wrongly(packed: object, out: torch.Tensor) -> torch.Tensor:
        return out.fill_(1)

    monkeypatch.setattr(verify, "decode_cpu", decode_wrongly)
    mismatch = first_of(verify_digests(Checkpoint.open(packed)))
    assert mismatch
    assert mismatch.found == "decoded words with another digest"


def test_a_flipped_bit_of_an_unchanged_tensor(packed: Path) -> None:
    flip(packed, in_planes(entry_of(packed, "model.norm.weight")))
    mismatch = first_of(verify_digests(Checkpoint.open(packed)))
    assert mismatch
    assert mismatch.tensor == "model.norm.weight"


def test_tensors_without_a_digest_are_counted(packed: Path) -> None:
    save_file(load_file(packed), packed)
    verdict = verify_digests(Checkpoint.open(packed))
    assert verdict.identical
    assert verdict.unchecked == sum(not entry.is_packed for entry in Checkpoint.open(packed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_against_what_is_cast(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compress casts it, NaNs and infinities too; but in shape, and in what cannot be cast, it must be the same."""
    monkeypatch.setattr(bf16, "_VALUES_AT_ONCE", 1000)
    values = torch.randn(64, 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:2] = torch.tensor([float("inf"), float("nan"), -0.0, 1e-7, 65504, -1, -float("nan")]).repeat(11).to(dtype)
    content = {"a": values, "b": values[0, :5].clone(), "steps": torch.arange(3), "empty": torch.empty(0, 4).to(dtype)}
    source, packed = write_file(tmp_path / "a.safetensors", content), tmp_path / "b.safetensors"
    compress(source, packed, CompressOptions(cast=True))
    verdict = verify_against(Checkpoint.open(packed), Checkpoint.open(source), cast=True)
    assert (verdict.mismatches, verdict.cast_tensors) == ([], 2)
    words = original_bytes(entry_of(packed, "a")).view(torch.int16)
    assert {int(words[1]), int(words[6])} == {0x7FC0}
    content["a"][7, 9] += 1
    content["b"] = content["b"][None]
    verdict = verify_against(Checkpoint.open(packed), Checkpoint.open(write_file(source, content)), cast=True)
    first, second = sorted(verdict.mismatches, key=lambda mismatch: mismatch.tensor)
    assert (first.tensor, first.index, second.found) == ("a", (7, 9), "BF16 [5]")


def test_folders(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    compress(source, tmp_path / "packed")
    assert verify_against(Checkpoint.open(tmp_path / "packed"), Checkpoint.open(source)).identical


@pytest.mark.parametrize("position", [0, 1, 99, 100, 249])
def test_first_difference_across_blocks(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_COMPARE_BYTES", 100)
    left, right = np.zeros((2, 250), np.uint8)
    assert first_difference(left, right) is None
    right[position:] = 1
    assert first_difference(left, right) == position


@pytest.mark.parametrize("before", [True, False])
def test_attention_is_as_it_was_afterwards(before: bool) -> None:
    @repeatable_attention()
    def enabled_inside() -> bool:
        return torch.backends.cuda.cudnn_sdp_enabled()

    usual = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        assert not enabled_inside()
        with pytest.raises(KeyError), repeatable_attention():
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(usual)
