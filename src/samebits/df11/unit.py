"""One unit of a DFloat11 checkpoint: the matrices of a block behind each other, and their one code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from samebits.bf16 import histogram_of_range
from samebits.df11 import loops
from samebits.df11.code import MAX_CODE_LENGTH, MEND, UnitCode, check_tables, short_codes
from samebits.errors import FormatError, InputError
from samebits.parallel import run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_BYTES = loops.BLOCK_BITS // 8
BLOCK_WINDOWS = loops.BLOCK_WINDOWS
GAP_BITS = 5
MAX_STREAM_BYTES = (1 << 31) - 1
MAX_WORDS = (1 << 32) - 1  # of what output_positions count
LARGE = ("encoded_exponent", "sign_mantissa")  # tensors; the others take a fiftieth of them
_GAP_BYTES = BLOCK_WINDOWS * GAP_BITS // 8  # of a block
_TASK_WORDS = 1 << 20
_TASK_BLOCKS = 32
_TASK_GROUPS = 1 << 17  # of eight gaps

Write = Callable[[str, int, "NDArray[np.uint8]"], None]


@dataclass(frozen=True)
class Unit:
    """The six tensors of a unit, under the names that they have in a file.

    Attributes:
        luts: uint8 [tables + 1, 256], see code.py.
        encoded_exponent: uint8, the stream; most significant bit first.
        sign_mantissa: uint8 [n], ``sign << 7 | mantissa``.
        output_positions: uint8, little-endian u32: the first word whose code starts in each 4096 bytes of the stream,
            where one does; then n.
        gaps: uint8, 5 bits for each 8 bytes of the stream, most significant bit first: where the first code in it
            starts.
        split_positions: int64, cumulative sizes of all matrices but the last.
    """

    luts: NDArray[np.uint8]
    encoded_exponent: NDArray[np.uint8]
    sign_mantissa: NDArray[np.uint8]
    output_positions: NDArray[np.uint8]
    gaps: NDArray[np.uint8]
    split_positions: NDArray[np.int64]

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def words(self) -> int:
        return int(self.sign_mantissa.size)

    @property
    def sizes(self) -> list[int]:
        """Words of each matrix."""
        return [end - start for start, end in pairwise([0, *self.split_positions.tolist(), self.words])]

    @property
    def blocks(self) -> int:
        return -(-self.encoded_exponent.size // BLOCK_BYTES)

    def validate(self) -> None:
        """Check that the tensors fit each other, before anything is decoded.

        Raises:
            FormatError: what does not.
        """
        check_tables(self.luts)
        positions = self._positions()
        rising = bool((np.diff(positions) >= 0).all()) and positions[0] == 0 and positions[-1] == self.words
        _need(rising, "output_positions do not rise from 0 to the number of weights")
        _need(self.gaps.size == self.blocks * _GAP_BYTES, f"{self.gaps.size} bytes of gaps")
        _need(min(self.sizes) > 0, "split_positions do not rise within the weights")
        lengths = self.luts[-1][self.luts[-1] > 0]
        _need(lengths.size > 0, "no exponent has a code")
        gaps, words = self._gaps(), np.diff(positions)
        _need(gaps.max() < lengths.max(), "gaps are longer than codes")
        starts = (np.arange(self.blocks) * loops.BLOCK_BITS + gaps[::BLOCK_WINDOWS])[words > 0]
        bits = np.diff(starts, append=8 * self.encoded_exponent.size)  # of the codes of each block
        slack = np.where(starts == starts[-1], 7, 0)  # what fills up the last byte
        words = words[words > 0]
        fit = (words * int(lengths.min()) <= bits) & (bits - slack <= words * int(lengths.max()))
        _need(bool(fit.all()), f"output_positions do not fit the stream in block {np.argmin(fit)}")

    def _positions(self) -> NDArray[np.int64]:
        """int64 [blocks + 1]: the first word of each block, then n."""
        data = self.output_positions
        _need(data.size % 4 == 0, f"{data.size} bytes of output_positions")
        values = data.view("<u4").astype(np.int64)
        _need(
            self.words > 0 and values.size > 0 and values.size - self.blocks in (0, 1),
            f"{values.size} output_positions",
        )
        return values if values.size == self.blocks + 1 else np.append(values, values[-1])

    def _gaps(self) -> NDArray[np.uint8]:
        """uint8 [512 blocks]"""
        gaps = np.empty(self.gaps.size // GAP_BITS * 8, np.uint8)
        run_ranges(loops.unpack_gaps, gaps.size // 8, _TASK_GROUPS, self.gaps, gaps)
        return gaps

    def decode(self, output: NDArray[np.uint16] | None = None, before: int = 0) -> NDArray[np.uint16]:
        """The words of all matrices behind each other.

        Args:
            output: where to, uint16: from word ``before`` on, as many as it holds.

        Raises:
            FormatError: as validate, or the stream does not fit its tables.
        """
        self.validate()
        output = np.empty(self.words, np.uint16) if output is None else output
        failed = run_ranges(loops.decode_blocks, self.blocks, _TASK_BLOCKS, self.encoded_exponent, self.sign_mantissa,
                            self.luts, short_codes(self.luts), self._gaps(), self._positions(), output,
                            before)  # fmt: skip
        wrong = next((word for word in failed if word >= 0), None)
        _need(wrong is None, f"the stream does not fit its tables at weight {wrong}")
        return output

    def part(self, first: int, last: int) -> tuple[Unit, int]:
        """The blocks with words [first, last), at least one, as a unit of one matrix, and how many words come before.

        It shares the memory of this one. Its stream goes on behind them for as long as the last code may.

        Raises:
            FormatError: as validate.
        """
        self.validate()
        positions = self._positions()
        start = int(np.searchsorted(positions, first, "right")) - 1
        stop = int(np.searchsorted(positions, last, "left"))
        follows = int(stop < self.blocks)  # a block in which no code of the part starts
        bounds = np.append(positions[start : stop + 1], [positions[stop]] * follows) - positions[start]
        part = Unit(
            self.luts,
            self.encoded_exponent[start * BLOCK_BYTES : stop * BLOCK_BYTES + follows * MAX_CODE_LENGTH // 8],
            self.sign_mantissa[positions[start] : positions[stop]],
            bounds.astype("<u4").view(np.uint8),
            self.gaps[start * _GAP_BYTES : (stop + follows) * _GAP_BYTES],
            np.empty(0, np.int64),
        )
        return part, first - int(positions[start])

    @classmethod
    def encode(cls, words: NDArray[np.uint16], sizes: Sequence[int]) -> Unit:
        """Encode the words of matrices that lie behind each other, with the bytes of DFloat11's own encoder.

        Raises:
            InputError: the layout cannot hold them.
        """
        if sum(sizes) != words.size or min(sizes) < 1:
            raise InputError(f"matrices of {list(sizes)} weights do not make up {words.size}")
        matrices = np.split(words, np.cumsum(sizes)[:-1])
        return UnitPlan.of(matrices).encode(matrices)


@dataclass(frozen=True)
class UnitPlan:
    """How matrices become a unit: their code, and where each of their ranges of words starts in the stream.

    Attributes:
        luts: as a Unit has them.
        sizes: words of each matrix.
        starts: int64 [ranges + 1], bits.
        last_start: where the last code starts; the end symbol's, if that fills up the last byte.
    """

    code: UnitCode
    luts: NDArray[np.uint8]
    sizes: tuple[int, ...]
    starts: NDArray[np.int64]
    last_start: int

    @classmethod
    def of(cls, matrices: Sequence[NDArray[np.uint16]]) -> UnitPlan:
        """Plan a unit of matrices, given as their words; none is empty.

        Raises:
            InputError: the layout cannot hold them.
        """
        words = sum(matrix.size for matrix in matrices)
        if words > MAX_WORDS:
            raise InputError(f"it has {words} weights, the layout has room for {MAX_WORDS}")
        ranges = _ranges(matrices)
        histograms = run_ranges(_count_exponents, len(ranges), 1, ranges)
        code = UnitCode.from_histogram(np.sum(histograms, axis=0))
        luts = code.tables()
        starts = np.cumsum([0, *(int(histogram @ code.lengths) for histogram in histograms)])
        total = int(starts[-1])
        if total > 8 * MAX_STREAM_BYTES:
            raise InputError(f"its stream takes {-(-total // 8)} bytes, the layout has room for {MAX_STREAM_BYTES}")
        last_start = total if total % 8 else total - int(code.lengths[matrices[-1][-1] >> 7 & 0xFF])
        return cls(code, luts, tuple(matrix.size for matrix in matrices), starts, last_start)

    @property
    def stream_bytes(self) -> int:
        return -(-int(self.starts[-1]) // 8)

    @property
    def blocks(self) -> int:
        return -(-self.stream_bytes // BLOCK_BYTES)

    @property
    def positions(self) -> int:
        """Entries of output_positions: none for a last block in which no code starts."""
        return self.last_start // loops.BLOCK_BITS + 2

    @property
    def split_positions(self) -> NDArray[np.int64]:
        return np.cumsum(self.sizes, dtype=np.int64)[:-1]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the unit's tensors."""
        return {
            "luts": self.luts.shape,
            "encoded_exponent": (self.stream_bytes,),
            "sign_mantissa": (sum(self.sizes),),
            "output_positions": (4 * self.positions,),
            "gaps": (self.blocks * BLOCK_WINDOWS * GAP_BITS // 8,),
            "split_positions": (len(self.sizes) - 1,),
        }

    def encode(self, matrices: Sequence[NDArray[np.uint16]]) -> Unit:
        """Encode the matrices that the plan was made of."""
        shapes = self.shapes()
        large: dict[str, Any] = {name: np.empty(shapes[name], np.uint8) for name in LARGE}

        def write(name: str, start: int, data: NDArray[np.uint8]) -> None:
            large[name][start : start + data.size] = data

        return Unit(**large, **self.encode_to(write, matrices))

    def encode_to(self, write: Write, matrices: Sequence[NDArray[np.uint16]]) -> dict[str, Any]:
        """Encode the matrices that the plan was made of, without holding the unit's LARGE tensors in memory.

        Args:
            write: called as ``write(name, start, data)`` with bytes of these tensors, from several threads.

        Returns:
            The unit's other tensors.
        """
        ranges, total, words = _ranges(matrices), int(self.starts[-1]), sum(self.sizes)
        gaps, positions = np.zeros(self.blocks * BLOCK_WINDOWS + 1, np.uint8), np.zeros(self.positions, np.uint32)
        ends = run_ranges(_encode_range, len(ranges), 1, self, ranges, write, gaps, positions)
        shared = dict.fromkeys((self.starts[self.starts % 8 > 0] // 8).tolist(), 0)  # bytes of more than one range
        for start, stop, (head, tail) in zip(self.starts[:-1], self.starts[1:], ends, strict=True):
            if start % 8:
                shared[start // 8] |= head
            if stop % 8:
                shared[stop // 8] |= tail
        if total % 8:  # the end symbol's code fills up the last byte, and counts as one that starts
            shared[total // 8] |= _top_bits(self.code.end_code, self.code.end_length, 8) >> total % 8
        elif self.last_start // loops.WINDOW_BITS < total // loops.WINDOW_BITS:
            gaps[total // loops.WINDOW_BITS] = 0  # no code starts there
        for place, byte in shared.items():
            write("encoded_exponent", place, np.array([byte], np.uint8))
        positions[-1] = words
        packed_gaps = np.empty(self.blocks * _GAP_BYTES, np.uint8)
        run_ranges(loops.pack_gaps, packed_gaps.size // GAP_BITS, _TASK_GROUPS, gaps, packed_gaps)
        return {"luts": self.luts, "output_positions": positions.astype("<u4").view(np.uint8), "gaps": packed_gaps,
                "split_positions": self.split_positions}  # fmt: skip


@dataclass(frozen=True)
class _Range:
    """Words that one task counts or encodes; ``index`` of the first one in the unit."""

    words: NDArray[np.uint16]
    index: int


def _ranges(matrices: Sequence[NDArray[np.uint16]]) -> list[_Range]:
    ranges: list[_Range] = []
    index = 0
    for matrix in matrices:
        for first in range(0, matrix.size, _TASK_WORDS):
            words = matrix[first : first + _TASK_WORDS]
            ranges.append(_Range(words, index))
            index += words.size
    return ranges


def _count_exponents(ranges: list[_Range], first: int, last: int) -> NDArray[np.int64]:
    """int64 [256], of range ``first``."""
    words = ranges[first].words
    return histogram_of_range(words, 0, words.size)


def _encode_range(
    plan: UnitPlan, ranges: list[_Range], write: Write, gaps: NDArray[np.uint8], positions: NDArray[np.uint32],
    first: int, last: int,
) -> tuple[int, int]:  # fmt: skip
    """Encode range ``first``, and write it but for bytes of the stream that it shares with others.

    Returns:
        What it has of its first byte and of its last, which may be the same.
    """
    part, start, stop, lengths = ranges[first], int(plan.starts[first]), int(plan.starts[first + 1]), plan.code.lengths
    codes = plan.code.codes.astype(np.uint64) << np.uint64(MAX_CODE_LENGTH) << (MAX_CODE_LENGTH - lengths)
    windows = np.empty(stop // loops.WINDOW_BITS - start // loops.WINDOW_BITS + 1, np.uint64)
    sign_mantissa = np.empty(part.words.size, np.uint8)
    loops.write_codes(part.words, codes, lengths.astype(np.uint64), start, part.index, windows, sign_mantissa, gaps,
                      positions)  # fmt: skip
    write("sign_mantissa", part.index, sign_mantissa)
    begin, end = start // 8, -(-stop // 8)
    stream = windows.view(np.uint8)[begin % 8 :][: end - begin]
    whole = slice(-(-start // 8), stop // 8)
    write("encoded_exponent", whole.start, stream[whole.start - begin : whole.stop - begin])
    return int(stream[0]), int(stream[-1])


def _top_bits(code: int, length: int, count: int) -> int:
    """The first ``count`` bits of a code, with zeros behind it if it is shorter."""
    return code >> length - count if length >= count else code << count - length


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what, mend=MEND)
