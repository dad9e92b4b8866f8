"""Packed modules as modules: copies, pickles, state dicts, dtypes, assignment, gradients, compilation, threads."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.errors import DigestError, DtypeError, FormatError, InputError
from samebits.format.header import Section
from samebits.format.packed import PackedTensor
from samebits.nn import held, packed_module, recipe
from samebits.nn.lazy import LazyTensor, LazyWeight
from samebits.nn.packed_module import PackedModule, packed_class, packed_parameters, share_ties
from samebits.nn.stored import keeps_bytes
from tests.nn.modules import CASES, INPUT, MIN_WEIGHTS, TOKENS, make, same_bits, watch_decoding

NAMES = ["tied", "experts", "linear"]


def compressed(name: str):
    """A compressed module, how to call it, and what it gives."""
    module, call, _ = make(name)
    expected = call(module).detach()  # a graph holds weights, so that compress looks for other modules with them
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


WRITERS: dict[str, Callable[[nn.Module], bytes]] = {
    "pickle": pickle.dumps,
    "torch.save": lambda module: saved(module),
    "torch.save as it was once": lambda module: saved(module, _use_new_zipfile_serialization=False),
}


def saved(module: nn.Module, **options: Any) -> bytes:
    torch.save(module, file := io.BytesIO(), **options)
    return file.getvalue()


@pytest.mark.parametrize("section", ["offsets", "planes", "streams"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_damaged_pickle(writer: str, section: Section) -> None:
    """What was written and read is looked at before it is decoded, also of a copy."""
    module, call, _ = compressed("linear")
    content, stored = bytearray(WRITERS[writer](module)), module.sb_packed.numpy().tobytes()
    content[content.index(stored) + module.sb_recipes["weight"].pieces[0].header.sections[section].start] ^= 64
    other = pickle.loads(content) if writer == "pickle" else torch.load(io.BytesIO(content), weights_only=False)
    for damaged in (copy.deepcopy(other), copy.copy(other), other):
        with pytest.raises(
            DigestError, match=r"Linear\.weight: its packed bytes were changed, in a file .*; load it again"
        ):
            call(damaged)


def test_copies_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call, expected = compressed("linear")
    monkeypatch.setattr(PackedTensor, "from_data", None)
    for other in (copy.deepcopy(module), copy.copy(module)):
        assert same_bits(call(other), expected)


def test_a_new_module_of_that_class_is_plain() -> None:
    """As PEFT makes adapters of convolutions."""
    module = compressed("conv2d")[0]
    new = type(module)(8, 4, kernel_size=3, bias=False)
    assert type(new) is nn.Conv2d
    assert new.weight.shape == (4, 8, 3, 3)


def test_one_class_for_all_modules_of_a_kind() -> None:
    first, second = (compressed("linear")[0] for _ in range(2))
    assert type(first) is type(second) is packed_class(nn.Linear, ("weight",))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"embedding with max_norm"}))  # whose weights change
def test_state_dict_into_a_fresh_module(name: str, assign: bool, tmp_path: Path) -> None:
    """By way of a file that holds nothing but tensors; the module may have no memory yet."""
    module, call, expected = compressed(name)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = make(name)[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    if assign:
        other.to("meta")
    samebits.load_state_dict(other, state, assign=assign)
    assert list(other.state_dict()) == list(module.state_dict())
    assert [type(m) for m in other.modules()] == [type(m) for m in module.modules()]
    assert same_bits(call(other), expected)


def test_a_fresh_module_keeps_ties() -> None:
    for assign in (False, True):
        module, call, expected = compressed("tied")
        other = make("tied")[0]
        samebits.load_state_dict(other, module.state_dict(), assign=assign)
        assert other.head.sb_packed is other.embedding.sb_packed
        samebits.decompress(other)
        assert other.head.weight is other.embedding.weight
        assert same_bits(call(other), expected)


def test_bad_state_dicts_into_a_fresh_module() -> None:
    state = compressed("linear")[0].state_dict()
    fresh = make("linear")[0]
    expected = fresh(INPUT)
    with pytest.raises(FormatError, match=r"^sb_packed: "):
        samebits.load_state_dict(fresh, {**state, "sb_packed": state["sb_packed"][:-16]})
    with pytest.raises(DtypeError, match=r"^sb_packed: "):
        samebits.load_state_dict(fresh, {**state, "sb_packed": state["bias"]})
    with pytest.raises(FormatError, match=r"sb_packed: shape \[96, 64\] where the module has \[64, 96\]"):
        samebits.load_state_dict(nn.Linear(96, 64).to(torch.bfloat16), state)
    flipped = state["sb_packed"].clone()
    flipped[-100] ^= 8
    for load in (samebits.load_state_dict, nn.Module.load_state_dict):
        module = fresh if load is samebits.load_state_dict else compressed("linear")[0]
        with pytest.raises(DigestError, match=r"^sb_packed: the bytes differ from their digest"):
            load(module, {**state, "sb_packed": flipped})
        assert same_bits(module(INPUT), expected)
    assert type(fresh) is nn.Linear
    assert same_bits(fresh(INPUT), expected)
    with pytest.raises(RuntimeError, match="bias"):
        samebits.load_state_dict(fresh, {"sb_packed": state["sb_packed"]})
    with pytest.raises(RuntimeError, match="other"):
        samebits.load_state_dict(make("linear")[0], {**state, "other": state["bias"]})


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


def test_state_dicts_reach_whoever_shares_by_then() -> None:
    """Modules outside of the loaded one too, and those that came between two loads."""
    module, outside = make("linear")[0], nn.Linear(96, 64, bias=False).to(torch.bfloat16)
    states = []
    for scale in (1, 2, 3):
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.weight.mul_(torch.rand(len(other.weight), 1) * scale)
        states.append((other.weight.detach().clone(), other))
        samebits.compress(other, min_weights=MIN_WEIGHTS)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    for weight, other in states:
        module.load_state_dict(other.state_dict())
        assert torch.equal(module.weight.view(torch.int16), weight.view(torch.int16))
        if isinstance(outside, PackedModule):
            assert outside.sb_packed is module.sb_packed
            assert torch.equal(outside.weight.view(torch.int16), weight.view(torch.int16))
        else:
            outside.weight = module.weight
            share_ties(outside)


def test_who_shares_is_looked_for_once_in_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packed modules that there are would be looked at for each weight."""
    modules = [nn.Sequential(*(nn.Linear(64, 96) for _ in range(3))).to(torch.bfloat16) for _ in range(2)]
    for module in modules:
        samebits.compress(module)
    looked, look = [], held.loading._look
    monkeypatch.setattr(held.loading, "_look", lambda: (looked.append(1), look()))
    modules[0].load_state_dict(modules[1].state_dict())
    assert looked == [1]
    assert same_bits(modules[0][2].weight, modules[1][2].weight + 0)


