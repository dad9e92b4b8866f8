"""One unit of a DFloat11 checkpoint: the matrices of a block behind each other, and their one code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from samebits.bf16 import histogram_of_words
from samebits.df11 import loops
from samebits.df11.code import MEND, UnitCode, check_tables
from samebits.errors import FormatError, InputError
from samebits.parallel import run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_BYTES = loops.BLOCK_BITS // 8
BLOCK_WINDOWS = loops.BLOCK_BITS // loops.WINDOW_BITS
GAP_BITS = 5
MAX_STREAM_BYTES = (1 << 31) - 1
_TASK_WORDS = 1 << 20
_TASK_BLOCKS = 32


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
        return [int(size) for size in np.diff(self.split_positions, prepend=0, append=self.words)]

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
        _need(self.gaps.size == self.blocks * BLOCK_WINDOWS * GAP_BITS // 8, f"{self.gaps.size} bytes of gaps")
        _need(min(self.sizes) > 0, "split_positions do not rise within the weights")
        lengths = self.luts[-1][self.luts[-1] > 0]
        _need(lengths.size > 0, "no exponent has a code")
        gaps, words = self._gaps(), np.diff(positions)
        _need(gaps[0] == 0 and gaps.max() < lengths.max(), "gaps are longer than codes")
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
        _need(self.words > 0 and values.size - self.blocks in (0, 1), f"{values.size} output_positions")
        return values if values.size == self.blocks + 1 else np.append(values, values[-1])

    def _gaps(self) -> NDArray[np.uint8]:
        """uint8 [512 blocks]"""
        bits = np.unpackbits(self.gaps).reshape(-1, GAP_BITS)
        return np.packbits(bits, axis=1).ravel() >> np.uint8(8 - GAP_BITS)

    def decode(self, output: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
        """The words of all matrices behind each other.

        Args:
            output: where to; uint16 [words].

        Raises:
            FormatError: as validate, or the stream does not fit its tables.
        """
        self.validate()
        output = np.empty(self.words, np.uint16) if output is None else output
        failed = run_ranges(loops.decode_blocks, self.blocks, _TASK_BLOCKS, self.encoded_exponent, self.sign_mantissa,
                            self.luts, self._gaps(), self._positions(), output)  # fmt: skip
        wrong = next((word for word in failed if word >= 0), None)
        _need(wrong is None, f"the stream does not fit its tables at weight {wrong}")
        return output

    @classmethod
    def encode(cls, words: NDArray[np.uint16], sizes: Sequence[int]) -> Unit:
        """Encode the words of matrices that lie behind each other, with the bytes of DFloat11's own encoder.

        Raises:
            InputError: the layout cannot hold them.
        """
        if sum(sizes) != words.size or min(sizes) < 1:
            raise InputError(f"matrices of {list(sizes)} weights do not make up {words.size}")
        code = UnitCode.from_histogram(histogram_of_words(words))
        luts = code.tables()
        bits = run_ranges(loops.count_bits, words.size, _TASK_WORDS, words, code.lengths)
        starts = np.concatenate([[0], np.cumsum(bits)])
        total = int(starts[-1])
        stream_bytes = -(-total // 8)
        if stream_bytes > MAX_STREAM_BYTES:
            raise InputError(f"its stream takes {stream_bytes} bytes, the layout has room for {MAX_STREAM_BYTES}")
        blocks = -(-stream_bytes // BLOCK_BYTES)
        gaps, positions = np.zeros(blocks * BLOCK_WINDOWS, np.uint8), np.zeros(blocks + 1, np.uint32)
        sign_mantissa = np.empty(words.size, np.uint8)
        parts = run_ranges(_encode_range, words.size, _TASK_WORDS, words, code, starts, sign_mantissa, gaps, positions)
        stream = np.zeros(stream_bytes, np.uint8)
        for start, part in zip(starts, parts, strict=False):
            stream[start // 8 : start // 8 + part.size] |= part
        last_start = total - int(code.lengths[words[-1] >> 7 & 0xFF])
        if total % 8:  # the end symbol's code fills up the last byte, and counts as one that starts
            stream[-1] |= _top_bits(code.end_code, code.end_length, 8) >> total % 8
            loops.note_start(total, last_start, words.size, gaps, positions)
            last_start = total
        counted = last_start // loops.BLOCK_BITS + 1
        positions[counted] = words.size
        bits_of_gaps = np.unpackbits(gaps[:, None] << np.uint8(8 - GAP_BITS), axis=1)[:, :GAP_BITS]
        split = np.cumsum(sizes)[:-1].astype(np.int64)
        return cls(luts, stream, sign_mantissa, positions[: counted + 1].astype("<u4").view(np.uint8),
                   np.packbits(bits_of_gaps.ravel()), split)  # fmt: skip


def _top_bits(code: int, length: int, count: int) -> int:
    """The first ``count`` bits of a code, with zeros behind it if it is shorter."""
    return code >> length - count if length >= count else code << count - length


def _encode_range(
    words: NDArray[np.uint16], code: UnitCode, starts: NDArray[np.int64], sign_mantissa: NDArray[np.uint8],
    gaps: NDArray[np.uint8], positions: NDArray[np.uint32], first: int, last: int,
) -> NDArray[np.uint8]:  # fmt: skip
    """The bytes of a range's codes, from the byte in which the first one starts."""
    task = first // _TASK_WORDS
    start, stop = int(starts[task]), int(starts[task + 1])
    part = np.zeros(-(-stop // 8) - start // 8, np.uint8)
    loops.write_codes(words, code.codes, code.lengths, start, part, sign_mantissa, gaps, positions, first, last)
    return part


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what, mend=MEND)
