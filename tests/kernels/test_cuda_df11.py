"""The CUDA decoder of DFloat11's units: right on everything the layout allows, and no fault whatever the contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from samebits.df11 import unit as unit_module
from samebits.df11.code import UnitCode
from samebits.df11.decode import decode_unit
from samebits.df11.unit import Unit
from samebits.errors import FormatError, SamebitsError
from tests.codecs.tensors import words_of
from tests.df11.test_unit import NAMES, Words, random_words, unit_of

pytestmark = pytest.mark.gpu
LAYOUT = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps")
POISON = 0x5A5A
GUARD = 64  # words around the output that must stay as they are


def on_gpu(unit: Unit) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(getattr(unit, name))).cuda() for name in LAYOUT]


def decode(tensors: list[torch.Tensor], offset: int = 0) -> tuple[Words, int]:
    """The words, and whether the unit was called malformed. Nothing around the output may change."""
    words = tensors[2].numel()
    room = torch.full((words + 2 * GUARD + offset,), POISON, dtype=torch.int16, device="cuda")
    malformed = torch.zeros(1, dtype=torch.int32, device="cuda")
    start = GUARD + offset
    torch.ops.samebits.df11_decode(*tensors, room.view(torch.bfloat16)[start : start + words], malformed)
    result = room.cpu().numpy().view(np.uint16)
    assert (result[:start] == POISON).all()
    assert (result[start + words :] == POISON).all()
    return result[start : start + words], int(malformed.item())


def assert_decodes(unit: Unit, words: Words) -> None:
    result, malformed = decode(on_gpu(unit))
    assert result.tobytes() == words.tobytes()
    assert not malformed


def drawn(seed: int, frequencies: Sequence[float], count: int) -> Words:
    """Exponents from 60 on, drawn with these frequencies."""
    rng = np.random.default_rng(seed)
    p = np.asarray(frequencies, np.float64)
    return with_exponents(rng.choice(p.size, count, p=p / p.sum()) + 60, seed)


def with_exponents(exponents: NDArray[np.integer], seed: int) -> Words:
    rng = np.random.default_rng(seed)
    rest = rng.integers(0, 2, exponents.size) << 15 | rng.integers(0, 128, exponents.size)
    return (exponents.astype(np.int64) << 7 | rest).astype(np.uint16)


def fibonacci(count: int) -> list[int]:
    numbers = [1, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers


@pytest.mark.parametrize("name", NAMES)
def test_decodes_the_original(name: str) -> None:
    unit = unit_of(name)
    assert_decodes(unit, unit.decode())


@pytest.mark.parametrize("count", [*range(2, 40), 100, 1000, 4096, 12_345, 30_000, 1_000_003])
def test_any_number_of_words(count: int) -> None:
    words = random_words(count, count)
    assert_decodes(Unit.encode(words, [count]), words)


@pytest.mark.parametrize("spread", [0.6, 1, 3, 8, 16])
def test_spreads(spread: float) -> None:
    """The widest one takes all 17 tables."""
    words = random_words(1, 2_000_000, spread)
    assert_decodes(Unit.encode(words, [words.size]), words)


@pytest.mark.parametrize(
    "frequencies", [[1, 1e-6], [1, 1e-3, 1e-4], [1, 1], [1] * 4, [1] * 128, fibonacci(36)], ids=len
)
def test_frequencies(frequencies: Sequence[float]) -> None:
    """From one bit a code to twenty; as many codes in a block as there can be."""
    words = drawn(2, frequencies, 1_500_000)
    words[:2] = 60 << 7, 61 << 7
    assert_decodes(Unit.encode(words, [words.size]), words)


@pytest.mark.parametrize("tables", range(2, 18))
def test_numbers_of_tables(tables: int) -> None:
    """Every code of 8 bits but one is an exponent's, or begins those of two exponents: a table for each of these."""
    pairs = tables - 1
    counts = np.zeros(256, np.int64)
    counts[0], counts[1 : 129 - pairs], counts[129 - pairs : 129 + pairs] = 128 << 20, 1 << 20, 1 << 19
    assert UnitCode.from_histogram(counts).tables().shape[0] - 1 == tables
    exponents = np.random.default_rng(tables).choice(256, 200_000, p=counts / counts.sum())
    words = with_exponents(exponents, tables)
    assert_decodes(encoded_as(words, counts), words)


