"""What transformers' from_pretrained was called with, and what the folder or hub id holds that it loads."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.hub import cached_file

from samebits.format.folder import INDEX_SUFFIX, KEY, STEM, Folder
from samebits.format.names import BARE, PACKED
from samebits.format.safetensors_file import SUFFIX

# The folder or hub id, and from_pretrained's keyword arguments.
loading: ContextVar[tuple[str, Mapping[str, Any]]] = ContextVar("samebits_loading", default=("", {}))
KEEP_FORMAT = "keep_format"  # one of these: see layout.py
FILE = "transformers_weights"  # of a config: the file to load

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def hub_options() -> dict[str, Any]:
    """How from_pretrained was told to fetch files from the hub."""
    _, options = loading.get()
    return {name: options[name] for name in _HUB_OPTIONS if options.get(name) is not None}


def says_compressed(config: Any) -> bool:
    """Whether a model's config says that its weights are samebits'."""
    return _is_own(getattr(config, "quantization_config", None))


def _is_own(entry: Any) -> bool:
    return (entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)) == KEY


def make_plain(config: Any) -> None:
    """Have a model's config say nothing of samebits, in place."""
    del config.quantization_config
    vars(config).pop(FILE, None)


def follow_source(config: Any) -> None:
    """Have a config that from_pretrained was given say of samebits what its source says: it may be another model's."""
    path, options = loading.get()
    if options.get("config") is None or not (says_compressed(config) or Path(path).is_dir()):
        return  # of the source already, or of no matter
    entry = _entry_of_source(config)
    if entry is not None:
        config.quantization_config = entry
    elif says_compressed(config):
        make_plain(config)


def _entry_of_source(config: Any) -> dict[str, Any] | None:
    """The quantization_config that the weights were saved with, if they are packed."""
    path, options = loading.get()
    state = options.get("state_dict")
    if state is not None:
        is_packed = says_compressed(config) and any(PACKED in name or BARE in name for name in state)
        return _as_dict(config.quantization_config) if is_packed else None
    try:
        own, _ = PreTrainedConfig.get_config_dict(path, subfolder=options.get("subfolder") or "", **hub_options())
    except (OSError, ValueError):  # a folder has none; or the hub was not reached, of which nothing else is known
        is_known = Path(path).is_dir() or not says_compressed(config)
        return None if is_known else _as_dict(config.quantization_config)
    entry: dict[str, Any] | None = own.get("quantization_config")
    return entry if _is_own(entry) else None


def _as_dict(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else dict(entry.to_dict())


def weights_file() -> str:
    """The weight file or index of the folder or hub id that is being loaded.

    Raises:
        FormatError, InputError: a local folder without weights, or with shards missing.
    """
    path, options = loading.get()
    subfolder = options.get("subfolder") or ""
    folder = Path(path, subfolder)
    if not folder.is_dir():
        hub = hub_options() | {"subfolder": subfolder, "_raise_exceptions_for_missing_entries": False}
        index = path and cached_file(path, STEM + INDEX_SUFFIX, **hub)
        return STEM + (INDEX_SUFFIX if index else SUFFIX)
    return Folder.scan(folder).to_open.name
