"""The CUDA encoder writes the same bytes as the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

import samebits
from samebits.digest import digest
from samebits.format.packed import PackedTensor
from samebits.kernels import encode
from tests.codecs import zoo
from tests.codecs.strategies import words_of_any_shape
from tests.codecs.tensors import bytes_of, tensor_of, without_compact, words_of
from tests.codecs.zoo import Words
from tests.vectors.make import FAST, path_of, stored_words, written

pytestmark = pytest.mark.gpu


def check(tensor: torch.Tensor) -> PackedTensor:
    """Encode a tensor on the GPU, and hold the bytes against the CPU's; also without the compact code."""
    with without_compact():
        check_encoded(tensor)
    return check_encoded(tensor)


def check_encoded(tensor: torch.Tensor) -> PackedTensor:
    expected = samebits.encode(tensor.cpu())
    packed = samebits.encode(tensor)
    assert packed.device == tensor.device
    assert packed.header == expected.header
    assert bytes_of(packed) == bytes_of(expected)
    assert words_of(samebits.decode(packed)).tobytes() == words_of(tensor).tobytes()
    return packed


@settings(max_examples=250)
@given(words_of_any_shape(6000))
@example(np.zeros((0,), np.uint16))
@example(np.zeros((3, 0, 2), np.uint16))
@example(np.array(0x7FC1, np.uint16))
@example(np.array([0x8000], np.uint16))
@example(np.array(zoo.SPECIAL, np.uint16))
@example(np.full((64, 64), 0xFFFF, np.uint16))
@example(np.zeros((64, 65), np.uint16))
def test_same_bytes_for_any_tensor(words: Words) -> None:
    check(tensor_of(words).cuda())


@pytest.mark.parametrize("case", zoo.ZOO, ids=str)
def test_same_bytes_for_the_zoo(case: zoo.Case) -> None:
    check(tensor_of(case.words).cuda())


@pytest.mark.parametrize("name", zoo.LARGE)
def test_same_bytes_for_large_tensors(name: str) -> None:
    check(tensor_of(zoo.large(name)).cuda())


@pytest.mark.parametrize("code", ["quad", "single"])
def test_same_bytes_where_rows_are_sampled(code: str) -> None:
    assert check(tensor_of(zoo.beyond_the_sample(code)).cuda()).code.name.lower() == code


def test_same_bytes_where_chunks_become_raw() -> None:
    check(tensor_of(zoo.around_raw_chunks()).cuda())


@pytest.mark.parametrize("name", FAST)
def test_same_bytes_as_the_golden_vectors(name: str) -> None:
    words = stored_words(name, FAST[name].shape)
    assert written(name, tensor_of(words).cuda()) == path_of(name, "bin").read_bytes()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.T,
    "strided": lambda tensor: tensor[::3, 5::2],
    "expanded": lambda tensor: tensor[:1].expand(96, -1),
    "one word of stride 0": lambda tensor: tensor.as_strided((1,), (0,)),
    "permuted": lambda tensor: tensor.view(4, 24, 8, 16).permute(2, 0, 3, 1),
    "offset by 2 bytes": lambda tensor: tensor.view(-1)[1:12001],
    "offset by 8 bytes": lambda tensor: tensor.view(-1)[4:12001],
    "no words": lambda tensor: tensor[:0],
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=True),
}


@pytest.mark.parametrize("view", VIEWS)
def test_same_bytes_for_views(view: str) -> None:
    check(VIEWS[view](tensor_of(zoo.normal((96, 128))).cuda()))


def test_runs_on_the_current_stream() -> None:
    """The words arrive late, on a stream of their own."""
    words = zoo.normal((1024, 1024))
    source = tensor_of(words).cuda()
    late = torch.zeros_like(source)
    samebits.encode(source)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(source)
        packed = samebits.encode(late)
        stream.synchronize()
    assert bytes_of(packed) == bytes_of(samebits.encode(tensor_of(words)))


def test_threads_with_streams_of_their_own() -> None:
    tensors = [tensor_of(zoo.normal((512 + 64 * i, 1024), i)).cuda() for i in range(8)]
    samebits.encode(tensors[0])  # compiles
    torch.cuda.synchronize()

    def encode(tensor: torch.Tensor) -> bytes:
        with torch.cuda.stream(torch.cuda.Stream()):
            packed = [samebits.encode(tensor) for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        assert len({bytes_of(each) for each in packed}) == 1
        return bytes_of(packed[0])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, tensors)) == [bytes_of(samebits.encode(tensor.cpu())) for tensor in tensors]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 255, 2048, 100_003])
def test_same_digest(size: int) -> None:
    data = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    assert encode._value(encode._digest(data.cuda())) == digest(data)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_encodes_on_the_device_of_the_words() -> None:
    with torch.cuda.device(0):
        assert check(tensor_of(zoo.normal((64, 256))).to("cuda:1")).device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
