"""Modules larger than the memory they are given: the same bits, and no more bytes than allowed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.errors import InputError
from samebits.nn import offload as module
from samebits.nn import stored
from samebits.nn.offload import BUFFERS, Offloaded
from tests.nn.modules import MIN_WEIGHTS, Experts, same_bits
from tests.nn.test_streaming import LateLane

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


class Block(nn.Module):
    """Attention, experts with bare parameters, and a matrix that is not packed."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(64, 4, 128 if wide else 96, batch_first=True)
        self.experts = Experts()
        self.plain = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.experts(self.attention(x)) / 8)


class Model(nn.Module):
    """Blocks of two sizes, some with a matrix in common, and matrices around them."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(wide=number % 2 == 1) for number in range(blocks))
        self.blocks[0].attention.linear2.weight = self.blocks[2].attention.linear2.weight  # of two blocks
        self.blocks[1].attention.self_attn.out_proj.weight = self.blocks[1].plain.weight  # of one block, twice
        self.blocks[4].plain.weight = self.first.weight  # also outside
        self.blocks[5].plain = self.first  # a module that is outside too
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return Model().to(torch.bfloat16).eval()


@pytest.fixture
def model() -> nn.Module:
    model = make_model()
    samebits.compress(model, min_weights=MIN_WEIGHTS, exclude=["*.plain.*", "first.*", "*.out_proj.*"])
    return model


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    with torch.no_grad():
        return make_model()(X)


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def least(model: nn.Module) -> int:
    """The smallest gpu_memory, as the error says it."""
    with pytest.raises(InputError, match="needs") as caught:
        samebits.offload(model, 1, device="cpu")
    return int(caught.value.what.split("needs ")[1].split()[0].replace(",", ""))


def offload(model: nn.Module, gpu_memory: int | None = None) -> Offloaded:
    return samebits.offload(model, gpu_memory or least(model), device="cpu")


@pytest.mark.parametrize("packed", [True, False])
def test_same_bits_whatever_fits(packed: bool, expected: torch.Tensor) -> None:
    model = make_model()
    if packed:
        samebits.compress(model, min_weights=MIN_WEIGHTS)
    smallest, total = least(model), nbytes(model)
    streamed = []
    for budget in range(smallest, total + 1, (total - smallest) // 6):
        report = offload(model, budget)
        assert report.device_bytes <= budget
        assert report.resident_bytes + report.streamed_bytes == total
        for _ in range(2):
            with torch.no_grad():
                assert same_bits(model(X), expected)
        streamed.append(len(report.streamed))
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] == 7
    assert not offload(model, total).streamed


def test_copies_that_are_as_late_as_they_may(
    model: nn.Module, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = LateLane()
    monkeypatch.setattr(module, "lane_to", lambda device: lane)
    streamed = len(offload(model).streamed)
    with torch.no_grad():
        for number in range(3):
            assert same_bits(model(X), expected)
            assert lane.copies == BUFFERS + (number + 1) * streamed


def test_bytes_that_come_are_meant(model: nn.Module, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digests are not compared at every pass, which would read them all."""
    looked_at: list[str] = []
    monkeypatch.setattr(stored, "_refuse_other_bytes", lambda piece, data, where: looked_at.append(where))
    offload(model)
    with torch.no_grad():
        for _ in range(2):
            assert same_bits(model(X), expected)
    assert not looked_at
    model.blocks[0].attention.linear1.sb_packed.add_(0)
    with torch.no_grad():
        assert same_bits(model(X), expected)
    assert looked_at == ["Linear.weight"]


def test_what_lies_where(model: nn.Module) -> None:
    report = offload(model)
    staged = sum(len(buffer.memory) for buffer in buffers(model))
    assert (report.blocks, report.streamed) == (7, tuple(f"blocks.{number}" for number in range(7)))
    assert report.staging_bytes == staged
    assert "0 of 7 blocks stay on cpu" in str(report)


def buffers(model: nn.Module) -> list[Any]:
    return model.blocks[0].forward.streamer._buffers