def encoded_as(words: Words, counts: NDArray[np.int64]) -> Unit:
    """With the code of other frequencies than the words have."""

    class Code(UnitCode):
        @classmethod
        def from_histogram(cls, histogram: NDArray[np.int64]) -> UnitCode:
            return UnitCode.from_histogram(counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_module, "UnitCode", Code)
        return Unit.encode(words, [words.size])


def test_codes_of_up_to_32_bits() -> None:
    """Long ones alone, short ones alone, both in turn, all of them equally often."""
    counts = np.zeros(256, np.int64)
    counts[100:133] = fibonacci(33)
    assert UnitCode.from_histogram(counts).lengths.max() == 32
    rng = np.random.default_rng(3)
    for exponents in (
        np.full(50_000, 100),
        np.full(200_000, 132),
        np.where(rng.random(200_000) < 0.5, 100, 132),
        rng.integers(100, 133, 200_000),
    ):
        words = with_exponents(exponents, 4)
        assert_decodes(encoded_as(words, counts), words)


def test_blocks_of_short_and_of_long_codes_in_turn() -> None:
    """Blocks of more codes than are made compact at a time lie between others, and some threads have many codes."""
    counts = np.zeros(256, np.int64)
    counts[100:130] = fibonacci(30)
    rng = np.random.default_rng(5)
    for length in (60, 300, 20_000, 100_000):
        dense, loose = np.full(length, 129), rng.integers(115, 130, length // 2)
        words = with_exponents(np.tile(np.concatenate([dense, loose]), 1_000_000 // length + 1), 6)
        assert_decodes(encoded_as(words, counts), words)


def test_streams_that_end_anywhere_in_a_block() -> None:
    for count in range(12_000, 12_400, 7):
        words = random_words(count, count)
        assert_decodes(Unit.encode(words, [count]), words)


def test_a_missing_last_position() -> None:
    """Some files have one position less: no code starts in the last block."""
    words = random_words(1, 100_000)
    unit = Unit.encode(words, [words.size])
    positions = unit.output_positions.view("<u4")
    count = int(positions[-2])
    cut = replace(
        unit,
        encoded_exponent=unit.encoded_exponent[: (positions.size - 2) * 4096 + 4],
        sign_mantissa=unit.sign_mantissa[:count],
        output_positions=np.append(positions[:-2], count).astype("<u4").view(np.uint8),
    )
    assert decode(on_gpu(cut))[0].tobytes() == words[:count].tobytes()


@pytest.mark.parametrize("offset", [1, 2, 4, 7, 8, 15])
def test_tensors_at_any_address(offset: int) -> None:
    words = random_words(5, 50_000)
    tensors = []
    for tensor in on_gpu(Unit.encode(words, [words.size])):
        room = torch.zeros(tensor.numel() + offset, dtype=torch.uint8, device="cuda")
        room[offset:] = tensor.view(-1)
        tensors.append(room[offset:].view(tensor.shape))
    assert decode(tensors, offset)[0].tobytes() == words.tobytes()


def test_many_weights() -> None:
    """More blocks of the stream than the device runs at a time."""
    part = random_words(6, 3_000_000)
    words = np.tile(part, 20)
    assert_decodes(Unit.encode(words, [words.size]), words)


@pytest.mark.parametrize("name", NAMES)
def test_parts_as_checkpoints_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin and end in the midst of a block. Nothing is decoded on the CPU."""
    unit, words = unit_of(name), unit_of(name).decode()
    monkeypatch.delattr(Unit, "decode")
    for first in range(0, words.size, words.size // 9):
        for last in (first + 1, min(first + 20_001, words.size), words.size):
            part, before = unit.part(first, last)
            found = words_of(decode_unit(part, "cuda")[before : before + last - first].cpu())
            assert found.tobytes() == words[first:last].tobytes()


def test_a_damaged_part_is_refused() -> None:
    unit = unit_of("lm_head")
    part, _ = replace(unit, encoded_exponent=unit.encoded_exponent ^ np.uint8(0x55)).part(20_000, 200_000)
    with pytest.raises(FormatError, match="contradict the stream"):
        decode_unit(part, "cuda")


def test_is_captured_in_a_cuda_graph() -> None:
    """Replays decode what the bytes are then."""
    words = random_words(7, 300_000)
    tensors = on_gpu(Unit.encode(words, [words.size]))
    output = torch.empty(words.size, dtype=torch.bfloat16, device="cuda")
    malformed = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.ops.samebits.df11_decode(*tensors, output, malformed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.samebits.df11_decode(*tensors, output, malformed)
    tensors[2][100:200] ^= 0x81
    graph.replay()
    words[100:200] ^= 0x8001
    assert words_of(output).tobytes() == words.tobytes()


def test_runs_on_the_current_stream() -> None:
    words = random_words(8, 300_000)
    tensors = on_gpu(Unit.encode(words, [words.size]))
    late = [torch.zeros_like(tensor) for tensor in tensors]
    output = torch.empty(words.size, dtype=torch.bfloat16, device="cuda")
    malformed = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.ops.samebits.df11_decode(*late, output, malformed)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, tensors, strict=True):
            target.copy_(source)
        torch.ops.samebits.df11_decode(*late, output, malformed)
        copy = output.clone()
    stream.synchronize()
    assert words_of(copy).tobytes() == words.tobytes()


@pytest.mark.parametrize("seed", range(300))
def test_hostile_contents_do_no_harm(seed: int) -> None:
    """Any words, but no fault and nothing written elsewhere: and the next decode is right again."""
    rng = np.random.default_rng(seed)
    words = random_words(3, 60_000, 4.0)
    unit = Unit.encode(words, [words.size])
    changed = {}
    for name in rng.choice(LAYOUT, rng.integers(1, 6), replace=False):
        data = getattr(unit, name).copy()
        flat = data.view(np.uint8).reshape(-1)
        kind = rng.integers(3)
        if kind == 0:
            flat[:] = rng.integers(0, 256, flat.size)
        elif kind == 1:
            flat[:] = rng.choice([0, 1, 31, 32, 239, 240, 255])
        else:
            flat[rng.integers(0, flat.size, 5)] = rng.integers(0, 256, 5)
        changed[name] = data
    decode(on_gpu(replace(unit, **changed)))
    torch.cuda.synchronize()
    assert_decodes(unit, words)


@pytest.mark.parametrize("name", ["encoded_exponent", "gaps", "output_positions"])
def test_contradictions_are_reported(name: str) -> None:
    words = random_words(9, 60_000)
    unit = Unit.encode(words, [words.size])
    data = getattr(unit, name).copy()
    data[4:10] ^= 0x55
    assert decode(on_gpu(replace(unit, **{name: data})))[1] == 1


@pytest.mark.parametrize("name", LAYOUT)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    words = random_words(10, 60_000)
    tensors = on_gpu(Unit.encode(words, [words.size]))
    at = LAYOUT.index(name)
    for wrong in (tensors[at][:0], tensors[at].to(torch.int32), tensors[at].cpu()):
        output = torch.empty(words.size, dtype=torch.bfloat16, device="cuda")
        malformed = torch.zeros(1, dtype=torch.int32, device="cuda")
        with pytest.raises((SamebitsError, NotImplementedError)):
            torch.ops.samebits.df11_decode(*tensors[:at], wrong, *tensors[at + 1 :], output, malformed)


def test_operator_keeps_torchs_rules() -> None:
    tensors = on_gpu(Unit.encode(random_words(11, 5000), [5000]))
    output = torch.zeros(5000, dtype=torch.bfloat16, device="cuda")
    malformed = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.library.opcheck(torch.ops.samebits.df11_decode.default, (*tensors, output, malformed))
