"""The nodes of examples/comfyui, with a stand-in for what they call of ComfyUI."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samebits.nn.packed_module import packed_parameters
from tests import comfyui as stand_in

NODES = Path(__file__).resolve().parents[1] / "examples" / "comfyui" / "__init__.py"
INPUT = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(stand_in.Linear(64, 128), nn.GELU(), stand_in.Linear(128, 64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Model().to(torch.bfloat16).state_dict(), tmp_path / "flux.safetensors")
    return tmp_path


@pytest.fixture
def nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as ComfyUI loads it."""

    def full_path(kind: str, name: str) -> str:
        assert kind == "diffusion_models"
        assert (folder / name).exists()
        return str(folder / name)

    def load(state: dict[str, torch.Tensor]) -> stand_in.ModelPatcher | None:
        if "0.weight" not in state:
            return None
        model = Model().to(torch.bfloat16)
        model.load_state_dict(state)
        return stand_in.ModelPatcher(stand_in.BaseModel(model), "cpu")

    paths, comfy, sd = ModuleType("folder_paths"), ModuleType("comfy"), ModuleType("comfy.sd")

    def files(kind: str) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))

    paths.get_filename_list = files  # type: ignore[attr-defined]
    paths.get_full_path_or_raise = full_path  # type: ignore[attr-defined]
    sd.load_diffusion_model_state_dict = load  # type: ignore[attr-defined]
    comfy.sd = sd  # type: ignore[attr-defined]
    for module in (paths, comfy, sd):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("samebits_nodes", NODES)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def call(node: type, **inputs: Any) -> tuple[Any, ...]:
    """As ComfyUI does, with the first choice where none is made."""
    declared = node.INPUT_TYPES()["required"]  # type: ignore[attr-defined]
    assert inputs.keys() <= declared.keys()
    assert inputs["file"] in declared["file"][0]
    result = getattr(node(), node.FUNCTION)(**inputs)  # type: ignore[attr-defined]
    assert len(result) == len(node.RETURN_TYPES)  # type: ignore[attr-defined]
    return result


def test_names(nodes: Any) -> None:
    assert nodes.NODE_CLASS_MAPPINGS.keys() == nodes.NODE_DISPLAY_NAME_MAPPINGS.keys()
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        assert callable(getattr(node, node.FUNCTION))
        assert node.CATEGORY


@pytest.mark.parametrize("place", ["", "more/"])
def test_compress_and_load(nodes: Any, folder: Path, place: str) -> None:
    """Also in a folder of the models' folder: the result is a name that the loader knows."""
    source = f"{place}flux.safetensors"
    (folder / place).mkdir(exist_ok=True)
    (folder / "flux.safetensors").rename(folder / source)
    (name,) = call(nodes.SamebitsCompressor, file=source)
    assert name == f"{place}flux-samebits.safetensors"
    assert (folder / name).stat().st_size < 0.85 * (folder / source).stat().st_size
    (expected,) = call(nodes.SamebitsLoader, file=source, keep_packed=False)
    assert not list(packed_parameters(expected.model.diffusion_model))
    for file in (source, name):
        for keep in (True, False):
            (model,) = call(nodes.SamebitsLoader, file=file, keep_packed=keep)
            assert len(list(packed_parameters(model.model.diffusion_model))) == 2 * keep
            outputs = [each.model.diffusion_model(INPUT) for each in (model, expected)]
            assert torch.equal(*(output.view(torch.int16) for output in outputs))


def test_why_a_model_is_not_compressed(nodes: Any, folder: Path) -> None:
    call(nodes.SamebitsCompressor, file="flux.safetensors")
    with pytest.raises(RuntimeError, match=r"^samebits: .*/flux-samebits\.safetensors: the file exists; remove it"):
        call(nodes.SamebitsCompressor, file="flux.safetensors")


def test_lora_on_the_loaded_model(nodes: Any, folder: Path) -> None:
    (name,) = call(nodes.SamebitsCompressor, file="flux.safetensors")
    torch.manual_seed(1)
    parts = {"lora_up.weight": torch.randn(128, 4), "lora_down.weight": torch.randn(4, 64), "alpha": torch.tensor(2.0)}
    lora = {f"lora_unet_0.{part}": tensor for part, tensor in parts.items()}
    words = []
    for keep in (True, False):
        (model,) = call(nodes.SamebitsLoader, file=name, keep_packed=keep)
        patched = model.clone()
        assert patched.add_patches(stand_in.load_lora(lora, stand_in.lora_keys(model.model)), strength=0.8)
        patched.load()
        assert len(list(packed_parameters(model.model.diffusion_model))) == 2 * keep
        words.append(model.model.diffusion_model(INPUT).view(torch.int16))
        patched.unpatch_model()
        words.append(model.model.diffusion_model(INPUT).view(torch.int16))
    assert torch.equal(words[0], words[2])
    assert torch.equal(words[1], words[3])
    assert not torch.equal(words[0], words[1])


def test_a_model_that_comfyui_does_not_know(nodes: Any, folder: Path) -> None:
    save_file({"other": torch.zeros(3)}, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: ComfyUI knows no model"):
        call(nodes.SamebitsLoader, file="other.safetensors")
