"""Damaged and hostile bytes: an error, or words whose digest tells; never a crash, a hang or a wrong weight unnoticed.

The loops run in this process without bounds checks, so a wrong access would end or garble it: reads and writes are also
watched by a canary around the output (decode into a slice of a larger tensor).
"""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samebits
from samebits.codecs.decode import decode_cpu
from samebits.codecs.decode_loops import SLACK
from samebits.codecs.reference import Reading, decode_reference
from samebits.digest import digest
from samebits.errors import FormatError, VersionError
from samebits.format.packed import PackedTensor
from tests.codecs.malformed import MALFORMED, QUAD, SINGLE, Malformed
from tests.codecs.slow_encoder import seal
from tests.codecs.surgery import FIELDS, Parts, hostile_runs, put
from tests.codecs.tensors import bytes_of, packed_of, tensor_of, words_of
from tests.codecs.zoo import ZOO, Case, normal, scaled_rows, scattered

CANARY = 0x5AA5
ROOM = 4096
SECTIONS = ["header", "shape", "code", "row_shifts", "offsets", "planes", "streams"]
SMALL = {case.name: case for case in ZOO if len(case.packed) < 20_000}
CHUNKED = {name for name, case in SMALL.items() if not case.is_compact}


def decode_in_a_cage(packed: PackedTensor) -> torch.Tensor:
    """Decode between two canaries."""
    cage = torch.full((packed.words + 2 * ROOM,), CANARY, dtype=torch.int16)
    inside = cage[ROOM:-ROOM].view(torch.bfloat16).view(packed.shape)
    decode_cpu(packed, inside)
    assert bool((cage[:ROOM] == CANARY).all() and (cage[-ROOM:] == CANARY).all()), "wrote outside its output"
    return inside


def survives(data: bytes) -> bool:
    """Whether ``data`` got past validation; if so it is decoded, and its digest must tell right from wrong."""
    try:
        packed = packed_of(data)
    except FormatError:
        return False
    words = decode_in_a_cage(packed)
    assert words_of(samebits.decode(packed)).shape == packed.shape
    try:
        expected = decode_reference(data).tobytes()
    except FormatError:
        return True
    assert words_of(words).tobytes() == expected, "well-formed bytes, but not the words they mean"
    return True


def tells(data: bytes) -> bool:
    """Whether the digests show that ``data`` is not what was written."""
    packed = packed_of(data)
    return digest(packed.data[16:]) != packed.header.stored_digest or (
        digest(decode_in_a_cage(packed)) != packed.header.original_digest
    )


@pytest.mark.clause("2.2", "3.2", "3.4", "3.5", "4.2", "6.1", "6.6")
@pytest.mark.parametrize("malformed", MALFORMED, ids=str)
def test_malformed_tensors(malformed: Malformed) -> None:
    assert survives(malformed.data) is not malformed.refused


@pytest.mark.clause("2.2")
@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_named(version: int) -> None:
    with pytest.raises(VersionError, match=f"version {version}; this samebits reads version 1"):
        packed_of(QUAD[:4] + bytes([version]) + QUAD[5:])


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    "name",
    ["quad_row_shifts", "quad_patches", "quad_raw_chunks", "single_flat", "single_row_shifts", "compact_escapes"],
)
def test_flipped_bits_are_noticed(name: str, section: str) -> None:
    data = SMALL[name].packed
    reading = Reading(data)
    start = reading.places[section].start
    size = len(reading.sections[section])
    rng = np.random.default_rng(len(section))
    for at in start + rng.integers(0, size, 40) if size else []:
        flipped = data[:at] + bytes([data[at] ^ 1 << int(rng.integers(0, 8))]) + data[at + 1 :]
        if survives(flipped):
            assert tells(flipped)


@pytest.mark.parametrize("name", ["quad_row_shifts", "single_flat", "compact_escapes"])
def test_every_cut_is_refused(name: str) -> None:
    data = SMALL[name].packed
    for length in [*range(200), *range(200, len(data), 61), len(data) - 1]:
        with pytest.raises(FormatError):
            packed_of(data[:length])


@settings(max_examples=300)
@given(st.sampled_from(sorted(SMALL)), st.sampled_from(sorted(FIELDS)), st.integers(0, 2**64 - 1), st.integers(0, 64))
def test_any_header_field(name: str, field: str, value: int, bits: int) -> None:
    parts = Parts.of(SMALL[name].packed)
    size = 8 * struct.calcsize(FIELDS[field][1])
    value &= (1 << min(bits, size)) - 1
    signed = field == "shift" and value >= 128
    parts[field] = value - 256 if signed else value
    survives(parts.joined())


