"""What launches of products with routed experts are: csrc/routing.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from samebits.kernels import nvrtc
from samebits.kernels.linear.job import magic
from samebits.kernels.structures import JobStructure, RoutingStructure

MAX_EXPERTS = (1 << 16) - 1  # kNoExpert
MAX_DIVIDED = 1 << 32  # csrc: divide


class Part(NamedTuple):
    """One of the launches, made one behind the other.

    Attributes:
        arguments: those of the launch that the kernel takes, by name (experts._Parameters).
    """

    file: str
    name: str
    grid: int
    threads: int
    shared_bytes: int
    arguments: tuple[str, ...]

    @property
    def source(self) -> nvrtc.Source:
        return nvrtc.Source(self.file, self.name)


@dataclass(frozen=True, eq=False)
class ExpertsLaunch:
    """For one packed tensor, number of pairs and device.

    Attributes:
        job, routing: without addresses.
        arranged_bytes: of memory that is needed meanwhile, in front, for x: csrc/unit_tables.cuh.
        tables_bytes: and behind it, for units.
    """

    parts: tuple[Part, ...]
    job: JobStructure
    routing: RoutingStructure
    arranged_bytes: int = 0
    tables_bytes: int = 0

    @property
    def sources(self) -> set[nvrtc.Source]:
        return {part.source for part in self.parts}

    @property
    def scratch_bytes(self) -> int:
        return self.arranged_bytes + self.tables_bytes


def routing(
    pairs: int, experts: int, groups: int, sharing: int, units: int, unit_pairs: int, tiles: int = 1
) -> RoutingStructure:
    """csrc: Routing, without addresses."""
    return RoutingStructure(None, None, 0, pairs, experts, groups, sharing, units, unit_pairs,
                            *map(magic, (groups, sharing, unit_pairs, tiles)), tiles)  # fmt: skip
