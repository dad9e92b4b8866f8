"""The compact code of small tensors (FORMAT.md 1.6, 3.6, 3.7, 5.5, 6.7): no geometry, no padding, small tables.

An asymmetric numeral system with 256 states, of the kind that goes through tables (J. Duda, "Asymmetric numeral
systems", arXiv:1311.2540). Unlike a prefix code it spends less than a bit on an exponent that is much more frequent
than all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from samebits.bf16 import histogram_of_words
from samebits.cached import cached_property
from samebits.codecs import compact_loops
from samebits.format.geometry import RUN_WORDS
from samebits.format.header import EXPONENTS, STATES, Header
from samebits.format.packed import PackedTensor, frequencies_of
from samebits.parallel import run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TASK_RUNS = 1024
_REVERSED = np.array([int(f"{state:08b}"[::-1], 2) for state in range(STATES)])


@dataclass(frozen=True)
class CompactCode:
    """Frequencies, and what follows from them.

    Attributes:
        frequencies: int64 [257], of the exponents and the escape; they sum to 256.
    """

    frequencies: NDArray[np.int64]

    @classmethod
    def of_histogram(cls, histogram: NDArray[np.int64]) -> CompactCode:
        """The frequencies that make words and code section smallest."""
        used = np.argsort(-histogram, kind="stable")[: np.count_nonzero(histogram)]
        return cls(compact_loops.choose_frequencies(histogram, used))

    def to_section(self) -> NDArray[np.uint8]:
        section, previous = bytearray(), -1
        for exponent in np.nonzero(self.frequencies[:EXPONENTS])[0].tolist():
            if exponent > previous + 1:
                section += bytes([0, exponent - previous - 1])
            section.append(int(self.frequencies[exponent]))
            previous = exponent
        return np.frombuffer(bytes(section), np.uint8)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 [257]: where each symbol's states start in ``states``."""
        starts: NDArray[np.int64] = np.cumsum(self.frequencies) - self.frequencies
        return starts

    @cached_property
    def states(self) -> NDArray[np.int64]:
        """int64 [256]: the states of each symbol, ascending, one symbol after the other."""
        symbols = np.repeat(np.arange(self.frequencies.size), self.frequencies)
        return _REVERSED[np.lexsort((_REVERSED, symbols))]


@dataclass(frozen=True)
class CompactWords:
    """The words of a tensor in the compact code, not yet put together.

    Attributes:
        words: uint16, the tensor's.
        lengths: uint16 [runs], in bits.
        streams: uint32 [stream_words].
    """

    words: NDArray[np.uint16]
    code: CompactCode
    lengths: NDArray[np.uint16]
    streams: NDArray[np.uint32]
    header: Header

    @classmethod
    def of(cls, words: NDArray[np.uint16], shape: tuple[int, ...], original: int) -> CompactWords:
        code = CompactCode.of_histogram(histogram_of_words(words))
        lengths = np.empty(-(-words.size // RUN_WORDS), np.uint16)
        streams = compact_loops.encode_runs(words, code.frequencies, code.starts, code.states, lengths)
        header = Header.of_compact(shape, code.to_section().size, streams.size, original)
        return cls(words, code, lengths, streams, header)

    def write(self, packed: PackedTensor) -> None:
        """Fill the bytes of ``packed``, whose header is ``self.header``."""
        self.header.write(packed.data)
        packed.array("code", "u1")[:] = self.code.to_section()
        packed.array("offsets", "<u2")[:] = self.lengths
        packed.array("planes", "u1")[:] = self.words >> 8 & 0x80 | self.words & 0x7F
        packed.array("streams", "<u4")[:] = self.streams


def decode_compact(packed: PackedTensor, output: NDArray[np.uint16]) -> None:
    """Decode a validated packed tensor into ``output``, the tensor's words."""
    code, sizes, planes, coded = packed.arrays_to_decode(
        ("code", "u1"), ("offsets", "<u2"), ("planes", "u1"), ("streams", "<u4")
    )
    streams = np.zeros(packed.header.stream_words + compact_loops.SLACK, np.uint32)
    streams[: packed.header.stream_words] = coded
    lengths = sizes.astype(np.int64)
    starts = np.minimum(np.cumsum(lengths) - lengths, 32 * packed.header.stream_words)  # whatever was written since
    table = _table(code.tobytes())
    run_ranges(compact_loops.decode_runs, starts.size, _TASK_RUNS, output, table, starts, planes, streams)


@lru_cache(maxsize=256)  # a kilobyte each
def _table(section: bytes) -> NDArray[np.uint32]:
    return compact_loops.decode_table(frequencies_of(np.frombuffer(section, np.uint8)))