@settings(max_examples=300)
@given(st.sampled_from(sorted(SMALL)), st.sampled_from(SECTIONS[1:]), st.data())
def test_any_bytes_anywhere(name: str, section: str, data: st.DataObject) -> None:
    """Sections overwritten in part, with digests that hide it."""
    parts = Parts.of(SMALL[name].packed)
    content: bytearray = getattr(parts, section)
    start = data.draw(st.integers(0, len(content)))
    fill = data.draw(st.binary(max_size=64) | st.sampled_from([b"\xff" * 4096, b"\0" * 4096, b"\x80\x7f" * 2048]))
    content[start : start + len(fill)] = fill[: len(content) - start]
    survives(parts.joined())


@pytest.mark.clause("6.6")
@settings(max_examples=200)
@given(st.sampled_from(sorted(CHUNKED)), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_hostile_streams(name: str, seed: int, first_word: int) -> None:
    """Random streams behind valid tables: any base, unit and patch count."""
    parts = Parts.of(SMALL[name].packed)
    parts.streams[:] = np.random.default_rng(seed).bytes(len(parts.streams))
    for at in range(len(parts.offsets) // 4 - 1):
        put(parts.streams, struct.unpack_from("<I", parts.offsets, 4 * at)[0], first_word)
    assert survives(parts.joined())


@pytest.mark.clause("6.6")
@pytest.mark.parametrize("fill", [b"\xff", b"\0"])
@pytest.mark.parametrize("case", [case for case in ZOO if not case.is_compact], ids=str)
def test_chunks_of_one_word(case: Case, fill: bytes) -> None:
    """The shortest chunks there can be, whose streams and patches all lie beyond their end."""
    parts = Parts.of(case.packed)
    chunks = len(parts.offsets) // 4 - 1
    parts["stream_words"] = chunks
    parts["max_chunk_words"] = 1
    parts.offsets[:] = struct.pack(f"<{chunks + 1}I", *range(chunks + 1))
    parts.streams[:] = fill * (4 * chunks)
    assert survives(parts.joined())


@pytest.mark.clause("6.5", "6.6")
@pytest.mark.parametrize("case", [case for case in ZOO if not case.is_compact], ids=str)
def test_raw_chunks_that_are_too_short(case: Case) -> None:
    """No memory of others gets into the words: what was freed just before holds something else each time."""
    parts = Parts.of(case.packed)
    for at in range(len(parts.offsets) // 4 - 1):
        put(parts.streams, struct.unpack_from("<I", parts.offsets, 4 * at)[0], 0)
    packed, room = packed_of(parts.joined()), 1 + 128 * parts["chunk_stages"] + SLACK
    found = set()
    for fill in range(1, 4):
        [np.full(room, 0x01010101 * fill, np.uint32) for _ in range(4)].clear()
        found.add(words_of(decode_in_a_cage(packed)).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("section", ["code", "offsets", "streams"])
@pytest.mark.parametrize("name", ["quad_row_shifts", "single_flat", "compact_escapes"])
def test_bytes_written_behind_validation(name: str, section: str) -> None:
    """As through a parameter's ``.data``: an error, or other words, but no access outside the tensor."""
    for fill in (0x7F, 0xFF, 0):
        packed = packed_of(SMALL[name].packed)
        packed.section(section)[4:].fill_(fill)  # type: ignore[arg-type]
        with suppress(FormatError):
            decode_in_a_cage(packed)
    packed = packed_of(SMALL[name].packed)
    assert words_of(decode_in_a_cage(packed)).tobytes() == decode_reference(SMALL[name].packed).tobytes()


@pytest.mark.clause("6.8")
@settings(max_examples=200)
@given(st.sampled_from(sorted(SMALL.keys() - CHUNKED)), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_hostile_runs(name: str, seed: int, random_code: bool, short: bool) -> None:
    """Random streams, runs of any legal length, and any frequencies."""
    assert survives(hostile_runs(SMALL[name].packed, np.random.default_rng(seed), random_code, short))


@pytest.mark.parametrize("words", [normal((64, 256)), scaled_rows((64, 512)), scattered((9000,))], ids=["a", "b", "c"])
def test_every_changed_byte_is_noticed(words: np.ndarray) -> None:
    """What samebits itself wrote: no single changed byte goes unnoticed, wherever it is."""
    data = bytes_of(samebits.encode(tensor_of(words)))
    for at in np.random.default_rng(1).integers(0, len(data), 60):
        changed = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        if survives(changed):
            assert tells(changed)


def test_a_sealed_change_of_contents_is_noticed() -> None:
    """Both digests matter: with a stored digest that fits, the words' own digest still tells."""
    parts = Parts.of(SINGLE)
    parts.planes[5] ^= 1
    assert tells(parts.joined())
    assert not tells(seal(SINGLE))