def test_a_parameter_that_comes_while_a_state_dict_is_loaded() -> None:
    """Put there by a hook of another module's loading."""
    model = nn.Sequential(*(make("linear")[0] for _ in range(2)))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(torch.rand_like(parameter))
    expected = other[1].weight.detach().clone()
    for each in (model, other):
        samebits.compress(each, min_weights=MIN_WEIGHTS)

    def replace(module: nn.Module, *_: object) -> None:
        model[1]._parameters["sb_packed"] = nn.Parameter(model[1].sb_packed.clone(), requires_grad=False)

    model[1].register_load_state_dict_pre_hook(replace)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model[1].weight.view(torch.int16), expected.view(torch.int16))


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


def test_another_memory_format_is_refused() -> None:
    module, call, expected = compressed("conv2d")
    with pytest.raises(InputError, match=r"memory format.*before samebits\.compress"):
        module.to(memory_format=torch.channels_last)
    assert same_bits(call(module), expected)
    compressed("linear")[0].to(memory_format=torch.channels_last)  # it has no such weights


@pytest.mark.parametrize(
    ("layer", "own", "other"),
    [
        (nn.Conv2d(32, 64, 3), torch.channels_last, torch.contiguous_format),
        (nn.Conv3d(16, 32, 3), torch.contiguous_format, torch.channels_last_3d),
        (nn.Conv3d(16, 32, 3), torch.channels_last_3d, torch.contiguous_format),
    ],
)
def test_memory_formats(layer: nn.Module, own: torch.memory_format, other: torch.memory_format) -> None:
    module = copy.deepcopy(layer).to(torch.bfloat16).to(memory_format=own)
    expected = module.weight.detach().clone()
    assert samebits.compress(module).packed
    with pytest.raises(InputError, match="memory format"):
        module.to(memory_format=other)
    module.to(memory_format=own)
    assert module.weight.stride() == expected.stride()
    assert same_bits(module.weight.clone(), expected)


