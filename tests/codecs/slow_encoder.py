"""A slow encoder for tests: it writes any packed tensor that FORMAT.md allows, not only those samebits itself writes.

Everything FORMAT.md leaves to the writer is an argument (Choices). It knows the format from FORMAT.md alone.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from samebits.codecs.reference import digest_reference
from tests.codecs.slow_compact import CompactChoices, compact_sections

QUAD, SINGLE = 1, 2
LONGEST = {QUAD: 13, SINGLE: 12}
Values = NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """What FORMAT.md leaves to the writer of a packed tensor in the quad or the single code.

    Attributes:
        code: QUAD or SINGLE.
        lengths: code length of each symbol that has a codeword; a complete code.
        matrix: the layout.
        shifts: one shift for all rows (a number), or one for each.
        raw_chunks: numbers of the chunks that are raw whatever the coded chunk's length.
        spare_base: bits by which ``base`` exceeds the shortest stream.
        least_unit: ``unit`` is at least this.
        loose: header bounds as high as the format allows, instead of exact.
        strange_padding: padding as no writer may write it (5.4), but every decoder must ignore it.
    """

    code: int
    lengths: Mapping[int, int]
    matrix: bool
    window: int = 0
    chunk_stages: int = 16
    shifts: int | tuple[int, ...] = 0
    raw_chunks: frozenset[int] = field(default_factory=frozenset)
    spare_base: int = 0
    least_unit: int = 1
    loose: bool = False
    strange_padding: bool = False

    @property
    def symbols(self) -> list[int]:
        """3.1: by code length, then by value."""
        return sorted(self.lengths, key=lambda symbol: (self.lengths[symbol], symbol))

    @property
    def codewords(self) -> dict[int, str]:
        """3.2: each symbol's codeword, the most significant bit first."""
        codewords, code, before = {}, 0, 0
        for symbol in self.symbols:
            length = self.lengths[symbol]
            code <<= length - before
            codewords[symbol] = format(code, f"0{length}b")
            code, before = code + 1, length
        return codewords

    @property
    def padding(self) -> list[int]:
        """5.4: the shifted exponent of padding at position i of a quad."""
        symbol = self.symbols[-1 if self.strange_padding else 0]
        return [2 * (self.window + (symbol >> 3 * i & 7)) if self.code == QUAD else symbol for i in range(4)]


def slow_encode(words: NDArray[np.uint16], choices: Choices | CompactChoices) -> bytes:
    """``words`` (any shape with at least one word) as a packed tensor."""
    if isinstance(choices, CompactChoices):
        original = digest_reference(words.astype("<u2").tobytes())
        return seal(join_sections(compact_sections(words, choices, original), multiple=4))
    return Writing(words, choices).packed()


