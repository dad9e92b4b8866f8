"""The part of the slow, plain decoder that reads the compact code; see reference.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from samebits.cached import cached_property
from samebits.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ESCAPE = 256  # 3.6: after all exponents


def must(condition: bool, clause: str, what: str) -> None:
    """Raise FormatError, naming the clause, unless ``condition`` holds."""
    if not condition:
        raise FormatError(f"{what} (FORMAT.md {clause})", mend="the bytes are damaged or were not written by samebits")


class CompactReading:
    """What the sections of a packed tensor of ``count`` words say."""

    def __init__(self, sections: Mapping[str, bytes], count: int) -> None:
        self.count = count
        self.raw = np.frombuffer(sections["planes"], np.uint8)
        self.lengths: list[int] = np.frombuffer(sections["offsets"], "<u2").tolist()
        self.bits: list[int] = np.unpackbits(np.frombuffer(sections["streams"], np.uint8), bitorder="little").tolist()
        self.frequencies = dict(self._read_frequencies(sections["code"]))
        self.frequencies[_ESCAPE] = 256 - sum(self.frequencies.values())
        must(self.frequencies[_ESCAPE] >= 0, "3.6", "the frequencies add up to more than 256")
        self._check_lengths()

    @staticmethod
    def _read_frequencies(section: bytes) -> Iterator[tuple[int, int]]:
        """3.6"""
        exponent, content = 0, iter(section)
        for byte in content:
            if byte:
                must(exponent < 256, "3.6", "a frequency beyond exponent 255")
                yield exponent, byte
                exponent += 1
            else:
                skip = next(content, 0)
                must(skip >= 1, "3.6", "a skip of no exponents")
                exponent += skip
                must(exponent <= 256, "3.6", "a skip beyond exponent 255")

    def _check_lengths(self) -> None:
        """6.7"""
        for run, length in enumerate(self.lengths):
            must(8 <= length <= 8 + 16 * self.words_of(run), "6.7", "a run's length out of range")
        words = -(-sum(self.lengths) // 32)
        must(len(self.bits) == 32 * words, "6.7", "runs of another length than the streams")
        must(not any(self.bits[sum(self.lengths) :]), "6.7", "not zero after the last run")

    def words_of(self, run: int) -> int:
        """1.6"""
        return min(256, self.count - 256 * run)

    @cached_property
    def states(self) -> list[tuple[int, int]]:
        """3.7: symbol and y of every state."""
        owners = [symbol for symbol in sorted(self.frequencies) for _ in range(self.frequencies[symbol])]
        met = dict(self.frequencies)
        states = []
        for x in range(256):
            symbol = owners[int(format(x, "08b")[::-1], 2)]
            states.append((symbol, met[symbol]))
            met[symbol] += 1
        return states

    @cached_property
    def exponents(self) -> list[int]:
        """6.7: the runs follow each other without gaps."""
        ends = itertools.pairwise(itertools.accumulate(self.lengths, initial=0))
        return [exponent for run, (start, end) in enumerate(ends) for exponent in self._read_run(run, start, end)]

    def _read_run(self, run: int, start: int, end: int) -> Iterator[int]:
        """6.8"""
        position = start

        def read(count: int) -> int:
            nonlocal position
            must(position + count <= end, "6.8", "a run passes its end")
            position += count
            return sum(bit << i for i, bit in enumerate(self.bits[position - count : position]))

        x = read(8)
        for _ in range(self.words_of(run)):
            symbol, y = self.states[x]
            yield read(8) if symbol == _ESCAPE else symbol
            n = next(n for n in range(9) if y << n >= 256)
            x = (y << n) - 256 + read(n)
        must(position == end, "6.8", "a run ends after its last word")
        must(x == 0, "6.8", "a run ends in another state than 0")

    @cached_property
    def words(self) -> NDArray[np.uint16]:
        """5.5"""
        raw, exponents = self.raw.astype(np.int64), np.array(self.exponents)
        return (raw >> 7 << 15 | exponents << 7 | raw & 0x7F).astype(np.uint16)
