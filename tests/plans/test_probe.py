"""Probes cancel, are always the same, and look like weights to the encoder."""

from __future__ import annotations

import pytest
import torch

import samebits
from samebits.format.geometry import Code, Layout
from samebits.plans import probe
from samebits.plans.probe import Probe
from tests.plans.sums import split_linear

CPU = torch.device("cpu")


def differing(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.view(torch.int16) != right.view(torch.int16)).float().mean())


@pytest.fixture(scope="module")
def made() -> Probe:
    return Probe.make(256, 1024, CPU)


def test_every_sum_cancels_exactly(made: Probe) -> None:
    for x in (made.cancelling(4, 1), made.cancelling(4, 2)):
        exact = x.double() @ made.weight.double().T  # products have 16 bits, and their sums fit into 53
        assert not exact.any()
        assert float((x.double() @ made.weight.double().abs().T).min()) != 0


def test_partners_are_far_apart(made: Probe) -> None:
    assert sorted(torch.cat([made.paired.first, made.paired.second]).tolist()) == list(range(1024))
    assert torch.equal(made.weight[:, made.paired.first], -made.weight[:, made.paired.second])
    assert float((made.paired.first - made.paired.second).abs().float().mean()) > 1024 / 4


def test_splits_differ_nearly_everywhere_only_on_cancelling_sums(made: Probe) -> None:
    weight = made.weight
    for first, second in ((1, 2), (2, 3), (3, 4), (5, 6)):
        x = made.cancelling(4, 1)
        assert differing(split_linear(x, weight, None, first), split_linear(x, weight, None, second)) > 0.7
        x = made.plain(4, 1)
        assert differing(split_linear(x, weight, None, first), split_linear(x, weight, None, second)) < 0.05


def test_a_bias_hides_nothing(made: Probe) -> None:
    """Added to rounding errors, it is of their size; and a bias added after rounding shows on ordinary sums."""
    x, weight = made.cancelling(4, 1), made.weight
    bias = made.bias(split_linear(x, weight, None, 1).float().abs().mean(), 1)
    assert bias.any()
    assert differing(split_linear(x, weight, bias, 1), split_linear(x, weight, bias, 2)) > 0.7
    assert differing(split_linear(x, weight, bias, 1), split_linear(x, weight, None, 1)) > 0.7
    x = made.plain(4, 1)
    bias = made.bias(split_linear(x, weight, None, 1).float().abs().mean(), 1)
    assert differing(split_linear(x, weight, bias, 1), split_linear(x, weight, None, 1) + bias) > 0.1


def test_the_same_at_every_call(made: Probe) -> None:
    """Whatever torch's own generator and default dtype are; and the generator goes on as if nothing had happened."""
    torch.manual_seed(123)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = Probe.make(256, 1024, CPU)
        x, bias = again.cancelling(3, 7), again.bias(torch.ones(()), 7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again.weight, made.weight)
    assert torch.equal(x, made.cancelling(3, 7))
    assert torch.equal(bias, made.bias(torch.ones(()), 7))
    assert not torch.equal(x, made.cancelling(3, 8))
    assert torch.equal(torch.get_rng_state(), state)


def test_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_BLOCK_WORDS", 5000)
    blocks = Probe.make(100, 512, CPU)
    assert blocks.weight.shape == (100, 512)
    assert torch.equal(blocks.weight[:, blocks.paired.first], -blocks.weight[:, blocks.paired.second])
    assert len(blocks.weight.unique(dim=0)) == 100


@pytest.mark.parametrize(("shape", "even"), [((256, 512), True), ((64, 4096), True), ((1024, 4096), False)], ids=str)
def test_suits_the_quad_code(shape: tuple[int, int], even: bool) -> None:
    packed = samebits.encode(Probe.make(*shape, CPU, even=even).weight)
    assert (packed.code, packed.header.layout) == (Code.QUAD, Layout.MATRIX)
    assert 10.5 < packed.bits_per_weight < 10.8


def test_packs_like_trained_weights() -> None:
    """Streams are as long as those of normal weights whose rows differ in scale."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1024, 4096, generator=generator) * torch.exp(0.2 * torch.randn(1024, 1, generator=generator))
    trained, made = samebits.encode(weight.bfloat16()), samebits.encode(Probe.make(1024, 4096, CPU).weight)
    assert abs(made.header.max_chunk_words / trained.header.max_chunk_words - 1) < 0.03
    assert abs(made.nbytes / trained.nbytes - 1) < 0.005