class Writing:
    def __init__(self, words: NDArray[np.uint16], choices: Choices) -> None:
        self.words, self.choices = words, choices
        self.columns = words.shape[-1] if choices.matrix else 128
        self.rows = words.size // self.columns if choices.matrix else -(-words.size // 128)
        self.row_groups, self.stages = -(-self.rows // 8), -(-self.columns // 64)
        self.sign, self.exponent, self.mantissa = self._planes_order()

    @property
    def quad(self) -> bool:
        return self.choices.code == QUAD

    def _planes_order(self) -> tuple[Values, Values, Values]:
        """Sign, shifted exponent and mantissa of every word, padding included: [row group, stage, lane, step, i]."""
        inside = np.zeros((8 * self.row_groups, 64 * self.stages), bool)
        inside[: self.rows, : self.columns] = (np.arange(self.rows * self.columns) < self.words.size).reshape(
            self.rows, -1
        )
        values = np.full(inside.shape, 0x807F if self.choices.strange_padding else 0)
        values[inside] = self.words.reshape(-1)
        shifts = np.zeros((8 * self.row_groups, 1), np.int64)
        shifts[: self.rows, 0] = self.choices.shifts
        exponent = values >> 7 & 255
        exponent = np.where(exponent == 0, 0, exponent + shifts)  # 4.1
        exponent = np.where(inside, exponent, np.tile(self.choices.padding, 16 * self.stages))
        return self._in_lanes(values >> 15), self._in_lanes(exponent), self._in_lanes(values & 127)

    def _in_lanes(self, matrix: Values) -> Values:
        """1.3, one lane after the other."""
        result = np.empty((self.row_groups, self.stages, 32, 4, 4), np.int64)
        for lane in range(32):
            for step in range(4):
                for i in range(4):
                    result[:, :, lane, step, i] = matrix[lane >> 2 :: 8, 16 * step + 4 * (lane & 3) + i :: 64]
        return result

    def packed(self) -> bytes:
        """2.1"""
        chunks = [self._chunk(number, stages) for number, stages in enumerate(self._chunks())]
        ends = np.cumsum([0] + [len(chunk) // 4 for chunk in chunks])
        header = self._header(max(map(len, chunks)) // 4, int(ends[-1]))
        shifts = self.choices.shifts
        sections = [
            header,
            struct.pack(f"<{self.words.ndim}Q", *self.words.shape),
            self._code(),
            b"" if isinstance(shifts, int) else struct.pack(f"<{self.rows}b", *shifts),
            ends.astype("<u4").tobytes(),
            self._planes(),
            b"".join(chunks),
        ]
        return seal(join_sections(sections, wide=self.rows * self.columns >= 65536))

    def _header(self, max_chunk_words: int, stream_words: int) -> bytes:
        """2.2, the stored digest still missing."""
        choices = self.choices
        longest = LONGEST[choices.code] if choices.loose else max(choices.lengths.values())
        scalar = isinstance(choices.shifts, int)
        return (
            struct.pack("<IBBBB", 0x54494253, 1, choices.code, int(choices.matrix), self.words.ndim)
            + struct.pack("<QQ", 0, digest_reference(self.words.astype("<u2").tobytes()))
            + struct.pack(
                "<IBBBb", self.columns, choices.chunk_stages, longest, choices.window, choices.shifts if scalar else 0
            )
            + struct.pack("<QHH", self.rows, len(choices.lengths), 0 if scalar else 1)
            + struct.pack("<IQQ", 1 + 128 * choices.chunk_stages if choices.loose else max_chunk_words, stream_words, 0)
        )

    def _code(self) -> bytes:
        """3.1"""
        counts = Counter(self.choices.lengths.values())
        symbols = self.choices.symbols
        return struct.pack(f"<{16 + len(symbols)}H", *(counts[length] for length in range(16)), *symbols)

    def _planes(self) -> bytes:
        """5.3"""
        low = (self.exponent & 1) << 7 if self.quad else self.sign << 7
        raw = (low | self.mantissa).astype(np.uint8)
        parts = []
        for group in range(self.row_groups):
            for stage in range(self.stages):
                if self.quad and stage % 2 == 0:
                    parts.append(struct.pack("<32I", *(self._sign_word(group, stage, lane) for lane in range(32))))
                parts.append(raw[group, stage].tobytes())
        return b"".join(parts)

    def _sign_word(self, group: int, stage: int, lane: int) -> int:
        """5.2"""
        signs = self.sign[group, stage : stage + 2, lane]
        places = ((s, q, i) for s in range(len(signs)) for q in range(4) for i in range(4))
        return sum(int(signs[s, q, i]) << 8 * i + 7 - (4 * s + q) for s, q, i in places)

    def _chunks(self) -> Iterator[list[tuple[int, int]]]:
        """1.4: the stages of each chunk, found by filling one chunk after the other."""
        size = self.choices.chunk_stages
        chunk: list[tuple[int, int]] = []
        for group in range(self.row_groups):
            if len(chunk) + min(self.stages, size) > size:  # a row group that does not fit begins a chunk
                yield chunk
                chunk = []
            for stage in range(self.stages):
                if len(chunk) == size:
                    yield chunk
                    chunk = []
                chunk.append((group, stage))
        yield chunk

    def _chunk(self, number: int, stages: list[tuple[int, int]]) -> bytes:
        values = np.stack([self.exponent[place] for place in stages]) >> int(self.quad)
        raw = bytes(4) + values.astype(np.uint8).tobytes()  # 6.5
        if number in self.choices.raw_chunks:
            return raw
        coded = self._coded_chunk(values)
        return coded if coded and len(coded) < len(raw) else raw

    def _coded_chunk(self, values: Values) -> bytes | None:
        """6.3, 6.4; None where the first word cannot hold its fields."""
        patches: list[int] = []
        streams = [self._stream(values, stream, patches) for stream in range(64)]
        used = [len(bits) for bits in streams]
        base = min(used) + self.choices.spare_base
        unit = max(self.choices.least_unit, -(-(max(used) - base) // 15))
        if base > 8191 or unit > 63 or len(patches) > 8191:
            return None
        nibbles = [max(0, -(-(length - base) // unit)) for length in used]
        bits = "".join(stream.ljust(base + unit * nibble, "0") for stream, nibble in zip(streams, nibbles, strict=True))
        bits = bits.ljust(-(-len(bits) // 32) * 32, "0")
        return (
            struct.pack("<I", base | unit << 13 | len(patches) << 19)
            + bytes(nibbles[2 * lane] | nibbles[2 * lane + 1] << 4 for lane in range(32))
            + np.packbits(np.frombuffer(bits.encode(), np.uint8) - ord("0"), bitorder="little").tobytes()
            + struct.pack(f"<{len(patches)}I", *sorted(patches))
        )

    def _stream(self, values: Values, stream: int, patches: list[int]) -> str:
        """1.5: a stream's codewords one after the other; what they cannot say goes to ``patches``."""
        lane, steps = stream // 2, (0, 1) if stream % 2 == 0 else (2, 3)
        places = [(stage, step) for stage in range(len(values)) for step in steps]
        codewords = self.choices.codewords
        if not self.quad:
            return "".join(codewords[int(value)] for stage, step in places for value in values[stage, lane, step])
        return "".join(codewords[self._symbol(values, place, lane, patches)] for place in places)

    def _symbol(self, values: Values, place: tuple[int, int], lane: int, patches: list[int]) -> int:
        """3.4, 6.4: the codeword's symbol that needs the fewest patches."""
        stage, step = place
        top7 = tuple(map(int, values[stage, lane, step]))
        symbol = nearest_symbol(top7, self.choices)
        for i, x in enumerate(differences(top7, symbol, self.choices.window)):
            if x:
                patches.append(stage << 16 | step << 14 | lane << 9 | i << 7 | x)
        return symbol


def differences(top7: Iterable[int], symbol: int, window: int) -> list[int]:
    """The x of 6.4 for each word of a quad written as ``symbol``."""
    return [value ^ window + (symbol >> 3 * i & 7) for i, value in enumerate(top7)]


def nearest_symbol(top7: tuple[int, ...], choices: Choices) -> int:
    """The symbol with a codeword that needs the fewest patches, the first of them."""
    classes = [value - choices.window for value in top7]
    exact = sum(c << 3 * i for i, c in enumerate(classes))
    if all(0 <= c < 8 for c in classes) and exact in choices.lengths:
        return exact
    return min(choices.symbols, key=lambda symbol: np.count_nonzero(differences(top7, symbol, choices.window)))


def join_sections(sections: Iterable[bytes], *, multiple: int = 16, wide: bool = False) -> bytearray:
    """2.1"""
    data = bytearray()
    for number, section in enumerate(sections):
        data += bytes(-len(data) % (128 if number == 5 and wide else multiple))
        data += section
    return data + bytes(-len(data) % 16)


def seal(data: bytes | bytearray) -> bytes:
    """2.2: put the stored digest into a packed tensor."""
    return bytes(data[:8]) + struct.pack("<Q", digest_reference(bytes(data[16:]))) + bytes(data[16:])


def huffman_lengths(counts: Mapping[int, int], limit: int) -> dict[int, int]:
    """Code lengths of at most ``limit``: plain Huffman codes of ever flatter counts."""
    if len(counts) == 1:
        return dict.fromkeys(counts, 1)
    lengths = dict.fromkeys(counts, 0)
    heap = [(count, symbol, [symbol]) for symbol, count in counts.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, _, left), (b, tie, right) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in left + right:
            lengths[symbol] += 1
        heapq.heappush(heap, (a + b, tie, left + right))
    if max(lengths.values()) <= limit:
        return lengths
    return huffman_lengths({symbol: 1 + count // 2 for symbol, count in counts.items()}, limit)


def shifted_exponents(words: NDArray[np.uint16], shifts: int | tuple[int, ...] = 0) -> Values:
    """4.1, [rows, columns] in the matrix layout where there is more than one shift."""
    exponent = words.astype(np.int64) >> 7 & 255
    if not isinstance(shifts, int):
        exponent = exponent.reshape(len(shifts), -1)
    return np.where(exponent == 0, 0, exponent + np.reshape(shifts, (-1, 1) if np.ndim(shifts) else ()))


def single_choices(words: NDArray[np.uint16], *, matrix: bool, shifts: int | tuple[int, ...] = 0) -> Choices:
    """A single code with a codeword for every exponent that occurs."""
    counts = Counter(shifted_exponents(words, shifts).reshape(-1).tolist())
    return Choices(SINGLE, huffman_lengths(counts, LONGEST[SINGLE]), matrix, shifts=shifts)


def quad_choices(
    words: NDArray[np.uint16], *, matrix: bool, shifts: int | tuple[int, ...] = 0, book: int = 64
) -> Choices:
    """A quad code of the ``book`` most frequent quads, in the legal window that covers most words."""
    top7 = shifted_exponents(words, shifts).reshape(-1) >> 1
    counts = np.bincount(top7, minlength=136)
    legal = [window for window in range(121) if window & 15 <= 8]
    window = max(legal, key=lambda start: int(counts[start : start + 8].sum()))
    whole = top7[: top7.size // 4 * 4].reshape(-1, 4) - window
    inside = whole[((whole >= 0) & (whole < 8)).all(axis=1)]
    symbols = Counter((inside << 3 * np.arange(4)).sum(axis=1).tolist()) or Counter([0])
    lengths = huffman_lengths(dict(symbols.most_common(book)), LONGEST[QUAD])
    return Choices(QUAD, lengths, matrix, window=window, shifts=shifts)
