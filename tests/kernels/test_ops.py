"""The operators samebits::decode, decode_rows and decode_experts as torch sees them; no GPU needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import samebits
from samebits.errors import DtypeError, InputError
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.ops import decode_experts, decode_packed, decode_rows, fields_of, header_of
from samebits.plans import dispatch  # noqa: F401 - defines two of the operators
from tests.codecs.tensors import packed_of, tensor_of, words_of
from tests.codecs.zoo import ZOO, Case, normal

SOME_NAMES = ("quad_matrix", "quad_row_shifts", "single_flat", "no_dimensions", "compact_escapes")
SOME = [case for case in ZOO if case.name in SOME_NAMES]


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_fields_hold_the_header(case: Case) -> None:
    header = packed_of(case.packed).header
    rebuilt = header_of(tuple(header.shape), tuple(fields_of(header)))
    assert rebuilt.sections == header.sections
    assert fields_of(rebuilt) == fields_of(header)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_operator_keeps_torchs_rules(case: Case) -> None:
    packed = packed_of(case.packed)
    torch.library.opcheck(
        torch.ops.samebits.decode.default, (packed.data, list(packed.shape), fields_of(packed.header))
    )


@pytest.mark.parametrize("case", SOME, ids=str)
def test_operator_inside_torch_compile(case: Case) -> None:
    packed = packed_of(case.packed)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def flipped(data: torch.Tensor) -> torch.Tensor:
        weight = torch.ops.samebits.decode(data, packed.shape, fields_of(packed.header))
        return weight.view(torch.int16) ^ -1

    assert words_of(flipped(packed.data).view(torch.bfloat16)).tobytes() == (~case.words).tobytes()


def test_decode_goes_through_the_operator() -> None:
    packed = samebits.encode(tensor_of(normal((64, 256))))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = decode_packed(packed)
    assert (fake.shape, fake.dtype, fake.device) == (packed.shape, torch.bfloat16, packed.device)


WITH_ROWS = [case for case in SOME if case.words.ndim]
PARTIAL = [torch.ops.samebits.decode_rows.default, torch.ops.samebits.decode_experts.default]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("operator", PARTIAL, ids=str)
@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_operators_for_entries_keep_torchs_rules(case: Case, operator: Any, dtype: torch.dtype) -> None:
    """All entries, so that nothing is left as the memory held it."""
    packed = packed_of(case.packed)
    ids = torch.arange(len(case.words), dtype=dtype)
    torch.library.opcheck(operator, (packed.data, list(packed.shape), fields_of(packed.header), ids))


def test_operators_for_entries_inside_torch_compile() -> None:
    words = normal((96, 128))
    packed = samebits.encode(tensor_of(words))

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def both(data: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = PackedTensor(packed.header, data)
        return decode_rows(found, ids), decode_experts(found, ids)[ids]

    for ids in (torch.tensor([3]), torch.tensor([95, 0, 3]), torch.arange(96)):
        for result in both(packed.data, ids):
            assert words_of(result).tobytes() == words[ids.numpy()].tobytes()


@pytest.mark.parametrize("operator", [decode_rows, decode_experts])
def test_bad_indices(operator: Callable[[PackedTensor, torch.Tensor], torch.Tensor]) -> None:
    packed = samebits.encode(tensor_of(normal((96, 128))))
    with pytest.raises(DtypeError, match=r"int32 or int64, not torch\.float32"):
        operator(packed, torch.zeros(2))
    with pytest.raises(InputError, match="indices on meta for packed data on cpu"):
        operator(packed, torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(InputError, match="without dimensions"):
        operator(samebits.encode(torch.tensor(1.0, dtype=torch.bfloat16)), torch.tensor([0]))


@pytest.mark.parametrize("change", ["short", "long", "dtype", "strided"])
def test_bytes_that_the_fields_are_not_of(change: str) -> None:
    """A decoder would read beyond their end: an operator may be called by a trace, where no module looks first."""
    packed = samebits.encode(tensor_of(normal((256, 512))))
    data, ids, x = packed.data, torch.tensor([1]), torch.ones(1, 512, dtype=torch.bfloat16)
    wrong = {
        "short": data[:-16],
        "long": torch.cat([data, data]),
        "dtype": data.view(torch.int16),
        "strided": data.repeat_interleave(2)[::2],
    }[change]
    arguments, ops = (list(packed.shape), fields_of(packed.header)), torch.ops.samebits
    for call in (
        lambda: ops.decode(wrong, *arguments), lambda: ops.decode_rows(wrong, *arguments, ids),
        lambda: ops.decode_experts(wrong, *arguments, ids), lambda: ops.linear(x, wrong, None, *arguments),
        lambda: ops.frozen_linear(x, wrong, None, *arguments),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"in the place of {packed.nbytes} packed bytes"):
            call()


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_architectures(capability: tuple[int, int], target: str) -> None:
    assert nvrtc.architecture(capability) == target