def test_memory_that_was_never_filled() -> None:
    """It is not decoded: its bytes may lead anywhere."""
    module, call, expected = compressed("linear")
    state = copy.deepcopy(module.state_dict())
    module.to_empty(device="cpu")
    module.sb_packed.data.fill_(255)  # which nobody counts
    with pytest.raises(DigestError, match="load it again"):
        call(module)
    module.load_state_dict(state)
    assert same_bits(call(module), expected)


@pytest.mark.parametrize("value", [0, 255])
def test_memory_that_was_never_filled_and_holds_one_value(value: int) -> None:
    """As what a system gives away: it is not taken for memory with the bytes that were there."""
    assert not keeps_bytes(lambda own: torch.full_like(own, value))
    assert keeps_bytes(torch.clone)


def test_memory_that_was_never_filled_and_holds_what_was_asked_before() -> None:
    """As torch hands memory out again that was just returned."""
    probes: list[torch.Tensor] = []

    def kept(own: torch.Tensor) -> torch.Tensor:
        probes.append(own.clone())
        return own

    assert keeps_bytes(kept)
    assert not keeps_bytes(lambda own: probes[0].clone())


def test_memory_is_known_where_it_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call, expected = compressed("linear")
    module._apply(torch.clone)
    monkeypatch.setattr("samebits.nn.stored._refuse_other_bytes", lambda *_: pytest.fail("looked at again"))
    assert same_bits(call(module), expected)


@pytest.mark.parametrize("kind", [torch.Tensor.clone, nn.Parameter])
def test_functional_call_with_another_weight_is_refused(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module, call, expected = compressed("linear")
    other = kind(torch.zeros(module.weight.shape, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"weight: torch\.func\.functional_call cannot"):
        torch.func.functional_call(module, {"weight": other}, INPUT)
    assert isinstance(module, PackedModule)
    assert same_bits(call(module), expected)
    own = dict(module.named_parameters())
    assert same_bits(torch.func.functional_call(module, own, INPUT), expected)


def test_state_with_gaps() -> None:
    module, call, expected = compressed("linear")
    state = copy.deepcopy(module.state_dict())
    state["sb_packed"] = torch.stack([state["sb_packed"]] * 2, 1)[:, 0]
    assert not state["sb_packed"].is_contiguous()
    module.load_state_dict(state, assign=True)
    assert same_bits(call(module), expected)


def test_a_new_weight_replaces_the_packed_one() -> None:
    module, _, _ = compressed("linear")
    weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.bfloat16))
    module.weight = weight
    assert type(module) is nn.Linear
    assert module.weight is weight
    assert list(module.state_dict()) == ["weight", "bias"]


def test_what_is_no_parameter_is_not_assigned() -> None:
    module, call, expected = compressed("linear")
    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'weight'"):
        module.weight = torch.zeros(96, 64)
    assert same_bits(call(module), expected)


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


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    return watch_decoding(monkeypatch)


