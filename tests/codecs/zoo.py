"""Packed tensors that between them use everything FORMAT.md allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.codecs.slow_compact import COMPACT, CompactChoices, compact_choices
from tests.codecs.slow_encoder import LONGEST, Choices, quad_choices, single_choices, slow_encode

Words = NDArray[np.uint16]
SPECIAL = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0080, 0x7F7F, 0xFF7F]


def to_bf16(values: NDArray[np.floating]) -> Words:
    """Floats cut to BF16 words."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 0.02) -> Words:
    """Words as a trained layer has them."""
    return to_bf16(np.random.default_rng(seed).standard_normal(shape) * scale)


def scaled_rows(shape: tuple[int, ...], seed: int = 0) -> Words:
    """Rows of scales between 2^-12 and 2^12, some words zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 13, (*shape[:-1], 1))
    values[rng.random(shape) < 0.05] = 0
    return to_bf16(values)


def octaves(shape: tuple[int, ...], seed: int = 0, rows: int = 1) -> Words:
    """Four equally frequent exponents (so few quads), the rows scaled by powers of two if there are several."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(-20, 20, (rows, 1)) if rows > 1 else 0
    return to_bf16(2.0 ** (rng.uniform(0, 4, shape) + scales))


def scattered(shape: tuple[int, ...], seed: int = 0) -> Words:
    """Ordinary words, and every twentieth any of the 65,536."""
    rng = np.random.default_rng(seed)
    words = normal(shape, seed)
    strange = rng.random(shape) < 0.05
    words[strange] = rng.integers(0, 1 << 16, int(strange.sum()))
    return words


def nearly_constant(shape: tuple[int, ...], seed: int = 0) -> Words:
    """One word everywhere, but for three in a hundred."""
    rng = np.random.default_rng(seed)
    strange = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    return np.where(rng.random(shape) < 0.03, strange, np.uint16(0xBF80))


def few_exponents(shape: tuple[int, ...]) -> Words:
    """Thirteen exponents, each half as frequent as the one above it."""
    rng = np.random.default_rng(0)
    exponents = 130 - np.minimum(rng.geometric(0.5, shape) - 1, 12)
    return (exponents << 7 | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15).astype(np.uint16)


def far_rows(shape: tuple[int, int]) -> Words:
    """Rows with exponents of 130 to 133, and every third with 3 to 6: just further apart than a shift may be."""
    far = np.arange(shape[0])[:, None] % 3 == 1
    return to_bf16(2.0 ** (np.random.default_rng(0).uniform(0, 4, shape) + np.where(far, -124, 3)))


def every_exponent(shape: tuple[int, ...]) -> Words:
    """Ordinary words, every 32nd of another sign and exponent; at least 16,384."""
    words = normal(shape)
    words.reshape(-1)[: 512 * 32 : 32] = np.arange(512) << 7 | np.arange(512) & 127
    return words


def every_shift() -> tuple[Words, tuple[int, ...]]:
    """247 rows of 64 words, and shifts from -126 to 120 that fit them."""
    shifts = np.arange(-126, 121)[:, None]
    exponents = 126 - np.random.default_rng(0).integers(0, 6, (247, 64)) - shifts
    words = exponents << 7 | np.arange(64) | (shifts & 1) << 15
    words[:, 5::9] = 0x8000
    return words.astype(np.uint16), tuple(shifts[:, 0].tolist())


def all_words(shape: tuple[int, ...] = (65536,)) -> Words:
    return np.arange(65536, dtype=np.uint16).reshape(shape)


def row_shifts(words: Words) -> tuple[int, ...]:
    """Shifts that bring each row's largest exponent to 120, as 4.3 allows."""
    exponents = (words.reshape(-1, words.shape[-1]).astype(np.int64) >> 7) & 255
    subnormal = ((exponents == 0) & (words.reshape(exponents.shape) & 127 != 0)).any(axis=1)
    lowest = np.where(exponents == 0, 255, exponents).min(axis=1)
    shifts = np.clip(120 - exponents.max(axis=1), np.maximum(1 - lowest, -126), 126)
    pinned = subnormal | (exponents.max(axis=1) == 255)
    return tuple(np.where(pinned, 0, shifts).tolist())


