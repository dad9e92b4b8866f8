"""The CUDA decoder, emulated on the CPU: right on all that the format allows, and no harm whatever the contents."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from samebits.format.geometry import Code
from samebits.format.packed import PackedTensor
from samebits.kernels import decode, rows
from samebits.kernels.rows import decode_experts_cuda, decode_rows_cuda
from tests.codecs.malformed import MALFORMED, Malformed
from tests.codecs.surgery import Parts, put
from tests.codecs.tensors import packed_of, words_of
from tests.codecs.zoo import ZOO, Case
from tests.kernels import emulator
from tests.kernels.emulator import EmulationError
from tests.kernels.emulator.device import EmulatedDevice
from tests.vectors.make import FOLDER, path_of

pytestmark = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))
CHUNKED = [case for case in ZOO if not case.is_compact]
WITH_ROWS = [case for case in CHUNKED if case.words.size and case.words.ndim > 1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    made.install(monkeypatch)
    monkeypatch.setattr(decode, "decode_table", lambda packed: None)
    monkeypatch.setattr(rows, "gathers", lambda header, count: True)
    return made


def decoded(device: EmulatedDevice, packed: PackedTensor) -> torch.Tensor:
    output = torch.full(packed.shape, torch.nan, dtype=torch.bfloat16)
    device.memory = [packed.data, output]
    if packed.code is Code.COMPACT:
        decode._decode_compact(packed, output)
    else:
        decode.launch("decode.cu", "decode", packed, output, None, decode.is_whole(packed.header.geometry))
    return output


def is_decoded_by_a_kernel(packed: PackedTensor) -> bool:
    return not packed.is_raw and packed.words > 0


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_decodes_the_zoo(device: EmulatedDevice, case: Case) -> None:
    packed = packed_of(case.packed)
    if is_decoded_by_a_kernel(packed):
        for device.seed, device.multiprocessors in ((1, 1), (2, 3)):
            assert words_of(decoded(device, packed)).tobytes() == case.words.tobytes()
        assert device.launched


@pytest.mark.parametrize("name", NAMES)
def test_decodes_the_golden_vectors(device: EmulatedDevice, name: str) -> None:
    packed = packed_of(path_of(name, "bin").read_bytes())
    if is_decoded_by_a_kernel(packed):
        assert words_of(decoded(device, packed)).tobytes() == path_of(name, "words").read_bytes()


@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_decodes_some_rows(device: EmulatedDevice, case: Case) -> None:
    packed = packed_of(case.packed)
    ids = torch.tensor([len(case.words) - 1, 0, len(case.words) // 2, 0])
    device.memory = []
    assert words_of(decode_rows_cuda(packed, ids)).tobytes() == case.words[ids.numpy()].tobytes()
    assert words_of(decode_experts_cuda(packed, ids)[ids]).tobytes() == case.words[ids.numpy()].tobytes()


def test_an_index_out_of_range(device: EmulatedDevice) -> None:
    packed = packed_of(WITH_ROWS[0].packed)
    with pytest.raises(EmulationError, match="out of range"):
        decode_rows_cuda(packed, torch.tensor([packed.shape[0]]))


@pytest.mark.parametrize("malformed", [case for case in MALFORMED if not case.refused], ids=str)
def test_malformed_streams_do_no_harm(device: EmulatedDevice, malformed: Malformed) -> None:
    packed = packed_of(malformed.data)
    if is_decoded_by_a_kernel(packed):
        assert decoded(device, packed).shape == packed.shape


@pytest.mark.parametrize("first_word", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF, None])
@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_hostile_streams_do_no_harm(device: EmulatedDevice, case: Case, first_word: int | None) -> None:
    """Random streams, whose chunks begin with a certain word."""
    parts = Parts.of(case.packed)
    parts.streams[:] = np.random.default_rng(1).bytes(len(parts.streams))
    if first_word is not None:
        for at in range(len(parts.offsets) // 4 - 1):
            put(parts.streams, struct.unpack_from("<I", parts.offsets, 4 * at)[0], first_word)
    packed = packed_of(parts.joined())
    if is_decoded_by_a_kernel(packed):
        assert decoded(device, packed).shape == packed.shape