TRAINED = ["tied", "experts", "attention", "encoder layer", "conv2d", "conv3d", "bare", "parent reads child", "linear"]


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str, decoded: list[weakref.ref[Any]]) -> None:
    """Those of the input and of what is not packed are the same, and autograd keeps no decoded weight until then."""
    plain, call, packed = make(name)
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    for full_name in packed:
        plain.get_parameter(full_name).requires_grad_(False)
    inputs: list[list[torch.Tensor]] = [[], []]
    for each, leaves in zip((plain, module), inputs, strict=True):
        each.register_forward_pre_hook(lambda _, args, leaves=leaves: _as_leaves(args, leaves))
    expected, result = call(plain), call(module)
    gc.collect()
    assert decoded
    assert [ref for ref in decoded if ref() is not None] == []
    count = len(decoded)
    for output in (expected, result):
        output.float().square().sum().backward()
    assert len(decoded) > count
    gradients = {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == {key for key, parameter in plain.named_parameters() if parameter.grad is not None}
    assert all(same_bits(gradient, plain.get_parameter(key).grad) for key, gradient in gradients.items())
    assert all(same_bits(first.grad, second.grad) for first, second in zip(*inputs, strict=True))


def _as_leaves(args: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Inputs of which a gradient is wanted; tokens are left alone."""
    args = tuple(arg.clone().requires_grad_() if arg.is_floating_point() else arg for arg in args)
    leaves += [arg for arg in args if arg.requires_grad]
    return args


@pytest.mark.parametrize("name", ["linear", "conv2d", "attention"])
def test_gradients_of_weights_that_were_written_to(name: str) -> None:
    """As torch refuses them of plain weights, though with as many bytes as before they would come out."""
    plain, call, packed = make(name)
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    for full_name in packed:
        plain.get_parameter(full_name).requires_grad_(False)
    for each, error in ((plain, RuntimeError), (module, InputError)):
        each.register_forward_pre_hook(lambda _, args: _as_leaves(args, []))
        output = call(each)
        each.load_state_dict(each.state_dict())
        with pytest.raises(error, match=r"inplace operation|written to between a forward pass and its backward pass"):
            output.float().sum().backward()


@pytest.mark.parametrize("name", ["linear", "conv2d", "attention"])
def test_bytes_whose_memory_was_freed(name: str) -> None:
    """As torch's fully_shard frees them behind a forward pass: a weight that was kept, and gradients, are refused."""
    module, call, _ = make(name)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    module._apply(torch.clone)  # to memory of torch's own
    module.register_forward_pre_hook(lambda _, args: _as_leaves(args, []))
    output = call(module)
    kept = [getattr(each, weight) for _, each, weight in packed_parameters(module)]
    assert kept
    for parameter in module.parameters():
        if parameter.dtype is torch.uint8:
            parameter.untyped_storage().resize_(0)
    for each in kept:
        with pytest.raises(InputError, match="memory was freed"):
            each.clone()
    with pytest.raises(InputError, match="memory was freed"):
        output.float().sum().backward()


def test_other_hooks_get_what_they_got() -> None:
    """Checkpointing and offloading take saved activations by hooks: inside packed modules too."""
    plain, call, packed = make("attention")
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    weights = {plain.get_parameter(full_name).requires_grad_(False).data_ptr() for full_name in packed}
    seen: list[list[tuple[int, ...]]] = [[], []]
    for each, shapes in zip((plain, module), seen, strict=True):

        def save(tensor: torch.Tensor, shapes: list[tuple[int, ...]] = shapes) -> torch.Tensor:
            if not isinstance(tensor, LazyTensor) and tensor.untyped_storage().data_ptr() not in weights:
                shapes.append(tuple(tensor.shape))
            return tensor

        each.register_forward_pre_hook(lambda _, args: _as_leaves(args, []))
        with saved_tensors_hooks(save, lambda tensor: tensor):
            call(each)
    assert seen[0]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients(reentrant: bool) -> None:
    plain, _, packed = make("encoder layer")
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    for full_name in packed:
        plain.get_parameter(full_name).requires_grad_(False)
    inputs = [INPUT.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((plain, module), inputs, strict=True):
        torch.manual_seed(0)  # for dropout
        checkpoint(each.train(), x, use_reentrant=reentrant).float().square().sum().backward()
    assert same_bits(inputs[0].grad, inputs[1].grad)
    assert same_bits(module.norm1.weight.grad, plain.norm1.weight.grad)


TRANSFORMS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "grad": lambda module: torch.func.grad(lambda x: module(x).float().square().sum())(INPUT),
    "vjp": lambda module: torch.func.vjp(module, INPUT)[1](torch.ones(2, 9, 96, dtype=torch.bfloat16))[0],
    "jvp": lambda module: torch.func.jvp(module, (INPUT,), (INPUT,))[1],
    "jacfwd": lambda module: torch.func.jacfwd(module)(INPUT[0, 0]),
    "jacrev": lambda module: torch.func.jacrev(module)(INPUT[0, 0]),
    "linearize": lambda module: torch.func.linearize(module, INPUT)[1](INPUT),
    "grad of each": lambda module: torch.vmap(torch.func.grad(lambda x: module(x).float().square().sum()))(INPUT),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("name", "shape"), [("linear", (2, 9, 64)), ("conv2d", (2, 8, 12, 6)), ("attention", (2, 9, 64))]
)
def test_transforms_where_no_gradients_are_recorded(
    name: str, shape: tuple[int, ...], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """There decoded weights have requires_grad, as parameters have."""
    plain, _, _ = make(name)
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=1)
    inputs = [INPUT.reshape(shape)] * (3 if name == "attention" else 1)

    def call(each: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        outputs = each(*inputs)
        return outputs[0] if name == "attention" else outputs

    for transform in (torch.vmap, lambda f: lambda *x: torch.func.jvp(f, x, x)[1]):
        with mode():
            outputs = [transform(partial(call, each))(*inputs) for each in (module, plain)]
        assert same_bits(*outputs)


def test_tangents_of_layers_whose_biases_are_trained() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)).to(torch.bfloat16)
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert same_bits(torch.func.jvp(module, (INPUT,), (INPUT,))[1], torch.func.jvp(plain, (INPUT,), (INPUT,))[1])
    assert same_bits(torch.func.jacfwd(module)(INPUT[0, 0]), torch.func.jacfwd(plain)(INPUT[0, 0]))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    plain, _, _ = make("linear")
    module = copy.deepcopy(plain)
    samebits.compress(module)
    assert same_bits(TRANSFORMS[name](module), TRANSFORMS[name](plain))


@pytest.mark.parametrize("name", ["tied", "linear"])
def test_compiled(name: str) -> None:
    """One graph, without a trace of how weights are kept."""
    module, call, expected = compressed(name)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same_bits(call(compiled), expected)


def test_a_part_of_a_tie_is_decompressed() -> None:
    """As errors about its weight say to do: who shares it goes on sharing it."""
    module, call, _ = make("tied")
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    samebits.decompress(module.embedding)
    assert module.head.weight is module.embedding.weight
    assert not isinstance(module.head, PackedModule)
    other = make("tied")[0]
    with torch.no_grad():
        for each in (module, other):
            each.embedding.weight.mul_(1.5)
    assert same_bits(call(module), call(other))


def test_compiling_to_torchscript_is_refused() -> None:
    module, call, expected = compressed("tied")
    for each in (module, module.head):
        with pytest.raises(InputError, match=r"jit\.script cannot compile a packed module; use torch\.export"):
            torch.jit.script(each)
    assert same_bits(call(module), expected)


@pytest.mark.parametrize("new", [nn.Parameter(torch.ones(4, 4)), None], ids=["parameter", "none"])
def test_registered_anew(new: nn.Parameter | None) -> None:
    """As assigning it: another parameter takes the weight's place."""
    module, call, expected = compressed("tied")
    module.head.register_parameter("weight", new)
    assert module.head.weight is new
    assert type(module.head) is nn.Linear
    assert isinstance(module.embedding, PackedModule)
    module.head.weight = module.embedding.weight
    assert same_bits(call(module), expected)


def test_a_tie_stays_where_one_who_shares_it_cannot_be_decompressed() -> None:
    module, call, expected = compressed("tied")
    module.head.register_parameter("scale", nn.Parameter(torch.ones(1)))
    register_parametrization(module.head, "scale", nn.Identity())
    with pytest.raises(InputError, match="undo that first"):
        samebits.decompress(module)
    assert module.head.sb_packed is module.embedding.sb_packed
    assert same_bits(call(module), expected)


def test_a_class_without_subclasses_is_left_as_it_is() -> None:
    class Registered(nn.Linear):
        def __init_subclass__(cls, *, tag: str) -> None:
            super().__init_subclass__()

    class Mine(Registered, tag="x"):
        pass

    module = Mine(64, 96).to(torch.bfloat16)
    tied = nn.Linear(64, 96, bias=False)
    tied.weight = module.weight
    expected = module(INPUT)
    report = samebits.compress(nn.ModuleList([tied, module]))
    assert "of whose class no subclass can be made" in report.raw["0.weight"]
    assert not report.packed
    assert type(module) is Mine
    assert list(module._parameters) == ["weight", "bias"]
    assert tied.weight is module.weight
    assert same_bits(module(INPUT), expected)


def test_a_class_that_is_excluded_makes_no_subclass() -> None:
    made: list[type] = []

    class Watched(nn.Linear):
        def __init_subclass__(cls) -> None:
            made.append(cls)
            raise RuntimeError("no")

    def model() -> nn.Module:
        return nn.ModuleList([Watched(64, 96), nn.Linear(64, 96)]).to(torch.bfloat16)

    assert samebits.compress(model(), exclude=["0.*"]).raw["0.weight"] == "not selected"
    assert not made
    assert samebits.compress(model()).raw["0.weight"].endswith("no subclass can be made (no)")
    assert made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_bytes_are_not_converted(dtype: torch.dtype) -> None:
    module, call, expected = compressed("linear")
    with pytest.raises(DtypeError, match="packed bytes"):
        module.type(dtype)
    assert same_bits(call(module), expected)


def test_threads() -> None:
    """One module used by several at once: none sees a dropped weight, and none is kept."""
    module, call, expected = compressed("tied")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: call(module), range(40)))
    assert all(same_bits(result, expected) for result in results)
    assert all(m.sb_decoded is None for m in module.modules() if isinstance(m, PackedModule))
    assert TOKENS.shape == expected.shape[:2]


