"""Blocks through staging buffers: every byte, and that nothing is copied or computed too early."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from samebits.errors import InputError
from samebits.kernels.residents import may_start_early
from samebits.nn import streaming
from samebits.nn.streaming import Block, Lane, Streamer, block_bytes

CPU = torch.device("cpu")


class LateLane(Lane):
    """A device that copies as late as it may: when something waits for it. And one that checks what copies wait for.

    Attributes:
        pending: copies that are not done yet.
        read: by address of a buffer, the number of the last mark when it was computed from.
        copies: how many there were.
    """

    def __init__(self) -> None:
        self.marks = self.copies = 0
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.read: dict[int, int] = {}

    def mark(self) -> int:
        self.marks += 1
        return -self.marks  # which is behind no copy

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: int) -> int:
        assert -after > self.read.get(target.data_ptr(), 0), "overwrites what a block may still compute from"
        self.copies += 1
        self.pending.append((self.copies, target, source))
        return self.copies

    def wait(self, event: int, memory: torch.Tensor) -> None:
        while self.pending and self.pending[0][0] <= event:
            _, target, source = self.pending.pop(0)
            target.copy_(source)
        self.read[memory.data_ptr()] = self.marks


class LaneOfStreams(Lane):
    """One that knows, for several streams, what each is behind, and checks what copies wait for.

    Attributes:
        stream: that computes now.
        behind: events that what comes next on a stream is behind; before: those that an event is behind.
        uses: events behind what computed from a buffer since it was filled, by its address.
    """

    def __init__(self) -> None:
        self.stream, self.events, self.used = "first", 0, 0
        self.behind: dict[str, set[int]] = defaultdict(set)
        self.before: dict[int, set[int]] = {0: set()}
        self.uses: dict[int, set[int]] = defaultdict(set)

    def mark(self) -> int:
        self.events += 1
        self.behind[self.stream].add(self.events)
        self.before[self.events] = set(self.behind[self.stream])
        self.uses[self.used].add(self.events)
        return self.events

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: int) -> int:
        assert self.uses.pop(target.data_ptr(), set()) <= self.before[after]
        super().copy(target, source, after)
        return 0

    def wait(self, event: int, memory: torch.Tensor) -> None:
        self.behind[self.stream] |= self.before[event]
        self.used = memory.data_ptr()


def test_a_buffer_is_filled_behind_all_streams_that_used_it() -> None:
    """Which two threads in step do, each with a stream of its own."""
    lane = LaneOfStreams()
    blocks, modules, weights = make_blocks(3, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    for number in [0, 1, 2] * 4:
        for lane.stream in ("first", "second", "first"):
            with streamer.staged(blocks[number]):
                assert torch.equal(modules[number].weight, weights[number])


def make_blocks(count: int, lane: Lane) -> tuple[list[Block], list[nn.Linear], list[torch.Tensor]]:
    """Blocks of several sizes and dtypes, their modules, and copies of the weights."""
    modules = [nn.Linear(8 + number, 5) for number in range(count)]
    for number, module in enumerate(modules):
        module.extra = nn.Parameter(torch.arange(number, number + 7, dtype=torch.uint8), requires_grad=False)
        module.requires_grad_(False)
    weights = [module.weight.clone() for module in modules]
    blocks = [
        Block(str(number), [(module.weight, [(module, "weight")]), (module.extra, [(module, "extra")])], lane)
        for number, module in enumerate(modules)
    ]
    return blocks, modules, weights


@pytest.fixture(params=[Lane, LateLane])
def lane(request: pytest.FixtureRequest) -> Lane:
    return request.param()


ORDERS = {
    "again and again": [0, 1, 2, 3, 4] * 3,
    "an encoder, then a decoder": [0, 1, *[2, 3, 4] * 5, 0, 1, *[2, 3, 4] * 2],
    "backwards": [4, 3, 2, 1, 0] * 2,
    "one more than once": [0, 0, 0, 3, 3, 1, 0, 4, 4, 4],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("buffers", [1, 2, 3, 5, 6])
def test_a_block_sees_its_weights(lane: Lane, buffers: int, order: list[int]) -> None:
    blocks, modules, weights = make_blocks(5, lane)
    streamer = Streamer(blocks, CPU, buffers, lane)
    for number in order:
        module, host = modules[number], modules[number].weight.data_ptr()
        with streamer.staged(blocks[number]):
            assert module.weight.data_ptr() != host
            assert (
                module.weight.data_ptr() % 64
                == module.extra.data_ptr() % 64
                == streamer._buffers[0].memory.data_ptr() % 64
            )
            assert torch.equal(module.weight, weights[number])
            assert module.extra.tolist() == list(range(number, number + 7))
        assert module.weight.data_ptr() == host
        assert torch.equal(module.weight, weights[number])


def copies(streamer: Streamer, lane: LateLane, blocks: list[Block], order: list[int]) -> int:
    before = lane.copies
    for number in order:
        with streamer.staged(blocks[number]):
            pass
    return lane.copies - before


def test_each_block_is_copied_once_a_pass() -> None:
    lane = LateLane()
    blocks, _, _ = make_blocks(5, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    assert lane.copies == 2  # before anything has run
    for _ in range(3):
        assert copies(streamer, lane, blocks, [0, 1, 2, 3, 4]) == 5


def test_what_all_fits_is_copied_once() -> None:
    lane = LateLane()
    blocks, _, _ = make_blocks(2, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    assert copies(streamer, lane, blocks, [0, 1, 0, 0, 1]) == 0


def test_learns_which_block_follows() -> None:
    lane = LateLane()
    blocks, _, _ = make_blocks(6, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    copies(streamer, lane, blocks, [0, 1, 2, 3, 4, 5, 2, 3, 4, 5])
    assert copies(streamer, lane, blocks, [2, 3, 4, 5] * 2) == 8


def test_copies_run_ahead_of_the_last_block() -> None:
    """Those of the next pass start behind it, not when the pass does."""
    lane = LateLane()
    blocks, _, _ = make_blocks(4, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    copies(streamer, lane, blocks, [0, 1, 2, 3])
    assert [buffer.block for buffer in streamer._buffers] == blocks[:2]


def test_what_was_written_is_copied_again(lane: Lane) -> None:
    blocks, modules, weights = make_blocks(3, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    for _ in range(2):
        for number, block in enumerate(blocks):
            modules[number].weight += 1
            with streamer.staged(block):
                weights[number] += 1
                assert torch.equal(modules[number].weight, weights[number])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_staged_bytes_are_never_settled(lane: Lane, mode: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel must not read them before the kernels and copies in front of it have ended (kernels/residents.py)."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    blocks, modules, _ = make_blocks(3, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    with mode():
        for _ in range(3):
            for number, block in enumerate(blocks):
                with streamer.staged(block):
                    assert [may_start_early(modules[number].extra) for _ in range(2)] == [False, True]


def test_a_block_that_fails_gives_its_buffer_back(lane: Lane) -> None:
    blocks, modules, weights = make_blocks(3, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    for number in range(3):
        with pytest.raises(ZeroDivisionError), streamer.staged(blocks[number]):
            raise ZeroDivisionError
        assert torch.equal(modules[number].weight, weights[number])
        with streamer.staged(blocks[number]):
            assert torch.equal(modules[number].weight, weights[number])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_takes_no_block_for_another() -> None:
    """Wherever Python raises a KeyboardInterrupt: behind each call."""
    for number in itertools.count():
        blocks, modules, weights = make_blocks(4, lane := Lane())
        streamer = Streamer(blocks, CPU, 2, lane)
        returns, was_raised = itertools.count(), False

        def interrupt(frame: Any, event: str, _: Any, number: int = number, returns: Any = returns) -> None:
            nonlocal was_raised
            caller = {"c_return": frame, "return": frame.f_back}.get(event)
            if caller and caller.f_code.co_filename == streaming.__file__ and next(returns) == number:
                was_raised = True
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            for block in [0, 1, 2, 3]:
                with streamer.staged(blocks[block]):
                    pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if not was_raised:
            break
        for block in [1, 0, 2, 3] * 2:
            with streamer.staged(blocks[block]):
                assert torch.equal(modules[block].weight, weights[block])
    assert number > 100


def test_blocks_inside_of_each_other(lane: Lane) -> None:
    blocks, modules, weights = make_blocks(4, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    for _ in range(2):
        with streamer.staged(blocks[3]):
            with streamer.staged(blocks[1]):
                assert torch.equal(modules[1].weight, weights[1])
                with pytest.raises(InputError, match="2: runs inside of 2 others"), streamer.staged(blocks[2]):
                    pass
                with pytest.raises(InputError, match="1: runs inside of itself"), streamer.staged(blocks[1]):
                    pass
            with streamer.staged(blocks[2]):
                assert torch.equal(modules[2].weight, weights[2])
            assert torch.equal(modules[3].weight, weights[3])


def replaced(module: nn.Linear) -> Iterator[Any]:
    yield lambda: setattr(module, "weight", nn.Parameter(torch.zeros(5, 10)))
    yield lambda: setattr(module.weight, "data", torch.zeros(5, 10))


@pytest.mark.parametrize("how", [0, 1])
def test_weights_that_are_gone(lane: Lane, how: int) -> None:
    blocks, modules, _ = make_blocks(3, lane)
    streamer = Streamer(blocks, CPU, 2, lane)
    list(replaced(modules[2]))[how]()
    with pytest.raises(InputError, match="2: streamed weights were moved or replaced"), streamer.staged(blocks[2]):
        pass


def test_each_block_has_pages_of_its_own() -> None:
    """So that pinning one does not touch another."""
    blocks, modules, _ = make_blocks(5, Lane())
    pages = [
        range(block.memory.data_ptr() // 4096, (block.memory.data_ptr() + len(block.memory) - 1) // 4096 + 1)
        for block in blocks
    ]
    assert all(block.memory.data_ptr() % 4096 == 0 for block in blocks)
    assert len({page for found in pages for page in found}) == sum(map(len, pages))
    for block, module in zip(blocks, modules, strict=True):
        assert len(block.memory) == block_bytes([module.weight, module.extra]) == 512
