"""Every region of a file flipped, cut or overwritten: one line, exit code 1 or 2, never a wrong weight."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samebits.digest import digest
from samebits.format.container import Checkpoint, Entry, FileInfo
from samebits.format.geometry import Code
from tests.cli.conftest import Command
from tests.codecs.zoo import GOLDEN
from tests.jobs.checkpoints import stored, write_folder
from tests.jobs.test_jobs import compress

CASES = {case.name: case for case in GOLDEN}
PACKED = ("quad_row_shifts", "quad_patches", "quad_raw_chunks", "single_row_shifts", "single_flat", "compact_escapes")
UNCHANGED = {"norm.weight": torch.ones(64, dtype=torch.bfloat16), "steps": torch.arange(5)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container with tensors that use all that the format has, beside its original."""
    folder = tmp_path_factory.mktemp("files")
    words = {name: torch.from_numpy(CASES[name].words.view("i2").copy()).view(torch.bfloat16) for name in PACKED}
    save_file(words | UNCHANGED, folder / "original.safetensors")
    data = {f"{name}.sb_bare": torch.frombuffer(bytearray(CASES[name].packed), dtype=torch.uint8) for name in PACKED}
    digests = {name: digest(tensor) for name, tensor in UNCHANGED.items()}
    save_file(data | UNCHANGED, folder / "packed.safetensors", {"samebits": FileInfo(digests).to_json()})
    return folder / "packed.safetensors"


def contents(path: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """All tensors whatever their names."""
    return sorted(stored(path).values())


def check_decompress(samebits: Command, damaged: Path, original: Path) -> int:
    """It fails with one line and leaves nothing, or what it writes is right."""
    target = damaged.with_name("back.safetensors")
    outcome = samebits("decompress", damaged, target)
    if outcome.code == 0:
        assert contents(target) == contents(original)
        target.unlink()
    else:
        assert outcome.code == 2
        assert str(damaged) in outcome.error
        assert "; " in outcome.error
    assert {path.name for path in damaged.parent.iterdir()} == {damaged.name}
    return outcome.code


def check_verify(samebits: Command, damaged: Path) -> int:
    outcome = samebits("verify", damaged)
    if outcome.code:
        assert outcome.code in (1, 2)
        assert str(damaged) in outcome.error
    return outcome.code


def regions(entry: Entry) -> dict[str, range]:
    """Each section of a packed tensor and each gap between them, as positions in the file."""
    assert entry.header
    found: dict[str, range] = {}
    end = 0
    for name, section in entry.header.sections.items():
        found[f"gap before {name}"] = range(end, section.start)
        found[name] = range(section.start, section.stop)
        end = section.stop
    found["end"] = range(end, entry.nbytes)
    return {name: range(entry.spec.start + r.start, entry.spec.start + r.stop) for name, r in found.items() if len(r)}


def some(region: range, count: int) -> list[int]:
    """First, last and ``count`` other positions."""
    return sorted({region[0], region[-1], *random.Random(0).sample(region, min(count, len(region)))})


def flipped(path: Path, position: int, target: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    target.write_bytes(data)
    return target


def test_the_file_has_all_sections(samebits: Command, packed: Path) -> None:
    entries = [Checkpoint.open(packed).entries[name] for name in PACKED]
    assert {entry.header.code for entry in entries if entry.header} == {Code.QUAD, Code.SINGLE, Code.COMPACT}
    assert any("row_shifts" in regions(entry) for entry in entries)
    assert samebits("verify", packed, "--against", packed.with_name("original.safetensors")).code == 0


@pytest.mark.parametrize("name", PACKED)
def test_flips_in_every_section_of_a_packed_tensor(samebits: Command, packed: Path, tmp_path: Path, name: str) -> None:
    for section, region in regions(Checkpoint.open(packed).entries[name]).items():
        for position in some(region, 64 if section == "header" else 6):
            damaged = flipped(packed, position, tmp_path / "damaged.safetensors")
            assert check_verify(samebits, damaged) in (1, 2), (section, position)
            check_decompress(samebits, damaged, packed.with_name("original.safetensors"))


@pytest.mark.parametrize("name", ["norm.weight", "steps"])
def test_flips_in_unchanged_tensors(samebits: Command, packed: Path, tmp_path: Path, name: str) -> None:
    spec = Checkpoint.open(packed).entries[name].spec
    for position in some(range(spec.start, spec.stop), 5):
        damaged = flipped(packed, position, tmp_path / "damaged.safetensors")
        assert check_verify(samebits, damaged) == 1
        assert check_decompress(samebits, damaged, packed.with_name("original.safetensors")) == 2


def test_flips_in_the_file_header(samebits: Command, packed: Path, tmp_path: Path) -> None:
    """A flip inside a name or among spaces may go unseen, but no weight comes out wrong."""
    (length,) = struct.unpack("<Q", packed.read_bytes()[:8])
    codes = set()
    for position in [*range(8), *some(range(8, 8 + length), 150)]:
        damaged = flipped(packed, position, tmp_path / "damaged.safetensors")
        check_verify(samebits, damaged)
        codes.add(check_decompress(samebits, damaged, packed.with_name("original.safetensors")))
    assert 2 in codes


def cuts(packed: Path) -> Iterator[int]:
    """Lengths to cut the file to: inside its header and inside and between its tensors."""
    yield from (0, 1, 7, 8, 9, 100)
    for entry in Checkpoint.open(packed):
        yield from (entry.spec.start, entry.spec.start + 1, entry.spec.start + 70, entry.spec.stop - 1)


def test_cuts(samebits: Command, packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    for length in cuts(packed):
        damaged.write_bytes(data[:length])
        assert check_verify(samebits, damaged) == 2
        assert check_decompress(samebits, damaged, packed) == 2
    damaged.write_bytes(data + bytes(16))
    assert check_verify(samebits, damaged) == 2


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("name", PACKED)
def test_overwritten_sections(samebits: Command, packed: Path, tmp_path: Path, name: str, byte: int) -> None:
    original = packed.with_name("original.safetensors")
    for region in regions(Checkpoint.open(packed).entries[name]).values():
        data = bytearray(packed.read_bytes())
        before = bytes(data[region.start : region.stop])
        data[region.start : region.stop] = bytes([byte]) * len(region)
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes(data)
        if before != data[region.start : region.stop]:
            assert check_verify(samebits, damaged) in (1, 2)
            check_decompress(samebits, damaged, original)


def test_random_overwrites(samebits: Command, packed: Path, tmp_path: Path) -> None:
    generator = random.Random(1)
    first = min(entry.spec.start for entry in Checkpoint.open(packed))
    data = packed.read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    for _ in range(60):
        start = generator.randrange(first, len(data) - 1)
        length = min(generator.choice((2, 8, 64, 4096)), len(data) - start)
        damaged.write_bytes(data[:start] + generator.randbytes(length) + data[start + length :])
        assert check_verify(samebits, damaged) in (1, 2), (start, length)
        check_decompress(samebits, damaged, packed.with_name("original.safetensors"))


def test_a_renamed_tensor_of_a_folder(samebits: Command, tmp_path: Path) -> None:
    """In a folder the index tells even that."""
    compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    shard = tmp_path / "packed" / "samebits-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"lm_head.sb_packed", b"lm_heae.sb_packed"))
    outcome = samebits("verify", tmp_path / "packed")
    assert outcome.code == 2
    assert f"lm_head.sb_packed: the index puts it into {shard.name}, which lacks it" in outcome.error
