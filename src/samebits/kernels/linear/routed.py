"""Launches of csrc/linear_routed.cuh: experts with many pairs each, which warpgroups multiply with; memory in bytes."""

from __future__ import annotations

from functools import lru_cache

from samebits.format.geometry import ROW_GROUP, STAGE
from samebits.format.header import Header
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import OCTET, Footprint
from samebits.kernels.linear.pairs import Warpgroups
from samebits.kernels.linear.routing import MAX_DIVIDED, MAX_EXPERTS, ExpertsLaunch, Part, routing
from samebits.kernels.structures import JobStructure

_WARPS = (8, 4)  # of a block, that multiply: as many as have room for their chunks
_MAX_PAIRS = 1 << 16  # csrc/route.cu
_MAX_THREADS = (1 << 31) - 1
_HEAD_WORDS, _UNIT_WORDS = 4, 4  # csrc/unit_tables.cuh: kHeadOfTables, kWordsOfUnit
_ROUTE_THREADS, _ARRANGE_THREADS = 1024, 256
_STEP = 16  # columns


def routed(header: Header, pairs: int, sharing: int, unit_pairs: int, device: int) -> ExpertsLaunch | None:
    """None if it does not fit, or there is no such kernel.

    Args:
        pairs: of tokens and experts.
        sharing: pairs behind each other that have one row of x.
        unit_pairs: of a tile.
    """
    if not nvrtc.has_wgmma(device) or pairs > _MAX_PAIRS:
        return None
    experts, rows, columns = header.shape
    way = _way(Footprint.of(header), unit_pairs, device)
    if way is None:
        return None
    chosen = min(experts, pairs)
    units, octets = min(pairs, chosen + pairs // unit_pairs), (pairs + (OCTET - 1) * chosen) // OCTET
    tiles, clusters = -(-rows // way.tile_rows), nvrtc.multiprocessors(device) // way.cluster
    items, counts_bytes = units * tiles, 4 * experts
    most_divided = max(items * tiles, pairs * max(sharing, unit_pairs), units * unit_pairs**2)
    all_steps = pairs * columns // _STEP
    fits = clusters and experts <= MAX_EXPERTS and counts_bytes <= nvrtc.shared_memory(device)
    if not fits or most_divided > MAX_DIVIDED or all_steps > _MAX_THREADS:
        return None
    blocks = way.cluster * min(items, clusters)
    parts = (
        Part("route.cu", "route_experts", 1, _ROUTE_THREADS, counts_bytes, ("job", "routing")),
        Part("route.cu", "arrange_experts", -(-all_steps // _ARRANGE_THREADS), _ARRANGE_THREADS, 0,
             ("geometry", "job", "routing")),
        Part("linear_routed.cu", f"linear_routed_{unit_pairs}", blocks, way.threads, way.shared_bytes,
             ("geometry", "packed", "job", "routing")),
    )  # fmt: skip
    stages = -(-columns // STAGE)
    words = _HEAD_WORDS + units * (_UNIT_WORDS + 2 * unit_pairs) + pairs
    return ExpertsLaunch(parts, JobStructure(None, None, None, None, None, *way.job(blocks)),
                         routing(pairs, experts, rows // ROW_GROUP, sharing, units, unit_pairs, tiles),
                         octets * OCTET * 2 * STAGE * stages, 4 * words)  # fmt: skip


@lru_cache(maxsize=8192)
def _way(footprint: Footprint, unit_pairs: int, device: int) -> Warpgroups | None:
    """Kept, as it is asked for with each new number of pairs."""
    return next((way for warps in _WARPS if (way := Warpgroups(footprint, unit_pairs, warps, device)).fits), None)
