"""How the fused layer's work is divided: what the kernels rely on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest

from samebits.format.geometry import STAGE, Code, Layout
from samebits.format.header import Header
from samebits.kernels import nvrtc
from samebits.kernels.decode import STATIC_SHARED, staging_words
from samebits.kernels.linear import chains
from samebits.kernels.linear.ahead import MAX_AHEAD_TOKENS
from samebits.kernels.linear.clusters import MAX_CLUSTER_TOKENS
from samebits.kernels.linear.clusters import TILES as CLUSTER_TILES
from samebits.kernels.linear.clusters import Tile as ClusterTile
from samebits.kernels.linear.cuts import Tiles, words
from samebits.kernels.linear.job import ATOM_BYTES, CHUNK_STAGES, LEFT, MAP_BYTES, Footprint, Kernel, Launch, magic
from samebits.kernels.linear.launch import (
    MAX_HOPPER_TOKENS,
    MAX_TOKENS,
    VARIANTS,
    different,
    joint_launch,
    launch_of,
    max_tokens,
    shared_launch,
)
from samebits.kernels.linear.pairs import MAX_WGMMA_TOKENS
from samebits.kernels.linear.products import LinearPlan, is_supported, sources
from samebits.kernels.linear.ranked import CLUSTER
from samebits.kernels.linear.relay import TILE_TOKENS, Tile, relay
from samebits.kernels.linear.tiles import MAX_TILE_TOKENS
from samebits.kernels.structures import MAX_PREFETCHED, JobStructure

SHARED_MEMORY = 232448
MOST_TOKENS = {
    Kernel.AHEAD: MAX_AHEAD_TOKENS,
    Kernel.CHAINS: MAX_TOKENS,
    Kernel.ROUNDS: MAX_TOKENS,
    Kernel.TILES: MAX_TILE_TOKENS,
    Kernel.SINGLES: 32,
    Kernel.PAIRS: 64,
    Kernel.WARPGROUPS: MAX_WGMMA_TOKENS,
    Kernel.RELAY: MAX_HOPPER_TOKENS,
    Kernel.CLUSTERS: MAX_CLUSTER_TOKENS,
}
DECODING_PAIRS = (Kernel.SINGLES, Kernel.PAIRS, Kernel.WARPGROUPS)
MANY_TOKENS = (Kernel.RELAY, Kernel.CLUSTERS)
GROUPS = (
    (((4096, 4096), 2), ((1024, 4096), 3), ((1024, 4096), 3)),
    (((14336, 4096), 1), ((14336, 4096), 1)),
    (((8192, 8192), 1), ((1024, 8192), 6), ((1024, 8192), 6)),
    (((64, 1024), 1), ((151936, 1024), 2), ((8, 1024), 5), ((2048, 1024), 1)),
)
SHAPES = ((8, 1024), (1064, 2880), (5120, 5120), (12288, 4096), (28672, 8192), (151936, 4096))


@pytest.fixture(params=[True, False], ids=["hopper", "other"])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    wgmma: bool = request.param
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: wgmma)
    monkeypatch.setattr(nvrtc, "shared_memory", lambda device: SHARED_MEMORY if wgmma else 101376)
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: 132)
    shared_launch.cache_clear()
    return wgmma


def header_of(shape: tuple[int, int], chunk_words: int) -> Header:
    return Header(Code.QUAD, Layout.MATRIX, shape, CHUNK_STAGES, 13, 50, 0, 1000, True, chunk_words, 1 << 20)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65, 128, 129, 512, 513])
@pytest.mark.parametrize("chunk_words", [250, 470, 1000, 2049])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launches_fit(shape: tuple[int, int], chunk_words: int, tokens: int, hopper: bool) -> None:
    header, found = header_of(shape, chunk_words), 0
    for split in (1, 3, 7):
        for number, variant in enumerate(VARIANTS):
            launch = launch_of(header, tokens, split, number, 0)
            if launch is None:
                continue
            found += 1
            job = job_of(launch)
            ranges, per_range, slots = job["ranges"], job["stages_per_range"], job["slots"]
            assert job["tokens"] == tokens <= MOST_TOKENS[variant.kernel]
            assert (ranges - 1) * per_range < header.geometry.stages <= ranges * per_range
            assert (job["ring"] > 0) == (variant.kernel not in (Kernel.CHAINS, Kernel.ROUNDS))
            if variant.kernel in DECODING_PAIRS + MANY_TOKENS:
                continue  # tests of their own
            has_ranges_apart = (variant.kernel is Kernel.ROUNDS or variant.apart) and ranges > 1
            meets = variant.kernel is Kernel.TILES or has_ranges_apart
            left = variant.kernel in (Kernel.AHEAD, Kernel.ROUNDS) and tokens > 8
            assert (launch.arrangement is not None) == (meets or left)
            assert hopper or not left
            segments = job["segments"] if variant.kernel in (Kernel.TILES, Kernel.ROUNDS) or variant.apart else 1
            assert launch.grid % segments == 0
            groups = slots * launch.grid // segments  # of a batch
            assert job["batches"] * groups >= header.geometry.row_groups > (job["batches"] - 1) * groups
            assert launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
            assert 1 <= launch.warps <= variant.warps
            assert job["buffer_words"] == staging_words(header)
            if variant.kernel is Kernel.AHEAD:
                check_lines(header, launch)
            if variant.kernel is Kernel.CHAINS:
                check_walks(header, launch)
            if variant.kernel is Kernel.ROUNDS:
                check_rounds(header, launch)
    assert found or tokens > MAX_TOKENS or not hopper


def job_of(launch: Launch, number: int = 0) -> dict[str, Any]:
    """JobStructure's fields between the pointers and the tensor map, by name."""
    names = [name for name, *_ in JobStructure._fields_]
    return dict(zip(names[names.index("tokens") : names.index("x_map")], launch.jobs[number], strict=True))


@dataclass(frozen=True)
class Piece:
    """Stages [first, end) of a row group, all in one chunk; where `border` is one of them, the next range begins there.

    Attributes:
        begins, ends: the warp's part of a chain; opens, closes: the chain itself.
    """

    slot: int
    first: int
    end: int
    border: int
    number: int  # of the first stage's range
    begins: bool
    ends: bool
    opens: bool
    closes: bool


