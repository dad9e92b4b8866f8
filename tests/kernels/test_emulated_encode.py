"""The CUDA encoder, emulated on the CPU, writes the bytes of the CPU's; and the decoder of DFloat11's units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import samebits
from samebits.df11.unit import Unit
from samebits.kernels import df11, encode
from samebits.kernels.df11 import decode_df11_cuda
from samebits.kernels.encode import encode_cuda
from tests.codecs import zoo
from tests.codecs.tensors import bytes_of, tensor_of, without_compact
from tests.df11.test_unit import Words, random_words
from tests.kernels import emulator
from tests.kernels.emulator.device import EmulatedDevice
from tests.vectors.make import FAST, stored_words

pytestmark = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
LAYOUT = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    made, empty = EmulatedDevice(), torch.empty
    made.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **kinds: empty(*sizes, **kinds))
    monkeypatch.setattr(encode, "_to_host", lambda *tensors: [each.clone() for each in tensors])
    monkeypatch.setattr(encode, "_to_device", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(df11, "_resident_blocks", lambda device: made.multiprocessors)
    return made


def check(device: EmulatedDevice, words: Words) -> None:
    tensor = tensor_of(words)
    with without_compact():
        expected = samebits.encode(tensor)
        for device.seed, device.multiprocessors in ((1, 1), (2, 3)):
            packed = encode_cuda(tensor)
            assert packed.header == expected.header
            assert bytes_of(packed) == bytes_of(expected)


@pytest.mark.parametrize("case", zoo.ZOO, ids=str)
def test_same_bytes_for_the_zoo(device: EmulatedDevice, case: zoo.Case) -> None:
    check(device, case.words)


@pytest.mark.parametrize("name", FAST)
def test_same_bytes_for_the_golden_vectors(device: EmulatedDevice, name: str) -> None:
    check(device, stored_words(name, FAST[name].shape))


def test_same_bytes_where_chunks_become_raw(device: EmulatedDevice) -> None:
    check(device, zoo.around_raw_chunks())


def decoded(device: EmulatedDevice, unit: Unit) -> tuple[Words, int]:
    """The words, and whether the unit was called malformed."""
    tensors = [torch.from_numpy(np.ascontiguousarray(getattr(unit, name))) for name in LAYOUT]
    output, malformed = torch.empty(tensors[2].numel(), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    device.memory = []
    decode_df11_cuda(*tensors, output, malformed)
    return output.view(torch.int16).numpy().view(np.uint16), int(malformed.item())


@pytest.mark.parametrize("count", [64, 1000, 20_000])
def test_units_of_dfloat11(device: EmulatedDevice, count: int) -> None:
    words = random_words(1, count)
    found, malformed = decoded(device, Unit.encode(words, [words.size]))
    assert found.tobytes() == words.tobytes()
    assert not malformed


@pytest.mark.parametrize("seed", range(12))
def test_hostile_units_do_no_harm(device: EmulatedDevice, seed: int) -> None:
    rng, words = np.random.default_rng(seed), random_words(3, 12_000, 4.0)
    unit, changed = Unit.encode(words, [words.size]), dict[str, Any]()
    for name in rng.choice(LAYOUT, rng.integers(1, 6), replace=False):
        data = getattr(unit, name).copy()
        flat = data.view(np.uint8).reshape(-1)
        flat[:] = rng.integers(0, 256, flat.size) if seed % 2 else rng.choice([0, 1, 31, 32, 239, 240, 255])
        changed[name] = data
    assert len(decoded(device, replace(unit, **changed))[0]) == words.size
