"""samebits.compress and samebits.decompress on torch modules of all kinds."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import samebits
from samebits import bf16
from samebits.bf16 import is_bf16
from samebits.errors import DeviceError, DtypeError, InputError
from samebits.nn import convert, spared
from samebits.nn.packed_linear import PackedLinearModule
from samebits.nn.packed_module import PackedModule, packed_parameters
from tests.nn.modules import CASES, INPUT, MIN_WEIGHTS, Tied, make, same_bits

MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_stay_the_same(name: str, mode: type[AbstractContextManager[None]]) -> None:
    plain, call, expected = make(name)
    module = copy.deepcopy(plain)
    report = samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert {full_name for full_name, _, _ in packed_parameters(module)} == expected
    assert report.packed.keys() <= expected
    with mode():
        assert same_bits(call(module), call(plain))


@pytest.mark.parametrize("name", CASES)
def test_decompress_undoes_it(name: str) -> None:
    plain, call, _ = make(name)
    module = copy.deepcopy(plain)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    samebits.decompress(module)
    assert [type(m) for m in module.modules()] == [type(m) for m in plain.modules()]
    assert list(module.state_dict()) == list(plain.state_dict())  # their order too
    assert all(same_bits(module.state_dict()[key], value) for key, value in plain.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert same_bits(call(module), call(plain))


def test_the_class_stays_a_subclass() -> None:
    module, _, _ = make("linear")
    samebits.compress(module)
    assert isinstance(module, nn.Linear)
    assert isinstance(module, PackedModule)
    assert repr(module) == "PackedLinear(in_features=64, out_features=96, bias=True)"
    assert list(module.state_dict()) == ["sb_packed", "bias"]


def test_tied_weights_are_packed_once() -> None:
    module, _, _ = make("tied")
    report = samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert module.head.sb_packed is module.embedding.sb_packed
    assert "embedding.weight" in report.packed
    assert "head.weight" not in report.packed
    samebits.decompress(module)
    assert module.head.weight is module.embedding.weight


@pytest.mark.parametrize("name", ["head", "embedding"])
def test_a_tie_is_selected_by_any_name_and_excluded_by_any(name: str) -> None:
    """What is shared stays shared: packed for one owner alone, it would take memory twice, and not learn together."""
    module, call, _ = make("tied")
    expected = call(module)
    report = samebits.compress(module, min_weights=MIN_WEIGHTS, exclude=[f"{name}.*"])
    assert report.raw["embedding.weight"] == "not selected"
    assert module.head.weight is module.embedding.weight
    samebits.compress(module, min_weights=MIN_WEIGHTS, include=iter([f"{name}.*"]))  # type: ignore[arg-type]
    assert module.head.sb_packed is module.embedding.sb_packed
    assert same_bits(call(module), expected)


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_a_tie_to_a_module_outside_stays(part: str) -> None:
    """As what is shared with it could not be packed for both."""
    module, call, _ = make("tied")
    module.other = nn.Linear(64, 64).to(torch.bfloat16)
    expected = call(module)
    parts = nn.ModuleList([module.get_submodule(part), module.other])
    for _ in range(2):
        report = samebits.compress(parts, min_weights=MIN_WEIGHTS)
        assert report.raw["0.weight"] == "tied to a weight of a module outside"
        assert report.packed.keys() == {"1.weight"}
        assert module.head.weight is module.embedding.weight
        assert same_bits(call(module), expected)
    samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert module.head.sb_packed is module.embedding.sb_packed
    samebits.decompress(module.embedding)
    assert samebits.compress(module.head).raw == {"weight": "tied to a weight of a module outside"}
    assert module.head.weight is module.embedding.weight
    assert same_bits(call(module), expected)


def test_who_else_has_a_weight_may_not_be_a_module() -> None:
    """Lists, optimizers, a second name in one module, and modules that are gone keep nothing plain."""
    module, call, _ = make("tied")
    expected = call(module)
    module.head.register_parameter("again", module.head.weight)
    gone = nn.Linear(64, 200, bias=False)
    gone.weight, gone.itself = module.head.weight, gone.forward  # a cycle
    del gone
    held = [list(module.parameters()), torch.optim.SGD(module.parameters()), module.state_dict(keep_vars=True)]
    report = samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert "embedding.weight" in report.packed
    assert module.head.sb_packed is module.embedding.sb_packed
    assert same_bits(call(module), expected)
    assert held


def test_what_only_stood_for_a_module_that_is_gone() -> None:
    """isinstance asks a proxy what it stands for."""
    module, gone = make("tied")[0], nn.Linear(1, 1)
    proxy = weakref.proxy(gone)
    del gone
    assert samebits.compress(module.embedding).raw == {"weight": "tied to a weight of a module outside"}
    assert proxy is not None


def test_all_objects_are_looked_at_only_where_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [make(name)[0] for name in CASES]
    monkeypatch.setattr(convert.gc, "get_objects", lambda: pytest.fail("they were"))
    assert sum(len(samebits.compress(module, min_weights=MIN_WEIGHTS).packed) for module in modules) > len(CASES)


def test_a_tie_that_is_made_afterwards() -> None:
    """Compressing again makes it one of the packed weight."""
    module = nn.ModuleDict({"embedding": nn.Embedding(96, 64), "head": nn.Linear(64, 96, bias=False)}).to(
        torch.bfloat16
    )
    samebits.compress(module, min_weights=1)
    module["head"] = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    module["head"].weight = module["embedding"].weight
    samebits.compress(module, min_weights=1)
    assert [name for name, _ in module.named_parameters()] == ["embedding.sb_packed"]
    moved = copy.deepcopy(module.to("cpu"))
    assert moved["head"].get_parameter("sb_packed") is moved["embedding"].get_parameter("sb_packed")


def test_a_tie_to_a_weight_that_changes() -> None:
    module = nn.Sequential(nn.Embedding(200, 64, max_norm=1.0), nn.Linear(64, 200, bias=False)).to(torch.bfloat16)
    module[1].weight = module[0].weight
    plain, tokens = copy.deepcopy(module), torch.arange(200)
    report = samebits.compress(module)
    assert report.raw == {"0.weight": "changes while its module runs (max_norm)"}
    assert same_bits(module(tokens), plain(tokens))
    module = nn.Sequential(nn.Linear(64, 200, bias=False), nn.Embedding(200, 64, max_norm=1.0)).to(torch.bfloat16)
    module[1].weight = module[0].weight
    assert samebits.compress(module).raw == {"0.weight": "tied to 1.weight: changes while its module runs (max_norm)"}


def test_torchscript_is_left_alone() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch\.jit\.script"):
        script = torch.jit.script(nn.Linear(64, 64).to(torch.bfloat16))
    module = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16), script)
    expected = module(INPUT)
    report = samebits.compress(module, min_weights=MIN_WEIGHTS)
    assert report.packed.keys() == {"0.weight"}
    assert report.raw["1.weight"] == "belongs to a TorchScript module, whose class must stay"
    assert same_bits(module(INPUT), expected)


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, {"layers.0.weight", "layers.3.weight", "embedding.weight"}),
        ({"min_weights": 6145}, {"embedding.weight"}),
        ({"min_weights": 10**6}, set()),
        ({"include": ["layers.*"]}, {"layers.0.weight", "layers.3.weight"}),
        ({"include": ["layers.*"], "exclude": ["*.3.*"]}, {"layers.0.weight"}),
        ({"exclude": ["*"]}, set()),
    ],
)
def test_selection(options: dict[str, Any], packed: set[str]) -> None:
    assert samebits.compress(make("tied")[0], **options).packed.keys() == packed


def test_report_says_why_not() -> None:
    module, _, _ = make("tied")
    with torch.no_grad():
        words = torch.randint(-32768, 32767, (96, 64), dtype=torch.int16)
        module.layers[0].weight.copy_(words.view(torch.bfloat16))
    module.layers[3].float()
    module.register_parameter("steps", nn.Parameter(torch.arange(5000), requires_grad=False))
    report = samebits.compress(module, exclude=["*.2.*"])
    assert report.raw == {
        "steps": "not floating point",
        "layers.0.weight": "packing does not make it smaller",
        "layers.0.bias": "fewer than 4096 weights",
        "layers.2.weight": "fewer than 4096 weights",
        "layers.2.bias": "fewer than 4096 weights",
        "layers.3.weight": "torch.float32, not bfloat16",
    }
    size = report.packed["embedding.weight"]
    assert size.words == 6400
    assert size.nbytes == module.embedding.sb_packed.nbytes
    assert report.bits_per_weight == 8 * size.nbytes / size.words
    assert "layers.3.weight: torch.float32, not bfloat16" in str(report)


def test_report_as_json() -> None:
    report = samebits.compress(make("tied")[0], min_weights=MIN_WEIGHTS)
    value = json.loads(report.to_json())
    assert value["packed"]["embedding.weight"] == {"words": 6400, "nbytes": report.packed["embedding.weight"].nbytes}
    assert value["raw"] == report.raw
    assert value["bits_per_weight"] == report.bits_per_weight


class OfAnotherClass(nn.Parameter):
    """Stands for what quantizers make of a parameter."""


def test_what_is_no_plain_tensor_is_left_alone() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False).to(torch.bfloat16) for _ in range(3)))
    module[0].weight = OfAnotherClass(module[0].weight.detach())
    module[1].weight = nn.Parameter(module[1].weight.detach()[:1].expand(64, 64))
    assert samebits.compress(module).raw == {
        "0.weight": "is a OfAnotherClass, not a plain tensor",
        "1.weight": "has gaps or repetitions in memory",
    }


def test_what_has_no_shape_yet_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16), nn.LazyLinear(32, dtype=torch.bfloat16))
    x = torch.randn(2, 64).to(torch.bfloat16)
    report = samebits.compress(module, min_weights=1024)
    assert set(report.packed) == {"0.weight"}
    assert report.raw["1.weight"] == "is a UninitializedParameter, not a plain tensor"
    module(x)
    assert set(samebits.compress(module, min_weights=1024).packed) == {"0.weight", "1.weight"}
    expected = copy.deepcopy(module)
    samebits.decompress(expected)
    assert torch.equal(module(x).view(torch.int16), expected(x).view(torch.int16))


def test_strides_stay() -> None:
    for name in ("channels last", "transposed linear"):
        module, _, _ = make(name)
        stride = module.weight.stride()
        samebits.compress(module)
        assert module.weight.stride() == stride
        assert module.sb_recipes["weight"].matrix is None  # no fused product has the bits of torch's
        samebits.decompress(module)
        assert module.weight.stride() == stride


def test_bad_arguments() -> None:
    module, call, _ = make("tied")
    expected = call(module)
    with pytest.raises(InputError, match=r"include is 'layers\.\*', no list of patterns; give a list"):
        samebits.compress(module, include="layers.*")
    with pytest.raises(InputError, match=r"exclude is \(1,\), no list of patterns"):
        samebits.compress(module, exclude=[1])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"min_weights is '9', which is no whole number"):
        samebits.compress(module, min_weights="9")  # type: ignore[arg-type]
    for number in (0, -5):
        with pytest.raises(
            InputError, match=rf"min_weights is {number}, which is less than 1; 1 packs all that it can"
        ):
            samebits.compress(module, min_weights=number)
    with pytest.raises(InputError, match=r"embedding\.weight: on the meta device"):
        samebits.compress(copy.deepcopy(module).to("meta"))
    for change in (samebits.compress, samebits.decompress):
        with pytest.raises(
            InputError, match=r"Tensor is no torch module; give a model.*samebits\.encode and samebits\.decode take"
        ):
            change(torch.ones(3))  # type: ignore[operator]
    assert same_bits(call(module), expected)


@pytest.mark.parametrize(
    ("function", "mend"),
    [
        (samebits.prepare, "one of its parts"),
        (lambda given: samebits.offload(given, "5MB"), "one of its parts"),
        (lambda given: samebits.cuda_graphs(given).__enter__(), "its transformer or unet"),
    ],
)
def test_what_is_no_module(function: Callable[[Any], object], mend: str) -> None:
    """As a pipeline is none."""
    with pytest.raises(InputError, match=rf"SimpleNamespace is no torch module; give a model, of a pipeline {mend}"):
        function(SimpleNamespace())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=rf"embedding\.weight: the weights are {dtype}"):
        samebits.compress(Tied().to(dtype))


def test_bf16_in_disguise() -> None:
    """Refused too, as the module computes in another dtype; but nothing is lost by converting it."""
    module = Tied().to(torch.bfloat16).to(torch.float32)
    with pytest.raises(DtypeError, match=r"\.to\(torch\.bfloat16\), which changes none of those to be packed"):
        samebits.compress(module)
    with torch.no_grad():
        module.head.weight[-1, -1] = 1 + 2**-20
    for lossy in (module, module.to("meta")):
        with pytest.raises(DtypeError, match=r"\.to\(torch\.bfloat16\), which loses bits"):
            samebits.compress(lossy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_which_values_are_bf16(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "_VALUES_AT_ONCE", 100)
    values = torch.randn(7, 50).to(torch.bfloat16).to(dtype)
    values[0, :3] = torch.tensor([-0.0, float("inf"), 2**-24])
    assert is_bf16(values)
    assert is_bf16(values.t())
    assert is_bf16(values[:0])
    values[-1, -1] = 1 + 2**-10
    assert not is_bf16(values)
    assert not is_bf16(torch.tensor([1.0, 1 + 2**-23]))
    assert not is_bf16(torch.ones(4, dtype=torch.int64))


def test_nans_are_not_bf16() -> None:
    """Converted they would get the bits that torch gives, here or elsewhere."""
    for word in (0x7F800001, 0x7F810000, 0x7FC00000, -0x10000):
        assert not is_bf16(torch.tensor([word], dtype=torch.int32).view(torch.float32))


def test_compressing_twice_changes_nothing() -> None:
    module, _, _ = make("tied")
    first = samebits.compress(module)
    packed = module.embedding.sb_packed
    assert samebits.compress(module) == first
    assert module.embedding.sb_packed is packed


def test_compressing_twice_beside_weights_of_another_dtype() -> None:
    module = nn.Sequential(make("linear")[0], nn.Linear(96, 64))
    first = samebits.compress(module)
    assert first.packed.keys() == {"0.weight"}
    assert samebits.compress(module) == first


class Router(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, nn.functional.linear(x[..., :64], self.weight)], -1)


class OwnLinear(nn.Linear):
    """Whose products are torch's layer's."""


def test_matrices_that_are_nothing_beside_the_model_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """If their module computes with them by code of its own: they are decoded for each use then."""
    monkeypatch.setattr(spared, "_SMALL_SHARE", 1 << 8)
    layers = [nn.Linear(64, 4096, bias=False), nn.Linear(4096, 191, bias=False), Router(65), Router(64)]
    module = nn.Sequential(*layers, OwnLinear(320, 12, bias=False)).to(torch.bfloat16)
    assert 64 * 64 <= sum(parameter.numel() for parameter in module.parameters()) >> 8 < 65 * 64
    expected = module(INPUT)
    for _ in range(2):
        report = samebits.compress(module, min_weights=64)
        assert report.packed.keys() == {"0.weight", "1.weight", "2.weight", "4.weight"}
        assert report.raw == {"3.weight": "small beside the model, and decoded for each use"}
        assert same_bits(module(INPUT), expected)
    assert samebits.compress(module[3], min_weights=64).packed.keys() == {"weight"}  # alone it is no small part
    other = nn.Sequential(Router(64), nn.Linear(128, 64, bias=False)).to(torch.bfloat16)
    assert samebits.compress(other, min_weights=64).packed.keys() == {"0.weight", "1.weight"}


def test_biases_stay_plain() -> None:
    """Linear layers go to fused products then; a bias is packed where it is as large as its matrix, nearly."""
    linear = nn.Linear(128, 2000).to(torch.bfloat16)
    report = samebits.compress(linear, min_weights=MIN_WEIGHTS)
    assert report.packed.keys() == {"weight"}
    assert report.raw == {"bias": "a vector, small beside its module's matrix"}
    assert isinstance(linear, PackedLinearModule)
    assert samebits.compress(nn.Linear(63, 2000).to(torch.bfloat16), min_weights=MIN_WEIGHTS).packed.keys() == {
        "weight",
        "bias",
    }


def test_progress() -> None:
    module = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(8, 8)).to(torch.bfloat16)
    module.append(module[0])  # tied, so it counts once
    steps: list[tuple[int, int]] = []
    samebits.compress(module, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(6144, 12288), (12288, 12288)]
    steps.clear()
    samebits.decompress(module, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(6144, 12288), (12288, 12288)]
    samebits.decompress(module, progress=lambda done, total: steps.append((done, total)))
    assert len(steps) == 2


def test_parametrized_weights() -> None:
    """What they are computed from is packed."""
    torch.manual_seed(0)
    module = weight_norm(nn.Linear(64, 96).to(torch.bfloat16)).requires_grad_(False)
    expected = module(INPUT)
    assert samebits.compress(module, min_weights=MIN_WEIGHTS).packed.keys() == {"parametrizations.weight.original1"}
    assert same_bits(module(INPUT), expected)
    samebits.decompress(module)
    assert same_bits(module(INPUT), expected)


def test_more_can_be_packed_later() -> None:
    module, call, _ = make("experts")
    expected = call(module)
    samebits.compress(module, include=["up"])
    assert {name for name, _, _ in packed_parameters(module)} == {"up"}
    samebits.compress(module)
    assert {name for name, _, _ in packed_parameters(module)} == {"up", "down"}
    assert same_bits(call(module), expected)


def test_modules_that_occur_twice() -> None:
    layer = nn.Linear(64, 64).to(torch.bfloat16)
    module = nn.Sequential(layer, layer)
    expected = module(INPUT)
    samebits.compress(module)
    assert module[0] is module[1]
    assert same_bits(module(INPUT), expected)
    samebits.decompress(module)
    assert same_bits(module(INPUT), expected)


def test_frozen_parameters_stay_frozen() -> None:
    module, _, _ = make("linear")
    module.weight.requires_grad_(False)
    samebits.compress(module)
    samebits.decompress(module)
    assert not module.weight.requires_grad
    assert module.bias.requires_grad


def test_errors_name_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: torch.Tensor) -> None:
        raise DeviceError("no kernel", mend="see samebits doctor")

    monkeypatch.setattr(convert, "encode", broken)
    with pytest.raises(DeviceError, match=r"embedding\.weight: no kernel; see samebits doctor"):
        samebits.compress(make("tied")[0])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False))
        self.out = nn.Linear(64, 64, bias=False)


class AsksForADtype(Tower):
    """As HunYuanVL asks its vision tower, Swinv2 its position biases, and OpenAI's GPT itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype=next(self.layers.parameters()).dtype)
        return self.out(self.layers(x) + x)


