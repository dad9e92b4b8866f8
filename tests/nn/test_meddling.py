"""What others do with packed modules and their bytes works, or is refused: never a wrong weight without a word."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samebits
from samebits.errors import DigestError, FormatError, InputError
from samebits.nn import stored
from samebits.nn.packed_module import PackedModule
from tests.nn.modules import INPUT, MIN_WEIGHTS, TOKENS, Tied, make, same_bits


def packed_linear() -> tuple[nn.Linear, torch.Tensor]:
    """A compressed layer, and what it gives for INPUT."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96).to(torch.bfloat16)
    expected = layer(INPUT)
    samebits.compress(layer)
    return layer, expected


# -- Bytes that are parameters --


@pytest.mark.parametrize("runs_between", [True, False])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_averaged_bytes_are_refused(decay: float, runs_between: bool) -> None:
    layer, expected = packed_linear()
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average.update_parameters(layer)
    if runs_between:
        assert same_bits(average(INPUT), expected)
    average.module.sb_packed.mul_(1)  # written, to no effect
    if runs_between:
        assert same_bits(average(INPUT), expected)
    average.update_parameters(layer)
    if decay != 0.9:  # only there are the bytes others than before
        assert average.module.sb_packed.equal(layer.sb_packed)
        assert same_bits(average(INPUT), expected)
    else:
        with pytest.raises(DigestError, match=r"^Linear\.weight: its packed bytes were changed.*samebits\.decompress"):
            average(INPUT)
    assert same_bits(layer(INPUT), expected)


@pytest.mark.parametrize("place", [0, 20, 40, 70, 1000, -1])
def test_a_byte_that_is_written_is_noticed(place: int) -> None:
    layer, _ = packed_linear()
    layer(INPUT)
    with torch.no_grad():
        layer.sb_packed[place] += 1
    for ask in (lambda: layer(INPUT), lambda: layer.weight + 0, lambda: samebits.decompress(layer)):
        with pytest.raises(DigestError, match=r"Linear\.weight: its packed bytes were changed"):
            ask()


def test_other_bytes_of_a_state_dict_are_meant() -> None:
    module, call, _ = make("tied")
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.head.weight.mul_(3)
        other.layers[0].weight.mul_(0.7)
    expected = call(other)
    for each in (module, other):
        samebits.compress(each, min_weights=MIN_WEIGHTS)
    call(module)
    module.load_state_dict(other.state_dict())
    assert module.head.sb_packed is module.embedding.sb_packed
    assert same_bits(call(module), expected)


def test_what_a_load_brought_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for any of those who share it."""
    module, call, _ = make("tied")
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    expected = call(module)
    module.load_state_dict(module.state_dict())
    monkeypatch.setattr(stored, "_refuse_other_bytes", lambda *_: pytest.fail("the bytes were read"))
    assert same_bits(call(module), expected)


@pytest.mark.parametrize("name", ["head", "embedding"])
def test_one_name_of_a_tie_is_loaded(name: str) -> None:
    """As safetensors' load_model does."""
    module, call, _ = make("tied")
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.head.weight.mul_(torch.rand(100, 1).to(torch.bfloat16))
    expected = call(other)
    for each in (module, other):
        samebits.compress(each, min_weights=MIN_WEIGHTS)
    call(module)
    state = other.state_dict()
    del state["embedding.sb_packed" if name == "head" else "head.sb_packed"]
    module.load_state_dict(state, strict=False)
    assert module.head.sb_packed is module.embedding.sb_packed
    assert module.head.sb_recipes["weight"].matrix == module.embedding.sb_recipes["weight"].matrix
    assert same_bits(call(module), expected)


def test_what_was_taken_before_other_bytes_came_stays() -> None:
    layer, _ = packed_linear()
    other = nn.Linear(64, 96).to(torch.bfloat16)
    with torch.no_grad():
        other.weight.mul_(torch.rand(96, 64).to(torch.bfloat16) ** 9)
    samebits.compress(other)
    x = INPUT.clone().requires_grad_()
    held, weight, y = layer.weight, layer.weight + 0, layer(x)
    layer.load_state_dict(other.state_dict())
    y.backward(torch.ones_like(y))
    assert same_bits(held + 0, weight)
    assert same_bits(x.grad, torch.ones_like(y) @ weight)
    assert same_bits(layer(INPUT), other(INPUT))


