"""The header and section table of a packed tensor (FORMAT.md section 2), against bytes written out by hand."""

from __future__ import annotations

import copy
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samebits
from samebits.codecs.reference import Reading
from samebits.errors import DeviceError, DigestError, DtypeError, FormatError, InputError
from samebits.format.geometry import Code, Layout
from samebits.format.header import Header
from samebits.format.packed import PackedTensor, existing
from tests.codecs.malformed import COMPACT, QUAD, SINGLE
from tests.codecs.tensors import bytes_of, packed_of, tensor_of, words_of
from tests.codecs.zoo import ZOO, Case, normal

HEADER = Header(
    Code.QUAD, Layout.MATRIX, (2, 12, 200), chunk_stages=16, max_code_length=11, window=56, shift=-3,
    symbol_count=300, has_row_shifts=False, max_chunk_words=777, stream_words=0x1_0203,
    original_digest=0x1122334455667788, stored_digest=0x99AABBCCDDEEFF00,
)  # fmt: skip
BYTES = bytes.fromhex(
    "53424954"  # 0   magic: "SBIT"
    "01 01 01 03"  # 4   version, quad, matrix, three dimensions
    "00ffeeddccbbaa99"  # 8   stored digest
    "8877665544332211"  # 16  original digest
    "c8000000 10 0b 38 fd"  # 24  200 columns, chunk_stages 16, max_code_length 11, window 56, shift -3
    "1800000000000000"  # 32  24 rows
    "2c01 0000 09030000"  # 40  300 symbols, no flags, max_chunk_words 777
    "0302010000000000"  # 48  stream_words
    "0000000000000000"  # 56  reserved
    "0200000000000000 0c00000000000000 c800000000000000"  # 64 shape
)


@pytest.mark.clause("2.2")
def test_header_as_bytes() -> None:
    assert HEADER.to_bytes() == BYTES
    assert Header.parse(BYTES) == HEADER
    assert Header.parse(BYTES + b"what follows") == HEADER


@pytest.mark.clause("2.2")
def test_header_is_the_struct_of_format_md() -> None:
    """2.2's table written as a struct: offsets 0, 4, 8, 16, 24, 28, 32, 40, 44, 48 and 56."""
    fields = (
        0x54494253,
        1,
        1,
        1,
        3,
        HEADER.stored_digest,
        HEADER.original_digest,
        200,
        16,
        11,
        56,
        -3,
        24,
        300,
        0,
        777,
        0x10203,
        0,
    )
    assert struct.pack("<I4B2QI3BbQ2HI2Q", *fields) == BYTES[:64]


@pytest.mark.clause("2.1")
def test_sections_as_offsets() -> None:
    """300 symbols, 24 x 200 words: 3 row groups of 4 stages, all in one chunk; less than 65,536 words."""
    sections = {name: (place.start, place.stop) for name, place in HEADER.sections.items()}
    assert sections == {
        "header": (0, 64),
        "shape": (64, 88),
        "code": (96, 728),
        "row_shifts": (736, 736),
        "offsets": (736, 744),
        "planes": (752, 752 + 3 * 2 * 1152),
        "streams": (7664, 7664 + 4 * 0x10203),
    }
    assert HEADER.nbytes == 7664 + 4 * 0x10203 + 4


@pytest.mark.clause("2.1")
@pytest.mark.parametrize(("rows", "planes"), [(512, 768), (511, 672)])
def test_planes_of_large_tensors_start_at_cache_lines(rows: int, planes: int) -> None:
    header = Header(Code.SINGLE, Layout.MATRIX, (rows, 128), 1, 9, 0, 0, 10, False, 99, 9999)
    assert header.sections["offsets"] == slice(144, 144 + 4 * 129)
    assert header.sections["planes"].start == planes


COMPACT_HEADER = Header.of_compact((7, 601), code_bytes=15, stream_words=345, original_digest=0x1122334455667788)
COMPACT_BYTES = bytes.fromhex(
    "53424954 01 03 00 02 0000000000000000 8877665544332211"  # magic, version, compact, two dimensions, digests
    "00000000000000000000000000000000"  # 24  no geometry
    "0f00 0000 00000000"  # 40  15 bytes of code
    "5901000000000000 0000000000000000"  # 48  stream_words
    "0700000000000000 5902000000000000"  # 64  shape
)


