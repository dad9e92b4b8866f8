"""Nobody waits for ever in csrc/linear_ahead.cuh: its warps, run by run, as launches have them wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from samebits.kernels import nvrtc
from samebits.kernels.linear.job import CHUNK_STAGES, Kernel
from samebits.kernels.linear.launch import VARIANTS, launch_of, shared_launch
from tests.kernels.test_linear_launch import header_of, job_of

RUN = 4  # stages, kRun
CHUNK_RUNS = CHUNK_STAGES // RUN
SHAPES = ((1024, 4096), (1024, 8192), (2048, 5376), (4096, 5376), (5120, 5120), (10240, 8192), (1064, 2880), (8, 1024))


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: True)
    monkeypatch.setattr(nvrtc, "shared_memory", lambda device: 232448)
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: 132)
    shared_launch.cache_clear()


@dataclass
class Segment:
    """Stages [begin, end), of so many lines; ``come``: runs of x that have come."""

    begin: int
    end: int
    first_line: int
    lines: int
    come: int = 0

    @property
    def first_run(self) -> int:
        return self.begin // RUN

    @property
    def runs(self) -> int:
        return (self.end - 1) // RUN - self.first_run + 1

    @property
    def first_chunk(self) -> int:
        return self.begin // CHUNK_STAGES

    @property
    def chunks(self) -> int:
        return (self.end - 1) // CHUNK_STAGES - self.first_chunk + 1


@dataclass
class Block:
    """
    Attributes:
        ready: of each place of each line's ring, how many runs there were with the one that it holds.
        taken: of each line, runs that are not needed any more.
    """

    segments: list[Segment]
    own: int
    sharing: int
    ring: int
    x_places: int
    decoders: int
    ready: list[list[int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def is_done_in_the_end(self) -> bool:
        """Every warp goes on whenever it can."""
        lines = self.own * len(self.segments)
        self.ready, self.taken = [[0] * self.ring for _ in range(lines)], [0] * lines
        waiting = [*(self.decode(number) for number in range(self.decoders)), *map(self.bring, self.segments),
                   *(self.multiply(segment, group) for segment in self.segments for group in self.groups)]  # fmt: skip
        has_gone_on = True
        while waiting and has_gone_on:
            has_gone_on, still = False, []
            for warp in waiting:
                can = next(warp, None)
                has_gone_on |= can is not False
                if can is not None:
                    still.append(warp)
            waiting = still
        return not waiting

    @property
    def groups(self) -> list[list[int]]:
        """Slots of each warp that multiplies a segment: the first ones have one line."""
        sharers = -(-self.own // self.sharing)
        alone = self.own if self.sharing == 1 else 2 * sharers - self.own
        return [[slot] for slot in range(alone)] + [[slot, slot + 1] for slot in range(alone, self.own, 2)]

    # Warps: each tells whether it went on, again and again, until it is done.

    def decode(self, number: int) -> Iterator[bool]:
        lines = self.own * len(self.segments)
        for task in range(number, lines * max(each.chunks for each in self.segments), self.decoders):
            chunk, line = divmod(task, lines)
            segment = self.segments[line // self.own]
            if chunk >= segment.chunks:
                continue
            first = (segment.first_chunk + chunk) * CHUNK_RUNS - segment.first_run
            for run in range(max(first, 0), min(first + CHUNK_RUNS, segment.runs)):
                while self.taken[line] < run - self.ring + 1:
                    yield False
                self.ready[line][run % self.ring] = run + 1
                yield True

    def bring(self, segment: Segment) -> Iterator[bool]:
        lines = range(segment.first_line, segment.first_line + segment.lines)
        for run in range(segment.runs):
            while min(self.taken[line] for line in lines) < run - self.x_places + 1:
                yield False
            segment.come = run + 1
            yield True

    def multiply(self, segment: Segment, slots: list[int]) -> Iterator[bool]:
        lines = [segment.first_line + slot for slot in slots]
        for run in range(segment.runs):
            while min(segment.come, *(self.ready[line][run % self.ring] for line in lines)) <= run:
                yield False
            for line in lines:
                self.taken[line] = run + 1
            yield True


def blocks_of(job: dict[str, Any], name: str, warps: int, stages: int) -> Iterator[Block]:
    """One of each kind: with as many row groups as any, and with one less; with each segment, where they are apart."""
    bounds = [(first, min(first + job["segment_stages"], stages)) for first in range(0, stages, job["segment_stages"])]
    for own in {job["own"] + (job["longer"] > 0), job["own"]} - {0}:
        for held in [[each] for each in bounds] if "apart" in name else [bounds]:
            segments = [Segment(begin, end, own * i, own) for i, (begin, end) in enumerate(held)]
            sharing = 2 if "two" in name else 1
            others = (-(-job["slots"] // sharing) + 1) * len(segments)
            yield Block(segments, own, sharing, job["ring"], job["x_places"], warps - others)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 48])
@pytest.mark.parametrize("chunk_words", [470, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_warps_end(shape: tuple[int, int], chunk_words: int, tokens: int) -> None:
    header, found = header_of(shape, chunk_words), 0
    for split in (1, 2, 3, 6):
        for number, variant in enumerate(VARIANTS):
            launch = launch_of(header, tokens, split, number, 0) if variant.kernel is Kernel.AHEAD else None
            if launch:
                for block in blocks_of(job_of(launch), launch.name, launch.warps, header.geometry.stages):
                    assert block.decoders > 0
                    assert block.is_done_in_the_end(), (variant, split)
                    found += 1
    assert found or chunk_words == 1000 or shape == (10240, 8192)


@pytest.mark.parametrize(("ring", "x_places"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
def test_some_would_wait_for_ever(ring: int, x_places: int) -> None:
    """Where rings and x have no room for a chunk's runs together: what these tests find."""
    block = Block([Segment(0, 64, 0, 4)], 4, 1, ring, x_places, decoders=1)
    assert block.is_done_in_the_end() == (ring + x_places >= CHUNK_RUNS)