def test_another_packed_tensor_is_written_in_their_place() -> None:
    """Of the same form it is meant; another form would be decoded as this one."""
    layer, _ = packed_linear()
    layer(INPUT)
    negative = nn.functional.linear(INPUT, -(layer.weight + 0), layer.bias)
    layer.sb_packed.copy_(samebits.encode(-(layer.weight + 0)).data)
    assert same_bits(layer(INPUT), negative)
    other = samebits.encode((layer.weight + 0).reshape(48, 128)).data
    layer.sb_packed.data = torch.cat([other, other])[: layer.sb_packed.numel()]
    layer.sb_packed.mul_(1)
    with pytest.raises(DigestError, match="its packed bytes were changed"):
        layer(INPUT)


@pytest.mark.parametrize("other", [torch.zeros(10, dtype=torch.uint8), torch.zeros(9000), torch.zeros(0)])
def test_something_else_in_their_place(other: torch.Tensor) -> None:
    layer, _ = packed_linear()
    layer(INPUT)
    layer.sb_packed.data = other
    with pytest.raises(
        DigestError, match=rf"Linear\.weight: \[{other.numel()}\] of {other.dtype} in the place of \d+ packed"
    ):
        layer(INPUT)


@pytest.mark.parametrize(
    "change", [lambda data: data.float(), lambda data: data.view(torch.int8), lambda data: data.repeat(2)[::2]]
)
def test_as_many_numbers_in_their_place(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As who converts a model by ``parameter.data = parameter.data.float()`` puts there; torch does not count that."""
    layer, _ = packed_linear()
    layer(INPUT)
    for parameter in layer.parameters():
        parameter.data = change(parameter.data) if parameter.dtype == torch.uint8 else parameter.data
    with pytest.raises(DigestError, match=r"in the place of \d+ packed"):
        layer(INPUT)


ASK = {
    "functional_call": lambda layer, state, _: functional_call(layer, state, (INPUT,)),
    "state dict": lambda layer, _, other: functional_call(layer, other.state_dict(), (INPUT,)),
    "assigned": lambda layer, state, _: (setattr(layer, "sb_packed", state["sb_packed"]), layer(INPUT)),
}


def two_of_a_length() -> tuple[nn.Linear, nn.Linear]:
    """Compressed layers with as many packed bytes, which decode with other tables."""
    layers = []
    for seed in range(1, 9):
        torch.manual_seed(seed)
        layers.append(nn.Linear(64, 96).to(torch.bfloat16))
        samebits.compress(layers[-1])
    headers = [each.sb_recipes["weight"].pieces[0].header for each in layers]
    here, there = next(
        (here, there)
        for here, there in itertools.combinations(range(8), 2)
        if headers[here].nbytes == headers[there].nbytes and not headers[here].has_form_of(headers[there])
    )
    return layers[here], layers[there]


@pytest.mark.parametrize("ask", ASK)
def test_as_many_packed_bytes_of_another_layer(ask: str) -> None:
    layer, other = two_of_a_length()
    assert same_bits(functional_call(layer, dict(layer.named_parameters()), (INPUT,)), layer(INPUT))
    with pytest.raises(InputError, match=r"^Linear\.weight: packed bytes of other modules.*samebits\.decompress"):
        ASK[ask](layer, dict(other.named_parameters()), other)


def test_bytes_for_one_call() -> None:
    """Others may be where they were, with the same id."""
    layer, other = two_of_a_length()
    expected = layer(INPUT)
    for _ in range(20):
        assert same_bits(functional_call(layer, {"sb_packed": layer.sb_packed.detach().clone()}, (INPUT,)), expected)
        with pytest.raises(InputError, match="packed bytes of other modules"):
            functional_call(layer, {"sb_packed": other.sb_packed.detach().clone()}, (INPUT,))


def test_bytes_in_two_dimensions_are_refused() -> None:
    layer, _ = packed_linear()
    with pytest.raises(DigestError, match=r"in the place of \d+ packed bytes; load it again"):
        functional_call(layer, {"sb_packed": layer.sb_packed.view(1, -1)}, (INPUT,))


def test_gradients_of_a_functional_call_that_is_the_first() -> None:
    layer, _ = packed_linear()
    bytes_, bias = layer.sb_packed.detach().clone(), layer.bias.detach()

    def total(bias: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, {"sb_packed": bytes_, "bias": bias}, (INPUT,)).float().sum()

    expected = torch.full_like(bias, INPUT.numel() // INPUT.shape[-1])
    assert same_bits(torch.func.grad(total)(bias), expected)


def test_fake_tensors() -> None:
    layer, expected = packed_linear()
    bytes_ = layer.sb_packed.detach()
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = functional_call(layer, {"sb_packed": bytes_}, (torch.empty(INPUT.shape).bfloat16(),))
    assert found.shape == expected.shape


def test_stacked_modules_are_refused() -> None:
    """torch.vmap would decode all of them as the first."""
    layer, _ = packed_linear()
    parameters, buffers = stack_module_state([layer, copy.deepcopy(layer)])
    with pytest.raises(InputError, match=r"^Linear\.weight: packed bytes of other modules.*samebits\.decompress"):
        torch.vmap(lambda *state: functional_call(layer, state, (INPUT,)))(parameters, buffers)


def test_a_packed_weight_is_encoded_again() -> None:
    layer, _ = packed_linear()
    assert torch.equal(samebits.encode(layer.weight).data, layer.sb_packed)
    assert not layer.weight.is_shared()


def test_pruning_is_refused() -> None:
    """It would keep the weight under another name, and compute it anew at each call."""
    layer, expected = packed_linear()
    names = [name for name, _ in layer.named_parameters()]
    with pytest.raises(InputError, match=r"^Linear\.weight_orig: a packed weight .*samebits\.decompress"):
        prune.l1_unstructured(layer, "weight", amount=0.3)
    assert [name for name, _ in layer.named_parameters()] == names
    assert same_bits(layer(INPUT), expected)
    samebits.decompress(layer)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert samebits.compress(layer).packed.keys() == {"weight_orig"}
    assert (layer.weight == 0).sum() == layer.weight.numel() // 2


# -- Weights that change while their module runs --


class Codebook(nn.Module):
    """Keeps an average of what it sees in its own weight, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter((torch.randn(96, 64) / 8).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.code.mul_(0.5)
        return x @ self.code.T


def test_a_forward_that_writes_to_its_weight() -> None:
    module = Codebook().eval()
    expected = module(INPUT)
    samebits.compress(module)
    assert same_bits(module(INPUT), expected)
    module.train()
    with pytest.raises(InputError, match=r"^Codebook\.code: its forward writes to this weight.*samebits\.decompress"):
        module(INPUT)
    assert same_bits(module.eval()(INPUT), expected)


class Assigns(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return super().forward(x)


@pytest.mark.parametrize("kind", [lambda: Codebook(), lambda: Assigns(64, 96)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_that_writes_to_its_weight_in_any_mode(
    kind: Callable[[], nn.Module], mode: Callable[[], AbstractContextManager[None]], trained: bool
) -> None:
    module = kind().to(torch.bfloat16).requires_grad_(trained)
    samebits.compress(module)
    with mode(), pytest.raises(InputError, match="its forward writes to this weight"):
        module(INPUT)


def test_a_packed_state_dict_for_weights_that_change() -> None:
    plain, packed = nn.Embedding(200, 64, max_norm=1.0), nn.Embedding(200, 64)
    packed.weight = plain.weight
    plain, packed = plain.to(torch.bfloat16), copy.deepcopy(packed).to(torch.bfloat16)
    samebits.compress(packed)
    for assign in (False, True):
        other = nn.Embedding(200, 64, max_norm=1.0, dtype=torch.bfloat16, device="meta" if assign else None)
        samebits.load_state_dict(other, packed.state_dict(), assign=assign)
        assert type(other) is nn.Embedding
        assert same_bits(other(torch.arange(200)), copy.deepcopy(plain)(torch.arange(200)))


class Versioned(nn.Module):
    """Loads what an earlier version of it has saved otherwise."""

    _version = 3
    loaded: object = None

    def _load_from_state_dict(self, state: object, prefix: str, metadata: dict[str, object], *_: object) -> None:
        self.loaded = metadata.get("version")


def test_a_packed_state_dict_says_by_which_versions_it_was_saved() -> None:
    packed = nn.Sequential(nn.Embedding(200, 64), Versioned()).to(torch.bfloat16)
    samebits.compress(packed)
    other = nn.Sequential(nn.Embedding(200, 64, max_norm=1.0, dtype=torch.bfloat16), Versioned())
    samebits.load_state_dict(other, packed.state_dict())
    assert other[1].loaded == 3


def test_a_packed_state_dict_with_buffers() -> None:
    """Files are packed without a look at the model: `samebits compress` knows no buffers."""
    module = nn.BatchNorm1d(8192).to(torch.bfloat16).eval()
    module.running_mean.copy_(torch.randn(8192))
    state = module.state_dict()
    for name in ("running_mean", "weight"):
        state[f"sb_bare_{name}" if name != "weight" else "sb_packed"] = samebits.encode(state.pop(name)).data
    other = nn.BatchNorm1d(8192).to(torch.bfloat16).eval()
    samebits.load_state_dict(other, state)
    x = torch.randn(2, 8192).to(torch.bfloat16)
    assert same_bits(other(x), module(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["embedding", "head"])
def test_a_packed_state_dict_with_one_name_of_a_tie(name: str, assign: bool) -> None:
    """As safetensors' save_model writes it."""
    first = Tied().to(torch.bfloat16)
    second, expected = copy.deepcopy(first), first(TOKENS)
    second.embedding.weight.data.mul_(2)
    samebits.compress(first, min_weights=MIN_WEIGHTS)
    state = {key: value for key, value in first.state_dict().items() if key == f"{name}.sb_packed"}
    assert len(state) == 1
    samebits.load_state_dict(second, state, strict=False, assign=assign)
    assert second.embedding.sb_packed is second.head.sb_packed
    assert same_bits(second(TOKENS), expected)


def test_nothing_of_a_damaged_state_dict_is_loaded() -> None:
    """Into a module that is packed already, too."""
    module = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(torch.bfloat16)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.mul_(3)
    for each in (module, other):
        samebits.compress(each, min_weights=MIN_WEIGHTS)
    state, expected = other.state_dict(), module(INPUT)
    state["1.sb_packed"] = state["1.sb_packed"].clone()
    state["1.sb_packed"][-1] ^= 1
    with pytest.raises((DigestError, FormatError), match=r"1\.sb_packed"):
        samebits.load_state_dict(module, state)
    assert same_bits(module(INPUT), expected)


def test_a_packed_state_dict_for_a_module_of_another_dtype() -> None:
    """torch converts what it copies."""
    packed, plain = nn.Linear(64, 64).to(torch.bfloat16), nn.Linear(64, 64)
    state = packed.state_dict()
    plain.load_state_dict(state)
    samebits.compress(packed, min_weights=MIN_WEIGHTS)
    other = nn.Linear(64, 64)
    samebits.load_state_dict(other, packed.state_dict())
    assert isinstance(other, PackedModule)
    x = torch.randn(3, 64)
    assert torch.equal(other(x).view(torch.int32), plain(x).view(torch.int32))


# -- Methods that are kept, classes that are changed --


@pytest.mark.parametrize("undo", ["decompress", "assign"])
@pytest.mark.parametrize("name", ["linear", "experts"])
def test_decompressed_under_a_hook(name: str, undo: str) -> None:
    module, call, expected_names = make(name)
    expected = call(module)
    plain = copy.deepcopy(module)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    add_hook_to_module(module, ModelHook())
    assert same_bits(call(module), expected)
    if undo == "decompress":
        samebits.decompress(module)
    else:
        for weight in expected_names:
            setattr(module, weight, getattr(plain, weight))
    assert not isinstance(module, PackedModule)
    assert same_bits(call(module), expected)


def test_a_parametrization_of_another_parameter() -> None:
    layer, expected = packed_linear()
    register_parametrization(layer, "bias", nn.Identity())
    assert same_bits(layer(INPUT), expected)
    for change in (samebits.decompress, lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(96, 64)))):
        with pytest.raises(InputError, match="class of a packed Linear has become ParametrizedPackedLinear; undo that"):
            change(layer)
    assert same_bits(layer(INPUT), expected)


def test_data_parallel_is_refused() -> None:
    layer, expected = packed_linear()
    with pytest.raises(
        InputError, match=r"torch\.nn\.DataParallel cannot copy packed weights; .*DistributedDataParallel"
    ):
        layer._replicate_for_data_parallel()
    assert same_bits(layer(INPUT), expected)


class WithALock(nn.Linear):
    """Can be copied because it says how."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


def test_a_copy_of_a_class_that_says_how() -> None:
    module = WithALock(64, 96).to(torch.bfloat16)
    expected = module(INPUT)
    samebits.compress(module)
    other = copy.deepcopy(module)
    assert other.lock is not module.lock
    assert same_bits(other(INPUT), expected)


@pytest.mark.parametrize("take", [lambda p: p.pop("a"), lambda p: p.__delitem__("a"), lambda p: p.clear()])
def test_taken_out_of_a_dict(take: Callable[[nn.ParameterDict], object]) -> None:
    weight = (torch.randn(96, 64) / 8).to(torch.bfloat16)
    module = nn.ParameterDict({"a": nn.Parameter(weight), "b": nn.Parameter(weight + 1)})
    samebits.compress(module)
    taken = take(module)
    assert taken is None or same_bits(taken + 0, weight)
    assert "a" not in module
    assert not any(name.endswith("_a") for name in module.state_dict())


def test_assigned_to_a_plain_module_then_compressed_or_not() -> None:
    """torch takes the packed weight for a parameter."""
    for finish in (samebits.compress, samebits.decompress):
        module, call, _ = make("tied")
        expected = call(module)
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        samebits.compress(module.embedding)
        module.head.weight = module.embedding.weight
        finish(module)
        if finish is samebits.compress:
            assert module.head.sb_packed is module.embedding.sb_packed
        else:
            assert type(module.head.weight) is nn.Parameter
            assert module.head.weight is module.embedding.weight
        assert same_bits(call(module), expected)


# -- Tensors of other layouts --


class SparseProduct(nn.Module):
    """A graph layer: a sparse matrix times what a packed weight gives."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter((torch.randn(64, 96) / 8).to(torch.bfloat16))
        self.b = nn.Parameter(torch.randn(96, dtype=torch.bfloat16))

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency.float(), (x @ self.w + self.b).float())


def test_sparse_tensors_beside_a_packed_weight() -> None:
    module = SparseProduct()
    plain = copy.deepcopy(module)
    plain.w.requires_grad_(False)
    samebits.compress(module)
    adjacency, x = torch.eye(7).to_sparse().to(torch.bfloat16), INPUT.reshape(-1, 64)[:7]
    results = [each(adjacency, x) for each in (module, plain)]
    assert torch.equal(*(result.view(torch.int32) for result in results))
    for result in results:
        result.sum().backward()
    assert same_bits(module.b.grad, plain.b.grad)


def test_what_accelerate_places_anew_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each pass, on a GPU, that would wait for all that goes before."""
    layer, expected = packed_linear()
    dispatched = cpu_offload(layer, execution_device=torch.device("cpu"))
    monkeypatch.setattr(stored, "_has_form", lambda *_: pytest.fail("bytes are read"))
    for _ in range(2):
        assert same_bits(dispatched(INPUT), expected)


@pytest.mark.parametrize("write", ["of the parameter", "into its memory"])
def test_packed_bytes_of_another_form_of_which_nobody_was_told(write: str) -> None:
    """Of as many bytes, through ``.data``: a decoder would go by the header of the others, and may read anywhere."""
    errors = []
    for seed in range(40):
        torch.manual_seed(seed)
        first, second = (nn.Linear(64, 128, bias=False, dtype=torch.bfloat16) for _ in range(2))
        samebits.compress(first, min_weights=1)
        samebits.compress(second, min_weights=1)
        own, other = first.get_parameter("sb_packed"), second.get_parameter("sb_packed")
        if own.shape != other.shape:
            continue
        if write == "of the parameter":
            own.data = other.data
        else:
            own.data.copy_(other.data)
        try:
            found = first.weight.clone()
        except DigestError as error:
            errors.append(str(error))
        else:
            assert same_bits(found, second.weight.clone())
            assert same_bits(first(INPUT), second(INPUT))
    assert errors
    assert all("packed bytes are others than they were" in error for error in errors)
