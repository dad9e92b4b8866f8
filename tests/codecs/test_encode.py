"""samebits.encode: every word comes back, no tensor grows, and the bytes keep FORMAT.md's rules for writers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

import samebits
from samebits import parallel
from samebits.bf16 import entropy, exponent_histogram
from samebits.codecs import encode as encode_module
from samebits.codecs.reference import Reading, decode_reference, digest_reference
from samebits.errors import DtypeError, InputError
from samebits.format.geometry import Code
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from tests.codecs import zoo
from tests.codecs.slow_encoder import huffman_lengths
from tests.codecs.strategies import words_of_any_shape
from tests.codecs.tensors import bytes_of, packed_of, tensor_of, without_compact, words_of
from tests.codecs.writer_rules import check_writer
from tests.codecs.zoo import Words


def check(tensor: torch.Tensor) -> PackedTensor:
    """Encode, and hold the result against everything that must be true of it; also without the compact code."""
    packed = check_encoded(tensor)
    with without_compact():
        other = check_encoded(tensor)
    assert other.code is not Code.COMPACT
    assert packed.nbytes <= other.nbytes
    return packed


def check_encoded(tensor: torch.Tensor) -> PackedTensor:
    before = words_of(tensor).tobytes()
    packed = samebits.encode(tensor)
    assert words_of(tensor).tobytes() == before
    assert packed.shape == tensor.shape
    assert packed.device == tensor.device
    assert packed.header.original_digest == digest_reference(before)
    decoded = samebits.decode(packed)
    assert decoded.shape == tensor.shape
    assert decoded.is_contiguous()
    assert words_of(decoded).tobytes() == before
    assert packed.nbytes == packed.data.numel()
    assert packed.words == tensor.numel()
    if packed.is_raw:
        assert bytes_of(packed) == before
    else:
        assert packed.nbytes < 2 * tensor.numel()
        check_packed(bytes_of(packed), before)
    return packed


def check_packed(data: bytes, words: bytes) -> None:
    assert decode_reference(data).tobytes() == words
    assert packed_of(data).header.stored_digest == digest_reference(data[16:])
    check_writer(data)


@pytest.mark.clause("4.3", "5.4", "6.5", "6.8", "7.5")
@settings(max_examples=250)
@given(words_of_any_shape(6000))
@example(np.zeros((0,), np.uint16))
@example(np.zeros((0, 7), np.uint16))
@example(np.zeros((3, 0, 2), np.uint16))
@example(np.array(0x7FC1, np.uint16))
@example(np.array([0x8000], np.uint16))
@example(np.array(zoo.SPECIAL, np.uint16))
@example(np.full((64, 64), 0xFFFF, np.uint16))
@example(np.zeros((64, 65), np.uint16))
def test_every_tensor_comes_back(words: Words) -> None:
    check(tensor_of(words))


@pytest.mark.parametrize("case", zoo.ZOO, ids=str)
def test_the_zoo_comes_back(case: zoo.Case) -> None:
    check(tensor_of(case.words))


@pytest.mark.parametrize("pattern", ["sorted", "shuffled", "rows", "common"])
def test_all_words_come_back(pattern: str) -> None:
    words = np.arange(65536, dtype=np.uint16)
    if pattern == "shuffled":
        words = np.random.default_rng(0).permutation(words)
    if pattern == "rows":  # shifts make them alike
        words = words.reshape(512, 128)
    if pattern == "common":  # among so many ordinary words that the tensor gains
        words = np.random.default_rng(0).permutation(np.concatenate([words, zoo.normal((700_000,))]))
    packed = check(tensor_of(words))
    assert packed.is_raw == (pattern in ("sorted", "shuffled"))


@pytest.mark.parametrize("code", ["quad", "single"])
def test_rows_outside_the_sample_come_back(code: str) -> None:
    """Above 16 M words the plan counts every third row; here the others hold every word there is."""
    words = zoo.beyond_the_sample(code)
    packed = samebits.encode(tensor_of(words))
    assert packed.code.name.lower() == code
    assert packed.nbytes < 0.7 * words.nbytes
    assert words_of(samebits.decode(packed)).tobytes() == words.tobytes()


@pytest.mark.clause("6.5")
def test_a_chunk_is_raw_from_its_raw_length_on() -> None:
    words = zoo.around_raw_chunks()
    data = bytes_of(samebits.encode(tensor_of(words)))
    check_packed(data, words.tobytes())
    chunks = Reading(data).chunks[:60]
    assert {chunk.stored.size for chunk in chunks if chunk.is_raw} == {2049}
    assert max(chunk.stored.size for chunk in chunks if not chunk.is_raw) == 2048


def test_streams_whose_words_offsets_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They gain nothing, though with its planes the tensor would be smaller."""
    tensor = tensor_of(zoo.normal((64, 1024)))
    header = replace(samebits.encode(tensor).header, shape=(1 << 17, 1 << 18))
    for stream_words, expected in ((1 << 32) - 1, True), (1 << 32, False):
        large = replace(header, stream_words=stream_words)
        assert large.nbytes < 2 * large.words
        assert encode_module.gains(large) == expected
    monkeypatch.setattr(encode_module, "header_of", lambda *fields: replace(header, stream_words=1 << 32))
    monkeypatch.setattr(Header, "nbytes", 0)
    with without_compact():
        assert samebits.encode(tensor).is_raw


