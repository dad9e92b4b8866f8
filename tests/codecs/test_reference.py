"""The oracle itself: it reads everything the slow encoder writes, and refuses whatever breaks a clause."""

from __future__ import annotations

import numpy as np
import pytest

from samebits.codecs.reference import Reading, decode_reference, digest_reference
from samebits.errors import FormatError
from tests.codecs.malformed import MALFORMED, QUAD, Malformed
from tests.codecs.zoo import ZOO, Case


@pytest.mark.clause(
    "1.1", "1.2", "1.3", "1.4", "1.5", "2.1", "2.2", "3.1", "3.2", "3.3", "3.4", "3.5", "4.1", "4.2", "4.3"
)
@pytest.mark.clause("5.1", "5.2", "5.3", "6.1", "6.2", "6.3", "6.4", "6.5")
@pytest.mark.clause("1.6", "3.6", "3.7", "5.5", "6.7", "6.8")
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_reads_all_the_format_allows(case: Case) -> None:
    words = decode_reference(case.packed)
    assert words.dtype == np.uint16
    assert words.shape == case.words.shape
    assert words.tobytes() == case.words.tobytes()


@pytest.mark.clause("1.1", "2.1", "2.2", "3.1", "3.2", "3.4", "3.5", "3.6", "4.2", "5.2", "6.1", "6.3", "6.4", "6.5")
@pytest.mark.clause("6.6", "6.7", "6.8")
@pytest.mark.parametrize("malformed", MALFORMED, ids=str)
def test_refuses_what_breaks_a_clause(malformed: Malformed) -> None:
    with pytest.raises(FormatError, match=rf"\(FORMAT\.md {malformed.clause}\)"):
        decode_reference(malformed.data)


def test_the_zoo_uses_the_whole_format() -> None:
    readings = [Reading(case.packed) for case in ZOO if not case.is_compact]
    chunks = [(reading, chunk) for reading in readings for chunk in reading.chunks]
    coded = [chunk for _, chunk in chunks if not chunk.is_raw]
    assert {reading.is_quad for reading, chunk in chunks if chunk.is_raw} == {True, False}
    assert {reading.is_quad for reading, chunk in chunks if not chunk.is_raw} == {True, False}
    assert {len(chunk.stages) for chunk in coded} >= {1, 2, 3, 4, 16, 64}
    assert max(len({group for group, _ in chunk.stages}) for chunk in coded) > 2
    assert max(chunk.patch_count for chunk in coded) > 256
    assert {byte & 15 for chunk in coded for byte in chunk.stored[1:9].tobytes()} == set(range(16))
    lengths = {length for reading, _ in chunks for length, _ in reading.codewords}
    assert lengths == set(range(1, 14))


def test_the_zoo_uses_the_whole_compact_code() -> None:
    readings = [Reading(case.packed).compact for case in ZOO if case.is_compact]
    assert {1, 257} <= {reading.count for reading in readings}
    assert {0, 256} <= {reading.frequencies[256] for reading in readings}
    assert {1, 255} <= {reading.frequencies[e] for reading in readings for e in reading.frequencies if e < 256}
    assert {8, 8 + 16 * 256} <= {length for reading in readings for length in reading.lengths}
    assert {len(reading.frequencies) for reading in readings} >= {1, 2, 257}


@pytest.mark.clause("2.3")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"\0", 0xE220A8397B1DCDAF),  # the first output of splitmix64 from seed 0
        (bytes(16), (0xE220A8397B1DCDAF + 0x6E789E6AA1B965F4) % 2**64),  # and the second
    ],
)
def test_digest_of_known_bytes(data: bytes, expected: int) -> None:
    assert digest_reference(data) == expected


@pytest.mark.clause("2.3")
def test_digest_tells_every_change_of_one_byte() -> None:
    data = QUAD[16:]
    changed = {
        digest_reference(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]) for at in range(0, len(data), 97)
    }
    assert digest_reference(data) not in changed
    assert len(changed) == len(range(0, len(data), 97))


@pytest.mark.clause("2.2", "2.3")
@pytest.mark.parametrize("case", ZOO[:3], ids=str)
def test_both_digests_are_stored(case: Case) -> None:
    header = Reading(case.packed).header
    assert header["stored_digest"] == digest_reference(case.packed[16:])
    assert header["original_digest"] == digest_reference(case.words.tobytes())
