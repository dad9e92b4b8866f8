"""The fused layer's kernels for all architectures, emulated on the CPU, in every variant that fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import samebits
from samebits.bf16 import same_words
from samebits.format.packed import PackedTensor
from samebits.kernels.linear import launch, products
from samebits.kernels.linear.products import (
    LinearPlan,
    Operands,
    fused_linear,
    fused_linears,
    is_supported,
    launch_together,
    variants,
)
from tests.codecs.tensors import always_quad
from tests.kernels import emulator
from tests.kernels.emulator.device import EmulatedDevice

pytestmark = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
KEPT = (products.is_supported, products._jobs, launch.shared_launch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    made.install(monkeypatch)
    monkeypatch.setattr(products, "decode_table", lambda packed: None)
    forget()
    with always_quad():
        yield made
    forget()


def forget() -> None:
    """What is known of a device's launches."""
    for kept in KEPT:
        kept.cache_clear()


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return emulator.values((rows, columns), torch.Generator().manual_seed(rows))


def expected_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: int) -> torch.Tensor:
    sums = emulator.chains(x, weight, split)
    return (sums if bias is None else sums + bias.float()).to(torch.bfloat16)


@pytest.mark.parametrize(("rows", "columns"), [(136, 1088), (72, 2880), (40, 4096)])
def test_every_variant(device: EmulatedDevice, rows: int, columns: int) -> None:
    weight, generator = weight_of(rows, columns), torch.Generator().manual_seed(1)
    packed, bias = samebits.encode(weight), emulator.values((rows,), generator)
    for tokens in (1, 5, 8, 12):
        x = emulator.values((tokens, columns), generator)
        for split in (1, 2, 3):
            for device.multiprocessors in (2, 9):
                forget()
                assert is_supported(packed.header, tokens, -1)
                for variant in variants(packed.header, tokens, split):
                    device.seed += 1
                    added = bias if device.seed % 2 else None
                    found = fused_linear(x, packed, added, LinearPlan(split, variant))
                    assert same_words(found, expected_of(x, weight, added, split)), f"split {split}, variant {variant}"
    kinds = {"_".join(name.split("_")[:3]) for name in device.launched}
    assert kinds == {"linear_ahead_8", "linear_chains_8", "linear_chains_16"}


def test_several_weights_in_one_launch(device: EmulatedDevice) -> None:
    weights, generator = [weight_of(rows, 1088) for rows in (64, 24, 136)], torch.Generator().manual_seed(1)
    x, splits = emulator.values((3, 1088), generator), (1, 3, 2)
    operands = [
        Operands(samebits.encode(weight), None, LinearPlan(split))
        for weight, split in zip(weights, splits, strict=True)
    ]
    device.multiprocessors = 7
    expected, tried = [expected_of(x, *each) for each in zip(weights, (None,) * 3, splits, strict=True)], 0
    for variant in range(len(launch.VARIANTS)):
        made = launch_together(operands, 3, variant, -1)
        if made is not None:
            tried += 1
            assert all(map(same_words, fused_linears(x, operands, made), expected))
    assert tried >= 2


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF, None])
@pytest.mark.parametrize("section", ["code", "offsets", "streams"])
def test_hostile_contents_do_no_harm(device: EmulatedDevice, section: str, fill: int | None) -> None:
    """Sections that change after they were validated: shared memory is touched where it may be, and launches end."""
    intact = samebits.encode(weight_of(136, 2112))
    packed = PackedTensor(intact.header, intact.data.clone())
    part = packed.section(section)
    part.random_(0, 256, generator=torch.Generator().manual_seed(1)) if fill is None else part.fill_(fill)
    x = emulator.values((5, 2112), torch.Generator().manual_seed(1))
    for variant in variants(packed.header, 5, 3):
        assert fused_linear(x, packed, None, LinearPlan(3, variant)).shape == (5, 136)