def test_threads_have_decoded_weights_of_their_own() -> None:
    """Each decodes on a stream of its own, which no other waits for."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64).to(torch.bfloat16))

        def forward(self, is_first: bool) -> list[torch.Tensor]:
            read = [self.weight]
            both_have_read.wait(60)
            read.append(self.weight)
            if not is_first:  # and forward ends, while the other's goes on
                return read
            has_ended.wait(60)
            return [*read, self.weight]

    both_have_read, has_ended = Barrier(2), Barrier(2)
    module = Slow()
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(module, True), pool.submit(module, False)
        reads = [second.result(60), (has_ended.wait(60), first.result(60))[1]]
    assert [len(read) for read in reads] == [2, 3]
    assert all(tensor is read[0] for read in reads for tensor in read)
    assert reads[0][0] is not reads[1][0]
    assert not isinstance(reads[0][0], LazyTensor)


def test_an_interrupted_forward_leaves_nothing_decoded() -> None:
    """Wherever Python raises a KeyboardInterrupt: behind each call."""
    module, call, expected = compressed("attention")
    own = PackedModule.forward.__code__
    for number in itertools.count():
        returns = itertools.count()

        def interrupt(frame: Any, event: str, _: Any, number: int = number, returns: Any = returns) -> None:
            caller = {"c_return": frame, "return": frame.f_back}.get(event)
            if caller and caller.f_code is own and next(returns) == number:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            call(module)
            break
        except KeyboardInterrupt:
            assert packed_module._running.of_module == {}
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        finally:
            sys.setprofile(None)
    assert number > 8
    assert same_bits(call(module), expected)


def test_what_is_loaded_is_there_before_the_module_has_it() -> None:
    """Another thread may run it meanwhile: nothing decodes memory that is not filled."""
    module, call, expected = compressed("linear")
    other = copy.deepcopy(module)
    samebits.decompress(other)
    with torch.no_grad():
        other.get_parameter("weight").mul_(torch.rand(len(other.get_parameter("weight")), 1).to(torch.bfloat16))
    changed = call(other)
    samebits.compress(other, min_weights=MIN_WEIGHTS)
    assert not same_bits(changed, expected)
    for load in (lambda state: module.load_state_dict(state), lambda state: samebits.load_state_dict(module, state)):
        seen: list[torch.Tensor] = []
        hook = module._register_load_state_dict_pre_hook(lambda *_, seen=seen: seen.append(call(module)))
        load(other.state_dict())
        hook.remove()
        assert [same_bits(each, changed) for each in seen] == [True]
        samebits.decompress(module)


def test_a_forked_child_copies_a_module() -> None:
    """Though another thread was looking at all modules when it was forked."""
    module, _, _ = compressed("linear")
    with held.modules._lock:
        child = os.fork()
        if not child:
            copy.deepcopy(module)
            os._exit(0)
    end = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)


def test_threads_that_copy_and_look() -> None:
    """Who looks at all modules there are, as decompress does, is not disturbed by others that come meanwhile."""
    module = nn.Linear(64, 64).to(torch.bfloat16)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    copies: list[nn.Module] = []
    thread = Thread(target=lambda: copies.extend(copy.deepcopy(module) for _ in range(1000)))
    thread.start()
    while thread.is_alive():
        found = packed_module.sharers()
        assert sum(module in {owner for owner, _ in owners} for owners in found.values()) == 1
    thread.join()
    assert len(copies) == 1000


class CopiesItself(nn.Module):
    """In the way that many classes do, and torch's parametrized modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        made = self.__class__.__new__(self.__class__)
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def test_classes_that_copy_themselves() -> None:
    module = CopiesItself().to(torch.bfloat16)
    expected = module(INPUT)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    made = copy.deepcopy(module)
    assert type(made) is type(module)
    assert same_bits(made(INPUT), expected)
    fresh = type(module)()
    assert type(fresh) is CopiesItself
    samebits.decompress(made)
    assert same_bits(made(INPUT), expected)