@dataclass(frozen=True)
class Case:
    """Words, and how they are to be packed."""

    name: str
    words: Words
    choose: Callable[[Words], Choices | CompactChoices]

    @cached_property
    def packed(self) -> bytes:
        return slow_encode(self.words, self.choose(self.words))

    @property
    def is_compact(self) -> bool:
        return self.packed[5] == COMPACT

    def __str__(self) -> str:
        return self.name


def case(name: str, words: Words, choose: Callable[[Words], Choices | CompactChoices], **changes: Any) -> Case:
    """``choose``'s choices with some of them changed."""
    return Case(name, words, lambda words: replace(choose(words), **changes))


quad_matrix, quad_flat = partial(quad_choices, matrix=True), partial(quad_choices, matrix=False)
single_matrix, single_flat = partial(single_choices, matrix=True), partial(single_choices, matrix=False)


def quad_with_row_shifts(words: Words) -> Choices:
    return quad_choices(words, matrix=True, shifts=row_shifts(words))


def single_with_row_shifts(words: Words) -> Choices:
    return single_choices(words, matrix=True, shifts=row_shifts(words))


def few_quads(words: Words) -> Choices:
    """Most quads need patches."""
    return quad_choices(words, matrix=words.ndim > 1, book=3)


def one_quad(words: Words) -> Choices:
    """3.2: a single symbol of length 1."""
    return quad_choices(words, matrix=words.ndim > 1, book=1)


def longest_codewords(choices: Choices) -> Choices:
    """Codewords of every length the code may have."""
    longest = LONGEST[choices.code]
    symbols = choices.symbols[: longest + 1]
    spare = (symbol for symbol in range(256) if symbol not in symbols)
    symbols += [next(spare) for _ in range(longest + 1 - len(symbols))]
    return replace(choices, lengths=dict(zip(symbols, [*range(1, longest + 1), longest], strict=True)))


# The golden vectors in tests/vectors.
GOLDEN = [
    case("quad_matrix", normal((16, 256)), quad_matrix),
    case("quad_row_shifts", scaled_rows((24, 128), 1), quad_with_row_shifts),
    case("quad_shift", normal((16, 128), 2), partial(quad_choices, matrix=True, shifts=-9)),
    case("quad_flat", normal((1000,), 3), quad_flat),
    case("quad_patches", scattered((16, 192), 4), quad_matrix),
    case("quad_one_symbol", nearly_constant((16, 128)), one_quad),
    case("quad_raw_chunks", scattered((16, 256), 5), quad_matrix, chunk_stages=2, raw_chunks=frozenset({1, 3})),
    case("quad_odd_stages", normal((11, 200), 6), quad_matrix, chunk_stages=3),
    case("quad_row_groups_in_chunk", normal((72, 128), 7), quad_matrix, chunk_stages=5),
    case("quad_short_last_chunk", normal((8, 320), 8), quad_matrix, chunk_stages=2),
    case("quad_loose", normal((8, 256), 9), quad_matrix, spare_base=37, least_unit=9, loose=True),
    case("quad_every_exponent", every_exponent((16384,)), quad_flat),
    case("quad_all_words", all_words(), quad_flat),
    case("single_matrix", normal((16, 256), 10), single_matrix),
    case("single_row_shifts", scaled_rows((24, 128), 11), single_with_row_shifts),
    case("single_flat", scattered((777,), 12), single_flat),
    case("single_raw_chunks", normal((8, 320), 13), single_matrix, chunk_stages=1, raw_chunks=frozenset({0, 4})),
    case("single_loose", normal((8, 256), 14), single_matrix, spare_base=11, least_unit=63, loose=True),
    case("single_every_exponent", every_exponent((128, 128)), single_matrix),
    case("single_all_words", all_words((256, 256)), single_matrix),
    case("compact_normal", normal((13, 100), 15), compact_choices),
    case("compact_escapes", scattered((777,), 16), partial(compact_choices, most=9)),
    case("compact_sparse", nearly_constant((5, 3, 111), 17), partial(compact_choices, most=1)),
    case("compact_loose", octaves((512,), 18), compact_choices, loose=True, escaped=frozenset({128})),
    case("compact_every_exponent", every_exponent((16385,)), partial(compact_choices, most=250)),
]

