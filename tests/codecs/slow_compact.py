"""The slow encoder's part for the compact code; see slow_encoder.py."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

COMPACT = 3
ESCAPE = 256


@dataclass(frozen=True)
class CompactChoices:
    """What FORMAT.md leaves to the writer of a packed tensor in the compact code.

    Attributes:
        frequencies: of the exponents that have one; at most 256 in all.
        escaped: exponents written by the escape although they have a frequency.
        loose: the code section skips one exponent at a time, up to the last there is.
    """

    frequencies: Mapping[int, int]
    escaped: frozenset[int] = field(default_factory=frozenset)
    loose: bool = False

    def symbol(self, exponent: int) -> int:
        return ESCAPE if exponent in self.escaped or exponent not in self.frequencies else exponent

    def section(self) -> bytes:
        """3.6"""
        section, behind = bytearray(), 0
        for exponent in [*sorted(self.frequencies), *([256] if self.loose else [])]:
            gap = exponent - behind
            section += bytes([0, 1] * gap) if self.loose else bytes([0, gap] if gap else [])
            section += bytes([self.frequencies[exponent]] if exponent < 256 else [])
            behind = exponent + 1
        return bytes(section)

    @cached_property
    def steps(self) -> dict[tuple[int, int], tuple[int, str]]:
        """3.7: (symbol, state after it) -> (state before it, the bits read in between, the first bit first)."""
        frequencies = {**self.frequencies, ESCAPE: 256 - sum(self.frequencies.values())}
        owners = [symbol for symbol in sorted(frequencies) for _ in range(frequencies[symbol])]
        of_state = [owners[int(f"{state:08b}"[::-1], 2)] for state in range(256)]
        steps = {}
        for state, symbol in enumerate(of_state):
            y = frequencies[symbol] + of_state[:state].count(symbol)
            n = min(n for n in range(9) if 2**n * y >= 256)
            for b in range(2**n):
                steps[symbol, 2**n * y - 256 + b] = state, number(b, n)
        return steps


def number(value: int, bits: int) -> str:
    """3.7: the bits of a number, the least significant one first."""
    return f"{value:0{bits}b}"[::-1] if bits else ""


def compact_sections(words: NDArray[np.uint16], choices: CompactChoices, original_digest: int) -> list[bytes]:
    """2.1, the stored digest still missing."""
    flat = words.reshape(-1)
    runs = [run_bits(run.tolist(), choices) for run in runs_of(flat)]
    bits = "".join(runs)
    bits = bits.ljust(-(-len(bits) // 32) * 32, "0")  # 6.7
    code = choices.section()
    header = struct.pack("<IBBBBQQ", 0x54494253, 1, COMPACT, 0, words.ndim, 0, original_digest)
    header += bytes(16) + struct.pack("<HHIQQ", len(code), 0, 0, len(bits) // 32, 0)  # 2.2
    return [
        header,
        struct.pack(f"<{words.ndim}Q", *words.shape),
        code,
        b"",
        struct.pack(f"<{len(runs)}H", *map(len, runs)),
        (flat >> 15 << 7 | flat & 127).astype(np.uint8).tobytes(),  # 5.5
        np.packbits(np.frombuffer(bits.encode(), np.uint8) - ord("0"), bitorder="little").tobytes(),
    ]


def runs_of(words: NDArray[np.uint16]) -> Iterator[NDArray[np.uint16]]:
    """1.6"""
    return (words[start : start + 256] for start in range(0, words.size, 256))


def run_bits(words: list[int], choices: CompactChoices) -> str:
    """6.8, from the end: the state after the last word is 0."""
    state, pieces = 0, []
    for word in reversed(words):
        exponent = word >> 7 & 255
        symbol = choices.symbol(exponent)
        state, bits = choices.steps[symbol, state]
        pieces.append((number(exponent, 8) if symbol == ESCAPE else "") + bits)
    return number(state, 8) + "".join(reversed(pieces))


def compact_choices(words: NDArray[np.uint16], *, most: int = 128) -> CompactChoices:
    """Frequencies for the ``most`` most frequent exponents, about as they occur."""
    counts = Counter((words.reshape(-1) >> 7 & 255).tolist())
    kept = counts.most_common(most)
    share = {exponent: max(1, (255 - len(kept)) * count // words.size) for exponent, count in kept}
    return CompactChoices(share)
