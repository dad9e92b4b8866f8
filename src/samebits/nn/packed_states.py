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
from samebits.format.header import align
from samebits.format.packed import PackedTensor
from samebits.kernels.pieces import STORED, Piece, Pieces, can_be_piece

BLOCK_WORDS = 1 << 20  # of a block, at least
MOST_WORDS = 1 << 25  # of one that a long prompt makes
ROW_TOKENS = 64  # whose states of one head are a row, of a scale of its own, where a block has so many
LATEST_TOKENS = 16  # never packed: assisted generation takes back a few tokens at every step
ROOM_SHARE = 8  # the room for the latest tokens has no more to spare than this part of what is packed
SEGMENT_BYTES = 64 << 20  # of an arena, at most
SEGMENT_SHARE = 8  # while it holds less than so many of these, a segment is this part of it
_LARGE = 10 << 20  # bytes of a tensor, at least, that torch's allocator gives a segment of its own
ROUNDED = 2 << 20  # bytes of which that has a multiple
_SMALL = 1 << 20  # bytes of a tensor, at most, that it puts into segments for small ones
_ALIGNMENT = 256
_GOLDEN = (math.sqrt(5) - 1) / 2


class TokenBlock(NamedTuple):
    """Some tokens' states, packed.

    Attributes:
        shape: sequences, heads, tokens, channels, as they were packed.
        order: which of these sequences there are now, int64; None: all, as they were.
    """

    packed: PackedTensor
    shape: tuple[int, int, int, int]
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, states: torch.Tensor, arena: Arena, beside: int) -> TokenBlock:
        """
        Args:
            states: [sequences, heads, tokens, channels], bfloat16.
            beside: as Arena has it.
        """
        packed = encode(matrix_of(states))
        sequences, heads, tokens, channels = states.shape
        return cls(PackedTensor(packed.header, arena.keep(packed.data, beside)), (sequences, heads, tokens, channels))

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

    def select(self, indices: torch.Tensor) -> TokenBlock:
        return self._replace(order=indices if self.order is None else self.order[indices])

    def to(self, device: torch.device) -> TokenBlock:
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
    """Memory for what stays, apart from what comes and goes.

    torch's allocator would put each block into what is free at the moment, which is of the size of a layer's states,
    and is wanted again for those of the next step, which are a little larger. Here blocks lie in segments of a pool of
    their own, of which nothing else takes. A segment goes when nothing in it is needed any more. As soon as little
    memory is left, blocks lie where the allocator has rounded up, too.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Tensor]] = {}  # on each device; the last one is used first
        self._pool: Any = None  # torch.cuda.MemPool
        self._held = 0  # bytes
        self._phases = 0

    def __getstate__(self) -> dict[str, Any]:
        """Copies take memory of their own."""
        return vars(self) | {"_free": {}, "_pool": None}

    def phase(self) -> float:
        """Of whoever keeps blocks here: a number below 1, evenly spread however many ask."""
        self._phases += 1
        return self._phases * _GOLDEN % 1

    def keep(self, data: torch.Tensor, beside: int) -> torch.Tensor:
        """A copy of uint8 ``data``; itself in main memory.

        Args:
            beside: bytes of what comes and goes, for which memory should be left.
        """
        if not data.is_cuda:
            return data
        size = align(data.numel(), _ALIGNMENT)
        with torch.inference_mode(False), torch.no_grad():  # else nothing could be added outside of inference mode
            free = self._free.setdefault(data.device, [])
            while free and free[-1].numel() < size:
                free.pop()
            if not free:
                free += self._more(size, data.device, beside)
            place = free.pop()
            free.append(place[size:])
            self._held += size
            place.record_stream(torch.cuda.current_stream(data.device))  # the segment may be another's
            return place[: data.numel()].copy_(data)

    def _more(self, size: int, device: torch.device, beside: int) -> list[torch.Tensor]:
        """Places for a block of ``size`` bytes, and for others of about that size."""
        torch.cuda.empty_cache()  # pools take nothing from each other, and what is free has no remains
        most = max(1, min(SEGMENT_BYTES, self._held // SEGMENT_SHARE) // size)
        each = size + size // 256  # others may be a little larger
        number = min(range(-(-most // 2), most + 1), key=lambda number: -number * each % ROUNDED / number)
        segment = self._segment(align(number * each, ROUNDED), device)
        is_little_left = segment is None or empty(beside, device) is None
        if is_little_left and (remains := min(most, _remains(size, device))):
            return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(remains)]
        return [torch.empty(size, dtype=torch.uint8, device=device) if segment is None else segment]

    def _segment(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        try:
            self._pool = self._pool or torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool, device):
                return empty(nbytes, device)
        except RuntimeError:  # an allocator without pools
            return None


def empty(nbytes: int, device: torch.device) -> torch.Tensor | None:
    """None if there is no room."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def _remains(size: int, device: torch.device) -> int:
    """How many tensors of ``size`` bytes torch's allocator has room for where it has rounded up."""
    if size <= _SMALL or torch.cuda.get_allocator_backend() != "native":
        return 0
    stream = torch.cuda.current_stream(device).cuda_stream
    segments = (
        segment["blocks"]
        for segment in torch.cuda.memory_snapshot()
        if (segment["device"], segment["segment_pool_id"], segment["stream"]) == (device.index, (0, 0), stream)
    )
    free = (block["size"] for blocks in segments for block in blocks if block["state"] == "inactive")
    return sum(size <= remains < ROUNDED for remains in free)


