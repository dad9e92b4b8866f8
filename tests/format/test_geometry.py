"""FORMAT.md section 1 as arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.format.geometry import Code, Geometry, Layout, choose_layout


@pytest.mark.clause("1.1")
@pytest.mark.parametrize(
    ("shape", "layout", "rows", "columns"),
    [
        ((), Layout.FLAT, 1, 128),
        ((1,), Layout.FLAT, 1, 128),
        ((128,), Layout.FLAT, 1, 128),
        ((129,), Layout.FLAT, 2, 128),
        ((3, 5, 7), Layout.FLAT, 1, 128),
        ((3, 5, 7), Layout.MATRIX, 15, 7),
        ((12288, 4096), Layout.MATRIX, 12288, 4096),
        ((8, 14336, 4096), Layout.MATRIX, 8 * 14336, 4096),
    ],
)
def test_rows_and_columns(shape: tuple[int, ...], layout: Layout, rows: int, columns: int) -> None:
    geometry = Geometry.of_layout(shape, layout, 16)
    assert (geometry.rows, geometry.columns, geometry.words) == (rows, columns, math.prod(shape))


@pytest.mark.clause("1.1")
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((8, 128), Layout.MATRIX),
        ((4096,), Layout.FLAT),
        ((), Layout.FLAT),
        ((8, 128 * 7 + 64), Layout.MATRIX),  # 15 stages: 4 columns in 960 are 0.42 %
        ((8, 128 * 5 + 64), Layout.FLAT),  # 11 stages: 4 in 704 are 0.57 %
        ((1600, 128), Layout.MATRIX),
        ((1601, 128), Layout.MATRIX),  # 7 rows in 1601 are 0.44 %
        ((1393, 128), Layout.FLAT),  # 7 in 1393 are 0.503 %
        ((800, 12799), Layout.MATRIX),
        ((2, 4, 3, 128), Layout.MATRIX),
        ((4096, 100), Layout.FLAT),
        ((1, 4096), Layout.FLAT),
    ],
)
def test_choice_of_layout(shape: tuple[int, ...], layout: Layout) -> None:
    assert choose_layout(shape) is layout
    assert Geometry.of_shape(shape, 16) == (layout, Geometry.of_layout(shape, layout, 16))


@pytest.mark.clause("1.2")
@pytest.mark.parametrize(
    ("rows", "columns", "row_groups", "stages"), [(1, 1, 1, 1), (8, 64, 1, 1), (9, 65, 2, 2), (4096, 11008, 512, 172)]
)
def test_row_groups_and_stages(rows: int, columns: int, row_groups: int, stages: int) -> None:
    geometry = Geometry(rows, columns, rows * columns, 16)
    assert (geometry.row_groups, geometry.stages) == (row_groups, stages)


@pytest.mark.clause("1.4")
@given(st.integers(1, 200), st.integers(1, 3000), st.integers(1, 64))
def test_chunks_cover_all_stages_in_order(rows: int, columns: int, chunk_stages: int) -> None:
    geometry = Geometry(rows, columns, rows * columns, chunk_stages)
    chunks = [geometry.chunk(index) for index in range(geometry.chunks)]
    found = [
        (group, stage)
        for first_group, groups, first_stage, stages in chunks
        for group in range(first_group, first_group + groups)
        for stage in range(first_stage, first_stage + stages)
    ]
    assert found == [(group, stage) for group in range(geometry.row_groups) for stage in range(geometry.stages)]
    assert all(1 <= groups * stages <= chunk_stages for _, groups, _, stages in chunks)


@pytest.mark.clause("1.4")
@pytest.mark.parametrize(
    ("rows", "columns", "chunk_stages", "chunks"),
    [
        (16, 64 * 16, 16, [(0, 1, 0, 16), (1, 1, 0, 16)]),
        (16, 64 * 17, 16, [(0, 1, 0, 16), (0, 1, 16, 1), (1, 1, 0, 16), (1, 1, 16, 1)]),
        (40, 64 * 5, 16, [(0, 3, 0, 5), (3, 2, 0, 5)]),
        (17, 64, 1, [(0, 1, 0, 1), (1, 1, 0, 1), (2, 1, 0, 1)]),
        (8, 64 * 9, 16, [(0, 1, 0, 9)]),
    ],
)
def test_chunks(rows: int, columns: int, chunk_stages: int, chunks: list[tuple[int, ...]]) -> None:
    geometry = Geometry(rows, columns, rows * columns, chunk_stages)
    assert [geometry.chunk(index) for index in range(geometry.chunks)] == chunks


@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 64), st.integers(1, 400))
def test_chunks_of_runs(rows: int, columns: int, chunk_stages: int, words: int) -> None:
    """A bound for every run of words in the tensor, and reached if the tensor is long enough."""
    geometry = Geometry(rows, columns, rows * columns, chunk_stages)
    of_group = {
        group: number
        for number in range(geometry.chunks)
        for group in range(geometry.chunk(number)[0], sum(geometry.chunk(number)[:2]))
    }

    def chunks(begin: int) -> int:
        first, last = begin // columns // 8, (begin + words - 1) // columns // 8
        several = geometry.chunks_per_row_group > 1
        return (last - first + 1) * geometry.chunks_per_row_group if several else of_group[last] - of_group[first] + 1

    found = [chunks(begin) for begin in range(0, rows * columns - words + 1, words)]
    bound = geometry.chunks_of_runs(words)
    assert all(number <= bound for number in found)
    unit = 8 * columns * geometry.row_groups_per_chunk
    if len(found) * words >= np.lcm(words, unit):
        assert max(found) == bound


@pytest.mark.clause("5.3")
@pytest.mark.parametrize(
    ("rows", "columns", "quad", "single"),
    [(8, 128, 1152, 1024), (8, 64, 640, 512), (9, 129, 2 * (1152 + 640), 2 * 3 * 512), (1, 1, 640, 512)],
)
def test_bytes_of_planes(rows: int, columns: int, quad: int, single: int) -> None:
    geometry = Geometry(rows, columns, rows * columns, 16)
    assert (geometry.plane_bytes(Code.QUAD), geometry.plane_bytes(Code.SINGLE)) == (quad, single)
