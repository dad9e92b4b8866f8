"""Pieces on a GPU: each packed tensor in its place, and not a word beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import samebits
from samebits.format.packed import PackedTensor
from samebits.kernels.pieces import Piece, Pieces, can_be_piece
from tests.codecs.surgery import Parts
from tests.codecs.tensors import packed_of, tensor_of, without_compact, words_of
from tests.codecs.zoo import ZOO, Words, normal, octaves

pytestmark = pytest.mark.gpu


def packed(words: Words) -> PackedTensor:
    with without_compact():
        return samebits.encode(tensor_of(words)).to("cuda")


def pieces_of(entries: int, gap: int, sizes: list[tuple[int, int]]) -> tuple[list[Piece], torch.Tensor]:
    """Pieces of so many rows in each entry and columns, ``gap`` words apart, and the output that they belong in.

    They have few kinds of quads, and row shifts, or they would be too small for the quad code.
    """
    pieces, start = [], gap
    for number, (rows, columns) in enumerate(sizes):
        all_rows = entries * rows
        words = octaves((all_rows, columns), number, all_rows if number % 2 else 1)
        pieces.append(Piece(packed(words), start, rows * columns))
        start += rows * columns + gap
    return pieces, torch.empty(entries, start, dtype=torch.bfloat16, device="cuda")


def expected_of(pieces: list[Piece], output: torch.Tensor) -> torch.Tensor:
    expected = output.clone()
    for piece in pieces:
        expected[:, piece.start : piece.start + piece.words] = samebits.decode(piece.packed).view(len(output), -1)
    return expected.view(torch.int16)


def check(pieces: list[Piece], output: torch.Tensor) -> None:
    assert all(map(can_be_piece, pieces))
    output.view(torch.int16).fill_(-1)
    expected, several = expected_of(pieces, output), Pieces(pieces)
    for _ in range(2):  # the second one begins early
        output.view(torch.int16).fill_(-1)
        several.decode(output)
        assert torch.equal(output.view(torch.int16), expected)


@pytest.mark.parametrize("gap", [0, 4, 100])
@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        (8, [(1, 512)]),
        (8, [(1, 4096), (1, 512), (2, 1088)]),
        (1, [(8, 1024)] * 3),
        (5, [(8, 2048), (16, 256)]),
        (16, [(32, 8192), (4, 512), (1, 640), (32, 8192)]),
        (8, [(1, 512)] * 200),
    ],
    ids=str,
)
def test_each_in_its_place(entries: int, sizes: list[tuple[int, int]], gap: int) -> None:
    check(*pieces_of(entries, gap, sizes))


@pytest.mark.parametrize("entries", [1, 8])
def test_the_zoo_side_by_side(entries: int) -> None:
    """Patches, raw chunks, row shifts, the longest codewords, chunks of one stage and of 64."""
    pieces, start = [], 0
    for case in ZOO:
        piece = Piece(packed_of(case.packed).to("cuda"), start, case.words.size // entries)
        if can_be_piece(piece):
            pieces.append(piece)
            start += piece.words
    assert len(pieces) > 15
    check(pieces, torch.empty(entries, start + 8, dtype=torch.bfloat16, device="cuda"))


def test_large_pieces() -> None:
    """As a cache has them."""
    starts = range(0, 4 * 32 * 8192, 32 * 8192)
    pieces = [Piece(packed(normal((256, 8192), start)), start, 32 * 8192) for start in starts]
    check(pieces, torch.empty(8, 5 * 32 * 8192, dtype=torch.bfloat16, device="cuda"))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 40), st.integers(8, 40)), min_size=1, max_size=12),
)
def test_any_pieces(groups: int, gap: int, sizes: list[tuple[int, int]]) -> None:
    pieces, output = pieces_of(8 * groups, 4 * gap, [(rows, 64 * stages) for rows, stages in sizes])
    pieces = list(filter(can_be_piece, pieces))  # small ones may take another code
    assume(pieces)
    check(pieces, output)


def test_what_is_no_piece() -> None:
    """Another code, padding, rows that reach across entries, bytes at odd addresses."""
    whole = packed(octaves((16, 512)))
    assert can_be_piece(Piece(whole, 0, 512))
    assert can_be_piece(Piece(whole, 4, 1024))
    assert not can_be_piece(Piece(whole, 2, 512))
    assert not can_be_piece(Piece(whole, 0, 256))
    assert not can_be_piece(Piece(whole, 0, 768))
    for words in (normal((16, 512)), octaves((64, 500))):
        assert not can_be_piece(Piece(packed(words), 0, words.shape[1]))
    small = samebits.encode(tensor_of(normal((16, 256)))).to("cuda")
    assert not can_be_piece(Piece(small, 0, 256))
    raw = samebits.encode(torch.ones(8, dtype=torch.bfloat16, device="cuda"))
    assert raw.is_raw
    assert not can_be_piece(Piece(raw, 0, 1))
    room = torch.zeros(whole.nbytes + 8, dtype=torch.uint8, device="cuda")
    room[8:] = whole.data
    assert not can_be_piece(Piece(PackedTensor(whole.header, room[8:]), 0, 512))


def test_behind_what_writes_pieces_and_output() -> None:
    """All on one stream, the bytes and the words around them written late."""
    words = octaves((64, 4096))
    source = packed(words)
    late = PackedTensor(source.header, torch.zeros_like(source.data))
    output = torch.zeros(8, 8 * 4096 + 64, dtype=torch.bfloat16, device="cuda")
    Pieces([Piece(source, 0, 8 * 4096)]).decode(output)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pieces = Pieces([Piece(late, 0, 8 * 4096)])
        torch.cuda._sleep(100_000_000)
        late.data.copy_(source.data)
        pieces.decode(output)
        output.zero_()
        pieces.decode(output)
    stream.synchronize()
    assert words_of(output[:, : 8 * 4096].contiguous()).tobytes() == words.tobytes()
    assert not output[:, 8 * 4096 :].any()


def test_on_another_stream_than_before() -> None:
    """Which waits for nothing, and finds what it is told there all the same."""
    words = octaves((64, 4096))
    piece, output = Piece(packed(words), 0, 8 * 4096), torch.empty(8, 8 * 4096, dtype=torch.bfloat16, device="cuda")
    Pieces([piece]).decode(output)  # compiles
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(100_000_000)
        pieces = Pieces([piece])
        pieces.decode(torch.empty_like(output))
    with torch.cuda.stream(streams[1]):
        pieces.decode(output)
    streams[1].synchronize()
    assert words_of(output).tobytes() == words.tobytes()
    with torch.cuda.stream(streams[0]):
        pieces.decode(output.zero_())
    torch.cuda.synchronize()
    assert words_of(output).tobytes() == words.tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_hostile_streams_do_no_harm(seed: int) -> None:
    """Random streams behind valid tables: any words, but in their place."""
    rng = np.random.default_rng(seed)
    with without_compact():
        parts = Parts.of(bytes(samebits.encode(tensor_of(octaves((64, 1024)))).data.numpy()))
    parts.streams[:] = rng.bytes(len(parts.streams))
    hostile = packed_of(parts.joined()).to("cuda")
    good = packed(octaves((64, 1024), 1))
    pieces = [Piece(hostile, 4, 8192), Piece(good, 8196, 8192)]
    output = torch.full((8, 8192 * 2 + 8), -1, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    Pieces(pieces).decode(output)
    torch.cuda.synchronize()
    words = output.view(torch.int16)
    assert (words[:, :4] == -1).all()
    assert (words[:, -4:] == -1).all()
    assert torch.equal(words[:, 8196:-4], samebits.decode(good).view(8, -1).view(torch.int16))