class Decoding(NamedTuple):
    """How blocks are decoded.

    Attributes:
        pieces: those that one launch decodes.
        others: with the tokens in front of them.
    """

    pieces: Pieces | None
    others: list[tuple[int, TokenBlock]]

    @classmethod
    def of(cls, blocks: list[TokenBlock]) -> Decoding:
        pieces, others, start = [], [], 0
        for block in blocks:
            piece = block.piece(start) if block.packed.data.is_cuda else None
            if piece is None:
                others.append((start, block))
            else:
                pieces.append(piece)
            start += block.tokens
        return cls(Pieces(pieces) if pieces else None, others)

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

    def __init__(self, arena: Arena, block_tokens: int | None) -> None:
        self._arena, self._block_tokens, self._phase = arena, block_tokens, arena.phase()
        self._blocks: list[TokenBlock] = []
        self._packed_tokens = 0  # in them
        self._others: torch.Tensor | None = None  # the latest tokens, behind all blocks, if they have no room
        self._room: torch.Tensor | None = None  # for them and the next ones, if there are blocks; they are the first
        self._held = 0  # tokens in it
        self._decoding: Decoding | None = None  # of the blocks, as soon as they are decoded
        self._stream: torch.cuda.Stream | None = None  # that computed with them last

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds addresses and what can be made again, for copies."""
        return vars(self) | {"_decoding": None, "_stream": None, "_room": None, "_others": self.latest}

    @property
    def latest(self) -> torch.Tensor | None:
        """Tokens that are not packed."""
        return self._others if self._room is None else self._room.narrow(2, 0, self._held)

    @property
    def tokens(self) -> int:
        return self._packed_tokens + (0 if (latest := self.latest) is None else latest.shape[2])

    @property
    def nbytes(self) -> int:
        latest = self._others if self._room is None else self._room
        return sum(block.packed.nbytes for block in self._blocks) + (0 if latest is None else latest.nbytes)

    def replace(self, states: torch.Tensor | None) -> None:
        """By others, of any number of tokens."""
        self._set([], None if states is None else states.contiguous())

    def updated(self, states: torch.Tensor) -> torch.Tensor:
        """All states, these behind the others, as torch.cat has them: its errors, its dtype."""
        held = self.latest
        if self._blocks and held is not None and _kind(states) != _kind(held):
            every = torch.cat([self._followed_by(), states], dim=2)
            self._set([], every)
            return every
        if (place := self._place(states)) is not None:
            place.copy_(states)
            self._held += states.shape[2]
            return self._followed_by()
        every = self._followed_by(states)
        latest = every[:, :, self._packed_tokens :]
        if latest.requires_grad or latest.dtype != torch.bfloat16:
            self._set(self._blocks, latest.clone() if self._blocks else latest)
        elif end := self._whole_blocks(latest):
            self._keep([*self._blocks, *self._packed(latest[:, :, :end], 2 * every.nbytes)])
            self._hold(latest[:, :, end:])
        elif self._blocks:
            self._hold(latest)
        else:
            self._others = latest
        return every

    def all(self) -> torch.Tensor | None:
        return self._followed_by() if self._blocks else self._others

    def _place(self, states: torch.Tensor) -> torch.Tensor | None:
        """In the room, behind those that are there, if they fit there."""
        room, tokens = self._room, states.shape[2]
        if room is None or self._held + tokens > room.shape[2] or states.requires_grad:
            return None
        return room.narrow(2, self._held, tokens)

    def _followed_by(self, *states: torch.Tensor) -> torch.Tensor:
        """All, and these behind them, contiguous."""
        latest = self.latest
        ends = states if latest is None else (latest, *states)
        self._note_stream(ends[0])
        if not self._blocks:
            return torch.cat(ends, dim=2)
        sequences, heads, _, channels = ends[0].shape
        start = self._packed_tokens
        output = new_empty(ends[0], (sequences, heads, start + sum(end.shape[2] for end in ends), channels))
        for end in ends:
            output.narrow(2, start, end.shape[2]).copy_(end)
            start += end.shape[2]
        if self._decoding is None:
            self._decoding = Decoding.of(self._blocks)
        self._decoding.into(output)
        return output

    def _note_stream(self, states: torch.Tensor) -> None:
        """Where another stream computes than before: memory of the other's that is freed stays until this one is done.

        Once is enough, however often it computes. What ``move`` brings on a third stream is not noted: that one waits.
        """
        if not states.is_cuda or (stream := torch.cuda.current_stream(states.device)) == self._stream:
            return
        self._stream = stream
        held = [self._others if self._room is None else self._room]
        for tensor in (*held, *(part for block in self._blocks for part in (block.packed.data, block.order))):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _hold(self, latest: torch.Tensor) -> None:
        """These, in the room."""
        sequences, heads, tokens, channels = latest.shape
        most = tokens + max(LATEST_TOKENS, self._packed_tokens // ROOM_SHARE)
        if self._room is None or not tokens <= self._room.shape[2] <= most:
            unit, ahead = self._rhythm(latest)
            room = min(unit + ahead + LATEST_TOKENS - 1, most)  # behind these, blocks are packed
            with torch.inference_mode(False):  # else nothing could be added outside of inference mode
                self._room = latest.new_empty((sequences, heads, room, channels))
        self._others, self._held = None, tokens
        self._room.narrow(2, 0, tokens).copy_(latest)

    def sequences(self) -> torch.Tensor:
        """Their indices."""
        latest = self.latest
        assert latest is not None
        return torch.arange(len(latest), device=latest.device)

    def select(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        if (latest := self.latest) is not None:
            indices = indices.to(latest.device)
            self._set([block.select(indices) for block in self._blocks], latest.index_select(0, indices))

    def forget(self, tokens: int) -> None:
        """The last ones."""
        blocks, latest = [*self._blocks], self.latest
        assert latest is not None
        while tokens > latest.shape[2]:
            tokens -= latest.shape[2]
            latest = blocks.pop().decoded()
        self._set(blocks, latest[:, :, : latest.shape[2] - tokens].clone())

    def move(self, device: torch.device) -> None:
        latest = self.latest
        if latest is not None and latest.device != device:
            self._set([block.to(device) for block in self._blocks], latest.to(device, non_blocking=True))

    def _rhythm(self, latest: torch.Tensor) -> tuple[int, int]:
        """Tokens of a block, and how many more the next one has, so that it ends where the phase says."""
        sequences, heads, _, channels = latest.shape
        unit = self._block_tokens or default_block_tokens(sequences * heads * channels)
        whole = whole_tokens(sequences * heads)
        return unit, (int(self._phase * unit) // whole * whole - self._packed_tokens) % unit

    def _whole_blocks(self, latest: torch.Tensor) -> int:
        """How many of these tokens make up blocks."""
        unit, ahead = self._rhythm(latest)
        blocks = (latest.shape[2] - LATEST_TOKENS - ahead) // unit
        return blocks * unit + ahead if blocks > 0 else 0

    def _packed(self, states: torch.Tensor, beside: int) -> list[TokenBlock]:
        """Such whole blocks; many are fewer, larger ones."""
        sequences, heads, tokens, channels = states.shape
        unit, _ = self._rhythm(states)
        most = max(1, MOST_WORDS // (sequences * heads * channels * unit)) * unit
        starts = [0, *range(tokens % unit + most, tokens, most)]
        return [
            TokenBlock.of(states[:, :, start:stop], self._arena, beside) for start, stop in pairwise((*starts, tokens))
        ]

    def _set(self, blocks: list[TokenBlock], latest: torch.Tensor | None) -> None:
        self._keep(blocks)
        self._others, self._room, self._held = latest, None, 0

    def _keep(self, blocks: list[TokenBlock]) -> None:
        self._blocks, self._packed_tokens, self._decoding = blocks, sum(block.tokens for block in blocks), None


def _kind(states: torch.Tensor) -> tuple[Any, ...]:
    """All but the number of tokens."""
    return states.dtype, states.device, *states.shape[:2], *states.shape[3:]


def new_empty(like: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """As torch's own, but a large one has all of its segment: nothing that stays can be put behind it."""
    words = math.prod(shape)
    if words * like.element_size() < _LARGE:
        return like.new_empty(shape)
    _, heads, tokens, channels = shape
    whole = like.new_empty(align(words, ROUNDED // like.element_size()))
    return whole.as_strided(shape, (heads * tokens * channels, tokens * channels, channels, 1))


def whole_tokens(heads: int) -> int:
    """Of how many tokens a multiple makes whole rows and row groups, with so many heads of all sequences."""
    return ROW_TOKENS * ROW_GROUP // math.gcd(ROW_GROUP, heads)


def default_block_tokens(words: int) -> int:
    """Tokens of a block where a token has so many words in a layer's keys: a power of two, and whole rows."""
    return 1 << (max(ROW_TOKENS, -(-BLOCK_WORDS // max(1, words))) - 1).bit_length()