@pytest.mark.clause("2.1", "2.2")
def test_header_of_the_compact_code() -> None:
    """4,207 words in 17 runs."""
    assert COMPACT_HEADER.to_bytes() == COMPACT_BYTES
    assert Header.parse(COMPACT_BYTES) == COMPACT_HEADER
    assert {name: (place.start, place.stop) for name, place in COMPACT_HEADER.sections.items()} == {
        "header": (0, 64),
        "shape": (64, 80),
        "code": (80, 95),
        "row_shifts": (96, 96),
        "offsets": (96, 130),
        "planes": (132, 132 + 4207),
        "streams": (4340, 4340 + 4 * 345),
    }
    assert COMPACT_HEADER.nbytes == 5728


@pytest.mark.clause("1.6", "2.2")
def test_the_compact_code_has_an_end() -> None:
    with pytest.raises(FormatError, match="no streams"):
        Header.parse(Header.of_compact((7, 601), 15, 0, 0).to_bytes())
    most = Header.of_compact((1 << 20,), 15, 345, 0)
    assert Header.parse(most.to_bytes()) == most
    with pytest.raises(FormatError, match="1048577 words in the compact code"):
        Header.parse(Header.of_compact(((1 << 20) + 1,), 15, 345, 0).to_bytes())


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_sections_are_the_references(case: Case) -> None:
    packed = packed_of(case.packed)
    for name, content in Reading(case.packed).sections.items():
        assert packed.section(name).numpy().tobytes() == content
    assert packed.shape == case.words.shape
    assert packed.words == case.words.size
    assert packed.header.to_bytes() == case.packed[: 64 + 8 * case.words.ndim]


@given(st.binary(min_size=0, max_size=200), st.sampled_from([b"", BYTES[:8], COMPACT_BYTES[:40]]))
def test_arbitrary_bytes_are_no_header(noise: bytes, start: bytes) -> None:
    data = start + noise
    try:
        header = Header.parse(data)
    except FormatError:
        return
    assert header.to_bytes() == data[: 64 + 8 * len(header.shape)]


@pytest.mark.clause("7.2")
@pytest.mark.parametrize(
    "data",
    [torch.zeros(64, dtype=torch.int8), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros((), dtype=torch.uint8)],
    ids=str,
)
def test_only_one_dimensional_bytes(data: torch.Tensor) -> None:
    with pytest.raises(DtypeError, match="one-dimensional uint8"):
        PackedTensor.from_data(data)


@pytest.mark.parametrize("offset", [1, 2, 4, 24])
@pytest.mark.parametrize("data", [QUAD, SINGLE, COMPACT], ids=["quad", "single", "compact"])
def test_bytes_at_any_address(data: bytes, offset: int) -> None:
    room = torch.zeros(offset + len(data), dtype=torch.uint8)
    room[offset:] = packed_of(data).data
    packed = PackedTensor.from_data(room[offset:])
    assert words_of(samebits.decode(packed)).tobytes() == words_of(samebits.decode(packed_of(data))).tobytes()


def test_what_is_no_packed_tensor() -> None:
    with pytest.raises(InputError, match=r"bytes is no tensor; torch\.frombuffer makes one"):
        PackedTensor.from_data(QUAD)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"Tensor is no PackedTensor; call PackedTensor\.from_data"):
        samebits.decode(packed_of(QUAD).data)  # type: ignore[arg-type]


def test_each_packed_tensor_is_one_of_its_own() -> None:
    """To compare bytes is what digests are for."""
    first, second = packed_of(QUAD), packed_of(QUAD)
    assert first == first
    assert first != second
    assert second in [first, second]
    assert len({first, second}) == 2


def test_every_second_byte_is_made_contiguous() -> None:
    room = packed_of(QUAD).data.repeat_interleave(2)
    assert bytes_of(PackedTensor.from_data(room[::2])) == QUAD


