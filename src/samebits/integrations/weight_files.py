"""The files of a compressed model folder (FORMAT.md 7.1 to 7.3), as save_pretrained writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save, save_file

from samebits.digest import digest
from samebits.errors import InputError
from samebits.format.container import FileInfo
from samebits.format.folder import CONFIG, INDEX_SUFFIX, KEY, STEM
from samebits.format.names import original_name
from samebits.format.safetensors_file import SUFFIX

_FILES = r"(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
_PACKED = re.compile(STEM + _FILES)
_STALE = re.compile(f"(model|pytorch_model|diffusion_pytorch_model|{STEM}){_FILES}")


def write_weights(tensors: Mapping[str, torch.Tensor], folder: Path, max_shard_size: int | str) -> None:
    """Write tensors under the names of FORMAT.md 7.2 into ``folder``, with an index if there are several files."""
    pattern = f"{STEM}{{suffix}}{SUFFIX}"
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name].contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt", KEY: _file_info(shard).to_json()})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / (STEM + INDEX_SUFFIX)).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _file_info(tensors: Mapping[str, torch.Tensor]) -> FileInfo:
    """FORMAT.md 7.3 for a file with these tensors."""
    unpacked = {name: tensor for name, tensor in tensors.items() if original_name(name) is None}
    digests = {name: digest(tensor.detach().cpu().contiguous()) for name, tensor in unpacked.items()}
    return FileInfo(digests).sealed({name: (_name_of(tensor.dtype), tensor.shape) for name, tensor in tensors.items()})


@cache
def _name_of(dtype: torch.dtype) -> str:
    """As headers of safetensors have it."""
    file = save({"": torch.empty(0, dtype=dtype, device="cpu")})
    return str(json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])[""]["dtype"])


def publish(staging: Path, destination: Path) -> None:
    """Move the files of one folder to another: stale weights go first and the config comes last, so that nothing
    half-written can be loaded.

    Raises:
        InputError: a folder stands where a file goes, or is named as weights are; nothing is moved then.
    """
    stale = [path for path in destination.iterdir() if _STALE.fullmatch(path.name)]
    for place in (*stale, *(destination / path.name for path in staging.iterdir())):
        if place.is_dir() and not place.is_symlink():
            raise InputError("a folder is in the way", where=str(place), mend="remove it")
    _remove(destination, _STALE)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == CONFIG):
        path.replace(destination / path.name)


def remove_packed(folder: Path) -> None:
    """Behind plain weights that were written over a compressed model, whose old ones must not be found any more."""
    if folder.is_dir():
        _remove(folder, _PACKED)


def _remove(folder: Path, names: re.Pattern[str]) -> None:
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            path.unlink()
