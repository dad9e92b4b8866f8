"""Where a checkpoint comes from, and which of its other files go along."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from samebits.errors import InputError
from samebits.format.folder import INDEX_SUFFIX
from samebits.format.safetensors_file import SUFFIX

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
OTHER_WEIGHTS = (
    "pytorch_model*", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack",
    "*.tflite", "*.ot", "consolidated*", "*.mlmodel",
)  # fmt: skip
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


def other_files(folder: Path, weights: set[Path]) -> tuple[list[Path], list[Path]]:
    """Files of a model folder besides its ``weights``, relative to it: those to copy, and those left behind.

    Left behind are the same weights in other formats. Safetensors files in subfolders belong to other modules and are
    copied; hidden caches are neither.
    """
    copied: list[Path] = []
    skipped: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _HIDDEN and not name.startswith(".samebits"))
        for path in (Path(root, name) for name in sorted(names)):
            if path not in weights:
                relative = path.relative_to(folder)
                (skipped if _is_weights(relative) else copied).append(relative)
    return copied, skipped


def _is_weights(relative: Path) -> bool:
    at_top = len(relative.parts) == 1
    if at_top and (relative.suffix == SUFFIX or relative.name.endswith(INDEX_SUFFIX)):
        return True
    return any(fnmatchcase(relative.name, pattern) for pattern in OTHER_WEIGHTS)
