"""The CUDA decoder: right on everything the format allows, and no fault whatever the contents."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samebits
from samebits.format.geometry import Code
from samebits.format.header import Section
from samebits.format.packed import PackedTensor
from samebits.kernels.decode_together import DecodeTogether, suits
from samebits.kernels.ops import fields_of
from samebits.kernels.structures import MAX_DECODED
from tests.codecs.malformed import MALFORMED, Malformed
from tests.codecs.slow_encoder import slow_encode
from tests.codecs.strategies import all_choices, words_of_any_shape
from tests.codecs.surgery import Parts, hostile_runs, put
from tests.codecs.tensors import packed_of, tensor_of, without_compact, words_of
from tests.codecs.zoo import LARGE, ZOO, Case, Words, large, normal, octaves, pruned
from tests.vectors.make import FOLDER, path_of

pytestmark = pytest.mark.gpu
NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))
CASES = {case.name: case for case in ZOO}
CHUNKED = [case.name for case in ZOO if not case.is_compact]
COMPACT = [case.name for case in ZOO if case.is_compact]
SMALL = {case.name: case for case in ZOO if len(case.packed) < 20_000}


def on_gpu(data: bytes, device: str = "cuda") -> PackedTensor:
    return packed_of(data).to(device)


def decoded(packed: PackedTensor) -> bytes:
    result = samebits.decode(packed)
    assert (result.device, result.shape) == (packed.device, packed.shape)
    return words_of(result).tobytes()


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_decodes_the_zoo(case: Case) -> None:
    assert decoded(on_gpu(case.packed)) == case.words.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_decodes_the_golden_vectors(name: str) -> None:
    assert decoded(on_gpu(path_of(name, "bin").read_bytes())) == path_of(name, "words").read_bytes()


@settings(max_examples=300)
@given(st.data())
def test_decodes_any_legal_choice(data: st.DataObject) -> None:
    words: Words = data.draw(words_of_any_shape(2000).filter(lambda words: words.size > 0))
    assert decoded(on_gpu(slow_encode(words, data.draw(all_choices(words))))) == words.tobytes()


@pytest.mark.parametrize("name", LARGE)
def test_decodes_large_tensors_of_the_cpu(name: str) -> None:
    packed = samebits.encode(tensor_of(large(name)))
    result = samebits.decode(packed, device="cuda")
    assert result.device.type == "cuda"
    assert words_of(result).tobytes() == large(name).tobytes()


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16, 17])
def test_bytes_at_any_address(offset: int) -> None:
    for case in SMALL.values():
        room = torch.zeros(offset + len(case.packed), dtype=torch.uint8, device="cuda")
        room[offset:] = on_gpu(case.packed).data
        assert decoded(PackedTensor.from_data(room[offset:])) == case.words.tobytes()


def decoded_together(every: Sequence[PackedTensor]) -> list[bytes]:
    made = DecodeTogether([packed.header for packed in every])(*(packed.data for packed in every))
    assert [result.shape for result in made] == [packed.shape for packed in every]
    return [words_of(result).tobytes() for result in made]


SUITED = [case for case in ZOO if suits(packed_of(case.packed))]


@pytest.mark.parametrize("first", range(len(SUITED)), ids=lambda number: SUITED[number].name)
def test_decodes_the_zoo_together(first: int) -> None:
    """Each of it with those behind it, of both codes."""
    cases = [SUITED[(first + i) % len(SUITED)] for i in range(2 + first % (MAX_DECODED - 1))]
    assert decoded_together([on_gpu(case.packed) for case in cases]) == [case.words.tobytes() for case in cases]


def test_decodes_large_tensors_together() -> None:
    """Many chunks, and one that has but one."""
    names = ["matrix", "short chunks end row groups", "short rows", "long rows", "rows of every scale", "bimodal rows"]
    cases = [*(large(name) for name in names), CASES["quad_matrix"].words]
    with without_compact():
        every = [samebits.encode(tensor_of(words)).to("cuda") for words in cases[:-1]]
    every.append(on_gpu(CASES["quad_matrix"].packed))
    assert all(map(suits, every))
    assert decoded_together(every) == [words.tobytes() for words in cases]
    assert decoded_together(every[::-1]) == [words.tobytes() for words in cases[::-1]]


def test_is_told_once_what_to_decode_together() -> None:
    """Again, on another stream, in a graph, and of other bytes."""
    words = [normal((512, 1024), seed) for seed in range(3)]
    every = [samebits.encode(tensor_of(each)).to("cuda") for each in words]
    launch = DecodeTogether([packed.header for packed in every])
    data = [packed.data for packed in every]

    def check() -> None:
        assert [words_of(result).tobytes() for result in launch(*data)] == [each.tobytes() for each in words]

    for _ in range(3):
        check()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            check()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = launch(*data)
    for _ in range(2):
        for result in made:
            result.zero_()
        graph.replay()
        assert [words_of(result).tobytes() for result in made] == [each.tobytes() for each in words]


def survives(data: bytes) -> None:
    """Any words, but no fault: and the next decode is right again."""
    packed = on_gpu(data)
    samebits.decode(packed)
    if suits(packed):
        neighbour = on_gpu(SUITED[0].packed)
        together = DecodeTogether([packed.header, neighbour.header])(packed.data, neighbour.data)
        assert words_of(together[1]).tobytes() == SUITED[0].words.tobytes()
    torch.cuda.synchronize()
    assert decoded(on_gpu(ZOO[0].packed)) == ZOO[0].words.tobytes()


@pytest.mark.parametrize("malformed", [case for case in MALFORMED if not case.refused], ids=str)
def test_malformed_streams_do_no_harm(malformed: Malformed) -> None:
    survives(malformed.data)


@settings(max_examples=200)
@given(st.sampled_from(CHUNKED), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_hostile_streams_do_no_harm(name: str, seed: int, first_word: int) -> None:
    """Random streams behind valid tables: any base, unit and patch count."""
    parts = Parts.of(CASES[name].packed)
    parts.streams[:] = np.random.default_rng(seed).bytes(len(parts.streams))
    for at in range(len(parts.offsets) // 4 - 1):
        put(parts.streams, struct.unpack_from("<I", parts.offsets, 4 * at)[0], first_word)
    survives(parts.joined())


@settings(max_examples=200)
@given(st.sampled_from(COMPACT), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_hostile_runs_do_no_harm(name: str, seed: int, random_code: bool, short: bool) -> None:
    """Random streams, runs of any legal length, and any frequencies."""
    survives(hostile_runs(CASES[name].packed, np.random.default_rng(seed), random_code, short))


@pytest.mark.parametrize("section", ["code", "offsets", "streams"])
@pytest.mark.parametrize("fill", [0x00, 0x01, 0x80, 0xFF])
@pytest.mark.parametrize("name", COMPACT)
def test_runs_changed_after_validation_do_no_harm(name: str, fill: int, section: Section) -> None:
    packed = on_gpu(CASES[name].packed)
    packed.section(section).fill_(fill)
    samebits.decode(packed)
    torch.cuda.synchronize()
    assert decoded(on_gpu(CASES[name].packed)) == CASES[name].words.tobytes()


def test_runs_behind_the_first_block() -> None:
    """More than 32 runs, the last one short; the most there may be."""
    for shape in ((8193,), (3, 50_001), (1 << 20,)):
        words = pruned(shape, 0.85)
        packed = samebits.encode(tensor_of(words))
        assert packed.code is Code.COMPACT
        assert decoded(packed.to("cuda")) == words.tobytes()


@pytest.mark.parametrize("fill", [b"\xff", b"\0"])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_of_one_word_do_no_harm(name: str, fill: bytes) -> None:
    parts = Parts.of(CASES[name].packed)
    chunks = len(parts.offsets) // 4 - 1
    parts["stream_words"] = chunks
    parts["max_chunk_words"] = 1
    parts.offsets[:] = struct.pack(f"<{chunks + 1}I", *range(chunks + 1))
    parts.streams[:] = fill * (4 * chunks)
    survives(parts.joined())


def test_runs_on_the_current_stream() -> None:
    """The bytes arrive late, on a stream of their own: only a decoder that waits on that stream sees them."""
    words = normal((1024, 1024))
    source = samebits.encode(tensor_of(words)).to("cuda")
    late = PackedTensor(source.header, source.data.clone())
    late.section("planes").zero_()
    assert decoded(late) != words.tobytes()  # and compiles
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.data.copy_(source.data)
        result = samebits.decode(late)
        copy = result.clone()
    stream.synchronize()
    assert words_of(result).tobytes() == words.tobytes()
    assert words_of(copy).tobytes() == words.tobytes()


def test_is_captured_in_a_cuda_graph() -> None:
    """Replays decode what the bytes are then, without the host."""
    words = octaves((512, 512))
    with without_compact():
        packed = samebits.encode(tensor_of(words)).to("cuda")
    samebits.decode(packed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = samebits.decode(packed)
    packed.section("planes")[128:640] ^= 0x7F  # mantissas of the first stage
    graph.replay()
    torch.cuda.synchronize()
    expected = words.copy()
    expected[:8, :64] ^= 0x7F
    assert words_of(result).tobytes() == expected.tobytes()


def test_inside_torch_compile() -> None:
    words = normal((1024, 512))
    packed = samebits.encode(tensor_of(words)).to("cuda")
    shape, fields = list(packed.shape), fields_of(packed.header)

    @torch.compile(fullgraph=True)
    def flipped(data: torch.Tensor) -> Any:
        return torch.ops.samebits.decode(data, shape, fields).view(torch.int16) ^ -1

    assert words_of(flipped(packed.data).view(torch.bfloat16)).tobytes() == (~words).tobytes()


def test_operator_keeps_torchs_rules() -> None:
    packed = on_gpu(ZOO[0].packed)
    torch.library.opcheck(
        torch.ops.samebits.decode.default, (packed.data, list(packed.shape), fields_of(packed.header))
    )


def test_raw_tensors_decode_to_a_copy() -> None:
    packed = samebits.encode(torch.ones(3, dtype=torch.bfloat16, device="cuda"))
    assert packed.is_raw
    samebits.decode(packed).zero_()
    assert words_of(samebits.decode(packed)).tolist() == [0x3F80] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", list(SMALL.values())[:4], ids=str)
def test_decodes_on_the_device_of_the_bytes(case: Case) -> None:
    with torch.cuda.device(0):
        assert decoded(on_gpu(case.packed, "cuda:1")) == case.words.tobytes()
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert decoded(on_gpu(case.packed, "cuda:0")) == case.words.tobytes()


def test_more_than_two_billion_words() -> None:
    """Positions beyond 2^31, in a matrix and flat."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    part = tensor_of(normal((1024, 8192))).cuda()
    for shape in [(257 * 1024, 8192), (257 * 1024 * 8192 - 5,)]:
        tensor = part.repeat(257, 1).view(-1)[: int(np.prod(shape))].view(shape)
        packed = samebits.encode(tensor)
        assert packed.bits_per_weight < 11
        assert torch.equal(samebits.decode(packed).view(torch.int16), tensor.view(torch.int16))