VIEWS = {
    "transposed": lambda tensor: tensor.T,
    "strided": lambda tensor: tensor[::3, 5::2],
    "expanded": lambda tensor: tensor[:1].expand(96, -1),
    "one word of stride 0": lambda tensor: tensor.as_strided((1,), (0,)),
    "no words": lambda tensor: tensor[:0],
    "permuted": lambda tensor: tensor.view(4, 24, 8, 16).permute(2, 0, 3, 1),
    "sliced": lambda tensor: tensor[1:, 1:],
    "offset": lambda tensor: tensor.view(-1)[1:12001],
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=True),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_encoded_as_their_copies(view: str) -> None:
    tensor = VIEWS[view](tensor_of(zoo.normal((96, 128))))
    assert bytes_of(check(tensor)) == bytes_of(
        samebits.encode(tensor.detach().clone(memory_format=torch.contiguous_format))
    )


@pytest.mark.parametrize("words", [zoo.normal((300, 4100)), zoo.scaled_rows((520, 2048))], ids=["normal", "rows"])
def test_threads_change_nothing(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    many = samebits.encode(tensor_of(words))
    monkeypatch.setattr("samebits.parallel.threads", lambda: 1)
    one = samebits.encode(tensor_of(words))
    assert bytes_of(many) == bytes_of(one)
    assert words_of(samebits.decode(many)).tobytes() == words.tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int16, torch.uint8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=r"only bfloat16 can be packed.*; convert it explicitly"):
        samebits.encode(torch.zeros(8, dtype=dtype))


def entropy_of(words: Words) -> float:
    return entropy(exponent_histogram(tensor_of(words)))


@pytest.mark.parametrize("name", zoo.LARGE)
def test_size_of_large_tensors(name: str) -> None:
    """At most 0.20 bits beyond the entropy, everything counted; below 2 bits of entropy prefix codes have a floor."""
    words = zoo.large(name)
    bits, limit = samebits.encode(tensor_of(words)).bits_per_weight, 8 + entropy_of(words)
    assert bits <= min(16, limit + 0.20 if limit >= 10 else max(limit + 0.5, 9.5))


@pytest.mark.parametrize("name", ["larger matrix", "bimodal rows", "octaves"])
def test_large_trained_tensors_get_the_fast_code(name: str) -> None:
    assert samebits.encode(tensor_of(zoo.large(name))).code.name == "QUAD"


@pytest.mark.parametrize("columns", [1024, 1152, 1280, 1536, 2432, 2880])
def test_rows_for_fused_kernels_get_the_fast_code(columns: int) -> None:
    """Also where they end in short chunks, which take more bits: 64 lengths each; or in a stage without another one,
    which has as many sign words as two.
    """
    words = zoo.normal((1280, columns))
    packed = samebits.encode(tensor_of(words))
    assert packed.code.name == "QUAD"
    assert packed.bits_per_weight <= 8 + entropy_of(words) + 0.23


@pytest.mark.parametrize("name", zoo.LARGE)
def test_large_tensors_come_back(name: str) -> None:
    words = zoo.large(name)
    assert words_of(samebits.decode(samebits.encode(tensor_of(words)))).tobytes() == words.tobytes()


