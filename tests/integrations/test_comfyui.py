"""Packed models under ComfyUI's patches, beside the plain model under the same patches: every byte compared."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samebits.errors import DtypeError, InputError
from samebits.integrations import comfyui
from samebits.integrations.comfyui import compress
from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import packed_parameters
from tests import comfyui as comfy

NODES = Path(__file__).resolve().parents[2] / "examples" / "comfyui" / "__init__.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = ("patchify", "qkv", "blocks.0.0", "blocks.1.0")
MEMORY = 40_000  # bytes: enough for the same layers, of both models
PLAIN = "plain"  # of another class than ComfyUI's


class Model(nn.Module):
    """Of ComfyUI's layers and one other."""

    def __init__(self) -> None:
        super().__init__()
        self.patchify = comfy.Conv2d(4, 64, 4, 4)
        self.qkv = comfy.Linear(64, 192, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(comfy.Linear(192, 192), nn.GELU()) for _ in range(2))
        self.norm = nn.LayerNorm(192)
        self.plain = nn.Linear(192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.qkv(self.patchify(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = x + block(x)
        return self.plain(self.norm(x))


class Pair:
    """The same model plain and packed, and the same done to both."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        model = Model().to(torch.bfloat16)
        self.x = torch.randn(2, 4, 16, 16).to(torch.bfloat16).to(device)
        self.plain, self.packed = (comfy.ModelPatcher(comfy.BaseModel(copy.deepcopy(model)), device) for _ in range(2))
        self.report = comfyui.compress(self.packed, min_weights=2048)
        self.base, self.slots = weights(self.plain), slots(self.packed)

    def __iter__(self) -> Iterator[comfy.ModelPatcher]:
        return iter((self.plain, self.packed))

    def clone(self) -> Pair:
        clone = copy.copy(self)
        clone.plain, clone.packed = (patcher.clone() for patcher in self)
        return clone

    def add(self, file: dict[str, torch.Tensor], **strengths: float) -> Pair:
        """A clone with a LoRA, as ComfyUI's LoRA node makes it."""
        clone = self.clone()
        for patcher in clone:
            patches = comfy.load_lora(file, comfy.lora_keys(patcher.model))
            assert patches.keys() == {f"diffusion_model.{name}.weight" for name in (*LAYERS, PLAIN)}
            assert len(patcher.add_patches(patches, **strengths)) == len(patches)
        return clone

    def load(self, memory: int | None = None) -> Pair:
        for patcher in self:
            patcher.load(memory)
        return self

    def unpatch(self) -> None:
        for patcher in self:
            patcher.unpatch_model()

    def assert_same(self) -> torch.Tensor:
        expected, found = (patcher.model.diffusion_model(self.x) for patcher in self)
        assert torch.equal(expected.view(torch.int16), found.view(torch.int16))
        assert_same_words(weights(self.packed), weights(self.plain))
        return expected.clone()

    def assert_base(self) -> None:
        """Nothing of a patch is left."""
        assert_same_words(weights(self.packed), self.base)
        assert_same_words(slots(self.packed), self.slots)


def weights(patcher: comfy.ModelPatcher) -> dict[str, torch.Tensor]:
    """By the names of the plain model, as words on the CPU."""
    state = patcher.model.diffusion_model.state_dict()
    return {key: tensor.to("cpu", copy=True).view(torch.int16) for key, tensor in state.items()}


def slots(patcher: comfy.ModelPatcher) -> dict[str, torch.Tensor]:
    """The packed bytes, on the CPU."""
    found = packed_parameters(patcher.model.diffusion_model)
    return {name: owner.sb_data(leaf)[0].to("cpu", copy=True) for name, owner, leaf in found}


def assert_same_words(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []


def lora(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA file, in another dtype than the model."""
    torch.manual_seed(seed)
    file = {}
    for name in (*LAYERS, PLAIN):
        shape = Model().get_submodule(name).weight.shape
        key = "lora_unet_" + name.replace(".", "_")
        file[f"{key}.lora_up.weight"] = torch.randn(shape[0], rank, *(1 for _ in shape[2:])).to(torch.float16)
        file[f"{key}.lora_down.weight"] = torch.randn(rank, *shape[1:]).to(torch.float16)
        file[f"{key}.alpha"] = torch.tensor(rank / 2)
    return file


@pytest.fixture(params=DEVICES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_packed(pair: Pair) -> None:
    """ComfyUI's layers, under their own names; a layer that it could not patch is left as it is."""
    assert pair.report.packed.keys() == slots(pair.packed).keys() == {f"{name}.weight" for name in LAYERS}
    assert pair.report.raw["plain.weight"] == "not selected"
    assert pair.plain.model.state_dict().keys() == pair.packed.model.state_dict().keys()
    pair.load().assert_same()
    with torch.no_grad():
        pair.load().assert_same()


def test_packed_twice(pair: Pair) -> None:
    module = pair.packed.model.diffusion_model
    before = len(module._state_dict_hooks)
    compress(pair.packed)
    assert len(module._state_dict_hooks) == before
    assert pair.plain.model.state_dict().keys() == pair.packed.model.state_dict().keys()


def test_sizes_are_those_of_packed_weights(pair: Pair) -> None:
    assert pair.packed.model_size() < 0.75 * pair.plain.model_size()
    assert pair.clone().packed.size == pair.packed.size
    layers = [patcher.model.diffusion_model.qkv for patcher in pair]
    assert comfy.module_size(layers[1]) < 0.75 * comfy.module_size(layers[0])


@pytest.mark.parametrize("memory", [None, MEMORY, 0])
def test_lora(memory: int | None, pair: Pair) -> None:
    """Several at once, then one of them, then none; as weights, or patched anew whenever a layer runs."""
    base = pair.load(memory).assert_same()
    one = pair.add(lora(1), strength=0.7)
    two = one.add(lora(2), strength=-0.3, strength_model=0.9)
    pair.unpatch()
    outputs = []
    for patched in (one, two, one):
        outputs.append(patched.load(memory).assert_same())
        backups = patched.packed.backup.keys()
        assert backups == patched.plain.backup.keys()
        assert len(backups) == {None: 5, MEMORY: 2, 0: 1}[memory]
        assert {type(patched.packed.backup[key]) for key in backups - {f"diffusion_model.{PLAIN}.weight"}} <= {
            LazyWeight
        }  # packed too
        patched.unpatch()
        patched.assert_base()
    assert torch.equal(outputs[0], outputs[2])
    assert not any(torch.equal(outputs[0], other) for other in (outputs[1], base))
    assert torch.equal(pair.load(memory).assert_same(), base)


def test_patches_of_parts_and_of_other_kinds(pair: Pair) -> None:
    """A LoRA for the queries alone, and a difference for the whole."""
    torch.manual_seed(3)
    at = "diffusion_model.qkv.weight"
    patches = {
        (at, (0, 0, 64)): ("lora", (torch.randn(64, 4), torch.randn(4, 64), 4.0)),
        at: ("diff", (torch.randn(192, 64),)),
    }
    for patcher in pair:
        assert patcher.add_patches(patches, strength=0.5) == list(patches)
    pair.load().assert_same()
    pair.unpatch()
    pair.assert_base()


def test_a_patched_weight_that_does_not_get_smaller(pair: Pair) -> None:
    noise = torch.randint(-(2**15), 2**15, (192, 64), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    noise = noise.view(torch.bfloat16).nan_to_num(0, 0, 0)
    for patcher in pair:
        patcher.add_patches({"diffusion_model.qkv.weight": ("diff", (noise,))}, strength_model=0.0)
    pair.load().assert_same()
    assert slots(pair.packed)["qkv.weight"].dtype == torch.bfloat16
    pair.unpatch()
    pair.assert_base()


def test_packed_after_patches(pair: Pair) -> None:
    """Patches that were in the weights by then can still be taken back."""
    patched = Pair(pair.x.device.type)
    one = patched.add(lora(1), strength=0.7)
    one.plain.load()
    report = comfyui.compress(one.plain, min_weights=2048)
    assert report.packed.keys() == patched.report.packed.keys()
    one.packed.load()
    one.assert_same()
    one.unpatch()
    for patcher in one:
        assert_same_words(weights(patcher), pair.base)


def test_writing_into_a_weight_is_refused(pair: Pair) -> None:
    """As scheduled LoRAs do it."""
    weight = pair.packed.model.diffusion_model.qkv.weight
    with pytest.raises(InputError, match="a packed weight cannot be changed"):
        weight.data.copy_(torch.zeros(192, 64))
    pair.assert_base()


@pytest.mark.parametrize("takes", [True, False])
def test_metadata_of_the_file(takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI recognizes some models by it; older versions have no argument for it."""
    file, seen = tmp_path / "model.safetensors", []
    save_file({"weight": torch.zeros(3)}, file, {"config": "{}"})

    def load(sd: dict[str, torch.Tensor], model_options: Any = None) -> str:
        seen.append((set(sd), None))
        return "model"

    def load_with_metadata(sd: dict[str, torch.Tensor], model_options: Any = None, metadata: Any = None) -> str:
        seen.append((set(sd), metadata))
        return "model"

    loader = loader_of(tmp_path, load_with_metadata if takes else load, monkeypatch)
    assert loader.load("model.safetensors", keep_packed=False) == ("model",)
    assert seen == [({"weight"}, {"config": "{}"} if takes else None)]


def test_a_file_of_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what a node's user can do."""
    save_file({"weight": torch.zeros(3)}, tmp_path / "half.safetensors")
    model = SimpleNamespace(model=SimpleNamespace(diffusion_model=Model().half()))
    loader = loader_of(tmp_path, lambda sd: model, monkeypatch)
    with pytest.raises(DtypeError, match=r"^half\.safetensors: .*float16.*; switch keep_packed off"):
        loader.load("half.safetensors")
    assert loader.load("half.safetensors", keep_packed=False) == (model,)


def loader_of(folder: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The node, in a ComfyUI that has its models in a folder and loads them so."""
    paths, package, sd = ModuleType("folder_paths"), ModuleType("comfy"), ModuleType("comfy.sd")
    paths.get_full_path_or_raise = lambda kind, name: str(folder / name)  # type: ignore[attr-defined]
    sd.load_diffusion_model_state_dict = load  # type: ignore[attr-defined]
    package.sd = sd  # type: ignore[attr-defined]
    for module in (paths, package, sd):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return runpy.run_path(str(NODES))["SamebitsLoader"]()


@pytest.mark.gpu
def test_layers_in_main_memory_decode_on_the_gpu() -> None:
    pair = Pair("cuda").load(0)
    seen = []
    layer = pair.packed.model.diffusion_model.qkv
    layer.weight_function = [lambda weight: (seen.append(weight.device.type), weight)[1]]
    assert layer._parameters["sb_packed"].device.type == "cpu"
    pair.assert_same()
    assert seen == ["cuda"]