EVERY_SHIFT = every_shift()
ZOO = [
    *GOLDEN,
    case("one_word_quad", normal((1,)), quad_flat),
    case("one_word_single", normal((1, 1)), single_matrix),
    case("no_dimensions", normal(()), quad_flat),
    case("eight_dimensions", normal((1, 2, 1, 3, 2, 1, 2, 5)), quad_matrix),
    case("experts", normal((3, 5, 72)), single_matrix),
    case("specials", np.resize(np.array(SPECIAL, np.uint16), 999), quad_flat),
    case("specials_single", np.resize(np.array(SPECIAL, np.uint16), (9, 65)), single_matrix),
    case("constant_quad", np.full((9, 130), 0x3F80, np.uint16), one_quad),
    case("constant_single", np.full((9, 130), 0xBF80, np.uint16), single_matrix),
    case("zeros", np.zeros(1234, np.uint16), quad_flat),
    case("zeros_shifted", np.zeros((8, 64), np.uint16), partial(quad_choices, matrix=True, shifts=5)),
    case("few_quads", nearly_constant((24, 320)), few_quads),
    case("longest_quads", normal((16, 256)), lambda words: longest_codewords(quad_matrix(words))),
    case("longest_singles", few_exponents((16, 256)), lambda words: longest_codewords(single_matrix(words))),
    case("one_stage_chunks", scattered((17, 130)), quad_matrix, chunk_stages=1),
    case(
        "short_chunks_end_row_groups", scattered((48, 64 * 5)), quad_matrix, chunk_stages=2, raw_chunks=frozenset({5})
    ),
    case("short_single_chunks_end_row_groups", normal((56, 64 * 7)), single_matrix, chunk_stages=3),
    case("longest_chunks", normal((8, 64 * 66)), quad_matrix, chunk_stages=64),
    case("longest_single_chunks", normal((8, 64 * 66)), single_matrix, chunk_stages=64),
    case("chunks_of_many_patches", scattered((16, 2048), 19), quad_matrix, raw_chunks=frozenset({2})),
    case("all_words_matrix", all_words((512, 128)), quad_matrix),
    case("all_words_flat_single", all_words(), single_flat, chunk_stages=7),
    case("all_chunks_raw", scattered((40, 70)), quad_matrix, raw_chunks=frozenset(range(99))),
    case("row_shifts_flat", normal((384,)), partial(quad_choices, matrix=False, shifts=(0, 2, -1))),
    case("widest_single_shift", normal((8, 64), scale=1e-3), partial(single_choices, matrix=True, shifts=126)),
    case("every_shift", EVERY_SHIFT[0], partial(single_choices, matrix=True, shifts=EVERY_SHIFT[1])),
    case("far_rows", far_rows((64, 256)), single_with_row_shifts),
    case("equal_quads", normal((8, 4096)), quad_matrix, lengths=dict.fromkeys(range(4096), 12), chunk_stages=64),
    case("equal_singles", normal((8, 4096)), single_matrix, lengths=dict.fromkeys(range(256), 8), chunk_stages=64),
    case("unlike_its_code", normal((16, 128)), quad_matrix, lengths={0: 1, 4095: 2, 585: 2}, window=8),
    case("all_words_compact", all_words(), lambda words: CompactChoices(dict.fromkeys(range(256), 1))),
    case("one_word_compact", normal((1,)), compact_choices),
    case("no_dimensions_compact", normal(()), compact_choices),
    case("eight_dimensions_compact", normal((1, 2, 1, 3, 2, 1, 2, 25)), compact_choices),
    case("specials_compact", np.resize(np.array(SPECIAL, np.uint16), 999), compact_choices),
    case("constant_compact", np.full((9, 130), 0x3F80, np.uint16), lambda words: CompactChoices({127: 255})),
    case("one_exponent_each_compact", np.repeat(all_words()[::64], 3), compact_choices),
    case("only_escapes", scattered((512,)), lambda words: CompactChoices({})),
    case("unlike_its_frequencies", normal((600,)), lambda words: CompactChoices({3: 255})),
    case("longest_run", normal((257,)), lambda words: CompactChoices({3: 128, 2: 127}, escaped=frozenset({3}))),
    case("every_shift_quad", EVERY_SHIFT[0], partial(quad_choices, matrix=True, shifts=EVERY_SHIFT[1], book=600)),
]