def pieces_of(job: dict[str, Any], stages: int, walk: tuple[int, ...]) -> list[Piece]:
    """linear_chains.cuh: Chains::at, in its arithmetic."""
    *parts, edges = walk
    found, chunks, per_range = [], -(-stages // 16), job["stages_per_range"]
    for i, part in enumerate(parts):
        first_chunk, count = part & 0xFFFF, part >> 16
        for index in range(count):
            number = first_chunk + index
            slot = number * job["by_chunks"] >> 32 if job["by_chunks"] else number
            passed = 16 * (number - slot * chunks)
            first = passed + (edges >> 8 * i & 15 if index == 0 else 0)
            end = passed + (edges >> 8 * i + 4 & 15) + 1 if index + 1 == count else min(passed + 16, stages)
            in_range = first * job["by_range"] >> 32 if job["by_range"] else first
            closing = (in_range + 1) * per_range
            border = closing if closing < end else 0
            closes = min(border + per_range if border else closing, stages) == end
            opens = first == in_range * per_range
            found.append(Piece(slot, first, end, border, in_range, opens or index == 0,
                               closes or index + 1 == count, opens, closes))  # fmt: skip
    return found


def check_walks(header: Header, launch: Launch, number: int = 0) -> None:
    """linear_chains.cuh: the warps of a block go through all stages of all chains, each chain in order; what a warp
    takes over are sums of the warp in front, once, which has left them before it waits itself. A single tensor's
    schedulers have as many warps each, or each chain has one; beside another tensor's that is not always so."""
    job, stages = job_of(launch, number), header.geometry.stages
    own, longer, per_range, ranges = job["own"], job["longer"], job["stages_per_range"], job["ranges"]
    assert len(job["division"]) == 2 * 20 * 4
    assert job["slots"] == own + (longer > 0)
    between_turns, has_borders = "turns" in launch.name, "turns" in launch.name or "borders" in launch.name
    for kind, groups in enumerate((own + 1 if longer else 0, own)):
        words = job["division"][80 * kind : 80 * kind + 4 * launch.warps]
        by_warp = [tuple(words[i : i + 4]) for i in range(0, len(words), 4)]
        warps = sum(walk != (0, 0, 0, 0) for walk in by_warp)
        assert not any(map(any, by_warp[warps:]))
        assert (warps > 0) == (groups > 0)
        walks = sorted(by_warp[:warps], key=lambda walk: walk[3] >> 24)
        assert [walk[3] >> 24 for walk in walks] == list(range(warps))
        assert warps == groups * ranges or warps % 4 == 0 or warps in (1, 2, 3) or kind == 1 or len(launch.jobs) > 1
        left: dict[int, tuple[int, int, int]] = {}  # by walk, the chain and the stage at which its warp leaves sums
        closed = []
        for at, walk in enumerate(walks):
            pieces = pieces_of(job, stages, walk)
            assert pieces
            chain: tuple[int, int, int] | None = None
            for index, piece in enumerate(pieces):
                assert piece.first < piece.end
                assert piece.first // 16 == (piece.end - 1) // 16
                assert piece.slot < groups
                if piece.begins:
                    assert chain is None
                    chain = (piece.slot, piece.number, piece.first)
                    if not piece.opens:
                        assert left[at - 1] == chain  # what walk at - 1 leaves is known: its parts come first
                        assert at not in left or index > 0
                assert chain == (piece.slot, piece.number, piece.first)
                ends_in = [stage for stage in (piece.border, piece.end if piece.closes else 0) if stage]
                assert len({(stage - 1) // 8 for stage in ends_in}) == len(ends_in)  # one chain of a turn
                assert has_borders or not piece.border
                if has_borders:  # turns may be whole, so sums begin or end inside only with a chain
                    assert piece.opens or piece.first % 8 == 0
                    assert piece.closes or piece.end % 8 == 0
                assert not between_turns or (piece.first % 8, piece.border % 8, piece.end % 8) == (0, 0, 0)
                if piece.border:
                    closed.append((piece.slot, piece.number))
                    chain = (piece.slot, piece.number + 1, piece.border)
                    assert piece.border == (piece.number + 1) * per_range
                    assert piece.end <= piece.border + per_range  # the only one of a piece
                chain = (chain[0], chain[1], piece.end)
                if piece.closes:
                    assert piece.end == min((chain[1] + 1) * per_range, stages)
                    closed.append(chain[:2])
                elif piece.ends:
                    assert at not in left
                    left[at] = chain
                if piece.ends:
                    chain = None
            assert chain is None
        assert sorted(closed) == list(product(range(groups), range(ranges)))
        assert len(walks) - 1 not in left


def test_layers_share_launches(hopper: bool) -> None:
    """Whose tensors differ in nothing that a launch depends on; others have their own."""
    header = header_of((4096, 4096), 465)
    like = replace(header, window=51, shift=1, symbol_count=998, max_chunk_words=464, stream_words=1 << 21)
    others = (replace(header, max_chunk_words=500), replace(header, max_code_length=12), header_of((4104, 4096), 465))
    for number in range(len(VARIANTS)):
        launch = launch_of(header, 1, 1, number, 0)
        assert launch_of(like, 1, 1, number, 0) is launch
        assert all(launch_of(other, 1, 1, number, 0) is not launch for other in others if launch)


@pytest.mark.parametrize("columns", [960, 1024, 2880, 4096, 5120, 14336, 17408])
@pytest.mark.parametrize("split", range(1, 17))
def test_walks_cover_a_weight(split: int, columns: int, hopper: bool) -> None:
    for rows in (264, 4096, 14336):
        header = header_of((rows, columns), 250)
        for number, variant in enumerate(VARIANTS):
            if variant.kernel is not Kernel.CHAINS or not (launch := launch_of(header, 1, split, number, 0)):
                continue
            check_walks(header, launch)
            joint = joint_launch((header, header), 1, (split, 1), number, 0)
            for other in range(2 if joint else 0):
                assert joint is not None
                check_walks(header, joint, other)


@pytest.mark.parametrize(
    ("shapes", "splits", "multiprocessors", "warps", "has_borders"),
    [(((27624, 13760), (8, 13760)), (1, 5), 132, 5, False), (((8, 6464), (408, 6464)), (7, 5), 2, 8, True)],
)
def test_walks_beside_those_of_another_weight(
    shapes: tuple[tuple[int, int], ...], splits: tuple[int, ...], multiprocessors: int, warps: int, has_borders: bool,
    hopper: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As many warps as the other's whole chains; ranges shorter than a chunk where only the other's have borders."""
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: multiprocessors)
    found = set[tuple[int, bool]]()
    for chunk_words, tokens, number in product((250, 2049), (1, 4), range(len(VARIANTS))):
        headers = tuple(header_of(shape, chunk_words) for shape in shapes)
        launch = joint_launch(headers, tokens, splits, number, 0)
        if launch is None or VARIANTS[number].kernel is not Kernel.CHAINS:
            continue
        found.add((launch.warps, "borders" in launch.name))
        for i, header in enumerate(headers):
            check_walks(header, launch, i)
    shared_launch.cache_clear()
    assert not hopper or (warps, has_borders) in found


def check_rounds(header: Header, launch: Launch, number: int = 0) -> None:
    """linear_rounds.cuh: segments are whole ranges, every row group of each is walked once, and all has room."""
    every = [job_of(launch, i) for i in range(len(launch.jobs))]
    job, stages, octets = every[number], header.geometry.stages, 1 if "rounds_8" in launch.name else 2
    segments, per_segment, per_range, ranges = (
        job[name] for name in ("segments", "segment_stages", "stages_per_range", "ranges")
    )
    warps, row_groups = launch.warps - 1, header.geometry.row_groups
    assert per_segment % per_range == 0
    assert (segments - 1) * per_segment < stages <= segments * per_segment
    assert 1 <= warps <= (19 if octets == 1 else 14)
    assert job["tokens"] <= 8 * octets
    ends = [min((i + 1) * per_segment, stages) for i in range(segments)]
    if not launch.name.removesuffix("_together").endswith(("_8", "_16")):  # several ranges of a segment
        assert per_range >= 16  # one border of a chunk
        for i, end in enumerate(ends):
            closing = {*range(i * per_segment + per_range, end, per_range), end}
            assert len({(stage - 1) // 8 for stage in closing}) == len(closing)  # one chain of a turn
        if "turns" in launch.name:
            assert per_range % 8 == stages % 8 == 0
    else:
        assert per_segment == per_range
    walked = []
    for block in range(job["blocks"]):
        own = job["own"] + (block < job["longer"])
        for warp in range(warps):
            rounds = (own + warps - 1 - warp) * job["by_slots"] >> 32 if job["by_slots"] else own
            assert rounds <= job["batches"]
            walked += [(warp + i * warps) * job["blocks"] + block for i in range(rounds)]
    assert sorted(walked) == list(range(row_groups))
    assert job["slots"] == warps
    assert 2 <= job["x_places"] <= 6
    padded = 16 if octets == 2 else job["tokens"]
    assert job["x_words"] >= max(job["x_places"] * padded * 256, header.symbol_count)
    own_bytes = 4 * (2 * job["buffer_words"] + 4 * 1152 // 4 + 100)  # buffers, slabs, list
    needed = 4 * (job["table_words"] + job["x_words"]) + warps * own_bytes + 16 * job["x_places"]
    assert needed <= launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
    assert (4 * job["table_words"] + 4 * job["x_words"] + warps * own_bytes) % 8 == 0  # barriers
    memory = launch.arrangement
    assert (memory is not None) == (octets == 2 or any(each["ranges"] > 1 for each in every))
    check_left(header, launch, number, octets)
    if memory:
        assert memory.meetings[number] == (row_groups if segments > 1 else 0)
        assert memory.parts_bytes[number] == (row_groups * ranges * 2 * octets * 128 if ranges > 1 else 0)


@pytest.mark.parametrize("columns", [960, 1024, 2880, 4096, 5120, 14336, 17408])
@pytest.mark.parametrize("split", range(1, 17))
def test_rounds_cover_a_weight(split: int, columns: int, hopper: bool) -> None:
    found, number = 0, next(i for i, variant in enumerate(VARIANTS) if variant.kernel is Kernel.ROUNDS)
    for rows, tokens in product((8, 264, 4096, 14336), (1, 8, 16)):
        header = header_of((rows, columns), 250)
        if launch := launch_of(header, tokens, split, number, 0):
            found += 1
            check_rounds(header, launch)
        joint = joint_launch((header, header), tokens, (split, 1), number, 0)
        for other in range(2 if joint else 0):
            assert joint is not None
            check_rounds(header, joint, other)
    assert (found > 0) == hopper


def test_rounds_of_more_row_groups_than_can_be_counted(hopper: bool) -> None:
    number = next(i for i, variant in enumerate(VARIANTS) if variant.kernel is Kernel.ROUNDS)
    most = 132 * 65535 * 8
    assert (launch_of(header_of((most, 1024), 250), 1, 1, number, 0) is not None) == hopper
    assert launch_of(header_of((most + 8, 1024), 250), 1, 1, number, 0) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_equal_launches_one_is_a_variant(shape: tuple[int, int], hopper: bool) -> None:
    launches = [launch_of(header_of(shape, 470), 1, 1, number, 0) for number in range(len(VARIANTS))]
    found = different(launches)
    for number, launch in enumerate(launches):
        like = [first for first, other in found.items() if launch and other.key == launch.key]
        assert len(like) == (launch is not None)
        assert all(first <= number for first in like)
    assert len(found) < sum(launch is not None for launch in launches) or shape == SHAPES[-1]


def test_cuts_are_moved_to_where_less_is_decoded_twice(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded() -> int:
        shared_launch.cache_clear()
        launch = launch_of(header, 1, 5, number, 0)
        assert launch
        words, stages = job_of(launch)["division"], header.geometry.stages
        pieces = [
            piece for i in range(0, 80, 4) for piece in pieces_of(job_of(launch), stages, tuple(words[i : i + 4]))
        ]
        return sum(-(-(piece.end - piece.first // 16 * 16) // 8) * 8 for piece in pieces)

    header = header_of((10240, 8192), 470)
    number = next(i for i, variant in enumerate(VARIANTS) if variant.kernel is Kernel.CHAINS)
    moved = decoded()
    monkeypatch.setattr(chains._Planner, "_with_fewer_borders", lambda self, cuts: cuts)
    assert 10 * 128 <= moved < decoded() or not hopper  # fewer warps have fewer cuts
    shared_launch.cache_clear()


def check_lines(header: Header, launch: Launch, number: int = 0) -> None:
    """linear_ahead.cuh: segments are whole ranges, lines have warps and rings, segments x, and all has room."""
    job, stages, octets = job_of(launch, number), header.geometry.stages, int(launch.name.split("_")[2]) // 8
    assert (octets - (1 if octets < 4 else 2)) * 8 < job["tokens"] <= 8 * octets
    apart, per_segment, ranges = "_apart" in launch.name, job["segment_stages"], job["ranges"]
    assert per_segment % job["stages_per_range"] == 0
    assert (job["segments"] - 1) * per_segment < stages <= job["segments"] * per_segment
    segments = 1 if apart else job["segments"]  # of a block
    lines = job["slots"] * segments
    sharing, most_warps = (2, 16) if "_two" in launch.name else (1, 20)
    assert sharing == 2 or apart or octets == 1
    sharers = -(-job["slots"] // sharing)
    for own in {job["slots"], max(job["slots"] - 1, 1)}:  # blocks have so many lines of a segment
        alone = own if sharing == 1 else 2 * sharers - own
        firsts = [number if number < alone else 2 * number - alone for number in range(sharers)]
        shared = [line for number, first in enumerate(firsts) for line in range(first, first + 1 + (number >= alone))]
        assert [line for line in shared if sharing == 2 or line < own] == list(range(own))
    multipliers = sharers * segments
    decoders = launch.warps - multipliers - segments
    assert min(sharing, job["slots"]) <= decoders  # or lines of a warp wait for each other
    assert launch.warps <= most_warps
    padded = 8 * octets if octets > 1 else job["tokens"]
    runs = -(-min(per_segment, stages) // 4) + 1
    least, least_x = (2, 4) if octets <= 2 else (4, 2)  # one has a chunk's, or warps wait for each other
    assert min(least, runs) <= job["ring"] <= runs
    assert job["by_ring"] == magic(job["ring"])
    assert min(least_x, runs) <= job["x_places"] <= runs
    assert job["x_words"] >= max(segments * job["x_places"] * padded * 128, header.symbol_count)
    buffers = (launch.warps - multipliers - segments) * 2 * (1024 + 4 * job["buffer_words"])  # signs and streams
    rings = lines * (job["ring"] + 3) * 4 * 512  # of upper and of raw bytes
    parts = job["slots"] * ranges * 2 * octets * 128 if ranges > 1 and not apart else 0
    barriers = 8 * segments * job["x_places"] if octets > 1 else 0
    flags = 4 * (lines * (job["ring"] + 1) + segments + job["slots"])
    words = job["table_words"] + job["x_words"]
    assert 4 * words + buffers + rings + parts + barriers + flags <= launch.shared_bytes
    assert (4 * words + buffers + rings + parts) % 8 == 0  # where barriers are
    assert job["table_words"] % 4 == 0  # behind it x, by bulk copies
    assert (
        octets == 1 or launch.shared_bytes <= nvrtc.shared_memory(0) - 3 * 1024
    )  # arrange.cu's blocks begin beside it
    if memory := launch.arrangement:
        row_groups = header.geometry.row_groups
        assert memory.meetings[number] == (row_groups if apart and job["segments"] > 1 else 0)
        assert memory.parts_bytes[number] == (row_groups * ranges * 2 * octets * 128 if apart and ranges > 1 else 0)
    check_left(header, launch, number, octets)


@pytest.mark.parametrize(
    ("shape", "split", "tokens", "sharing", "segments"),
    [
        ((1024, 8192), 6, 16, 1, 3),  # rather three row groups than six, of which chunks' beginnings are decoded twice
        ((2048, 5376), 3, 16, 1, 2),
        ((1024, 4096), 3, 16, 1, 3),  # rather than two row groups of which each is added up for longer
        ((2048, 5376), 3, 32, 2, 3),
        ((4096, 5376), 2, 16, 1, None),  # eight row groups of each block: others are faster
        ((4096, 5376), 2, 32, 2, 2),
        ((5120, 5120), 1, 16, 1, None),
    ],
)
def test_segments_that_are_apart(
    shape: tuple[int, int], split: int, tokens: int, sharing: int, segments: int | None, hopper: bool
) -> None:
    """As they were measured to be fastest."""
    apart = [number for number, each in enumerate(VARIANTS) if each.apart and each.sharing == sharing]
    for number in apart:
        launch = launch_of(header_of(shape, 470), tokens, split, number, 0)
        assert (launch and job_of(launch)["segments"]) == (segments if hopper else None)
    assert apart


def check_left(header: Header, launch: Launch, number: int, octets: int) -> None:
    """More than eight tokens come arranged, in sixteens, by a kernel whose blocks find places beside others."""
    memory, columns = launch.arrangement, header.geometry.stages * STAGE
    if octets > 1:
        assert memory
        tokens = job_of(launch, number)["tokens"]
        assert (memory.tokens, memory.wide, memory.columns) == (tokens, 8 * octets, columns)
        assert (memory.x_bytes, memory.part_steps, memory.threads) == (16 * octets * columns, LEFT, 32)
        assert memory.grid * memory.threads >= tokens * columns // 16
    else:
        assert memory is None or (memory.tokens, memory.x_bytes) == (0, 0)


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 300, 4096])
def test_what_is_compiled_for_a_product(tokens: int, hopper: bool) -> None:
    """The kernels of its variants, and to decode first; each of them is there."""
    header, plans = header_of((4096, 4096), 470), [LinearPlan(1, number) for number in range(len(VARIANTS))]
    found = sources(header, tokens, plans, 0)
    assert all(source.kernel in nvrtc.instances(source.file) or source.file == "arrange.cu" for source in found)
    files = {source.file for source in found}
    if tokens > max_tokens(0):
        assert found == {("decode.cu", "decode_quad_whole")}
        return
    expected = {"decode.cu"} | ({"linear_chains.cu"} if tokens <= 16 else set())
    expected |= {"linear_ahead.cu"} if tokens <= 8 else set()
    if hopper:
        expected |= {"arrange.cu"} | ({"linear_pairs.cu", "linear_tiles.cu"} if tokens <= 64 else {"linear_relay.cu"})
        expected |= {"linear_warpgroups.cu"} if tokens <= 512 else set()
        expected |= {"linear_clusters.cu"} if 128 < tokens <= MAX_CLUSTER_TOKENS else set()
        expected |= {"linear_singles.cu"} if tokens <= 32 else set()
        expected |= {"linear_rounds.cu"} if tokens <= 16 else set()
        expected |= {"linear_ahead_left.cu"} if 8 < tokens <= 48 else set()
    assert files == expected or (not hopper and {"decode.cu", "linear_chains.cu"} <= files <= expected)
    assert len(found) <= len(files) + 2 * len(plans)


@pytest.mark.parametrize("shapes", [[shape for shape, _ in group] for group in GROUPS], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 4096])
def test_what_is_compiled_for_several(tokens: int, shapes: list[tuple[int, int]], hopper: bool) -> None:
    headers = tuple(header_of(shape, 470) for shape in shapes)
    launches = [joint_launch(headers, tokens, (1,) * len(headers), number, 0) for number in range(len(VARIANTS))]
    found = set().union(*(launch.sources for launch in launches if launch))
    assert all(source.kernel in nvrtc.instances(source.file) or source.file == "arrange.cu" for source in found)
    assert found or not hopper


@pytest.mark.parametrize("split", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 128])
@pytest.mark.parametrize("chunk_words", [250, 470, 1000, 2049])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_keep_going(shape: tuple[int, int], chunk_words: int, tokens: int, split: int, hopper: bool) -> None:
    number = next(i for i, variant in enumerate(VARIANTS) if variant.kernel is Kernel.TILES)
    launch = launch_of(header_of(shape, chunk_words), tokens, split, number, 0)
    if not hopper:
        assert launch is None
        assert max_tokens(0) == MAX_TOKENS
        return
    assert max_tokens(0) == MAX_HOPPER_TOKENS
    assert launch is not None
    check_tiles(launch, header_of(shape, chunk_words).geometry.stages)


def check_tiles(launch: Launch, stages: int, number: int = 0) -> None:
    """Of one tensor: warps and memory are enough for the kernel to keep going."""
    job = job_of(launch, number)
    slots, tokens = job["slots"], job["tokens"]
    wide, groups = map(int, launch.name.split("_")[2:4])
    warpgroups = 2 if wide == 128 and groups > 8 else 1
    multiplying = 4 * warpgroups
    decoding, ranges, segments = launch.warps - multiplying - 1, job["ranges"], job["segments"]
    assert wide >= tokens
    assert launch.arrangement is not None
    assert launch.boxes is not None
    assert (segments, job["segment_stages"]) in ((ranges, job["stages_per_range"]), (1, stages))
    meetings = job["blocks"] // segments * job["batches"] * multiplying if ranges > 1 else 0
    assert launch.arrangement.meetings[number] == (meetings if segments > 1 else 0)
    sums = 8 * groups * wide // multiplying  # of a warp
    assert launch.arrangement.parts_bytes[number] == 128 * job["blocks"] + 4 * sums * ranges * meetings
    assert (launch.arrangement.grid > 0) == any(launch.arrangement.meetings)
    assert launch.boxes[2] == wide
    assert slots <= groups
    assert groups == 8 or slots > 4 or wide == 64 * warpgroups  # else rows are placed otherwise
    assert launch.warps <= 19 + warpgroups
    assert slots <= decoding <= 16
    assert job["chunk_step"] * slots + job["slot_step"] == decoding
    assert job["ring"] >= 3 + (-(-decoding // slots) - 1) * CHUNK_STAGES // 2
    assert 0 <= job["x_places"] - {16: 4, 32: 4, 64: 3, 128: 2}[wide] <= 1
    barriers = 16 if wide <= 32 else 32  # of a slot of x
    rings = job["ring"] * (slots * 2048 + 16) + job["x_places"] * (2 * wide * 128 + barriers)
    others = 1024 + 128 + 16 + 8 * 16 + 4 * job["table_words"] + decoding * 8 * job["buffer_words"]
    assert rings + others <= launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 128, 129, 512])
@pytest.mark.parametrize("chunk_words", [250, 470, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_cover_a_weight(shape: tuple[int, int], chunk_words: int, tokens: int, hopper: bool) -> None:
    """Units are enough for all rows, ranges and tokens, clusters are whole, and memory is there for what meets."""
    header, found = header_of(shape, chunk_words), 0
    for split in (1, 3, 7):
        for number, variant in enumerate(VARIANTS):
            launch = launch_of(header, tokens, split, number, 0) if variant.kernel in DECODING_PAIRS else None
            if launch is None:
                continue
            found += 1
            cluster, warps = 2 if variant.kernel is Kernel.WARPGROUPS else 1, launch.warps - 4
            groups = 1 if variant.kernel is Kernel.SINGLES else 2
            at_once = int(launch.name.split("_")[-1])
            wide, arranges = max(at_once, 8), at_once > 4
            assert at_once >= tokens or variant.kernel is Kernel.WARPGROUPS
            job, prepared = job_of(launch), launch.arrangement
            ranges, token_tiles, units = job["ranges"], job["token_tiles"], job["units"]
            assert 1 <= warps <= variant.warps
            assert launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
            assert (job["first_block"], job["blocks"]) == (0, launch.grid)
            assert launch.grid % cluster == 0
            assert launch.grid <= nvrtc.multiprocessors(0)
            assert launch.grid <= units * cluster
            assert wide * (token_tiles - 1) < tokens <= wide * token_tiles
            covered = units // (ranges * token_tiles) * cluster * warps * groups
            assert header.geometry.row_groups <= covered < header.geometry.row_groups + cluster * warps * groups
            assert job["ring"] >= (4 if wide == 256 else 2)
            if variant.kernel is not Kernel.WARPGROUPS:
                check_cuts(header, launch, units)
            assert (prepared is not None) == (arranges or ranges > 1 or variant.hand_on)
            if prepared is None:
                continue
            flags = launch.grid * warps if variant.hand_on else 0
            assert prepared.wide == wide
            assert prepared.tokens == (tokens if arranges else 0)
            assert prepared.x_bytes == (token_tiles * wide * 2 * shape[1] if arranges else 0)
            meetings = covered // groups * token_tiles if ranges > 1 else 0
            assert prepared.meetings == (meetings + flags,)
            assert prepared.parts_bytes == ((meetings * ranges + flags) * 16 * wide * 4,)
            assert prepared.grid * prepared.threads >= max(prepared.tokens * shape[1] // 16, *prepared.meetings)
    assert (found > 0) == hopper


def check_cuts(header: Header, launch: Launch, units: int, number: int = 0) -> None:
    """linear_pairs.cuh: shares of blocks are all stages, nobody waits for who waits, and who begins a range ends it."""
    job, stages = job_of(launch, number), header.geometry.stages
    words = job["division"][: job["blocks"] + 1]
    assert (words[0], words[-1]) == (0, units << 12)
    assert not any(job["division"][job["blocks"] + 1 :])
    shares = [units_of(job, stages, block) for block in range(job["blocks"])]
    assert all(shares)
    walked = [
        (unit, stage) for share in shares for unit, first, last in reversed(share) for stage in range(first, last)
    ]
    per_range = job["stages_per_range"]
    assert walked == [
        (unit, stage)
        for unit in range(units)
        for start in [unit % job["ranges"] * per_range]
        for stage in range(start, min(start + per_range, stages))
    ]
    for share, behind in pairwise(shares):
        unit, first, last = share[0]
        taken, begin, end = behind[-1]
        if taken == unit:
            assert begin == last
            assert last % 2 == 0  # planes come in pairs of stages
            assert first % per_range == 0
            assert end == min(first + per_range, stages)


def units_of(job: dict[str, Any], stages: int, block: int) -> list[tuple[int, int, int]]:
    """linear_pairs.cuh: Units, in its arithmetic: numbers, first stages and the ones behind the last."""
    begin, end = job["division"][block : block + 2]
    found = []
    for unit in range((end - 1) >> 12, (begin >> 12) - 1, -1):
        tile = unit * job["by_ranges"] >> 32 if job["by_ranges"] else unit
        first = (unit - tile * job["ranges"]) * job["stages_per_range"]
        last = min(first + job["stages_per_range"], stages)
        if unit == end >> 12:
            last = first + (end & 4095)
        if unit == begin >> 12:
            first += begin & 4095
        found.append((unit, first, last))
    return found


@pytest.mark.parametrize("shapes", GROUPS, ids=str)
def test_some_cuts_lie_inside_ranges(shapes: tuple[tuple[tuple[int, int], int], ...], hopper: bool) -> None:
    headers, splits = tuple(header_of(shape, 250) for shape, _ in shapes), tuple(split for _, split in shapes)
    for number, variant in enumerate(VARIANTS):
        launch = joint_launch(headers, 16, splits, number, 0)
        if launch is None or variant.kernel not in (Kernel.SINGLES, Kernel.PAIRS):
            continue
        inside = 0
        for i, header in enumerate(headers):
            check_cuts(header, launch, job_of(launch, i)["units"], i)
            inside += sum(word & 4095 > 0 for word in job_of(launch, i)["division"])
        assert (inside > 0) == variant.hand_on


def test_a_share_goes_to_the_end_of_what_it_takes_over() -> None:
    """With the least that is allowed, too: a share as large as a unit."""
    tiles = Tiles(3, 64, 64)
    assert tiles.anywhere(tiles.cost(0) + 10) == ((0, 0), (1, 8), (2, 10), (3, 0))
    for stages, per_range in product((55, 64, 272, 513), (7, 16, 55, 128)):
        tiles = Tiles(5, stages, per_range)
        for more in range(40):
            cuts = tiles.anywhere(max(map(tiles.cost, range(tiles.ranges))) + more)
            assert all(unit < behind or not begin for (unit, begin), (behind, _) in pairwise(cuts))


def test_shares_are_about_equal(hopper: bool) -> None:
    """What each block decodes, from its units' first chunks on."""
    number = next(i for i, variant in enumerate(VARIANTS) if variant.hand_on)
    launch = launch_of(header_of((5120, 17408), 470), 16, 5, number, 0)
    if not hopper:
        assert launch is None
        return
    assert launch is not None
    shares = [
        sum(last - first // CHUNK_STAGES * CHUNK_STAGES for _, first, last in units_of(job_of(launch), 272, block))
        for block in range(launch.grid)
    ]
    assert 120 < len(shares) <= 132
    assert sum(shares[:-1]) / len(shares[:-1]) > 0.93 * max(shares)
    assert max(shares) < 110  # with whole units 128


@pytest.mark.parametrize("tokens", [128, 129, 512, 513, 2100, 16384])
@pytest.mark.parametrize("chunk_words", [250, 470, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_relays_cover_a_weight(shape: tuple[int, int], chunk_words: int, tokens: int, hopper: bool) -> None:
    """Every row and token is in one item; every row group's chunks are in one unit, in the order in which items are."""
    header, found = header_of(shape, chunk_words), 0
    geometry = header.geometry
    for number, variant in enumerate(VARIANTS):
        launch = launch_of(header, tokens, 1, number, 0) if variant.kernel is Kernel.RELAY else None
        if launch is None:
            continue
        found += 1
        job, memory, tile = job_of(launch), launch.arrangement, Tile(int(launch.name.split("_")[-1]))
        pairs, items, of_pass, groups = job["token_tiles"], job["units"], job["segments"], tile.rows // 8
        assert launch.warps == tile.warps <= variant.warps
        assert launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
        assert 1024 + job["ring"] * (tile.slot_bytes + 16) + 128 + 4 * job["table_words"] <= launch.shared_bytes
        assert job["ring"] >= 3 * tile.parts
        assert 2 * TILE_TOKENS * (pairs - 1) < tokens <= 2 * TILE_TOKENS * pairs
        tiles = items // pairs
        assert items == tiles * pairs
        assert groups * (tiles - 1) < geometry.row_groups <= groups * tiles
        assert launch.grid == job["blocks"] == CLUSTER * min(items, nvrtc.multiprocessors(0) // CLUSTER)
        assert 1 <= of_pass <= pairs
        assert 1 <= job["batches"] <= tiles
        assert memory is not None
        assert memory.tokens == 0
        leaving = 8 * launch.grid if job["segment_stages"] else 0
        counters = MAX_PREFETCHED if launch.spare else 0
        assert memory.meetings == (1 + tiles * -(-geometry.stages // 8) + leaving + counters,)
        assert memory.parts_bytes == (tiles * tile.rows * 2 * shape[1] + 128 * launch.grid + leaving * tile.rows * 64,)
        check_parts(job, geometry.stages)
        assert launch.boxes == (tokens, shape[1], TILE_TOKENS, 64 // tile.parts)
        assert launch_of(header, tokens, 3, number, 0) is None
        seen = [item_at(job, tiles, index) for index in range(items)]
        assert len(set(seen)) == items
        assert {pair for _, pair in seen} == set(range(pairs))
        count = -(-geometry.row_groups // tile.row_groups) * geometry.chunks_per_row_group
        units = [unit_at(job, header, tile, index) for index in range(count)]
        assert len(set(units)) == count
        firsts = list(dict.fromkeys(group // groups // job["batches"] for group, _ in units))
        assert firsts == sorted(firsts)  # what is multiplied side by side is decoded before what is multiplied behind
    assert (found > 0) == (hopper and tokens > TILE_TOKENS)


@pytest.mark.parametrize("shapes", [[(12288, 3072)], [(3072, 3072)] * 3, [(14336, 4096)] * 2], ids=str)
def test_room_for_weights_of_products_to_come(shapes: list[tuple[int, int]], hopper: bool) -> None:
    """The more tokens, the more; none where decoding takes as long as multiplying."""
    headers, room = tuple(header_of(shape, 470) for shape in shapes), []
    for tokens in (512, 1024, 2048, 4096, 8192):
        launch = relay(tuple(map(Footprint.of, headers)), tokens, (1,) * len(headers), 0, 0)
        assert (launch is not None) == hopper
        if launch is None or launch.spare is None:
            room.append(0)
            continue
        room.append(launch.spare.weights)
        tile = Tile(int(launch.name.split("_")[2]))
        buffers = [int(job_of(launch, i)["buffer_words"]) for i in range(len(headers))]
        assert launch.spare.buffer_words == min(buffers) >= staging_words(headers[0])
        ring = job_of(launch)["ring"] * (tile.slot_bytes + 16)
        used = 4 * (tile.decoders * 2 * tile.row_groups * max(buffers) + launch.spare.table_words)
        assert 1024 + ring + 128 + 8 * tile.bias_bytes + used == launch.shared_bytes
        assert all(launch.spare.suits(Footprint.of(header)) for header in headers)
        assert not launch.spare.suits(Footprint.of(header_of((1024, 1024), 10 * launch.spare.buffer_words)))
    assert room == sorted(room)
    assert room[0] == 0
    assert (room[-2] > 0) == hopper


@pytest.mark.parametrize(
    ("shapes", "most"),
    [
        ([(12288, 3072)], 1 << 27),
        ([(13824, 5120)], 5 * 13824 * 2560),
        ([(14336, 4096)] * 2, 1 << 28),
        ([(51200, 6144)], 51200 * 6144),
    ],
    ids=str,
)
def test_no_more_room_than_memory_is_worth(shapes: list[tuple[int, int]], most: int, hopper: bool) -> None:
    """However many tokens: two and a half times the own weights, within 256 and 512 MB of BF16; or as many as these."""
    launch = relay(tuple(Footprint.of(header_of(shape, 470)) for shape in shapes), 16384, (1,) * len(shapes), 0, 0)
    assert (launch is not None) == hopper
    assert launch is None or (launch.spare is not None and launch.spare.weights == most)


@pytest.mark.parametrize(
    ("shape", "tokens", "stages"),
    [
        ((3072, 15360), 4608, 80),  # 216 items for 66 clusters: 18 are left over, three parts each
        ((13824, 5120), 4096, 10),  # 864: six, with room for eleven parts each, but eight are enough
        ((12288, 3072), 4096, 0),  # 768: 42, too many for two parts each
        ((4096, 14336), 1024, 0),  # 64, one for each cluster
    ],
)
def test_items_that_are_left_over(shape: tuple[int, int], tokens: int, stages: int, hopper: bool) -> None:
    launch = relay((Footprint.of(header_of(shape, 470)),), tokens, (1,), 0, 0)
    if not hopper:
        assert launch is None
        return
    assert launch is not None
    assert launch.name == "linear_relay_256"
    job = job_of(launch)
    assert job["segment_stages"] == stages
    check_parts(job, shape[1] // 64)


@pytest.mark.parametrize("tokens", [1, 64, 300, 5000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_multiprocessor(shape: tuple[int, int], tokens: int, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clusters do not fit there is no launch of them."""
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: 1)
    launches = [launch_of(header_of(shape, 470), tokens, 1, number, 0) for number in range(len(VARIANTS))]
    assert all(launch.grid == 1 for launch in launches if launch)
    assert any(launches) or not hopper or tokens > 64
    shared_launch.cache_clear()


def test_no_more_columns_than_kernels_count(hopper: bool) -> None:
    assert is_supported(header_of((8, 1 << 22), 470), 1, 0)
    assert not is_supported(header_of((8, (1 << 22) + 64), 470), 1, 0)


def parts_of(job: dict[str, Any], stages: int, cluster: int) -> Iterator[tuple[int, int, int]]:
    """linear_relay.cuh: Parts, an item and its first and last stage, in their order."""
    clusters, length, index = job["blocks"] // CLUSTER, job["segment_stages"], cluster
    shared, number, whole_before = 0, 0, -1
    if length:
        items, parts = job["units"] % clusters, (stages - 1) // length + 1
        index += items
        if cluster < items * parts:
            shared = cluster // parts
            number = cluster - shared * parts
            whole_before = number * (job["units"] // clusters // (parts - 1))
    while whole_before >= 0 or index < job["units"]:
        if whole_before == 0:
            yield shared, number * length, min((number + 1) * length, stages)
        else:
            yield index, 0, stages
        whole_before -= 1
        if whole_before != -1:
            index += clusters


def check_parts(job: dict[str, Any], stages: int) -> None:
    """Every stage of every item is in one part, whose sums are left before the cluster behind takes them over."""
    clusters, seen, turns = job["blocks"] // CLUSTER, dict[int, list[tuple[int, int, int, int]]](), list[int]()
    for cluster in range(clusters):
        parts = list(parts_of(job, stages, cluster))
        turns.append(len(parts))
        for turn, (item, first, last) in enumerate(parts):
            assert first < last
            seen.setdefault(item, []).append((first, last, cluster, turn))
    assert sorted(seen) == list(range(job["units"]))
    for parts_of_item in seen.values():
        firsts, lasts, own_clusters, own_turns = zip(*sorted(parts_of_item), strict=True)
        assert (*firsts, stages) == (0, *lasts)
        assert own_clusters == tuple(range(own_clusters[0], own_clusters[0] + len(firsts)))
        if len(firsts) > 1:
            apart = job["units"] // clusters // (len(firsts) - 1)
            assert apart > 0
            assert own_turns == tuple(range(0, apart * len(firsts), apart))
    assert max(turns) - min(turns) <= 1


def item_at(job: dict[str, Any], tiles: int, index: int) -> tuple[int, int]:
    """linear_relay.cuh: Parts::part, a tile of rows and a pair of tiles of tokens."""
    first = index // (job["segments"] * tiles) * job["segments"]
    pairs = min(job["segments"], job["token_tiles"] - first)
    tile, pair = divmod(index - first * tiles, pairs)
    return tile, first + pair


def unit_at(job: dict[str, Any], header: Header, tile: Tile, index: int) -> tuple[int, int]:
    """linear_relay.cuh: UnitDecoder::unit_at, the first row group and the chunk."""
    geometry, side_by_side = header.geometry, job["batches"] * (tile.rows // 8)
    band, inside = divmod(index, side_by_side // tile.row_groups * geometry.chunks_per_row_group)
    first = band * side_by_side
    chunk, place = divmod(inside, -(-min(side_by_side, geometry.row_groups - first) // tile.row_groups))
    return first + tile.row_groups * place, chunk


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 64, 65, 128])
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str([shape for shape, _ in group]))
def test_joint_launches(group: tuple[tuple[tuple[int, int], int], ...], tokens: int, hopper: bool) -> None:
    """Every row group has one block, the kernels' own way to count them, and blocks have about as much to do."""
    headers, splits = tuple(header_of(shape, 470) for shape, _ in group), tuple(split for _, split in group)
    found = 0
    for number, variant in enumerate(VARIANTS):
        launch = joint_launch(headers, tokens, splits, number, 0)
        if launch is None:
            continue
        found += 1
        assert variant.kernel not in (Kernel.WARPGROUPS, *MANY_TOKENS)
        assert launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
        assert launch.grid <= nvrtc.multiprocessors(0)
        next_block, most = 0, []
        for i, (header, split) in enumerate(zip(headers, splits, strict=True)):
            job, stages = job_of(launch, i), header.geometry.stages
            ranges, per_range, blocks, own, longer = (
                job[name] for name in ("ranges", "stages_per_range", "blocks", "own", "longer")
            )
            assert (job["tokens"], job["first_block"]) == (tokens, next_block)
            assert (ranges - 1) * per_range < stages <= ranges * per_range
            next_block += blocks * (job["segments"] if variant.kernel is Kernel.ROUNDS or variant.apart else 1)
            if variant.kernel in DECODING_PAIRS:
                continue
            of_segment = blocks // job["segments"] if variant.kernel is Kernel.TILES else blocks
            assert own * of_segment + longer == header.geometry.row_groups
            assert job["slots"] * job["batches"] >= own + (longer > 0)
            assert ranges <= split
            if variant.kernel is Kernel.TILES:
                check_tiles(launch, stages, i)
            if variant.kernel is Kernel.ROUNDS:
                check_rounds(header, launch, i)
            most.append((own + (longer > 0)) * stages)
        assert next_block == launch.grid
        if variant.kernel is Kernel.AHEAD:
            for i, header in enumerate(headers):
                check_lines(header, launch, i)
        if variant.kernel is Kernel.AHEAD and not variant.apart:  # with fewer for each block there would be too many
            own = max(most) // headers[0].geometry.stages - 1
            assert own == 0 or sum(-(-header.geometry.row_groups // own) for header in headers) > 132
    assert found or not hopper


@pytest.mark.parametrize("tokens", [129, 512, 5000])
@pytest.mark.parametrize("shapes", [[shape for shape, _ in group] for group in GROUPS], ids=str)
def test_joint_relays(shapes: list[tuple[int, int]], tokens: int, hopper: bool) -> None:
    """Each tensor has clusters and memory of its own, and no other shares would let the busiest cluster do less."""
    headers, ones, found = tuple(header_of(shape, 470) for shape in shapes), (1,) * len(shapes), 0
    clusters = nvrtc.multiprocessors(0) // CLUSTER
    for number, variant in enumerate(VARIANTS):
        launch = joint_launch(headers, tokens, ones, number, 0)
        if launch is None or variant.kernel is Kernel.CLUSTERS:
            continue
        found += 1
        assert variant.kernel is Kernel.RELAY
        assert joint_launch(headers, tokens, (*ones[:-1], 2), number, 0) is None
        memory, tile = launch.arrangement, Tile(int(launch.name.split("_")[2]))
        assert launch.name == f"linear_relay_{tile.rows}_together"
        assert launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
        assert launch.grid <= CLUSTER * clusters
        assert memory is not None
        assert memory.parts == tuple(accumulate(memory.parts_bytes[:-1], initial=0))
        units, next_block = [], 0
        for i, header in enumerate(headers):
            job, geometry = job_of(launch, i), header.geometry
            assert job["first_block"] == next_block
            assert 1 <= job["blocks"] // CLUSTER <= job["units"]
            assert job["blocks"] % CLUSTER == 0
            next_block += job["blocks"]
            tiles = -(-geometry.rows // tile.rows)
            assert job["units"] == tiles * job["token_tiles"]
            leaving = 8 * job["blocks"] if job["segment_stages"] else 0
            counters = MAX_PREFETCHED if launch.spare and i == 0 else 0
            assert memory.meetings[i] == 1 + tiles * -(-geometry.stages // 8) + leaving + counters
            own_bytes = tiles * tile.rows * 2 * geometry.columns + 128 * job["blocks"] + leaving * tile.rows * 64
            assert memory.parts_bytes[i] == own_bytes
            check_parts(job, geometry.stages)
            assert 1024 + job["ring"] * (tile.slot_bytes + 16) + 128 + 4 * job["table_words"] <= launch.shared_bytes
            units.append((job["units"], job["blocks"] // CLUSTER))
        assert next_block == launch.grid
        rounds = max(-(-of_tensor // own) for of_tensor, own in units)
        assert rounds == 1 or sum(-(-of_tensor // (rounds - 1)) for of_tensor, _ in units) > clusters
    assert (found > 0) == hopper


@pytest.mark.parametrize("tokens", [129, 256, 257, 512, 1024])
@pytest.mark.parametrize("chunk_words", [250, 470, 1000])
@pytest.mark.parametrize(
    "shapes", [*([shape] for shape in SHAPES), *([each for each, _ in group] for group in GROUPS)], ids=str
)
def test_clusters_cover_weights(shapes: list[tuple[int, int]], chunk_words: int, tokens: int, hopper: bool) -> None:
    """Every row and token is in one unit of one tensor's clusters, and all that a block keeps has room."""
    headers, found = tuple(header_of(shape, chunk_words) for shape in shapes), 0
    ones, fitting = (1,) * len(headers), set()
    for number, variant in enumerate(VARIANTS):
        if variant.kernel is not Kernel.CLUSTERS:
            continue
        launch = clusters_of(headers, tokens, ones, number)
        assert clusters_of(headers, tokens, (*ones[:-1], 2), number) is None
        if launch is None:
            continue
        found += 1
        tile = ClusterTile(*map(int, launch.name.split("_")[2:4]))
        fitting.add(tile)
        assert tile in CLUSTER_TILES
        assert launch.name.endswith("_together") == (len(headers) > 1)
        assert launch.warps == 16 <= variant.warps
        assert 8 + 1 + tile.own_groups <= launch.warps  # multiplying, the carrier, decoding
        assert launch.shared_bytes <= nvrtc.shared_memory(0) - STATIC_SHARED
        assert launch.boxes == (tokens, shapes[0][1], tile.tokens, 64)
        assert tile.tokens <= 256  # of a tensor map's box
        memory, next_block = launch.arrangement, 0
        assert memory is not None
        assert (memory.tokens, memory.grid, memory.meetings) == (0, 0, (0,) * len(headers))
        assert memory.parts == tuple(accumulate(memory.parts_bytes[:-1], initial=0))
        for i, header in enumerate(headers):
            job = job_of(launch, i)
            assert (job["tokens"], job["ranges"], job["first_block"]) == (tokens, 1, next_block)
            assert job["blocks"] % CLUSTER == 0
            assert 1 <= job["blocks"] // CLUSTER <= job["units"]
            next_block += job["blocks"]
            tiles, pairs = job["units"] // job["token_tiles"], job["token_tiles"]
            assert job["units"] == tiles * pairs
            assert tile.rows * (tiles - 1) < 8 * header.geometry.row_groups <= tile.rows * tiles
            assert CLUSTER * tile.tokens * (pairs - 1) < tokens <= CLUSTER * tile.tokens * pairs
            assert job["ring"] >= 3
            slots = job["ring"] * tile.slot_bytes
            assert slots >= 4 * header.symbol_count  # where the table's entries are, first of all
            staging = tile.own_groups * 2 * 4 * job["buffer_words"]
            barriers = 3 * 8 * job["ring"] + 8 * 8
            needed = ATOM_BYTES - 1 + slots + MAP_BYTES + barriers + 15 + 4 * job["table_words"] + staging
            assert needed <= launch.shared_bytes
            assert job["buffer_words"] == staging_words(header)
            assert memory.parts_bytes[i] == MAP_BYTES * job["blocks"]
        assert next_block == launch.grid <= nvrtc.multiprocessors(0)
    assert len(fitting) == found
    assert (found > 0) == hopper


def clusters_of(headers: tuple[Header, ...], tokens: int, splits: tuple[int, ...], number: int) -> Launch | None:
    if len(headers) > 1:
        return joint_launch(headers, tokens, splits, number, 0)
    return launch_of(*headers, tokens, *splits, number, 0)


def test_cuts_are_signed_numbers() -> None:
    for units in ((1 << 19) - 1, 1 << 19):
        tiles = Tiles(units, 16, 16)
        assert tiles.is_small_enough == (words(tiles.between_units(132))[-1] < 1 << 31)


def test_divisions_by_multiplication() -> None:
    for divisor in (*range(1, 300), 1 << 10, 4095, 1 << 16):
        for number in (0, 1, divisor - 1, divisor, 12345, (1 << 32) // divisor - 1, (1 << 32) // divisor // 2):
            factor = magic(divisor)
            assert (number * factor >> 32 if factor else number) == number // divisor
