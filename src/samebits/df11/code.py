"""The prefix code of a unit and its decode tables, as DFloat11's encoder makes them.

A table is cut from the code tree every 8 bits. An entry below 240 is an exponent; one from 240 on says that the code
goes on in table ``256 - entry``. The last row of ``luts`` has the code length of each exponent.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from samebits.errors import FormatError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MAX_CODE_LENGTH = 32
FIRST_POINTER = 240
ENTRIES = 256
MAX_TABLES = ENTRIES - FIRST_POINTER + 1  # entries 240 to 255 lead to tables 16 to 1
MAX_LEVELS = MAX_CODE_LENGTH // 8
SHORT_BITS = 11  # of the stream that are looked up at a time
SHORT_CODES = 6  # found in them at most
MEND = "the file is damaged or was not written by DFloat11"
END = -1  # a symbol of count 1 that compares smallest; its code fills up the last byte

Node = int | tuple["Node", "Node"]


@dataclass(frozen=True)
class UnitCode:
    """Codewords of a unit.

    Attributes:
        codes, lengths: uint32, uint8 [256]; length 0 where an exponent does not occur.
        end_code, end_length: of the end symbol.
    """

    codes: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    end_code: int
    end_length: int

    @classmethod
    def from_histogram(cls, histogram: NDArray[np.int64]) -> UnitCode:
        """The code of a unit whose exponents occur so often, int64 [256].

        Raises:
            InputError: the layout cannot hold the unit.
        """
        used = np.nonzero(histogram)[0]
        if used.size and used[-1] >= FIRST_POINTER:
            raise InputError(f"exponent {used[-1]} occurs; the layout has codes for 0 to {FIRST_POINTER - 1}")
        if used.size < 2:
            raise InputError("all exponents are equal")
        texts = _limited_codes({int(exponent): int(histogram[exponent]) for exponent in used} | {END: 1})
        codes, lengths = np.zeros(ENTRIES, np.uint32), np.zeros(ENTRIES, np.uint8)
        for exponent in used:
            text = texts[int(exponent)]
            codes[exponent], lengths[exponent] = int(text, 2), len(text)
        return cls(codes, lengths, int(texts[END], 2), len(texts[END]))

    def tables(self) -> NDArray[np.uint8]:
        """``luts``, uint8 [tables + 1, 256].

        Raises:
            InputError: more tables than entries can point to.
        """
        texts = {int(e): f"{self.codes[e]:0{self.lengths[e]}b}" for e in np.nonzero(self.lengths)[0]}
        prefixes = sorted({text[:cut] for text in texts.values() for cut in range(0, len(text), 8)},
                          key=lambda prefix: (len(prefix), prefix))  # fmt: skip
        if len(prefixes) > MAX_TABLES:
            raise InputError(f"the code needs {len(prefixes)} tables, the layout has {MAX_TABLES}")
        luts = np.zeros((len(prefixes) + 1, ENTRIES), np.uint8)
        value = 0
        for table, prefix in enumerate(prefixes):
            entries = dict(_entries(texts, prefixes, prefix))
            for byte in range(ENTRIES):  # what no code reaches repeats what stands before it
                value = luts[table, byte] = entries.get(byte, value)
        luts[-1] = self.lengths
        return luts


def _entries(texts: dict[int, str], prefixes: list[str], prefix: str) -> Iterator[tuple[int, int]]:
    """The bytes that codes behind ``prefix`` go on with, and their entries."""
    for exponent, text in texts.items():
        rest = text[len(prefix) :]
        if not text.startswith(prefix) or not rest:
            continue
        if len(rest) > 8:
            yield int(rest[:8], 2), ENTRIES - prefixes.index(prefix + rest[:8])
        else:
            first = int(rest.ljust(8, "0"), 2)
            yield from ((byte, exponent) for byte in range(first, first + (1 << (8 - len(rest)))))


def _huffman_codes(counts: dict[int, int]) -> dict[int, str]:
    """Codes as text, from a heap of (count, leftmost symbol); the smaller node gets bit 0."""
    heap: list[tuple[int, int, Node]] = [(count, symbol, symbol) for symbol, count in counts.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        (first, leftmost, left), (second, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (first + second, leftmost, (left, right)))
    return dict(_walk(heap[0][2], ""))


def _walk(node: Node, code: str) -> Iterator[tuple[int, str]]:
    if isinstance(node, int):
        yield node, code
    else:
        yield from _walk(node[0], code + "0")
        yield from _walk(node[1], code + "1")


def _limited_codes(counts: dict[int, int]) -> dict[int, str]:
    """Codes of at most 32 bits: where they are longer, the rarest counts become 1, more of them each time."""
    rarest_first = sorted(counts, key=counts.__getitem__)
    for lowered in range(len(counts) + 1):
        codes = _huffman_codes(counts | dict.fromkeys(rarest_first[:lowered], 1))
        if max(map(len, codes.values())) <= MAX_CODE_LENGTH:
            return codes
    raise AssertionError("257 equal counts give codes of at most 9 bits")


def check_tables(luts: NDArray[np.uint8]) -> None:
    """Make sure that tables only lead forward, and that no code is too long.

    What no code reaches may hold anything that the encoder left there: in front of a row's first code stands the last
    entry of the row before, even if that leads back; in front of all, exponent 0, even if it has no code. So a decoder
    still counts its levels, and stops at a length of 0.

    Raises:
        FormatError: a table leads back or beyond the last, or a code is longer than 32 bits.
    """
    if luts.ndim != 2 or luts.shape[1] != ENTRIES or not 2 <= luts.shape[0] <= MAX_TABLES + 1:
        raise FormatError(f"decode tables of shape {list(luts.shape)}", mend=MEND)
    lengths, last = luts[-1], luts.shape[0] - 2
    for table, row in enumerate(luts[:-1]):
        left_over = luts[table - 1, -1] if table else None
        reached = row if left_over is None else row[np.argmax(row != left_over) :]
        children = ENTRIES - np.unique(reached[reached >= FIRST_POINTER]).astype(int)
        if children.size and not table < children.min() <= children.max() <= last:
            raise FormatError(f"decode table {table} leads to table {children.max()}", mend=MEND)
    if lengths.max() > MAX_CODE_LENGTH:
        raise FormatError(f"exponent {np.argmax(lengths)} has a code of {lengths.max()} bits", mend=MEND)


def short_codes(luts: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """What the next SHORT_BITS bits of a stream begin with, uint64 [1 << SHORT_BITS].

    An entry has, from its lowest byte on: up to SHORT_CODES exponents; their number; the bits that their codes take
    together. Codes of more than 8 bits, and whatever is not plain in ``luts``, end it early: it is 0 where that comes
    first.
    """
    first, code_lengths = luts[0], luts[-1]
    lengths = np.zeros(ENTRIES, np.uint64)  # by the next 8 bits
    for length in range(1, 9):
        same_code = first.reshape(1 << length, -1)
        exponents = same_code[:, 0]
        plain = (same_code == exponents[:, None]).all(1) & (exponents < FIRST_POINTER)
        lengths.reshape(same_code.shape)[plain & (code_lengths[exponents] == length)] = length
    bits = np.arange(1 << SHORT_BITS, dtype=np.uint64)
    entries, used = np.zeros((2, bits.size), np.uint64)
    fits = np.ones(bits.size, np.bool_)
    for place in range(SHORT_CODES):
        byte = (bits << used & np.uint64(bits.size - 1)) >> np.uint64(SHORT_BITS - 8)
        fits &= (lengths[byte] > 0) & (used + lengths[byte] <= SHORT_BITS)
        entries += fits * (first[byte].astype(np.uint64) << np.uint64(8 * place) | np.uint64(1 << 48))
        used += fits * lengths[byte]
    return entries | used << np.uint64(56)
