"""How a launch of the fused linear layer divides its work and its shared memory among blocks and warps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from samebits.format.header import Header
from samebits.kernels import nvrtc
from samebits.kernels.linear.ahead import ahead
from samebits.kernels.linear.chains import chains
from samebits.kernels.linear.clusters import WARPS, clusters
from samebits.kernels.linear.job import MAX_TOKENS, Footprint, Kernel, Launch
from samebits.kernels.linear.pairs import MULTIPLIERS, pairs, warpgroups
from samebits.kernels.linear.relay import TILES, relay
from samebits.kernels.linear.rounds import rounds
from samebits.kernels.linear.tiles import TILE_WARPS, tiles

_WARPGROUP = 4  # warps
_RANKS = 3  # linear_relay.cuh, linear_clusters.cuh: tiles of which the fastest is found by trying
_RANKED = {Kernel.RELAY: relay, Kernel.CLUSTERS: clusters}

MAX_HOPPER_TOKENS = 16384  # with more, decoding first takes a hundredth of the time


@dataclass(frozen=True)
class Variant:
    """One way to run the fused layer; changes the speed and never the bits.

    Attributes:
        kernel: which.
        warps: of a block, at most (csrc: of the launch bounds).
        shared_x: keep x in shared memory.
        hand_on: blocks may end inside a range of K and leave its sums for the next.
        rank: of linear_relay.cuh's or linear_clusters.cuh's tiles: how many are expected to be faster.
        sharing: of linear_ahead.cuh's lines: how many a warp multiplies.
        apart: linear_ahead.cuh's segments of K have blocks of their own.
    """

    kernel: Kernel
    warps: int
    shared_x: bool = True
    hand_on: bool = False
    rank: int = 0
    sharing: int = 1
    apart: bool = False

    def __str__(self) -> str:
        place = "" if self.shared_x else ", x in global memory"
        place += ", sums handed on" if self.hand_on else ""
        place += ", segments apart" if self.apart else ""
        rank = f", tile {self.rank + 1}" if self.kernel in _RANKED else ""
        sharing = f", {self.sharing} row groups each" if self.sharing > 1 else ""
        return f"{self.kernel.name.lower()}, {self.warps} warps{sharing}{place}{rank}"


VARIANTS = (
    Variant(Kernel.AHEAD, warps=20),
    Variant(Kernel.AHEAD, warps=16),
    *(Variant(Kernel.AHEAD, warps, sharing=2) for warps in (16, 15, 12)),
    Variant(Kernel.CHAINS, warps=20),
    Variant(Kernel.CHAINS, warps=20, shared_x=False),
    Variant(Kernel.CHAINS, warps=16),
    Variant(Kernel.TILES, warps=TILE_WARPS),
    Variant(Kernel.PAIRS, warps=max(MULTIPLIERS[2].values())),
    Variant(Kernel.WARPGROUPS, warps=_WARPGROUP),
    Variant(Kernel.WARPGROUPS, warps=2 * _WARPGROUP),
    Variant(Kernel.SINGLES, warps=max(MULTIPLIERS[1].values())),
    Variant(Kernel.PAIRS, warps=8),
    *(Variant(Kernel.RELAY, max(tile.warps for tile in TILES), rank=rank) for rank in range(_RANKS)),
    Variant(Kernel.CHAINS, warps=12),
    *(Variant(Kernel.CLUSTERS, WARPS, rank=rank) for rank in range(_RANKS)),
    Variant(Kernel.PAIRS, warps=8, hand_on=True),
    Variant(Kernel.PAIRS, warps=12, hand_on=True),
    Variant(Kernel.ROUNDS, warps=20),
    Variant(Kernel.AHEAD, warps=20, apart=True),
    *(Variant(Kernel.AHEAD, warps=w, sharing=2, apart=True) for w in (15, 12)),
)


def max_tokens(device: int) -> int:
    """For how many tokens there are kernels on a device."""
    return MAX_HOPPER_TOKENS if nvrtc.has_wgmma(device) else MAX_TOKENS


def launch_of(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """None if it does not fit, or there is no such kernel."""
    return joint_launch((header,), m, (split,), variant, device)


def different(launches: Iterable[Launch | None]) -> dict[int, Launch]:
    """Those that there are, by number; of equal ones the first."""
    found: dict[tuple[object, ...], tuple[int, Launch]] = {}
    for number, launch in enumerate(launches):
        if launch:
            found.setdefault(launch.key, (number, launch))
    return dict(found.values())


def nearest_launch(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """The variant, or the first that fits instead."""
    others = (launch_of(header, m, split, other, device) for other in range(len(VARIANTS)))
    return launch_of(header, m, split, variant, device) or next(filter(None, others), None)


def joint_launch(
    headers: tuple[Header, ...], m: int, splits: tuple[int, ...], variant: int, device: int
) -> Launch | None:
    """One launch for one to MAX_TOGETHER tensors of as many columns, each with blocks of its own; None as launch_of.

    Each block has row groups of one tensor, all blocks about as many stages to decode.
    """
    return shared_launch(tuple(map(Footprint.of, headers)), m, splits, variant, device)


@lru_cache(maxsize=8192)
def shared_launch(
    footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], variant: int, device: int
) -> Launch | None:
    """``joint_launch``: the same object for all tensors of these footprints."""
    kind = VARIANTS[variant]
    if kind.kernel in (Kernel.SINGLES, Kernel.PAIRS):
        return pairs(footprints, m, splits, device, kind.kernel, kind.warps, hand_on=kind.hand_on)
    if kind.kernel is Kernel.AHEAD:
        return ahead(footprints, m, splits, device, kind.warps, kind.sharing, apart=kind.apart)
    if kind.kernel is Kernel.CHAINS:
        return chains(footprints, m, splits, device, kind.warps, shared_x=kind.shared_x)
    if kind.kernel is Kernel.ROUNDS:
        return rounds(footprints, m, splits, device)
    if kind.kernel in _RANKED:
        return _RANKED[kind.kernel](footprints, m, splits, device, kind.rank)
    if kind.kernel is Kernel.WARPGROUPS and len(footprints) == 1:
        return warpgroups(footprints[0], m, splits[0], device, kind.warps)
    if kind.kernel is Kernel.TILES:
        return tiles(footprints, m, splits, device, kind.warps)
    return None