@pytest.mark.clause("2.3")
@pytest.mark.parametrize("data", [QUAD, SINGLE, COMPACT], ids=["quad", "single", "compact"])
def test_a_flipped_bit_is_noticed(data: bytes) -> None:
    """Wherever it is: by the digest, or before, where it breaks the structure."""
    for at in np.random.default_rng(1).integers(0, 8 * len(data), 200):
        flipped = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((DigestError, FormatError)):
            PackedTensor.from_data(flipped)


def test_a_known_header_is_checked_against_the_length() -> None:
    packed = packed_of(QUAD)
    assert PackedTensor.from_data(packed.data, header=packed.header).header is packed.header
    with pytest.raises(FormatError, match="bytes where the header asks for"):
        PackedTensor.from_data(packed.data[:-16], header=packed.header)


def test_what_a_packed_tensor_tells() -> None:
    words = normal((64, 256))
    packed = samebits.encode(tensor_of(words))
    assert isinstance(packed, samebits.PackedTensor)
    assert packed.shape == torch.Size([64, 256])
    assert (packed.words, packed.nbytes) == (16384, packed.data.numel())
    assert packed.bits_per_weight == 8 * packed.nbytes / 16384
    assert packed.device == torch.device("cpu")
    assert packed.to("cpu").header == packed.header
    assert not packed.is_raw


@pytest.mark.clause("7.5")
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7)], ids=str)
def test_what_gains_nothing_is_raw(shape: tuple[int, ...]) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(np.uint16)
    packed = samebits.encode(tensor_of(words))
    assert packed.is_raw
    assert packed.nbytes == words.nbytes
    assert packed.bits_per_weight == (16 if words.size else 0)
    assert bytes_of(packed) == words.tobytes()
    packed.validate()


def test_errors_say_what_and_how_to_mend() -> None:
    with pytest.raises(FormatError) as caught:
        packed_of(b"not a packed tensor" * 10)
    assert (
        str(caught.value)
        == "magic number 0x20746f6e instead of 0x54494253; the file is damaged or was not written by samebits"
    )


@pytest.mark.parametrize("made", [QUAD, SINGLE, COMPACT], ids=["quad", "single", "compact"])
def test_a_pickle_is_validated(made: bytes) -> None:
    """Of which other bytes may come than were put into it."""
    case = packed_of(made)
    content = pickle.dumps(case)
    assert bytes_of(pickle.loads(content)) == bytes_of(case) == bytes_of(copy.deepcopy(case))
    start = content.index(bytes_of(case))
    for place in {*range(0, case.nbytes, 97), *(section.start for section in case.header.sections.values())}:
        damaged = bytearray(content)
        damaged[start + place] ^= 0x40
        with pytest.raises((FormatError, DigestError)):
            pickle.loads(bytes(damaged))


def test_a_pickle_of_raw_words_is_validated() -> None:
    raw = samebits.encode(torch.arange(64, dtype=torch.int16).mul(1021).view(torch.bfloat16).view(8, 8))
    assert raw.is_raw
    again = pickle.loads(pickle.dumps(raw))
    assert (again.header, bytes_of(again)) == (raw.header, bytes_of(raw))
    damaged = bytearray(pickle.dumps(raw))
    damaged[damaged.index(bytes_of(raw)) + 5] ^= 1
    with pytest.raises(DigestError, match="the words differ from their digest"):
        pickle.loads(bytes(damaged))


@pytest.mark.parametrize("device", ["xyz", "", "mps", 5.0, None])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(DeviceError, match="is no device for packed tensors; take cpu, or cuda"):
        packed_of(QUAD).to(device)


def test_a_nested_tensor_holds_no_packed_bytes() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(InputError, match="a nested tensor is several"):
        PackedTensor.from_data(nested)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = samebits.encode(tensor_of(normal((64, 64))))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:0", torch.device("cuda", 3)):
        for move in (packed.to, lambda device: samebits.decode(packed, device), existing):
            with pytest.raises(DeviceError, match=f"no device {device} is available; take the CPU"):
                move(device)
        with pytest.raises(DeviceError, match=f"no device {device} is available"):
            samebits.offload(torch.nn.Linear(8, 8), "1MB", device=device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert existing("cuda:1") == torch.device("cuda", 1)
    assert existing("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="no device cuda:2"):
        existing("cuda:2")
