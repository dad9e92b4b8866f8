"""Products with routed experts, emulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import samebits
from samebits.bf16 import same_words
from samebits.format.packed import PackedTensor
from samebits.kernels.linear import experts
from samebits.kernels.linear.experts import VARIANTS, Input, experts_product, is_supported, launch_of
from tests.codecs.tensors import always_quad
from tests.kernels import emulator
from tests.kernels.emulator import EmulationError
from tests.kernels.emulator.device import EmulatedDevice

pytestmark = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
WALKED = [number for number, variant in enumerate(VARIANTS) if variant.input is not Input.ARRANGED]  # others need wgmma
SHAPES = (  # chunks of 10, 12, 16 stages, of 16 and 1, 4, 6, of two and 13
    (4, 24, 640), (3, 16, 768), (3, 16, 1024), (5, 40, 1088), (3, 24, 1280), (9, 8, 1408), (2, 16, 2880),
)  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    made.install(monkeypatch)
    monkeypatch.setattr(experts, "decode_table", lambda packed: None)
    launch_of.cache_clear()
    with always_quad():
        yield made
    launch_of.cache_clear()


class Products:
    """Of some tokens, with experts that a router has chosen."""

    def __init__(self, weight: torch.Tensor, tokens: int, sharing: int, seed: int) -> None:
        generator, pairs = torch.Generator().manual_seed(seed), tokens * sharing
        self.weight, self.packed = weight, samebits.encode(weight)
        self.x = emulator.values((tokens, weight.shape[2]), generator)
        self.ids = (torch.rand(pairs, generator=generator) ** 2 * len(weight)).int()
        self.ids[torch.rand(pairs, generator=generator) < 0.1] = -1
        self.ids[torch.rand(pairs, generator=generator) < 0.05] = len(weight)
        self.scales = torch.rand(pairs, generator=generator)

    def expected(self, scales: torch.Tensor | None) -> torch.Tensor:
        made = torch.zeros(len(self.ids), self.weight.shape[1])
        inputs = self.x.repeat_interleave(len(self.ids) // len(self.x), 0)
        for expert, weight in enumerate(self.weight):
            made[self.ids == expert] = emulator.chains(inputs[self.ids == expert], weight)
        return (made if scales is None else made * scales[:, None]).to(torch.bfloat16)

    def found(
        self, device: EmulatedDevice, variant: int, scales: torch.Tensor | None, packed: PackedTensor | None = None
    ) -> torch.Tensor | None:
        """None: the variant is of no use."""
        packed = packed or self.packed
        assert is_supported(packed.header)
        if launch_of(packed.header, len(self.ids), len(self.ids) // len(self.x), variant, -1) is None:
            return None
        guarded = torch.full((len(self.ids) + 2, packed.shape[1]), torch.nan, dtype=torch.bfloat16)
        y = guarded[1:-1]
        device.memory = [self.x, packed.data, self.ids, y, *([] if scales is None else [scales])]
        experts_product(self.x, packed, self.ids, scales, y, variant)
        assert guarded[[0, -1]].isnan().all()
        return y


def experts_of(shape: tuple[int, int, int]) -> torch.Tensor:
    return emulator.values(shape, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pair_is_multiplied_with_its_expert(device: EmulatedDevice, shape: tuple[int, int, int]) -> None:
    weight, tried = experts_of(shape), set()
    for tokens, sharing in ((1, 2), (3, 2), (9, 1), (20, 2), (50, 1)):
        products = Products(weight, tokens, sharing, tokens)
        for variant in WALKED:
            for device.multiprocessors in (1, 5, 30):
                launch_of.cache_clear()
                device.seed += 1
                scales = products.scales if device.seed % 2 else None
                found = products.found(device, variant, scales)
                if found is not None:
                    tried.add(variant)
                    assert same_words(found, products.expected(scales))
    assert tried == {*WALKED}


@pytest.mark.parametrize("kind", ["patches", "row shifts", "raw chunks"])
def test_every_kind_of_chunk(device: EmulatedDevice, kind: str) -> None:
    weight, tried = experts_of((3, 16, 2112)).float(), 0
    generator = torch.Generator().manual_seed(1)
    if kind == "patches":
        weight[torch.rand(weight.shape, generator=generator) < 0.01] *= 2.0**12
    elif kind == "row shifts":
        weight *= torch.exp2(torch.randint(-60, 60, (3, 16, 1), generator=generator))
    else:
        weight[1, :8] = torch.exp2(torch.randint(-100, 100, (8, 2112), generator=generator).float())
    products = Products(weight.bfloat16(), 20, 2, 0)
    if kind == "raw chunks":  # each token is a column, of which a sum has one term
        products.x[:] = torch.eye(2112)[torch.randint(2112, (20,), generator=generator)]
    assert products.packed.header.has_row_shifts == (kind == "row shifts")
    for variant in WALKED:
        found = products.found(device, variant, None)
        if found is not None:
            tried += 1
            assert same_words(found, products.expected(None))
    assert tried >= 2  # x of units of 16 may not fit into shared memory, and eight tokens need none of them


def test_a_table_in_memory(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(experts_of((3, 24, 1280)), 6, 2, 0)
    table = device.table_of(products.packed)
    monkeypatch.setattr(experts, "decode_table", lambda packed: table)
    y = torch.full((12, 24), torch.nan, dtype=torch.bfloat16)
    device.memory = [products.x, products.packed.data, products.ids, y, table]
    experts_product(products.x, products.packed, products.ids, None, y, 0)
    assert same_words(y, products.expected(None))


@pytest.mark.parametrize("fill", [0x00, 0x01, 0x7F, 0xFF, None])
@pytest.mark.parametrize("section", ["code", "offsets", "streams"])
def test_hostile_contents_do_no_harm(device: EmulatedDevice, section: str, fill: int | None) -> None:
    """Sections that change after they were validated: nothing is touched out of bounds, and the launch ends."""
    products = Products(experts_of((3, 16, 2112)), 20, 2, 0)
    packed = PackedTensor(products.packed.header, products.packed.data.clone())
    generator = torch.Generator().manual_seed(1)
    part = packed.section(section)
    part.random_(0, 256, generator=generator) if fill is None else part.fill_(fill)
    made = [products.found(device, variant, None, packed) is not None for variant in WALKED]
    assert sum(made) >= len(WALKED) - 1  # x of units of 16 does not fit into shared memory


def test_what_the_emulator_finds(device: EmulatedDevice) -> None:
    """Memory that is not allowed, and less shared memory than the kernel takes."""
    products = Products(experts_of((3, 24, 1280)), 6, 2, 0)
    y = torch.empty(12, 24, dtype=torch.bfloat16)
    device.memory = [products.x, products.ids, y, products.packed.data[:-4096]]
    with pytest.raises(EmulationError, match="outside of global memory"):
        experts_product(products.x, products.packed, products.ids, None, y, 0)
    device.memory = []
    launch = launch_of(products.packed.header, 12, 2, 0, -1)
    assert launch
    (part,) = launch.parts
    object.__setattr__(launch, "parts", (part._replace(shared_bytes=part.shared_bytes - 2048),))
    with pytest.raises(EmulationError, match="shared memory"):
        experts_product(products.x, products.packed, products.ids, None, y, 0)
