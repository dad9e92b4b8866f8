"""What comes before products of experts with many pairs each (csrc/route.cu), emulated on the CPU, and read back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import samebits
from samebits.bf16 import same_words
from samebits.kernels import nvrtc
from samebits.kernels.linear import experts
from samebits.kernels.linear.experts import (
    VARIANTS,
    Input,
    experts_product,
    is_supported,
    launch_of,
    may_be_fastest,
)
from samebits.kernels.linear.routed import routed
from samebits.kernels.structures import JobStructure, RoutingStructure
from tests.codecs.tensors import always_quad
from tests.kernels import emulator
from tests.kernels.emulator.device import EmulatedDevice

pytestmark = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
ROUTED = [number for number, variant in enumerate(VARIANTS) if variant.input is Input.ARRANGED]
NO_PAIR = 2**32 - 1


class Device(EmulatedDevice):
    """Whose warpgroups are played: see Products.multiply."""

    multiply: Callable[[int], None]

    def _launcher(self, function: tuple[str, str], *how: Any) -> Callable[[int], None]:
        if function[0] != "linear_routed.cu":
            return super()._launcher(function, *how)
        self.launched.append(function[1])
        return self.multiply


class Products:
    """Of pairs with the experts that a router has chosen."""

    def __init__(self, shape: tuple[int, int, int], tokens: int, sharing: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight, pairs = emulator.values(shape, generator), tokens * sharing
        self.packed, self.sharing = samebits.encode(self.weight), sharing
        self.x = emulator.values((tokens, shape[2]), generator)
        self.ids = (torch.rand(pairs, generator=generator) ** 2 * shape[0]).to(dtype)
        self.ids[torch.rand(pairs, generator=generator) < 0.1] = -1
        self.ids[torch.rand(pairs, generator=generator) < 0.05] = shape[0]
        self.scales = torch.rand(pairs, generator=generator)
        self.y = torch.full((pairs, shape[1]), torch.nan, dtype=torch.bfloat16)
        self.seen: list[int] = []  # pairs

    def product(self, pair: int) -> torch.Tensor:
        sums = emulator.chains(self.x[pair // self.sharing][None], self.weight[self.ids[pair]])[0]
        return (sums * self.scales[pair]).to(torch.bfloat16)

    def multiply(self, pointers: int) -> None:
        """What linear_routed does, with x and tables as they are in memory, each read once and compared."""
        _, _, at_job, at_routing = (ctypes.c_void_p * 4).from_address(pointers)
        job, routing = JobStructure.from_address(at_job), RoutingStructure.from_address(at_routing)
        experts, _, columns = self.weight.shape
        stages, wide = -(-columns // 64), routing.unit_pairs
        head = view(job.done, np.uint32, 4 + 4 * routing.units + 2 * routing.units * wide)
        units, lists = np.split(head[4:], [4 * routing.units])
        pairs, scales = lists[: routing.units * wide].reshape(-1, wide), lists[routing.units * wide :].reshape(-1, wide)
        assert head[0] <= routing.units
        ends = 0
        for number, (expert, octet, octets, _) in enumerate(units.reshape(-1, 4)[: head[0]]):
            assert expert < experts
            assert octet == ends
            assert 0 < octets <= wide // 8
            ends = octet + octets
            own = pairs[number]
            rows = self.rows(job.parts + int(octet) * 1024 * stages, int(octets), stages, parts=2 if wide == 256 else 1)
            count = int((own != NO_PAIR).sum())
            assert (own[count:] == NO_PAIR).all()
            assert count > 8 * (int(octets) - 1)
            for row, pair in zip(rows, own[:count].tolist(), strict=False):
                assert self.ids[pair] == expert
                assert row.tobytes() == self.x[pair // self.sharing].view(torch.int16).numpy().tobytes()
            assert scales[number][:count].tobytes() == self.scales[own[:count].tolist()].numpy().tobytes()
            self.seen += own[:count].tolist()
        for pair in self.seen:
            self.y[pair] = self.product(pair)

    def rows(self, address: int, octets: int, stages: int, parts: int) -> np.ndarray:
        """Of a unit's x: words [rows, columns], arranged back."""
        count, width = 8 * octets, 8 // parts  # width: 16-byte units of a row of a matrix
        matrices = view(address, np.uint32, stages * count * 32).reshape(stages, parts, count, width, 4)
        swizzle = np.arange(count) & 7 if parts == 1 else np.arange(count) >> 1 & 3
        places = np.arange(width)[None] ^ swizzle[:, None]
        plain = np.take_along_axis(matrices, places[None, None, :, :, None], 3)
        pairs = plain.reshape(stages, parts, count, width // 2, 2, 4)  # of a step: words 0, 2, 4, 6, then the others
        steps = pairs.transpose(2, 0, 1, 3, 5, 4).reshape(count, -1)
        return np.ascontiguousarray(steps).view(np.uint16)


def view(address: int, dtype: Any, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address), dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    made.install(monkeypatch)
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: True)
    monkeypatch.setattr(experts, "decode_table", lambda packed: None)
    launch_of.cache_clear()
    with always_quad():
        yield made
    launch_of.cache_clear()


