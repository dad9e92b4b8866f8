"""What FORMAT.md asks of writers alone: a decoder must accept what breaks these rules, samebits must not write it."""

from __future__ import annotations

import numpy as np

from samebits.codecs.reference import Reading


def check_writer(data: bytes) -> None:
    """Fail unless ``data`` is well-formed and keeps every rule for writers."""
    reading = Reading(data)
    if reading.is_compact:  # whose rules readers check too
        assert reading.words.size == np.prod(reading.shape)
        return
    layout = reading.header["layout"]
    assert layout == 1 or len(reading.shape) < 2 or not pads_little(reading.shape), "1.1"
    check_shifts(reading)
    check_padding(reading)
    check_chunks(reading)


def pads_little(shape: tuple[int, ...]) -> bool:
    """1.1: whether the matrix layout adds at most 0.5 % of words."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    stages = -(-columns // 64)
    padded = -(-rows // 8) * 8 * (64 * stages + 4 * (stages % 2))
    return 1000 * padded <= 1005 * rows * columns


def check_shifts(reading: Reading) -> None:
    """4.3"""
    sign, shifted, mantissa = (reading.in_rows(part) for part in reading.shifted)
    words = np.zeros(shifted.size, np.int64)
    words[: reading.words.size] = reading.words.reshape(-1)
    exponent = words.reshape(shifted.shape) >> 7 & 255
    moved = np.broadcast_to(reading.shifts[:, None] != 0, shifted.shape)
    assert not (moved & (exponent == 255)).any(), "4.3: Inf or NaN in a shifted row"
    assert not (moved & (exponent == 0) & (words.reshape(shifted.shape) & 127 != 0)).any(), "4.3: a shifted subnormal"
    assert np.abs(reading.shifts).max() <= 126, "4.3: a shift out of range"
    inside = (np.arange(shifted.size) < reading.words.size).reshape(shifted.shape)
    expected = np.where(exponent == 0, 0, exponent + reading.shifts[:, None])
    assert (shifted == expected)[inside].all(), "4.1"
    assert (shifted[moved & inside & (exponent != 0)] - 1 <= 253).all(), "4.3: a shifted exponent out of range"
    assert sign.max() <= 1
    assert mantissa.max() <= 127


def check_padding(reading: Reading) -> None:
    """5.4"""
    inside = np.zeros((8 * reading.row_groups, 64 * reading.stages), bool)
    words = np.arange(reading.rows * reading.columns) < reading.words.size
    inside[: reading.rows, : reading.columns] = words.reshape(reading.rows, reading.columns)
    first, window = reading.symbols[0], reading.header["window"]
    fill = [2 * (window + (first >> 3 * i & 7)) if reading.is_quad else first for i in range(4)]
    whole = Whole(reading)
    for part, expected in zip(reading.shifted, (0, np.tile(fill, 16 * reading.stages), 0), strict=True):
        matrix = whole.in_rows(part)
        assert (matrix == expected)[~inside].all(), "5.4"


class Whole(Reading):
    """The same, padding rows and columns included."""

    def __init__(self, reading: Reading) -> None:
        self.__dict__.update(reading.__dict__)
        self.rows, self.columns = 8 * reading.row_groups, 64 * reading.stages


def check_chunks(reading: Reading) -> None:
    """6.1, 6.5"""
    for chunk in reading.chunks:
        assert chunk.is_raw or chunk.stored.size < 1 + 128 * len(chunk.stages), "6.5"
    assert max(chunk.stored.size for chunk in reading.chunks) == reading.header["max_chunk_words"], "6.1"
