"""The operator samebits::df11_decode on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from samebits.df11.operator import check_unit
from samebits.df11.unit import Unit
from samebits.errors import FormatError
from samebits.kernels import df11
from tests.codecs.tensors import words_of
from tests.df11.test_unit import TENSORS, random_words, unit_of


def tensors_of(unit: Unit) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(getattr(unit, name)) for name in TENSORS}


def arguments(unit: Unit) -> list[torch.Tensor]:
    """Of the operator."""
    output = torch.zeros(unit.words, dtype=torch.bfloat16)
    return [*list(tensors_of(unit).values())[:-1], output, torch.zeros(1, dtype=torch.int32)]


def test_decodes_into_the_output() -> None:
    given = arguments(unit_of("lm_head"))
    torch.ops.samebits.df11_decode(*given)
    assert words_of(given[-2]).tobytes() == unit_of("lm_head").decode().tobytes()


def test_keeps_torchs_rules() -> None:
    torch.library.opcheck(torch.ops.samebits.df11_decode.default, arguments(Unit.encode(random_words(1, 5000), [5000])))


def test_refuses_a_stream_that_contradicts_its_tables() -> None:
    given = arguments(unit_of("lm_head"))
    given[1] = torch.zeros_like(given[1])
    with pytest.raises(FormatError, match="does not fit its tables"):
        torch.ops.samebits.df11_decode(*given)


def test_refuses_an_output_of_another_size() -> None:
    given = arguments(unit_of("lm_head"))
    given[-2] = given[-2][1:]
    with pytest.raises(FormatError, match="a unit of 262144 weights for 262143"):
        torch.ops.samebits.df11_decode(*given)


def test_checks_without_the_large_tensors() -> None:
    """Of these only the size is looked at, so that they may stay on a GPU."""
    tensors = tensors_of(unit_of("lm_head"))
    for name in ("encoded_exponent", "sign_mantissa"):
        tensors[name] = tensors[name].to("meta")
    assert check_unit(tensors).sizes == [262144]
    tensors["sign_mantissa"] = tensors["sign_mantissa"][1:]
    with pytest.raises(FormatError, match="output_positions"):
        check_unit(tensors)


@pytest.mark.parametrize(("weights", "fits"), [((1 << 32) - 9, True), ((1 << 32) - 8, False)])
def test_the_most_weights_on_a_gpu(weights: int, fits: bool) -> None:
    """The kernel's numbers of them must not overflow where it counts on to a multiple of 8."""
    sizes = ((2, 256), (4096,), (weights,), (8,), (320,))
    layout = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    output = torch.empty(weights, dtype=torch.bfloat16, device="meta")
    with nullcontext() if fits else pytest.raises(FormatError, match="do not fit"):
        assert df11._check_sizes(*layout, output) == 1


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1), (0, 7000), (12_345, 200_001), (150_000, 262_143), (262_143, 262_144)]
)
def test_takes_parts(first: int, last: int) -> None:
    """Their first gap is that of a block behind others, and the stream may go on behind their last block."""
    unit = unit_of("lm_head")
    part, before = unit.part(first, last)
    given = arguments(part)
    torch.ops.samebits.df11_decode(*given)
    assert words_of(given[-2][before : before + last - first]).tobytes() == unit.decode()[first:last].tobytes()
    assert part.gaps.size == part.blocks * 320
    assert part.output_positions.size in (4 * part.blocks, 4 * part.blocks + 4)
