"""Stacks in pieces become one packed tensor; the GPU on which that is done is played by the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.errors import DigestError
from samebits.nn import join
from samebits.nn.join import join_stacks
from samebits.nn.packed_module import PackedModule, pack
from samebits.nn.recipe import Piece, Recipe
from tests.integrations.models import Reference, assert_same_checkpoint, compress_folder, make

EXPERTS, ROWS, COLUMNS = 3, 32, 128


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(EXPERTS, 2 * ROWS, COLUMNS).to(torch.bfloat16), False)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x @ self.weight[expert].T


@pytest.fixture(autouse=True)
def on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_are_on_one_gpu", lambda data: all(each.device.type == "cpu" for each in data))


def divide(module: Experts) -> torch.Tensor:
    """Pack a module's weight in pieces, one of them raw; returns what it was."""
    weight, pieces, data = module.weight.detach().clone(), [], []
    for expert in range(EXPERTS):
        for half in range(2):
            index = (expert, slice(half * ROWS, (half + 1) * ROWS))
            packed = samebits.encode(weight[index]) if expert or half else None
            pieces.append(Piece(f"sb_piece_weight_{len(pieces)}", packed and packed.header, index))
            data.append(packed.data if packed else weight[index].clone())
    pack(module, "weight", Recipe(tuple(weight.shape), tuple(pieces), requires_grad=False), data)
    return weight


def decompressed(module: nn.Module) -> torch.Tensor:
    samebits.decompress(module)
    return module.weight  # type: ignore[return-value]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def test_pieces_become_one_tensor() -> None:
    model = nn.Sequential(Experts(), nn.Linear(COLUMNS, COLUMNS))
    weight, x = divide(model[0]), torch.randn(2, COLUMNS).to(torch.bfloat16)
    expected = model[0](x, 1)
    assert join_stacks(model) == 1
    assert join_stacks(model) == 0
    packed: Any = model[0]
    assert len(packed._parameters) == 1
    assert packed.sb_recipes["weight"].whole.shape == tuple(weight.shape)
    assert not packed.weight.requires_grad
    assert same(decompressed(copy.deepcopy(model[0])), weight)
    assert same(model[0](x, 1), expected)


def test_shared_by_several_modules() -> None:
    first, second = Experts(), Experts()
    weight = divide(first)
    assert isinstance(first, PackedModule)
    recipe = first.sb_recipes["weight"]
    pack(second, "weight", recipe, [first._parameters[slot] for slot in recipe.slots])
    assert join_stacks(first) == 1
    [ours], [others] = first.parameters(), second.parameters()
    assert ours is others
    assert same(decompressed(second), weight)


@pytest.mark.parametrize("reason", ["elsewhere", "memory", "raw"])
def test_what_stays_in_pieces(reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Experts()
    if reason == "raw":
        model.weight.data = torch.randint(-(1 << 15), 1 << 15, model.weight.shape, dtype=torch.int16).view(
            torch.bfloat16
        )
    weight = divide(model)

    def fail(tensor: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if reason == "elsewhere":
        monkeypatch.setattr(join, "_are_on_one_gpu", lambda data: False)
    elif reason == "memory":
        monkeypatch.setattr(join, "encode", fail)
    assert join_stacks(model) == 0
    assert isinstance(model, PackedModule)
    assert len(model.sb_recipes["weight"].pieces) == 2 * EXPERTS
    assert ("stay packed one by one" in caplog.text) is (reason == "memory")
    assert same(decompressed(model), weight)


@pytest.fixture(params=["mixtral", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    return make(request.param, tmp_path / "plain")


def test_a_loaded_model(folder: Reference, tmp_path: Path) -> None:
    """As it was before, and saved as the folder was."""
    compressed = compress_folder(folder.folder, tmp_path / "compressed")
    model = folder.load(compressed)
    stacks = [recipe for module in model.modules() if isinstance(module, PackedModule)
              for recipe in module.sb_recipes.values() if len(recipe.shape) == 3]  # fmt: skip
    assert len(stacks) == 4
    assert all(recipe.whole for recipe in stacks)
    folder.assert_same(model)
    folder.assert_all_packed(model)
    model.save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", folder.folder)
    folder.assert_same(folder.load(tmp_path / "saved"))


def test_prepare_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that were captured before, and other threads, have the pieces."""
    model = Experts()
    divide(model)
    before = list(model.parameters())
    samebits.prepare(model)
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))


def test_state_dicts_of_the_other_kind() -> None:
    """Neither fits the other, and none is left out without a word."""
    pieces, whole = Experts(), Experts()
    divide(pieces), divide(whole)
    join_stacks(whole)
    for module, other in ((pieces, whole), (whole, pieces)):
        with pytest.raises(
            RuntimeError, match=r"weight is one packed tensor in one of both.*to a GPU or to main memory"
        ):
            module.load_state_dict(other.state_dict(), strict=False)


def test_what_was_joined_fits_pieces() -> None:
    """By samebits' own function, to which a damaged tensor does no harm."""
    pieces, whole = Experts(), Experts()
    divide(pieces)
    weight = divide(whole)
    join_stacks(whole)
    [(key, data)] = whole.state_dict().items()
    damaged = data.clone()
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(DigestError):
        samebits.load_state_dict(pieces, {key: damaged})
    assert isinstance(pieces, PackedModule)
    assert len(pieces.sb_recipes["weight"].pieces) == 2 * EXPERTS
    samebits.load_state_dict(pieces, whole.state_dict())
    assert pieces.sb_recipes["weight"].whole
    assert same(decompressed(pieces), weight)


@pytest.mark.parametrize("key", ["0", "1", "2"])
@pytest.mark.parametrize("assign", [False, True])
def test_what_was_joined_fits_shared_pieces(key: str, assign: bool) -> None:
    """Whichever of its names is there: of two modules that share them, one of which has two names."""
    first, second, whole = Experts(), Experts(), Experts()
    divide(first)
    assert isinstance(first, PackedModule)
    recipe = first.sb_recipes["weight"]
    pack(second, "weight", recipe, [first._parameters[slot] for slot in recipe.slots])
    weight = divide(whole)
    join_stacks(whole)
    model = nn.Sequential(first, second, second).to_empty(device="cpu")  # whose bytes are nobody's
    [(name, data)] = whole.state_dict().items()
    samebits.load_state_dict(model, {f"{key}.{name}": data}, strict=False, assign=assign)
    [ours], [others] = first.parameters(), second.parameters()
    assert ours is others
    assert same(decompressed(first), weight)
    assert same(decompressed(second), weight)


def test_a_class_that_became_another() -> None:
    first, second = Experts(), Experts()
    divide(first)
    assert isinstance(first, PackedModule)
    recipe = first.sb_recipes["weight"]
    pack(second, "weight", recipe, [first._parameters[slot] for slot in recipe.slots])
    second.__class__ = type("Other", (type(second),), {})
    assert join_stacks(nn.ModuleList([first, second])) == 0
    assert all(len(each.sb_recipes["weight"].pieces) == 2 * EXPERTS for each in (first, second))
