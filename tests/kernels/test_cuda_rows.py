"""Rows and experts decoded on a GPU: the same words as from the whole tensor, also those a graph is replayed with."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samebits
from samebits.codecs.decode import gathers
from samebits.format.packed import PackedTensor
from samebits.kernels import rows
from samebits.kernels.ops import decode_experts, decode_rows, fields_of
from tests.codecs.entries import SHAPES, WITH_ROWS, only, some_ids
from tests.codecs.malformed import MALFORMED, Malformed
from tests.codecs.slow_encoder import slow_encode
from tests.codecs.strategies import all_choices, words_of_any_shape
from tests.codecs.surgery import Parts, put
from tests.codecs.tensors import packed_of, tensor_of, without_compact, words_of
from tests.codecs.zoo import LARGE, Case, Words, large, normal

pytestmark = pytest.mark.gpu
CHUNKED = [case.name for case in WITH_ROWS if not case.is_compact]


@pytest.fixture
def _always_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the tensor is."""
    monkeypatch.setattr(rows, "gathers", lambda header, count: header.is_chunked)


def on_gpu(data: bytes) -> PackedTensor:
    return packed_of(data).to("cuda")


def check(packed: PackedTensor, words: Words, ids: torch.Tensor) -> None:
    """Both operators, with ``ids`` from the CPU."""
    found, experts = decode_rows(packed, ids.cuda()), decode_experts(packed, ids.cuda())
    assert (found.device, found.shape) == (packed.device, (*ids.shape, *words.shape[1:]))
    assert (experts.device, experts.shape) == (packed.device, words.shape)
    assert words_of(found).tobytes() == words[ids.numpy()].tobytes()
    assert words_of(experts)[ids.numpy()].tobytes() == words[ids.numpy()].tobytes()


@pytest.mark.usefixtures("_always_gathers")
@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_the_zoo(case: Case) -> None:
    for ids in some_ids(len(case.words)):
        check(on_gpu(case.packed), case.words, ids)


@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_the_zoo_however_it_is_decoded(case: Case) -> None:
    for ids in some_ids(len(case.words)):
        check(on_gpu(case.packed), case.words, ids)


@pytest.mark.usefixtures("_always_gathers")
@settings(max_examples=200)
@given(st.data())
def test_any_legal_choice(data: st.DataObject) -> None:
    words: Words = data.draw(words_of_any_shape(2000).filter(lambda words: words.size > 0 and words.ndim > 0))
    packed = on_gpu(slow_encode(words, data.draw(all_choices(words))))
    ids = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=6))
    check(packed, words, torch.tensor(ids, dtype=torch.int64))


@pytest.mark.parametrize("name", LARGE)
def test_large_tensors(name: str) -> None:
    packed = samebits.encode(tensor_of(large(name))).to("cuda")
    for ids in some_ids(len(large(name))):
        check(packed, large(name), ids)


