"""Which of a checkpoint's other files go along with its weights, and what these are called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, NoReturn

from samebits.format.container import Checkpoint
from samebits.format.folder import CONFIG, DIFFUSERS, INDEX_SUFFIX, MAX_NAME, read_json, shard_name
from samebits.format.safetensors_file import PARTIAL, SUFFIX

OTHER_WEIGHTS = (
    "pytorch_model*", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data*", "*.h5", "*.msgpack",
    "*.tflite", "*.ot", "consolidated*", "*.mlmodel", "openvino*.bin",
)  # fmt: skip
_PARTS = ("sparse_linear.pt", "colbert_linear.pt", "spk_dict.pt")  # of BGE-M3, and the voices of Qwen2.5-Omni
EXPORTS = ("original", "onnx", "openvino", "coreml", "gguf")  # folders in which hubs keep a model's weights once more
_SAFETENSORS = (f"*{SUFFIX}", f"*{INDEX_SUFFIX}")
_HIDDEN = (".git", ".cache", "__pycache__")


def plain_names(checkpoint: Checkpoint) -> list[str]:
    """Names for a folder's files with the tensors uncompressed.

    They are those that the files had before, where all are known and distinct.
    """
    files = checkpoint.files
    if not checkpoint.is_packed:
        return [file.path.name for file in files]
    known = [info.original for file in files if (info := checkpoint.infos.get(file.path)) and info.original]
    longest = MAX_NAME - len(PARTIAL)
    if len(set(known)) == len(files) and all(
        name.endswith(SUFFIX) and len(os.fsencode(name)) <= longest for name in known
    ):
        return known
    stem = stem_of(checkpoint)
    return [shard_name(stem, number, len(files)) for number in range(1, len(files) + 1)]


def stem_of(checkpoint: Checkpoint) -> str:
    """How loaders want the files of the plain model, and their index, to begin."""
    originals = [info.original or "" for info in checkpoint.infos.values()]
    is_named = any(name.startswith(DIFFUSERS) for name in [*(file.path.name for file in checkpoint.files), *originals])
    return DIFFUSERS if is_named or "_class_name" in config_of(checkpoint) else "model"


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's config.json, in the folder or beside the file; empty if there is none."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def other_files(folder: Path, weights: set[Path]) -> tuple[list[Path], list[Path]]:
    """Files of a model folder besides its ``weights``, relative to it: those to copy, and those left behind.

    Left behind are what ``goes_along`` does not take and further safetensors files. Linked folders are copied, but for
    links that lead back to a folder that they are in; hidden caches are neither.

    Raises:
        OSError: a subfolder cannot be read.
    """
    copied: list[Path] = []
    skipped: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not _is_hidden(name) and not _leads_back(Path(root, name)))
        for name in sorted(names):
            if (path := Path(root, name)) not in weights:
                relative = path.relative_to(folder)
                is_further = root == str(folder) and _matches(name, _SAFETENSORS)
                (copied if goes_along(relative) and not is_further else skipped).append(relative)
    return copied, skipped


def goes_along(path: PurePath) -> bool:
    """Whether a file of a model folder, or of the hub, by its path there, is copied, or downloaded, with the weights.

    Weights in other formats are not, nor any in the folders by which hubs know these. What other subfolders hold
    belongs to other modules and goes along; hidden caches do not.
    """
    *folders, name = path.parts
    if any(map(_is_hidden, folders)):
        return False
    if not folders:
        return name in _PARTS or not _matches(name, OTHER_WEIGHTS)
    return folders[0] not in EXPORTS or not _matches(name, (*OTHER_WEIGHTS, *_SAFETENSORS, "*.bin"))


def _fail(error: OSError) -> NoReturn:
    raise error


def _is_hidden(name: str) -> bool:
    return name in _HIDDEN or name.startswith(".samebits")


def _leads_back(folder: Path) -> bool:
    return folder.is_symlink() and any(folder.samefile(parent) for parent in folder.absolute().parents)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