def bimodal_rows(shape: tuple[int, int]) -> Words:
    """Every other row a thousand times larger."""
    return to_bf16(np.random.default_rng(1).standard_normal(shape) * 1000.0 ** (np.arange(shape[0])[:, None] % 2))


def pruned(shape: tuple[int, ...], share: float) -> Words:
    words = normal(shape, 2).copy()
    words[np.random.default_rng(3).random(shape) < share] = 0
    return words


def heavy_tails(shape: tuple[int, ...]) -> Words:
    return to_bf16(np.random.default_rng(4).standard_cauchy(shape) * 1e-3)


def beyond_the_sample(code: str) -> Words:
    """Over 16 M words, of which a plan counts every third row: the others hold every word there is."""
    words = np.tile(normal((256, 2048)) if code == "quad" else nearly_constant((256, 2048)), (33, 1))
    words[1:97:3] = all_words((32, 2048))
    words[100:196:3] = scaled_rows((32, 2048))
    words[197] = 0
    words[199] = 0x7F80
    return words


def around_raw_chunks() -> Words:
    """60 chunks (of 16 stages) of ever more rare exponents, about as long coded as raw, and 140 of one word."""
    words = np.full((8, 200, 1024), 0x3F80, np.uint16)
    for number in range(60):
        rare = np.arange(7390 + 2 * number)
        chunk = np.full(8192, 0x3F80, np.uint16)
        chunk[rare * 8192 // rare.size] = 20 + rare % 200 << 7
        words[:, number] = chunk.reshape(8, 1024)
    return words.reshape(8, -1)


# Of a million words or more.
LARGE: dict[str, Callable[[], Words]] = {
    "matrix": lambda: normal((1024, 1024)),
    "larger matrix": lambda: normal((2048, 2048)),
    "odd stages": lambda: normal((1536, 64 * 11)),
    "short chunks end row groups": lambda: normal((3072, 64 * 36)),
    "short rows": lambda: normal((16384, 64)),
    "long rows": lambda: normal((8, 131072)),
    "flat": lambda: normal((1_000_003,)),
    "padded": lambda: normal((1001, 1088)),
    "experts": lambda: normal((3, 500, 700)),
    "bimodal rows": lambda: bimodal_rows((1024, 1024)),
    "rows of every scale": lambda: scaled_rows((2048, 512)),
    "half pruned": lambda: pruned((1024, 1024), 0.5),
    "a tenth pruned": lambda: pruned((1024, 1024), 0.1),
    "heavy tails": lambda: heavy_tails((1024, 1024)),
    "uniform": lambda: to_bf16(np.random.default_rng(5).uniform(-1, 1, (1024, 1024))),
    "octaves": lambda: octaves((1024, 1024)),
    "wide": lambda: to_bf16(2.0 ** np.random.default_rng(6).uniform(-20, 20, (1024, 1024))),
    "random": lambda: np.random.default_rng(7).integers(0, 1 << 16, (1024, 1024)).astype(np.uint16),
    "constant": lambda: np.full((1024, 1024), 0x3F80, np.uint16),
    "nine in ten pruned": lambda: pruned((1024, 1024), 0.9),
}


@cache
def large(name: str) -> Words:
    return LARGE[name]()
