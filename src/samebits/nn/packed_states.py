"""Keys or values of a model's tokens, all but the latest packed: about two thirds of the memory, and the same bits.

As soon as there are enough of the latest tokens, they are encoded as a block, behind the blocks that there are:

    | block | block | block | latest |     tokens, oldest first

Whoever computes with them has all of them decoded, on a GPU the blocks by one launch. What is packed at the same
tokens elsewhere (other layers, values beside keys) is packed at other steps, so that steps take about the same time.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from samebits.api import decode, encode
from samebits.format.geometry import ROW_GROUP
from samebits.format.packed import PackedTensor, align
from samebits.kernels.pieces import STORED, Piece, Pieces, can_be_piece

BLOCK_WORDS = 1 << 20  # of a block, at least
MOST_WORDS = 1 << 25  # of one that a long prompt makes
ROW_TOKENS = 64  # whose states of one head are a row, of a scale of its own, where a block has so many
LATEST_TOKENS = 16  # never packed: assisted generation takes back a few tokens at every step
SEGMENT_BYTES = 64 << 20  # of an arena, at most
SEGMENT_SHARE = 8  # while it holds less than so many of these, a segment is this part of it
_SEGMENT_UNIT = 2 << 20  # in which torch's allocator rounds
_ALIGNMENT = 256
_GOLDEN = (math.sqrt(5) - 1) / 2


class Block(NamedTuple):
    """Some tokens' states, packed.

    Attributes:
        shape: sequences, heads, tokens, channels, as they were packed.
        order: which of these sequences there are now, int64; None: all, as they were.
    """

    packed: PackedTensor
    shape: tuple[int, int, int, int]
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, states: torch.Tensor, arena: Arena) -> Block:
        """
        Args:
            states: [sequences, heads, tokens, channels], bfloat16.
        """
        packed = encode(matrix_of(states))
        sequences, heads, tokens, channels = states.shape
        return cls(PackedTensor(packed.header, arena.keep(packed.data)), (sequences, heads, tokens, channels))

    @property
    def tokens(self) -> int:
        return self.shape[2]

    def piece(self, start: int) -> Piece | None:
        """Where one launch can decode it together with others, on a GPU; ``start``: tokens in front of it."""
        _, _, tokens, channels = self.shape
        piece = Piece(self.packed, start * channels, tokens * channels)
        return piece if self.order is None and channels % STORED == 0 and can_be_piece(piece) else None

    def decoded(self) -> torch.Tensor:
        states = decode(self.packed).view(self.shape)
        return states if self.order is None else states.index_select(0, self.order)

    def select(self, indices: torch.Tensor) -> Block:
        return self._replace(order=indices if self.order is None else self.order[indices])

    def to(self, device: torch.device) -> Block:
        order = None if self.order is None else self.order.to(device, non_blocking=True)
        return self._replace(packed=self.packed.to(device, non_blocking=True), order=order)


def matrix_of(states: torch.Tensor) -> torch.Tensor:
    """States [sequences, heads, tokens, channels] as they are packed.

    A row has some tokens of one head, and a shift of its own; whole row groups if there can be.
    """
    sequences, heads, tokens, _ = states.shape
    rows = max(tokens, whole_tokens(sequences * heads)) // ROW_TOKENS
    return states.reshape(sequences * heads * (rows if tokens % rows == 0 else 1), -1)


class Arena:
    """Memory for what stays, in large segments.

    torch's allocator would put each block into what is free at the moment, which is of the size of a layer's states,
    and is wanted again for those of the next layer. A segment is free when nothing in it is needed any more.
    """

    def __init__(self) -> None:
        self._segments: dict[torch.device, torch.Tensor] = {}  # the last of each device, from where it is free
        self._held = 0  # bytes
        self._phases = 0

    def phase(self) -> float:
        """Of whoever keeps blocks here: a number below 1, evenly spread however many ask."""
        self._phases += 1
        return self._phases * _GOLDEN % 1

    def keep(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of uint8 ``data``; itself in main memory."""
        if not data.is_cuda:
            return data
        size = align(data.numel(), _ALIGNMENT)
        with torch.inference_mode(False), torch.no_grad():  # else nothing could be added outside of inference mode
            free = self._segments.get(data.device)
            if free is None or free.numel() < size:
                free = self._segment(size, data.device)
            self._held += size
            self._segments[data.device] = free[size:]
            return free[: data.numel()].copy_(data)

    def _segment(self, least: int, device: torch.device) -> torch.Tensor:
        torch.cuda.empty_cache()  # what comes and goes goes, and leaves its place whole
        wanted = align(max(least, min(SEGMENT_BYTES, self._held // SEGMENT_SHARE)), _SEGMENT_UNIT)
        try:
            return torch.empty(wanted, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # there may be room between others yet
            return torch.empty(least, dtype=torch.uint8, device=device)


class Decoding(NamedTuple):
    """How blocks are decoded.

    Attributes:
        pieces: those that one launch decodes.
        others: with the tokens in front of them.
        tokens: of all.
    """

    pieces: Pieces | None
    others: list[tuple[int, Block]]
    tokens: int

    @classmethod
    def of(cls, blocks: list[Block]) -> Decoding:
        pieces, others, start = [], [], 0
        for block in blocks:
            piece = block.piece(start) if block.packed.data.is_cuda else None
            if piece is None:
                others.append((start, block))
            else:
                pieces.append(piece)
            start += block.tokens
        return cls(Pieces(pieces) if pieces else None, others, start)

    def into(self, output: torch.Tensor) -> None:
        """
        Args:
            output: [sequences, heads, tokens, channels], contiguous; tokens behind those of the blocks stay.
        """
        for start, block in self.others:
            output[:, :, start : start + block.tokens] = block.decoded()
        if self.pieces:
            self.pieces.decode(output.view(len(output) * output.shape[1], -1))


class PackedStates:
    """A layer's keys, or its values.

    Args:
        block_tokens: as PackedCache has it.
    """

    def __init__(self, arena: Arena, block_tokens: int | None = None) -> None:
        self._arena, self._block_tokens, self._phase = arena, block_tokens, arena.phase()
        self._blocks: list[Block] = []
        self._latest: torch.Tensor | None = None  # behind all blocks; contiguous
        self._decoding: Decoding | None = None  # of the blocks, as soon as it is needed

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds addresses, for copies."""
        return vars(self) | {"_decoding": None}

    @property
    def tokens(self) -> int:
        latest = 0 if self._latest is None else self._latest.shape[2]
        return self._how().tokens + latest

    @property
    def nbytes(self) -> int:
        latest = 0 if self._latest is None else self._latest.nbytes
        return sum(block.packed.nbytes for block in self._blocks) + latest

    def replace(self, states: torch.Tensor | None) -> None:
        """By others, of any number of tokens."""
        self._set([], None if states is None else states.contiguous())

    def updated(self, states: torch.Tensor) -> torch.Tensor:
        """All states, these behind the others."""
        latest = [] if self._latest is None else [self._latest]
        self._latest = torch.cat([*latest, states], dim=2)
        every = self.all()
        assert every is not None
        self._pack()
        return every

    def all(self) -> torch.Tensor | None:
        latest = self._latest
        if not self._blocks or latest is None:
            return latest
        how = self._how()
        sequences, heads, tokens, channels = latest.shape
        output = latest.new_empty((sequences, heads, how.tokens + tokens, channels))
        how.into(output)
        output[:, :, how.tokens :] = latest
        return output

    def _how(self) -> Decoding:
        if self._decoding is None:
            self._decoding = Decoding.of(self._blocks)
        return self._decoding

    def sequences(self) -> torch.Tensor:
        """Their indices."""
        assert self._latest is not None
        return torch.arange(len(self._latest), device=self._latest.device)

    def select(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        if self._latest is not None:
            indices = indices.to(self._latest.device)
            self._set([block.select(indices) for block in self._blocks], self._latest.index_select(0, indices))

    def forget(self, tokens: int) -> None:
        """The last ones."""
        blocks, latest = [*self._blocks], self._latest
        assert latest is not None
        while tokens > latest.shape[2]:
            tokens -= latest.shape[2]
            latest = blocks.pop().decoded()
        self._set(blocks, latest[:, :, : latest.shape[2] - tokens].clone())

    def move(self, device: torch.device) -> None:
        if self._latest is not None and self._latest.device != device:
            self._set([block.to(device) for block in self._blocks], self._latest.to(device, non_blocking=True))

    def _pack(self) -> None:
        """As many of the latest tokens as make up blocks, of which the first is longer by what the phase says."""
        latest = self._latest
        assert latest is not None
        sequences, heads, tokens, channels = latest.shape
        unit = self._block_tokens or default_block_tokens(sequences * heads * channels)
        if tokens < unit + LATEST_TOKENS or latest.dtype != torch.bfloat16 or latest.requires_grad:
            return
        packed, whole = self._how().tokens, whole_tokens(sequences * heads)
        longer = int(self._phase * unit) // whole * whole
        end = (packed + tokens - LATEST_TOKENS - longer) // unit * unit + longer - packed
        if end < unit:
            return
        most = max(1, MOST_WORDS // (sequences * heads * channels * unit)) * unit
        starts = [0, *range(end % unit + most, end, most)]
        blocks = [Block.of(latest[:, :, start:stop], self._arena) for start, stop in pairwise((*starts, end))]
        self._set([*self._blocks, *blocks], latest[:, :, end:].clone())

    def _set(self, blocks: list[Block], latest: torch.Tensor | None) -> None:
        self._blocks, self._latest, self._decoding = blocks, latest, None


def whole_tokens(heads: int) -> int:
    """Of how many tokens a multiple makes whole rows and row groups, with so many heads of all sequences."""
    return ROW_TOKENS * ROW_GROUP // math.gcd(ROW_GROUP, heads)


def default_block_tokens(words: int) -> int:
    """Tokens of a block where a token has so many words in a layer's keys: a power of two, and whole rows."""
    return 1 << (max(ROW_TOKENS, -(-BLOCK_WORDS // max(1, words))) - 1).bit_length()