@settings(max_examples=200)
@given(words_of_any_shape(100_000).filter(lambda words: words.size > 0))
def test_size_of_any_tensor(words: Words) -> None:
    """At most 0.2 bits beyond what a Huffman code of the exponents needs, and 2 KiB for tables and padding."""
    counts = Counter((words.reshape(-1) >> 7 & 255).tolist())
    lengths = huffman_lengths(counts, 255)
    coded = sum(counts[exponent] * lengths[exponent] for exponent in counts)
    packed = samebits.encode(tensor_of(words))
    assert 8 * packed.nbytes <= min(16 * words.size, 8.2 * words.size + coded + 8 * 2048)


@pytest.mark.parametrize("words", [1, 100, 5_000])
@pytest.mark.parametrize("shape", [(37, 33), (5, 640), (203, 8), (1, 2_000), (130, 130)])
def test_tasks_of_any_size_write_the_same(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], words: int) -> None:
    """Of few words each, where rows begin within a digest's 64 bits; some rows have subnormal words, or none at all."""
    values = zoo.normal(shape, seed=words)
    values[:: shape[0] // 4 + 1, ::7] = 3  # subnormal
    values[shape[0] // 2] = 0
    matrix = tensor_of(values)
    whole = check(matrix)
    monkeypatch.setattr(parallel, "TASK_WORDS", words)
    monkeypatch.setattr(parallel, "_MIN_TASK_WORDS", 1)
    assert bytes_of(check(matrix)) == bytes_of(whole)


@pytest.mark.clause("2.2")
@pytest.mark.parametrize("shape", [(1,) * 8 + (4096,), (2,) * 16])
def test_more_dimensions_than_a_header_has(shape: tuple[int, ...]) -> None:
    packed = check(tensor_of(zoo.normal(shape)))
    assert packed.is_raw


def test_what_is_raw_is_a_copy() -> None:
    tensor = tensor_of(zoo.normal((5,)))
    before, packed = words_of(tensor).tobytes(), samebits.encode(tensor)
    assert packed.is_raw
    tensor.zero_()
    assert words_of(samebits.decode(packed)).tobytes() == before


def test_without_values_in_memory() -> None:
    tensor = torch.ones(8, 8, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"a tensor is on the meta device, .*; load it first"):
        samebits.encode(tensor.to("meta"))
    with pytest.raises(InputError, match=r"a tensor is torch\.sparse_coo, .*; call to_dense\(\) first"):
        samebits.encode(tensor.to_sparse())
    with pytest.raises(InputError, match=r"a nested tensor is several; pack those of unbind\(\) one by one"):
        samebits.encode(torch.nested.nested_tensor([tensor, tensor[:3]]))
    data = samebits.encode(tensor_of(zoo.normal((64, 64)))).data
    with pytest.raises(InputError, match=r"a tensor is on the meta device, .*; load it first"):
        samebits.PackedTensor.from_data(data.to("meta"))
    with pytest.raises(InputError, match=r"a tensor is torch\.sparse_coo, .*; call to_dense\(\) first"):
        samebits.PackedTensor.from_data(data.to_sparse())


@pytest.mark.parametrize("size", [0, 30, 62])
def test_a_tensor_whose_memory_was_freed_is_refused(size: int) -> None:
    """As sharding leaves parameters between their uses."""
    tensor = torch.zeros(4, 32, dtype=torch.bfloat16)[:2]
    data = tensor.view(torch.uint8)[0]
    tensor.untyped_storage().resize_(size)
    with pytest.raises(InputError, match="memory was freed"):
        samebits.encode(tensor)
    with pytest.raises(InputError, match="memory was freed"):
        samebits.PackedTensor.from_data(data)
    with pytest.raises(InputError, match="memory was freed"):
        samebits.compress(torch.nn.ParameterList([tensor]), min_weights=1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_of_whole_numbers_nothing_is_said_that_was_not_compared(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError) as error:
        samebits.encode(torch.ones(4, dtype=dtype))
    assert str(error.value).endswith("convert it explicitly with .to(torch.bfloat16)")


def test_a_view_of_the_opposite() -> None:
    """As the imaginary part of a conjugate is one: its sign bits are not those in memory."""
    tensor = tensor_of(zoo.normal((64, 64)))
    packed = samebits.encode(torch._neg_view(tensor))
    assert words_of(samebits.decode(packed)).tobytes() == (words_of(tensor) ^ 0x8000).tobytes()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_every_float8_value_is_a_bf16_value(name: str) -> None:
    dtype = getattr(torch, name)
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = values[~values.float().isnan()]
    assert len(values) >= 250
    with pytest.raises(DtypeError, match="which changes no value"):
        samebits.encode(values)
