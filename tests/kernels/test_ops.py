"""The operator samebits::decode as torch sees it; no GPU needed."""

from __future__ import annotations

import pytest
import torch

import samebits
from samebits.kernels import nvrtc
from samebits.kernels.ops import decode_packed, fields_of, header_of
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


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_architectures(capability: tuple[int, int], target: str) -> None:
    assert nvrtc.architecture(capability) == target