@pytest.mark.parametrize(
    ("shape", "tokens", "sharing"),
    [((4, 24, 640), 500, 1), ((40, 8, 768), 40, 4), ((70, 16, 1088), 50, 5), ((2, 24, 1280), 200, 2)],
    ids=str,
)
def test_units_have_their_pairs_and_x(
    device: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], tokens: int, sharing: int
) -> None:
    for number in ROUTED:
        device.seed += 1
        products = Products(shape, tokens, sharing, torch.int64 if number % 2 else torch.int32, number)
        assert is_supported(products.packed.header)
        launch = launch_of(products.packed.header, tokens * sharing, sharing, number, -1)
        assert launch is not None
        scratch = torch.full((launch.scratch_bytes + 256,), 0xA5, dtype=torch.uint8)  # another launch's before
        device.multiply = products.multiply
        device.memory = [products.x, products.packed.data, products.ids, products.y, products.scales, scratch]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", partial(room, scratch))
            experts_product(products.x, products.packed, products.ids, products.scales, products.y, number)
        is_routed = (products.ids >= 0) & (products.ids < shape[0])
        assert sorted(products.seen) == is_routed.nonzero()[:, 0].tolist()
        expected = torch.zeros_like(products.y)
        for pair in products.seen:
            expected[pair] = products.product(pair)
        assert same_words(products.y, expected)
        assert (scratch[launch.scratch_bytes :] == 0xA5).all()


def room(scratch: torch.Tensor, size: int, **how: Any) -> torch.Tensor:
    assert size <= len(scratch)
    assert how["dtype"] is torch.uint8
    return scratch[:size]


@pytest.mark.parametrize(
    ("pairs", "experts", "fits"), [(65536, 64, True), (65537, 64, False), (200, 0, True), (200, 58112, False)]
)
def test_what_there_is_room_for(device: Device, pairs: int, experts: int, fits: bool) -> None:
    """Ranks of 16 bits, and a word of shared memory for each expert."""
    header = samebits.encode(emulator.values((4, 24, 640), torch.Generator().manual_seed(0))).header
    many = replace(header, shape=torch.Size((experts + 4, *header.shape[1:])))
    assert [routed(many, pairs, 1, 64, -1) is not None, routed(many, pairs, 1, 256, -1) is not None] == [fits, fits]


def test_others_have_no_such_kernel(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    header = samebits.encode(emulator.values((4, 24, 640), torch.Generator().manual_seed(0))).header
    assert routed(header, 200, 1, 64, -1)
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: False)
    assert routed(header, 200, 1, 64, -1) is None


def test_which_variants_are_tried() -> None:
    """By the average number of pairs of an expert."""

    def tried(pairs: int, experts: int) -> list[int]:
        chosen = [each for number, each in enumerate(VARIANTS) if may_be_fastest(pairs, experts, number)]
        return sorted({8 * each.octets for each in chosen})

    assert tried(8, 128) == [8, 16]
    assert tried(1024, 128) == [8, 16, 64]
    assert tried(4096, 128) == [16, 64, 96, 128]
    assert tried(16384, 128) == [96, 128, 192, 256]
    assert tried(65536, 64) == [256]