class AsksItsRoot(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.out.parameters()).device)
        return self.out(x.to(next(iter(self.parameters())).dtype))


class AsksTwiceInALine(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device=next(self.layers.parameters()).device, dtype=next(self.layers.parameters()).dtype)
        return self.out(self.layers(x) + x)


@pytest.mark.parametrize("kind", [AsksForADtype, AsksItsRoot, AsksTwiceInALine])
def test_what_tells_a_dtype_stays_plain(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind().to(torch.bfloat16)
    expected = module(INPUT)
    report = samebits.compress(module)
    assert report.packed.keys() == {"layers.1.weight", "out.weight"}
    assert report.raw["layers.0.weight"] == "tells the model's code the dtype to compute with"
    assert same_bits(module(INPUT), expected)
    other = kind().to(torch.bfloat16)
    samebits.load_state_dict(other, module.state_dict())
    assert {name for name, _, _ in packed_parameters(other)} == report.packed.keys()
    assert same_bits(other(INPUT), expected)


class AsksWhatIsNoModule(Tower):
    """But has parameters, as a model that is kept out of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.other = SimpleNamespace(parameters=nn.Linear(1, 1).parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.to(next(self.other.parameters()).dtype).to(torch.bfloat16))


def test_parameters_of_what_is_no_module() -> None:
    module = AsksWhatIsNoModule().to(torch.bfloat16)
    expected = module(INPUT)
    assert samebits.compress(module).packed.keys() == {"layers.0.weight", "layers.1.weight", "out.weight"}
    assert same_bits(module(INPUT), expected)


def test_what_is_called_like_an_adapter_is_packed() -> None:
    """SAM has a part of that name."""
    module = nn.Module()
    module.prompt_encoder = nn.Linear(64, 64)
    assert samebits.compress(module.to(torch.bfloat16), min_weights=MIN_WEIGHTS).packed.keys() == {
        "prompt_encoder.weight"
    }


def test_made_plain_in_inference_mode() -> None:
    """What is made there can be trained later."""
    module = nn.Linear(64, 96).to(torch.bfloat16)
    samebits.compress(module)
    with torch.inference_mode():
        samebits.decompress(module)
    module(INPUT).float().sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("patterns", [None, 3, "*.weight", [None]])
def test_patterns_that_are_none(patterns: Any) -> None:
    with pytest.raises(InputError, match=r"include is .*, no list of patterns; give a list of strings"):
        samebits.compress(nn.Linear(64, 64).to(torch.bfloat16), include=patterns)


def test_nothing_is_included() -> None:
    module = nn.Sequential(nn.Linear(64, 96)).to(torch.bfloat16)
    with pytest.raises(InputError, match=r"no parameter's name matches include, \['1\.\*', 'head\*'\]"):
        samebits.compress(module, include=["1.*", "head*"])
    assert type(module[0]) is nn.Linear
    samebits.compress(module, min_weights=1)
    samebits.compress(module, include=["0.weight"])  # which is packed already


def test_patterns_that_are_of_no_name() -> None:
    module = nn.ModuleDict({"embedding": nn.Embedding(96, 64), "head": nn.Linear(64, 96, bias=False)}).to(
        torch.bfloat16
    )
    module["head"].weight = module["embedding"].weight
    with pytest.warns(UserWarning, match=r"the pattern 'haed\*' is the name of no parameter") as warned:
        report = samebits.compress(module, min_weights=1, include=["*.weight"], exclude=["haed*"])
    assert len(warned) == 1
    assert report.unmatched == json.loads(report.to_json())["unmatched"] == ["haed*"]
    assert "haed*: the name of no parameter" in str(report)
    samebits.decompress(module)
    report = samebits.compress(module, min_weights=1, exclude=["head.weight"])  # the other name of a tied weight
    assert not report.unmatched
    assert str(report).startswith("nothing packed, 1 unchanged")
