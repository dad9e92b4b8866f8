"""Packed modules as modules: copies, pickles, state dicts, dtypes, assignment, gradients, compilation, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import samebits
from samebits.errors import DtypeError, FormatError
from samebits.nn import recipe
from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import PackedModule, packed_class, share_ties
from tests.nn.modules import INPUT, MIN_WEIGHTS, TOKENS, make, same_bits

NAMES = ["tied", "experts", "linear"]


def compressed(name: str):
    """A compressed module, how to call it, and what it gives."""
    module, call, _ = make(name)
    expected = call(module)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    return module, call, expected


@pytest.mark.parametrize("name", NAMES)
def test_copies(name: str, tmp_path: Path) -> None:
    module, call, expected = compressed(name)
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, copy.copy(module)):
        assert type(other) is type(module)
        assert same_bits(call(other), expected)


def test_a_copy_keeps_ties_and_shares_nothing_else() -> None:
    module, call, expected = compressed("tied")
    other = copy.deepcopy(module)
    assert other.head.sb_packed is other.embedding.sb_packed
    assert other.head.sb_packed is not module.head.sb_packed
    samebits.decompress(other)
    assert isinstance(module.head, PackedModule)
    assert same_bits(call(module), expected)


def test_one_class_for_all_modules_of_a_kind() -> None:
    first, second = (compressed("linear")[0] for _ in range(2))
    assert type(first) is type(second) is packed_class(nn.Linear, ("weight",))


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_into_another_module(name: str) -> None:
    """Other bytes mean other headers and lengths."""
    module, call, expected = compressed(name)
    torch.manual_seed(9)
    other = copy.deepcopy(make(name)[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(torch.rand_like(parameter))
    samebits.compress(other, min_weights=MIN_WEIGHTS)
    assert not same_bits(call(other), expected)
    other.load_state_dict(module.state_dict())
    assert same_bits(call(other), expected)


def test_state_dict_of_itself_keeps_ties() -> None:
    module, call, expected = compressed("tied")
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert module.head.sb_packed is module.embedding.sb_packed
    assert same_bits(call(module), expected)


def test_bad_state_dicts() -> None:
    module, call, expected = compressed("linear")
    state = copy.deepcopy(module.state_dict())
    damaged = {**state, "sb_packed": state["sb_packed"][:-16]}
    with pytest.raises(FormatError):
        module.load_state_dict(damaged)
    other = nn.Linear(96, 64).to(torch.bfloat16)
    samebits.compress(other)
    with pytest.raises(FormatError, match=r"sb_packed: shape \[64, 96\] where the module has \[96, 64\]"):
        module.load_state_dict(other.state_dict())
    assert same_bits(call(module), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_another_dtype_is_refused(dtype: torch.dtype) -> None:
    module, call, expected = compressed("tied")
    with pytest.raises(DtypeError, match=f"cannot become {dtype}"):
        module.to(dtype)
    assert same_bits(call(module), expected)
    module.to(torch.bfloat16).to("cpu")
    assert same_bits(call(module), expected)


def test_a_new_weight_replaces_the_packed_one() -> None:
    module, _, _ = compressed("linear")
    weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.bfloat16))
    module.weight = weight
    assert type(module) is nn.Linear
    assert module.weight is weight
    assert list(module.state_dict()) == ["weight", "bias"]


def test_a_new_weight_beside_another_packed_one() -> None:
    module, call, _ = compressed("experts")
    module.up = nn.Parameter(torch.zeros_like(module.up))
    assert {name for name, _ in module.named_parameters()} == {"up", "up_bias", "sb_bare_down"}
    assert not isinstance(module.up, LazyWeight)
    assert isinstance(module.down, LazyWeight)
    assert call(module).shape == INPUT.shape


def test_assigning_a_packed_weight_ties() -> None:
    first, second = (compressed("linear")[0] for _ in range(2))
    second.weight = first.weight
    assert second.sb_packed is first.sb_packed
    plain = nn.Linear(64, 96).to(torch.bfloat16)
    plain.weight = first.weight
    share_ties(plain)
    assert plain.sb_packed is first.sb_packed
    plain.bias = first.bias
    assert same_bits(plain(INPUT), first(INPUT))


def test_decoded_once_for_each_forward_and_then_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call, _ = compressed("experts")
    alive: list[weakref.ref[torch.Tensor]] = []
    decode = recipe.Recipe.decode

    def watched(weight: recipe.Recipe, data: list[torch.Tensor]) -> torch.Tensor:
        decoded = decode(weight, data)
        alive.append(weakref.ref(decoded))
        return decoded

    monkeypatch.setattr(recipe.Recipe, "decode", watched)
    gc.disable()
    try:
        with torch.no_grad():
            call(module)
        assert len(alive) == 2
        assert [ref() for ref in alive] == [None, None]
        with pytest.raises(RuntimeError):
            module(INPUT[..., :5])
        assert [ref for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["tied", "experts", "attention", "conv2d"])
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of everything that is not packed are the same, and autograd keeps no decoded weight until then."""
    plain, call, _ = make(name)
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    alive: list[weakref.ref[torch.Tensor]] = []
    decode = recipe.Recipe.decode

    def watched(weight: recipe.Recipe, data: list[torch.Tensor]) -> torch.Tensor:
        decoded = decode(weight, data)
        alive.append(weakref.ref(decoded))
        return decoded

    monkeypatch.setattr(recipe.Recipe, "decode", watched)
    output = call(module)
    gc.collect()
    assert alive
    assert [ref for ref in alive if ref() is not None] == []
    output.float().square().sum().backward()
    call(plain).float().square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
    assert gradients
    for key, gradient in gradients.items():
        assert same_bits(gradient, plain.get_parameter(key).grad)


@pytest.mark.parametrize("name", ["tied", "linear"])
def test_compiled(name: str) -> None:
    """One graph, without a trace of how weights are kept."""
    module, call, expected = compressed(name)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same_bits(call(compiled), expected)


def test_threads() -> None:
    """One module used by several at once: none sees a dropped weight, and none is kept."""
    module, call, expected = compressed("tied")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: call(module), range(40)))
    assert all(same_bits(result, expected) for result in results)
    assert all(m.sb_decoded is None for m in module.modules() if isinstance(m, PackedModule))
    assert TOKENS.shape == expected.shape[:2]
