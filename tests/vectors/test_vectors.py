"""The format's stability: bytes written once must decode, and be written again, for as long as version 1 lasts."""

from __future__ import annotations

import numpy as np
import pytest

import samebits
from samebits.codecs.reference import Reading, decode_reference, digest_reference
from samebits.digest import digest
from tests.codecs.slow_encoder import slow_encode
from tests.codecs.tensors import packed_of, tensor_of, words_of
from tests.codecs.zoo import GOLDEN, Case
from tests.vectors.make import FAST, FOLDER, path_of, stored_words, written

NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


def test_no_vector_is_missing() -> None:
    assert set(NAMES) == {case.name for case in GOLDEN} | set(FAST)


@pytest.mark.parametrize("name", NAMES)
def test_reference_decodes(name: str) -> None:
    words = decode_reference(path_of(name, "bin").read_bytes())
    assert words.astype("<u2").tobytes() == path_of(name, "words").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_samebits_decodes(name: str) -> None:
    packed = packed_of(path_of(name, "bin").read_bytes())
    assert words_of(samebits.decode(packed)).tobytes() == path_of(name, "words").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_digests(name: str) -> None:
    data, words = path_of(name, "bin").read_bytes(), path_of(name, "words").read_bytes()
    header = packed_of(data).header
    assert header.stored_digest == digest_reference(data[16:]) == digest(np.frombuffer(data, np.uint8)[16:])
    assert header.original_digest == digest_reference(words) == digest(words)


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_slow_encoder_still_writes_it(case: Case) -> None:
    words = stored_words(case.name, case.words.shape)
    assert slow_encode(words, case.choose(words)) == path_of(case.name, "bin").read_bytes()


@pytest.mark.parametrize("name", FAST)
def test_samebits_still_writes_it(name: str) -> None:
    """Not the format but the plan: a better one may change these bytes, on purpose."""
    words = stored_words(name, FAST[name].shape)
    assert written(name, tensor_of(words)) == path_of(name, "bin").read_bytes()


@pytest.mark.parametrize("name", FAST)
def test_samebits_uses_the_code_of_the_name(name: str) -> None:
    reading = Reading(path_of(name, "bin").read_bytes())
    assert reading.is_quad == ("quad" in name)
    assert reading.is_compact == ("compact" in name)
    assert bool(reading.header["flags"]) == ("row_shifts" in name)
