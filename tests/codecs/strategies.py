"""Hypothesis strategies: shapes, words, and everything FORMAT.md leaves to a writer."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from tests.codecs import zoo
from tests.codecs.slow_compact import COMPACT, CompactChoices
from tests.codecs.slow_encoder import LONGEST, QUAD, SINGLE, Choices, quad_choices, shifted_exponents
from tests.codecs.zoo import Words


@st.composite
def shapes(draw: st.DrawFn, most: int = 4000) -> tuple[int, ...]:
    """0 to 4 dimensions of at most ``most`` words; empty ones too."""
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        room = max(1, most // max(1, math.prod(shape)))
        shape.append(
            draw(st.integers(0, min(room, 300)) | st.sampled_from([size for size in (1, 8, 64) if size <= room]))
        )
    return tuple(draw(st.permutations(shape)))


@st.composite
def word_arrays(draw: st.DrawFn, shape: tuple[int, ...]) -> Words:
    """Words of every kind: random, as trained, constant, skewed, by rows, pruned, special."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = math.prod(shape)
    kind = draw(st.sampled_from(["normal", "any", "constant", "skewed", "rows", "special", "subnormal"]))
    if kind == "normal":
        words = zoo.to_bf16(rng.standard_normal(size) * 2.0 ** draw(st.integers(-100, 100)))
    elif kind == "any":
        words = rng.integers(0, 1 << 16, size).astype(np.uint16)
    elif kind == "constant":
        words = np.full(size, draw(st.integers(0, 0xFFFF)), np.uint16)
    elif kind == "skewed":
        exponents = np.minimum(draw(st.integers(0, 255)) + rng.geometric(draw(st.floats(0.05, 0.99)), size), 255)
        words = (exponents << 7 | rng.integers(0, 128, size)).astype(np.uint16)
    elif kind == "rows":
        scales = 2.0 ** rng.integers(-40, 40, (*shape[:-1], 1)) if shape else 1
        words = zoo.to_bf16(np.broadcast_to(rng.standard_normal(shape) * scales, shape).reshape(-1))
    elif kind == "special":
        words = rng.choice(np.array(zoo.SPECIAL, np.uint16), size)
    else:
        words = (rng.integers(0, 128, size) | rng.integers(0, 2, size) << 15).astype(np.uint16)
    words = words.reshape(-1).copy()
    words[rng.random(size) < draw(st.sampled_from([0, 0, 0.05, 0.9]))] = 0
    strange = rng.random(size) < draw(st.sampled_from([0, 0, 0.01, 0.3]))
    words[strange] = rng.integers(0, 1 << 16, int(strange.sum()))
    return words.reshape(shape)


def words_of_any_shape(most: int = 4000) -> st.SearchStrategy[Words]:
    return shapes(most).flatmap(word_arrays)


def complete_lengths(count: int, longest: int, rng: np.random.Generator) -> list[int]:
    """The lengths of a complete code of ``count`` codewords, by splitting codewords at random."""
    lengths = [0] if count > 1 else [1]
    while len(lengths) < count:
        at = rng.choice([at for at, length in enumerate(lengths) if length < longest])
        lengths[at] += 1
        lengths.append(lengths[at])
    return lengths


@st.composite
def all_choices(draw: st.DrawFn, words: Words) -> Choices | CompactChoices:
    """Any legal way to pack ``words``."""
    code = draw(st.sampled_from([QUAD, SINGLE, COMPACT]))
    if code == COMPACT:
        return draw(all_compact_choices(words))
    matrix = words.ndim >= 2 and draw(st.booleans())
    shifts = legal_shifts(draw, words, matrix)
    if code == QUAD:
        window = draw(st.integers(0, 7)) * 16 + draw(st.integers(0, 8))
        strange = st.lists(st.integers(0, 4095), min_size=1, max_size=12, unique=True)
        symbols = draw(strange | st.just(list(quad_choices(words, matrix=matrix).lengths)))
    else:
        window = 0
        used = np.unique(in_rows(words, matrix, shifts)[1]).tolist()
        symbols = sorted({*used, *draw(st.sets(st.integers(0, 255), max_size=9))})
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = complete_lengths(len(symbols), LONGEST[code], rng)
    return Choices(
        code,
        dict(zip(symbols, lengths, strict=True)),
        matrix,
        window,
        shifts=shifts,
        chunk_stages=draw(st.integers(1, 64)),
        raw_chunks=draw(st.frozensets(st.integers(0, 9), max_size=4)),
        spare_base=draw(st.sampled_from([0, 0, 1, 31, 500])),
        least_unit=draw(st.integers(1, 63)),
        loose=draw(st.booleans()),
    )


@st.composite
def all_compact_choices(draw: st.DrawFn, words: Words) -> CompactChoices:
    """Frequencies for any exponents; those that occur and have none are escaped, and some that have one too."""
    used = np.unique(words >> 7 & 255).tolist()
    exponents = draw(st.sets(st.sampled_from(used)))
    exponents |= draw(st.sets(st.integers(0, 255), max_size=9))
    escaped = draw(st.sets(st.sampled_from(used), max_size=2))
    needs_escape = bool({*used} - exponents or escaped)
    if needs_escape and len(exponents) == 256:
        exponents.remove(draw(st.sampled_from(sorted(exponents))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spare = rng.integers(0, 256 - len(exponents) + (not needs_escape))
    cuts = np.sort(rng.integers(0, spare + 1, len(exponents)))
    frequencies = np.minimum(1 + np.diff(cuts, prepend=0), 255)
    return CompactChoices(dict(zip(sorted(exponents), frequencies.tolist(), strict=True)), frozenset(escaped),
                          draw(st.booleans()))  # fmt: skip


def in_rows(words: Words, matrix: bool, shifts: int | tuple[int, ...]) -> tuple[Words, Words]:
    """Words and shifted exponents, [rows, columns] of the layout; a flat layout's end is filled with the last word."""
    columns = words.shape[-1] if matrix else 128
    flat = words.reshape(-1)
    filled = np.concatenate([flat, np.repeat(flat[-1:], -flat.size % columns)]).reshape(-1, columns)
    return filled, shifted_exponents(filled, shifts)


def legal_shifts(draw: st.DrawFn, words: Words, matrix: bool) -> int | tuple[int, ...]:
    """4.3: a shift for all rows or for each, within what the words allow."""
    rows = in_rows(words, matrix, 0)[0]
    one_for_all = draw(st.booleans())
    if one_for_all:
        rows = rows.reshape(1, -1)
    exponents = rows.astype(np.int64) >> 7 & 255
    lowest = np.where(exponents == 0, 254, exponents).min(axis=1)
    highest = np.maximum(exponents.max(axis=1), 1)
    pinned = (highest == 255) | ((exponents == 0) & (rows & 127 != 0)).any(axis=1)
    low, high = np.maximum(1 - lowest, -126), np.minimum(254 - highest, 126)
    share = draw(st.none() | st.floats(0, 1))
    shifts = np.where(pinned, 0, 0 if share is None else low + np.round((high - low) * share).astype(np.int64))
    return int(shifts[0]) if one_for_all else tuple(shifts.tolist())
