"""Where a checkpoint comes from, and which of its other files go along."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.format.folder import INDEX_SUFFIX, shard_name
from samebits.format.safetensors_file import SUFFIX

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
OTHER_WEIGHTS = (
    "pytorch_model*", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack",
    "*.tflite", "*.ot", "consolidated*", "*.mlmodel",
)  # fmt: skip
_EXPORTS = ("original", "onnx", "openvino", "coreml", "gguf")  # folders in which hubs keep a model's weights once more
DIFFUSERS = "diffusion_pytorch_model"  # what diffusers calls its weights
_HIDDEN = (".git", ".cache", "__pycache__")


def resolve_source(text: str) -> Path:
    """A path as it is; a hub id as the folder of its downloaded snapshot.

    Raises:
        InputError: neither a path nor a model on the hub.
    """
    path = Path(text)
    if path.exists() or not _HUB_ID.fullmatch(text):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    transport_error: type[Exception] = HfHubHTTPError.__mro__[1]  # of whichever HTTP library this huggingface_hub uses
    try:
        return Path(snapshot_download(text, ignore_patterns=list(OTHER_WEIGHTS)))
    except (transport_error, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().partition("\n")[0]
        mend = "check the path, the hub id, the network, or log in with `hf auth login`"
        raise InputError(f"no such path, and not available on the hub ({reason})", where=text, mend=mend) from None


def plain_names(checkpoint: Checkpoint) -> list[str]:
    """Names for a folder's files with the tensors uncompressed.

    They are those that the files had before, where all are known and distinct.
    """
    files = checkpoint.files
    if not checkpoint.is_packed:
        return [file.path.name for file in files]
    known = [info.original for file in files if (info := checkpoint.infos.get(file.path)) and info.original]
    if len(set(known)) == len(files):
        return known
    stem = DIFFUSERS if any(file.path.name.startswith(DIFFUSERS) for file in files) else "model"
    return [shard_name(stem, number, len(files)) for number in range(1, len(files) + 1)]


def other_files(folder: Path, weights: set[Path]) -> tuple[list[Path], list[Path]]:
    """Files of a model folder besides its ``weights``, relative to it: those to copy, and those left behind.

    Left behind are the same weights in other formats, also those in folders by which hubs know these. What other
    subfolders hold, linked ones too, belongs to other modules and is copied, but for links that lead back to a folder
    that they are in; hidden caches are neither.

    Raises:
        OSError: a subfolder cannot be read.
    """
    copied: list[Path] = []
    skipped: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not _is_hidden(name) and not _leads_back(Path(root, name)))
        for path in (Path(root, name) for name in sorted(names)):
            if path not in weights:
                relative = path.relative_to(folder)
                (skipped if _is_weights(relative) else copied).append(relative)
    return copied, skipped


def _fail(error: OSError) -> NoReturn:
    raise error


def _is_hidden(name: str) -> bool:
    return name in _HIDDEN or name.startswith(".samebits")


def _leads_back(folder: Path) -> bool:
    return folder.is_symlink() and any(folder.samefile(parent) for parent in folder.absolute().parents)


def _is_weights(relative: Path) -> bool:
    patterns: tuple[str, ...] = (f"*{SUFFIX}", f"*{INDEX_SUFFIX}", *OTHER_WEIGHTS)
    if len(relative.parts) > 1:
        patterns = OTHER_WEIGHTS if relative.parts[0] in _EXPORTS else ()
    return any(fnmatchcase(relative.name, pattern) for pattern in patterns)