@pytest.mark.parametrize("count", [1, 8, 127, 128, 129, 1023])
def test_around_the_change_to_the_whole_tensor(count: int) -> None:
    """Of 1,024 rows in 128 row groups, each a chunk."""
    words = normal((1024, 1024))
    packed = samebits.encode(tensor_of(words)).to("cuda")
    assert gathers(packed.header, count) == (count <= 128)
    check(packed, words, torch.from_numpy(np.random.default_rng(count).integers(0, 1024, count)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_else_is_decoded(shape: tuple[int, ...]) -> None:
    words = normal(shape)
    with without_compact():
        packed = samebits.encode(tensor_of(words))
    for entry in (0, len(words) // 2, len(words) - 1):
        check(only(packed, entry).to("cuda"), words, torch.tensor([entry]))


@pytest.mark.usefixtures("_always_gathers")
@pytest.mark.parametrize("malformed", [case for case in MALFORMED if not case.refused], ids=str)
def test_malformed_streams_do_no_harm(malformed: Malformed) -> None:
    survives(malformed.data)


@pytest.mark.usefixtures("_always_gathers")
@settings(max_examples=100)
@given(st.sampled_from(CHUNKED), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_hostile_streams_do_no_harm(name: str, seed: int, first_word: int) -> None:
    parts = Parts.of(next(case for case in WITH_ROWS if case.name == name).packed)
    parts.streams[:] = np.random.default_rng(seed).bytes(len(parts.streams))
    for at in range(len(parts.offsets) // 4 - 1):
        put(parts.streams, struct.unpack_from("<I", parts.offsets, 4 * at)[0], first_word)
    survives(parts.joined())


def survives(data: bytes) -> None:
    packed = on_gpu(data)
    if packed.shape:
        ids = torch.tensor([0, packed.shape[0] - 1], device="cuda")
        decode_rows(packed, ids)
        decode_experts(packed, ids)
    torch.cuda.synchronize()


def test_is_captured_in_a_cuda_graph() -> None:
    """Replays decode the rows and experts whose numbers are in the tensor then, without the host."""
    words, expert_words = normal((4096, 512)), normal((16, 64, 256))
    packed, experts = (samebits.encode(tensor_of(each)).to("cuda") for each in (words, expert_words))
    ids, routed = (
        torch.zeros(5, dtype=torch.int64, device="cuda"),
        torch.zeros((2, 2), dtype=torch.int64, device="cuda"),  # else a copy in int64 may lie where ``written`` does
    )
    decode_rows(packed, ids), decode_rows(experts, routed), decode_experts(experts, routed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, selected, written = (
            decode_rows(packed, ids),
            decode_rows(experts, routed),
            decode_experts(experts, routed),
        )
    rng = np.random.default_rng(0)
    for _ in range(5):
        some, numbers = rng.integers(0, 4096, 5), rng.integers(0, 16, (2, 2))
        ids.copy_(torch.from_numpy(some))
        routed.copy_(torch.from_numpy(numbers))
        written.fill_(7)
        graph.replay()
        assert words_of(found).tobytes() == words[some].tobytes()
        assert words_of(selected).tobytes() == expert_words[numbers].tobytes()
        assert words_of(written)[numbers].tobytes() == expert_words[numbers].tobytes()
        assert (written[[number for number in range(16) if number not in numbers]] == 7).all()


def test_never_waits_for_the_gpu() -> None:
    packed = samebits.encode(tensor_of(normal((16, 64, 256)))).to("cuda")
    ids = torch.tensor([3, 1], device="cuda")
    decode_rows(packed, ids), decode_experts(packed, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode_rows(packed, ids), decode_experts(packed, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_current_stream() -> None:
    """The ids arrive late, on a stream of their own."""
    words = normal((1024, 1024))
    packed = samebits.encode(tensor_of(words)).to("cuda")
    source, late = torch.tensor([700, 3], device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    decode_rows(packed, late), decode_experts(packed, late)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(source)
        found, experts = decode_rows(packed, late), decode_experts(packed, late)
    stream.synchronize()
    assert words_of(found).tobytes() == words[[700, 3]].tobytes()
    assert words_of(experts)[[700, 3]].tobytes() == words[[700, 3]].tobytes()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "operator", [torch.ops.samebits.decode_rows.default, torch.ops.samebits.decode_experts.default]
)
def test_operators_keep_torchs_rules(operator: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    packed = samebits.encode(tensor_of(normal((16, 64, 256)))).to("cuda")
    ids = torch.arange(16, dtype=dtype, device="cuda")
    torch.library.opcheck(operator, (packed.data, list(packed.shape), fields_of(packed.header), ids))


def test_inside_torch_compile() -> None:
    words = normal((1024, 512))
    packed = samebits.encode(tensor_of(words)).to("cuda")

    @torch.compile(fullgraph=True, dynamic=True)
    def negated(data: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return decode_rows(PackedTensor(packed.header, data), ids).view(torch.int16) ^ -1

    for ids in (torch.tensor([3]), torch.tensor([1000, 0, 3]), torch.arange(1024)):
        assert (
            words_of(negated(packed.data, ids.cuda()).view(torch.bfloat16)).tobytes() == (~words[ids.numpy()]).tobytes()
        )


OUT_OF_RANGE = """
import torch, samebits
from samebits.kernels import ops
packed = samebits.encode((torch.randn({shape}) / 50).to(torch.bfloat16)).to("cuda")
ids = torch.tensor([3] * {count} + [{wrong}], device="cuda")
try:
    ops.{operator}(packed, ids)
    torch.cuda.synchronize()
except (RuntimeError, samebits.errors.DeviceError) as error:  # by torch, or by the driver's next call
    print(error)
"""


@pytest.mark.parametrize("wrong", [-1, 1024, 1 << 40])
@pytest.mark.parametrize(("operator", "count"), [("decode_rows", 1), ("decode_rows", 500), ("decode_experts", 1)])
def test_ids_out_of_range(operator: str, count: int, wrong: int) -> None:
    """A failed assertion on the device, as torch's embedding answers. It ends a process's use of the GPU."""
    script = OUT_OF_RANGE.format(shape=(1024, 1024), count=count, wrong=wrong, operator=operator)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert "assert" in done.stdout.lower(), done.stderr
    assert "Assertion" in done.stderr  # and which


def test_rows_beyond_two_billion_words() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    part = tensor_of(normal((1024, 8192))).cuda()
    packed = samebits.encode(part.repeat(257, 1))
    ids = torch.tensor([257 * 1024 - 1, 262_145], device="cuda")
    assert torch.equal(decode_rows(packed, ids).view(torch.int16), part[ids % 1024].view(torch.int16))
