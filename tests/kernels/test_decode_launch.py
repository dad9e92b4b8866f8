"""How a launch of csrc/decode.cu divides chunks among blocks and warps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samebits
from samebits.format.geometry import Code, Layout
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import decode, nvrtc
from samebits.kernels.decode import MAX_WARPS, decode_source, even_warps
from samebits.kernels.decode_together import suits
from samebits.kernels.residents import resident
from samebits.kernels.shares import share_out
from samebits.kernels.structures import MAX_DECODED
from tests.codecs.tensors import packed_of
from tests.codecs.zoo import ZOO, quad_matrix

MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: MULTIPROCESSORS)


@pytest.mark.parametrize(("tasks", "warps"), [(25, 13), (47, 16), (55, 14), (122, 14), (16, 16)])
def test_rounds_are_as_full_as_can_be(tasks: int, warps: int) -> None:
    """Of 5120 x 5120, 12288 x 4096, 14336 x 4096, 25600 x 5120 and 4096 x 4096, by block."""
    assert even_warps(tasks, MAX_WARPS) == warps


@pytest.mark.parametrize("most", [1, 5, 12, 16])
def test_no_number_of_warps_leaves_fewer_places(most: int) -> None:
    for tasks in range(1, 500):
        warps = even_warps(tasks, most)
        assert 1 <= warps <= most
        places = -(-tasks // warps) * warps
        assert all(places <= -(-tasks // other) * other for other in range(min(12, most), most + 1))


@pytest.mark.parametrize(
    ("shape", "shared"),
    [((1024, 4096), True), ((2048, 4096), True), ((8, 65536), True), ((4096, 4096), False), ((1024, 4032), False),
     ((1001, 4096), False), ((1024, 960), False)],
)  # fmt: skip
def test_who_shares_a_chunk(shape: tuple[int, int], shared: bool) -> None:
    """Two warps where one for each chunk would leave half of them without any, and all chunks are whole."""
    source = decode_source(Header(Code.QUAD, Layout.MATRIX, shape, 16, 13, 50, 0, 1000, True, 470, 1 << 20), 0)
    whole = shape[0] % 8 == shape[1] % 64 == 0
    assert source == ("decode.cu", f"decode_quad_{'whole' if whole else 'clipped'}{'_shared' if shared else ''}")


def test_what_shares_a_chunk_on_a_gpu_is_tested() -> None:
    """test_cuda_decode.py decodes the zoo: patches and raw chunks are among what two warps share, also of 64 stages."""
    packed = {case.name: packed_of(case.packed) for case in ZOO if not case.is_compact}
    shared = [name for name, tensor in packed.items() if is_shared(tensor)]
    assert {"chunks_of_many_patches", "equal_quads"} <= set(shared)
    words = next(case.words for case in ZOO if case.name == "chunks_of_many_patches")
    assert packed["chunks_of_many_patches"].header.chunk_stages == quad_matrix(words).chunk_stages == 16


def is_shared(tensor: PackedTensor) -> bool:
    return tensor.code is Code.QUAD and decode_source(tensor.header, 0).kernel.endswith("_shared")


def test_what_stays_is_prepared_once_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode table's memory has to wait for each; what is made again was launched on the same stream before."""
    stream, asked, started = 7, list[int](), list[int]()

    def has_table(packed: PackedTensor) -> None:
        kept = resident(packed.data)
        assert kept
        kept.has_table = True
        asked.append(stream)

    for target, name, value in (
        (nvrtc, "shared_memory", lambda device: 227 << 10),
        (nvrtc, "kernel", lambda *source: source),
        (nvrtc, "launch", lambda *arguments, early: started.append(stream)),
        (decode, "decode_table", has_table),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: stream),
        (torch.cuda, "current_device", lambda: -1),  # a tensor in main memory says so
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        monkeypatch.setattr(target, name, value, raising=False)
    output = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = samebits.encode(output)
    for stream in (7, 7, 8, 7, 8):
        assert (decode.repeat(packed) is None) == (stream not in started)
        decode.launch("decode.cu", "decode", packed, output, None, True)
    assert asked == [7, 8]
    assert started == [7, 7, 8, 7, 8]


@given(
    st.integers(2, 300), st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5000)), min_size=2, max_size=MAX_DECODED)
)
def test_tensors_of_one_launch_share_its_blocks(blocks: int, tensors: list[tuple[int, int]]) -> None:
    """No other way leaves the block that has most with less to do."""
    most, works = zip(*tensors, strict=True)
    blocks = max(blocks, len(tensors))
    own = share_out(blocks - len(works), works, [1] * len(works), most)
    assert sum(own) <= blocks
    assert all(1 <= count <= limit for count, limit in zip(own, most, strict=True))
    slowest = max(range(len(own)), key=lambda i: works[i] / own[i])
    if own[slowest] < most[slowest]:
        less = works[slowest] / own[slowest] * (1 - 1e-9)
        assert sum(min(math.ceil(work / less), limit) for work, limit in zip(works, most, strict=True)) > blocks


def test_blocks_of_one_launch() -> None:
    """Of Stable Diffusion XL: as much for each of them, eight times as much for one, and fewer chunks than blocks."""
    for most, works, own in (
        ([320] * 4, [3200.0] * 4, [33, 33, 33, 33]),
        ([2560, 320, 320], [25600.0, 3200.0, 3200.0], [105, 14, 13]),
        ([3, 1], [9.0, 8.0], [3, 1]),
    ):
        assert share_out(132 - len(works), works, [1] * len(works), most) == own


def test_what_can_be_decoded_together() -> None:
    suited = {case.name for case in ZOO if suits(packed_of(case.packed))}
    assert {"quad_matrix", "single_matrix", "quad_patches", "all_words_matrix", "short_chunks_end_row_groups"} <= suited
    assert suited.isdisjoint({"quad_flat", "quad_odd_stages", "compact_normal", "one_word_quad", "experts"})
    packed = packed_of(next(case.packed for case in ZOO if case.name == "quad_matrix"))
    room = torch.zeros(1 + packed.data.numel(), dtype=torch.uint8)
    room[1:] = packed.data
    assert not suits(PackedTensor(packed.header, room[1:]))
    assert not suits(samebits.encode(torch.ones(3, dtype=torch.bfloat16)))
