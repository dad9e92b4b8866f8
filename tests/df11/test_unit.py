"""Units of DFloat11 checkpoints: the words and the bytes of the original encoder, and no harm from damaged ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open

from samebits.df11 import unit as unit_module
from samebits.df11.code import SHORT_BITS, UnitCode
from samebits.df11.unit import BLOCK_BYTES, Unit, UnitPlan
from samebits.errors import FormatError, InputError
from tests.codecs.tensors import words_of

FOLDER = (
    Path(__file__).resolve().parents[1] / "vectors" / "df11" / "tiny-llama"
)  # by the original encoder, version 0.5.0
Words = NDArray[np.uint16]
NAMES = {"lm_head": "lm_head.safetensors", "model.layers.1": "model_layers_1.safetensors"}
TENSORS = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps", "split_positions")


def unit_of(name: str) -> Unit:
    with safe_open(FOLDER / NAMES[name], "np") as file:
        return Unit(**{tensor: file.get_tensor(f"{name}.{tensor}") for tensor in TENSORS})


def matrices_of(name: str) -> list[Words]:
    patterns = json.loads((FOLDER / "config.json").read_text())["dfloat11_config"]["pattern_dict"]
    attributes = next(attributes for pattern, attributes in patterns.items() if re.fullmatch(pattern, name))
    with safe_open(FOLDER.parent / "bf16.safetensors", "pt") as file:
        modules = [f"{name}.{attribute}" for attribute in attributes] or [name]
        tensors = [file.get_tensor(f"{module}.weight") for module in modules]
    return [words_of(tensor).reshape(-1) for tensor in tensors]


def assert_same(left: Unit, right: Unit) -> None:
    for name in TENSORS:
        ours, theirs = getattr(left, name), getattr(right, name)
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes()), name


def random_words(seed: int, count: int, spread: float = 2.0, center: int = 120) -> Words:
    rng = np.random.default_rng(seed)
    exponents = np.clip(np.round(rng.normal(center, spread, count)), 0, 239).astype(np.uint16)
    return (exponents << 7 | rng.integers(0, 2, count) << 15 | rng.integers(0, 128, count)).astype(np.uint16)


def moved(unit: Unit, words: int) -> Unit:
    """With so many words more in the first block than there are."""
    positions = unit.output_positions.view("<u4").astype(np.int64)
    positions[1] += words
    return replace(unit, output_positions=positions.astype("<u4").view(np.uint8))


def starts_of(unit: Unit) -> tuple[list[int], list[int]]:
    """Where each code starts and what it says, walked bit by bit from the front."""
    bits = "".join(map(str, np.unpackbits(unit.encoded_exponent))) + "0" * 32
    starts, exponents, at = [], [], 0
    for _ in range(unit.words):
        table, level = 0, 0
        while (entry := int(unit.luts[table, int(bits[at + 8 * level : at + 8 * level + 8], 2)])) >= 240:
            table, level = 256 - entry, level + 1
        starts.append(at)
        exponents.append(entry)
        at += int(unit.luts[-1, entry])
    return [*starts, at], exponents


@pytest.mark.parametrize("name", NAMES)
def test_decodes_the_original(name: str) -> None:
    unit, matrices = unit_of(name), matrices_of(name)
    assert unit.sizes == [matrix.size for matrix in matrices]
    assert unit.decode().tobytes() == np.concatenate(matrices).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_encodes_the_same_bytes(name: str) -> None:
    matrices = matrices_of(name)
    assert_same(Unit.encode(np.concatenate(matrices), [matrix.size for matrix in matrices]), unit_of(name))


@pytest.mark.parametrize("count", [2, 3, 5, 100, 4096, 30_000])
def test_gaps_and_positions_say_where_codes_start(count: int) -> None:
    """By the layout's own words; the end symbol counts where it fills up the last byte."""
    unit = Unit.encode(random_words(count, count), [count])
    starts, exponents = starts_of(unit)
    assert [int(word) >> 7 & 0xFF for word in unit.decode()] == exponents
    started = starts if starts[-1] % 8 else starts[:-1]
    gaps = np.packbits(np.unpackbits(unit.gaps).reshape(-1, 5), axis=1).ravel() >> 3
    for window in range(gaps.size):
        inside = [start for start in started if start // 64 == window]
        assert gaps[window] == (inside[0] - 64 * window if inside else 0)
    blocks = sorted({start // (8 * BLOCK_BYTES) for start in started})
    firsts = [next(i for i, start in enumerate(starts) if start // (8 * BLOCK_BYTES) == block) for block in blocks]
    assert unit.output_positions.view("<u4").tolist() == [*firsts, count]


def test_both_ways_across_many_ranges() -> None:
    words = random_words(7, 5_000_011, spread=3.0)
    unit = Unit.encode(words, [1, 5_000_010])
    assert unit.decode().tobytes() == words.tobytes()
    assert unit.sizes == [1, 5_000_010]


@pytest.mark.parametrize("grain", [1, 2, 3, 7, 64, 1000])
def test_ranges_that_share_bytes_write_the_same(monkeypatch: pytest.MonkeyPatch, grain: int) -> None:
    """Ranges of a few words end within bytes, windows and blocks of the stream, several of them in one byte."""
    words, sizes = random_words(grain, 3_000 * min(grain, 10), spread=0.7), [1, 1, 5, 700]
    sizes.append(words.size - sum(sizes))
    whole = Unit.encode(words, sizes)
    monkeypatch.setattr(unit_module, "_TASK_WORDS", grain)
    assert_same(Unit.encode(words, sizes), whole)


@pytest.mark.parametrize("count", [2, 8, 4096, 100_003])
def test_a_plan_knows_all_shapes(count: int) -> None:
    matrices = [random_words(count, count), random_words(1, 3)]
    plan = UnitPlan.of(matrices)
    assert plan.shapes() == {name: array.shape for name, array in plan.encode(matrices).tensors().items()}


@pytest.mark.parametrize(("limit", "message"), [("MAX_STREAM_BYTES", "its stream takes"), ("MAX_WORDS", "it has 1000")])
def test_units_that_are_too_large(monkeypatch: pytest.MonkeyPatch, limit: str, message: str) -> None:
    monkeypatch.setattr(unit_module, limit, 250)
    with pytest.raises(InputError, match=f"{message}.*the layout has room for 250"):
        Unit.encode(random_words(1, 1000), [1000])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 3000), st.floats(0.6, 8), st.integers(0, 239))
def test_any_words(seed: int, count: int, spread: float, center: int) -> None:
    words = random_words(seed, count, spread, center)
    if np.unique(words >> 7 & 0xFF).size == 1:
        with pytest.raises(InputError, match="equal"):
            Unit.encode(words, [count])
    else:
        assert Unit.encode(words, [count]).decode().tobytes() == words.tobytes()


def test_a_missing_last_position_is_read() -> None:
    """Some files have one position less: no code starts in the last block."""
    unit = Unit.encode(random_words(1, 100_000), [100_000])
    positions = unit.output_positions.view("<u4")
    whole_blocks = (positions.size - 2) * BLOCK_BYTES
    words = int(positions[-2])
    cut = replace(
        unit,
        encoded_exponent=unit.encoded_exponent[: whole_blocks + 4],
        sign_mantissa=unit.sign_mantissa[:words],
        output_positions=np.append(positions[:-2], words).astype("<u4").view(np.uint8),
    )
    assert cut.decode().tobytes() == random_words(1, 100_000)[:words].tobytes()


@pytest.mark.parametrize("positions", [[60, 60], [70, 60], [0], [100], [1 << 62, -(1 << 63), -(1 << 62), 5]])
def test_positions_of_matrices_that_do_not_rise(positions: list[int]) -> None:
    """Also where differences of 64 bits would."""
    unit = replace(Unit.encode(random_words(1, 100), [100]), split_positions=np.array(positions, np.int64))
    with pytest.raises(FormatError, match="split_positions do not rise within the weights"):
        unit.validate()


@pytest.mark.parametrize(
    ("histogram", "message"),
    [
        ({120: 5, 240: 1}, "exponent 240 occurs"),
        ({120: 5}, "all exponents are equal"),
        ({0: 10**6} | dict.fromkeys(range(1, 201), 10), "tables"),
    ],
)
def test_what_the_layout_cannot_hold(histogram: dict[int, int], message: str) -> None:
    counts = np.zeros(256, np.int64)
    counts[list(histogram)] = list(histogram.values())
    with pytest.raises(InputError, match=message):
        UnitCode.from_histogram(counts).tables()


def test_long_codes_are_cured() -> None:
    """Fibonacci numbers give the longest codes there are."""
    counts = np.zeros(256, np.int64)
    counts[:2] = 1
    for symbol in range(2, 45):
        counts[symbol] = counts[symbol - 1] + counts[symbol - 2]
    cured = UnitCode.from_histogram(counts)
    used = cured.lengths[cured.lengths > 0].astype(int)
    assert max(used) <= 32
    assert sum(2.0**-length for length in used) + 2.0**-cured.end_length == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda unit: replace(unit, luts=unit.luts[:, :255]), "tables of shape"),
        (lambda unit: replace(unit, luts=np.vstack([unit.luts] * 6)), "tables of shape"),
        (lambda unit: replace(unit, luts=np.where(unit.luts == 255, 240, unit.luts)), "leads to table 16"),
        (lambda unit: replace(unit, luts=np.vstack([unit.luts[:-1], 0 * unit.luts[-1:]])), "no exponent has a code"),
        (lambda unit: replace(unit, luts=np.vstack([unit.luts[:-1], unit.luts[-1:] + 30])), "a code of"),
        (lambda unit: replace(unit, output_positions=unit.output_positions[:-4]), "output_positions"),
        (lambda unit: replace(unit, output_positions=unit.output_positions[:-3]), "output_positions"),
        (lambda unit: replace(unit, output_positions=unit.output_positions[::-1].copy()), "rise"),
        (lambda unit: replace(unit, gaps=unit.gaps[:-1]), "gaps"),
        (lambda unit: replace(unit, gaps=unit.gaps | 0x80), "gaps"),
        (lambda unit: replace(unit, gaps=np.full_like(unit.gaps, 0xFF)), "gaps"),
        (lambda unit: moved(unit, 11_000), "do not fit the stream in block 0"),
        (lambda unit: moved(unit, -11_000), "do not fit the stream in block 0"),
        (lambda unit: replace(unit, sign_mantissa=unit.sign_mantissa[:-1]), "output_positions"),
        (lambda unit: replace(unit, split_positions=np.array([unit.words])), "split_positions"),
        (lambda unit: replace(unit, encoded_exponent=unit.encoded_exponent[:-9]), "does not fit its tables at weight"),
    ],
)  # fmt: skip
def test_units_that_contradict_themselves(change: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        change(unit_of("lm_head")).decode()  # type: ignore[operator]


def test_a_gap_is_shorter_than_the_longest_code() -> None:
    """One bit at least of a code that reaches into a window lies before it."""
    words = random_words(1, 100_000, spread=0.5)
    unit = Unit.encode(words, [words.size])
    longest = int(unit.luts[-1].max())
    gaps = np.packbits(np.unpackbits(unit.gaps).reshape(-1, 5), axis=1).ravel() >> 3
    assert gaps.max() == longest - 1
    assert unit.decode().tobytes() == words.tobytes()
    gaps[gaps.argmax()] = longest
    bits = np.unpackbits(gaps[:, None] << 3, axis=1)[:, :5]
    with pytest.raises(FormatError, match="gaps are longer than codes"):
        replace(unit, gaps=np.packbits(bits)).decode()


def test_codes_of_all_lengths() -> None:
    """Each exponent is half as frequent as the one before it, in an order that mixes short codes and long ones."""
    exponents = np.repeat(np.arange(100, 118), 2 ** np.arange(18)[::-1])
    words = (np.random.default_rng(1).permutation(exponents) << 7).astype(np.uint16)
    unit = Unit.encode(words, [words.size])
    assert unit.luts[-1].max() == 18
    assert unit.decode().tobytes() == words.tobytes()


def outcome(unit: Unit) -> bytes | str:
    """Its words, or what is wrong with it."""
    try:
        return unit.decode().tobytes()
    except FormatError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TENSORS), st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_changed_bytes_do_no_harm(name: str, place: int, value: int) -> None:
    """Wrong words or an error, nothing else; looking up one code at a time gives the same ones."""
    unit = Unit.encode(random_words(3, 20_000), [7, 19_993])
    data = getattr(unit, name).copy()
    data.view(np.uint8).reshape(-1)[place % data.nbytes] = value
    damaged = replace(unit, **{name: data})
    found = outcome(damaged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_module, "short_codes", lambda luts: np.zeros(1 << SHORT_BITS, np.uint64))
        assert outcome(damaged) == found
    assert unit.decode().tobytes() == random_words(3, 20_000).tobytes()