class ReadsTwice(CopiesItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.w.norm()
        return x @ (self.w / scale)


def test_a_weight_that_is_read_with_and_without_gradients() -> None:
    module = ReadsTwice().to(torch.bfloat16)
    expected = module(INPUT)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert same_bits(module(INPUT), expected.detach())
    assert not module(INPUT).requires_grad


def test_a_shallow_copy_stays_what_it_is() -> None:
    """It has the same parameters in the same dict, until the module is packed."""
    module = nn.Linear(64, 64).to(torch.bfloat16)
    other, expected = copy.copy(module), module(INPUT)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert type(other) is nn.Linear
    assert same_bits(other(INPUT), expected)
    assert same_bits(module(INPUT), expected)


class CallsItself(CopiesItself):
    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        weight = self.w
        y = x @ weight
        if times:
            y = self(y, times - 1)
            assert self.w is weight
        return y @ self.w


def test_a_module_that_calls_itself() -> None:
    module = CallsItself().to(torch.bfloat16)
    expected = module(INPUT)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert same_bits(module(INPUT), expected)
    assert module.sb_decoded is None


def test_a_kind_that_is_registered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "_KINDS", [])
    monkeypatch.setattr(packed_module, "_CLASSES", {})

    class Kind(PackedModule):
        pass

    assert not issubclass(packed_class(CopiesItself, ("w",)), Kind)
    packed_module.register_kind(lambda base, names: base is CopiesItself, Kind)
    assert issubclass(packed_class(CopiesItself, ("w",)), Kind)


def test_packed_before_a_kind_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call, expected = compressed("experts")
    monkeypatch.setattr(packed_module, "_KINDS", list(packed_module._KINDS))
    monkeypatch.setattr(packed_module, "_CLASSES", dict(packed_module._CLASSES))
    packed_module.register_kind(lambda base, names: False, PackedModule)
    samebits.decompress(module)
    assert not isinstance(module, PackedModule)
    assert same_bits(call(module), expected)