def test_which_weights_are_streamed(model: nn.Module) -> None:
    """Matrices of one block alone, also those that are not packed."""
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}
    offload(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    moved = {name for name, parameter in after.items() if parameter.data_ptr() != before[name]}
    assert {"blocks.3.attention.self_attn.sb_bare_in_proj_weight", "blocks.3.plain.weight"} <= moved
    assert {"blocks.1.experts.sb_bare_up", "blocks.0.attention.linear1.sb_packed"} <= moved
    assert not {name for name in moved if "norm" in name or name.startswith("first") or name.endswith(".bias")}
    assert not {"blocks.0.attention.linear2.sb_packed", "blocks.2.attention.linear2.sb_packed"} & moved
    assert not {"blocks.4.plain.weight", "blocks.5.plain.weight"} & moved


def test_streamed_blocks_are_spread_evenly(model: nn.Module) -> None:
    report = offload(model, (least(model) + nbytes(model)) // 2)
    numbers = [int(name.split(".")[1]) for name in report.streamed]
    assert BUFFERS < len(numbers) < 7
    assert max(right - left for left, right in pairwise(numbers)) <= 2


def test_offloaded_again_with_more(model: nn.Module, expected: torch.Tensor) -> None:
    """What fits is an ordinary module."""
    keys = vars(model).keys()
    offload(model)
    assert not samebits.offload(model, "1GiB", device="cpu").streamed
    assert vars(model).keys() == keys
    assert "forward" not in vars(model.blocks[0])
    with torch.inference_mode():
        assert same_bits(copy.deepcopy(model)(X), expected)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("size", [1, "much"])
def test_offloaded_again_with_what_cannot_be(
    model: nn.Module, expected: torch.Tensor, size: int | str, wrapped: bool
) -> None:
    """It stays as it is, also inside of a module that is to be offloaded as a whole."""
    offload(model)
    state, forwards = model.sb_offloaded, [block.forward for block in model.blocks]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    outer = nn.Sequential(model) if wrapped else model
    with pytest.raises(InputError, match=r"gpu_memory is 1 bytes|'much' is no size"):
        samebits.offload(outer, size, device="cpu")
    assert model.sb_offloaded is state
    assert [block.forward for block in model.blocks] == forwards
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    with torch.no_grad():
        assert same_bits(outer(X), expected)
        offload(outer)
        assert same_bits(outer(X), expected)
    assert ("sb_offloaded" in vars(model)) is not wrapped


def test_gradients_are_dropped(model: nn.Module, expected: torch.Tensor) -> None:
    bias = model.blocks[0].attention.norm1.bias
    bias.requires_grad_().grad = torch.ones_like(bias)
    offload(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert same_bits(model(X), expected)


def test_onload_undoes_it(model: nn.Module, expected: torch.Tensor) -> None:
    model.hf_device_map = {"": "cpu"}
    keys = vars(model).keys() | vars(model.blocks[0]).keys()
    offload(model)
    assert model.hf_device_map != {"": "cpu"}
    with torch.no_grad():
        model(X)
    samebits.onload(model)
    samebits.onload(model)
    assert vars(model).keys() | vars(model.blocks[0]).keys() == keys
    assert model.hf_device_map == {"": "cpu"}
    with torch.no_grad():
        assert same_bits(copy.deepcopy(model).to("cpu")(X), expected)
        samebits.decompress(model)
        assert same_bits(model(X), expected)


def test_forward_that_was_an_attribute(model: nn.Module, expected: torch.Tensor) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return Block.forward(model.blocks[3], x)

    model.blocks[3].forward = forward
    offload(model)
    with torch.no_grad():
        assert same_bits(model(X), expected)
    samebits.onload(model)
    assert model.blocks[3].forward is forward


def test_state_dict_is_what_it_was(model: nn.Module, expected: torch.Tensor) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload(model)
    with torch.no_grad():
        model(X)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    fresh = make_model()
    samebits.load_state_dict(fresh, after)
    with torch.no_grad():
        assert same_bits(fresh(X), expected)


def test_loading_into_it(model: nn.Module, expected: torch.Tensor) -> None:
    """Values of weights that are not packed reach the device; packed ones of another length are refused."""
    offload(model)
    state = model.state_dict()
    other = {name: tensor.clone() for name, tensor in state.items()}
    other["blocks.0.plain.weight"].zero_()
    with torch.no_grad():
        assert same_bits(model(X), expected)
        model.load_state_dict(other)
        changed = make_model()
        changed.blocks[0].plain.weight.zero_()
        assert same_bits(model(X), changed(X))
        name = "blocks.3.attention.linear1.sb_packed"
        model.load_state_dict(state | {name: samebits.encode(torch.ones(128, 64, dtype=torch.bfloat16)).data})
        with pytest.raises(InputError, match=r"blocks\.3: streamed weights were moved or replaced.*onload"):
            model(X)
        samebits.onload(model)
        model(X)


def test_loading_packed_weights_where_plain_ones_are_streamed(expected: torch.Tensor) -> None:
    plain, packed = make_model(), make_model()
    samebits.compress(packed, min_weights=MIN_WEIGHTS)
    offload(plain)
    samebits.load_state_dict(plain, packed.state_dict())
    with torch.no_grad():
        with pytest.raises(InputError, match=r"streamed weights were moved or replaced.*onload"):
            plain(X)
        samebits.onload(plain)
        assert same_bits(plain(X), expected)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "moved": lambda model: model.to("meta"),
    "converted": lambda model: model.to(torch.float32),
    "of another memory format": lambda model: model.to(memory_format=torch.channels_last),
    "moved with more around it": lambda model: nn.Sequential(model).half(),
    "copied": copy.deepcopy,
    "copied in part": lambda model: copy.deepcopy(model.blocks[2]),
    "pickled": pickle.dumps,
    "compressed": samebits.compress,
    "decompressed": samebits.decompress,
    "decompressed in part": lambda model: samebits.decompress(model.blocks[1]),
    "offloaded in part": lambda model: samebits.offload(model.blocks, "1GiB"),
    "decompressed in a larger one": lambda model: samebits.decompress(nn.Sequential(model)),
}


@pytest.mark.parametrize("action", REFUSED.values(), ids=REFUSED)
def test_refused(model: nn.Module, action: Callable[[nn.Module], Any], expected: torch.Tensor) -> None:
    offload(model)
    with pytest.raises(InputError, match=r"offloaded.*samebits\.onload"):
        action(model)
    with torch.no_grad():
        assert same_bits(model(X), expected)


def test_moved_to_where_it_is(model: nn.Module, expected: torch.Tensor) -> None:
    offload(model)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert model.to("cpu") is model.bfloat16() is model
    nn.Sequential(model).to("cpu", torch.bfloat16)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    with torch.no_grad():
        assert same_bits(model(X), expected)


def test_gradients_are_refused(model: nn.Module, expected: torch.Tensor) -> None:
    offload(model)
    assert same_bits(model(X), expected)  # nothing has one
    with pytest.raises(InputError, match=r"blocks\.0: no gradient passes"):
        model(X.clone().requires_grad_())
    model.blocks[0].attention.norm1.weight.requires_grad_()
    with pytest.raises(InputError, match=r"blocks\.0: no gradient passes"):
        model(X)


def test_a_failing_block(model: nn.Module, expected: torch.Tensor) -> None:
    offload(model)
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            model(X[..., :7])
        with pytest.raises(RuntimeError):
            model.blocks[2](X[..., :7])
        assert same_bits(model(X), expected)


def test_threads(model: nn.Module, expected: torch.Tensor) -> None:
    offload(model)

    @torch.no_grad()
    def run(_: int) -> bool:
        return same_bits(model(X), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


def test_compiled_around_the_blocks(model: nn.Module, expected: torch.Tensor) -> None:
    offload(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert same_bits(compiled(X), expected)
        assert same_bits(compiled(X), expected)
    torch.compiler.reset()


def test_nothing_to_stream() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    assert offload(model, nbytes(model)).blocks == 0
    with pytest.raises(InputError, match=f"gpu_memory is 100 bytes, and this model needs {nbytes(model):,} at least"):
        offload(model, 100)


def test_lists_of_lists_and_of_leaves() -> None:
    """Entries that are lists are not called, and those without modules in them may be read from outside."""
    inner = [nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(2)) for _ in range(2)]
    model = nn.ModuleDict({"lists": nn.ModuleList(inner), "leaves": nn.ModuleList(nn.Linear(64, 64) for _ in range(9))})
    report = offload(model.to(torch.bfloat16))
    assert report.streamed == ("lists.0.0", "lists.0.1", "lists.1.0", "lists.1.1")


@pytest.mark.parametrize(("size", "message"), [("much", "'much' is no size"), ("1 KB", "gpu_memory is 1,000 bytes")])
def test_sizes(model: nn.Module, size: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        samebits.offload(model, size)


@pytest.mark.parametrize("memory", [None, True, 1.5, float("nan")], ids=str)
def test_memory_that_is_no_number_of_bytes(model: nn.Module, memory: Any) -> None:
    with pytest.raises(InputError, match=rf"gpu_memory is {memory}, which is no number of bytes; give a whole number"):
        samebits.offload(model, memory, device="cpu")


def test_weights_that_are_not_here(model: nn.Module) -> None:
    with pytest.raises(InputError, match="meta device"):
        offload(make_model().to("meta"), 1 << 30)
    with torch.inference_mode():
        made = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"weight: made in torch\.inference_mode"):
        offload(made, 1 << 30)
    model.hf_device_map = {"first": 0, "blocks": "cpu"}
    with pytest.raises(InputError, match="accelerate has placed"):
        offload(model, 1 << 30)
