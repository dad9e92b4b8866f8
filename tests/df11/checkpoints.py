"""DFloat11 checkpoints written by the original encoder, what they were made of, and other ones made from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch

from samebits.df11.unit import Unit

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "df11"
MODELS = ("tiny-llama", "tiny-dit")
Stored = dict[str, tuple[str, tuple[int, ...], str]]


def originals(model: str) -> Stored:
    """What tests.jobs.checkpoints.stored gives of the BF16 checkpoint that ``model`` was made from."""
    listed = json.loads((VECTORS / "originals.json").read_text())[model]
    return {name: ("torch.bfloat16", tuple(shape), digest) for name, (shape, digest) in listed.items()}


def copy(model: str, folder: Path, **config: Any) -> Path:
    """A copy of a vector; ``config`` changes its dfloat11_config."""
    shutil.copytree(VECTORS / model, folder)
    change_config(folder, **config)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["dfloat11_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors as they are stored."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def regroup(folder: Path, groups: Mapping[str, Sequence[str]]) -> None:
    """Write the same tensors into other files: name of a file -> names of tensors."""
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for file_name, names in groups.items():
        save_torch({name: tensors[name].clone() for name in names}, folder / file_name)


def write_units(
    path: Path, units: Mapping[str, Sequence[NDArray[np.uint16]]], vectors: Mapping[str, int] | None = None
) -> Path:
    """A single file: module path -> words of its matrices, name of a vector -> its length."""
    tensors: dict[str, NDArray[Any]] = {name: np.zeros(length, np.float32) for name, length in (vectors or {}).items()}
    for module, matrices in units.items():
        unit = Unit.encode(np.concatenate(matrices), [matrix.size for matrix in matrices])
        tensors |= {f"{module}.{name}": tensor for name, tensor in unit.tensors().items()}
    save_file(tensors, path)
    return path
