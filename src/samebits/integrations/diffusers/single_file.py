"""diffusers' from_single_file: of compressed files, and with the bits of the same call without compression."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import single_file as pipelines
from diffusers.loaders import single_file_model, single_file_utils

from samebits.errors import SamebitsError
from samebits.format.names import original_name
from samebits.format.safetensors_file import SUFFIX
from samebits.integrations.diffusers.quantizer import is_left_alone, single_file
from samebits.integrations.transformers.quantizer import SamebitsConfig
from samebits.nn.single_file import open_file
from samebits.nn.state import as_plain

_READS = "load_single_file_checkpoint"  # a function that other modules of diffusers may have imported already


def register() -> None:
    """Wrap the four functions."""
    pipelines.load_single_file_sub_model = _loading_part(pipelines.load_single_file_sub_model)
    mixin = single_file_model.FromOriginalModelMixin
    mixin.from_single_file = classmethod(_loading(mixin.from_single_file.__func__))
    single_file_utils.load_state_dict = _checking(single_file_utils.load_state_dict)
    original = single_file_utils.load_single_file_checkpoint
    wrapped = _reading(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and vars(module).get(_READS) is original:
            setattr(module, _READS, wrapped)


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_single_file(cls: Any, pretrained_model_link_or_path_or_dict: Any = None, **kwargs: Any) -> Any:
        """A file's tensors may come as a dict.

        Raises:
            FormatError: a damaged packed tensor of such a dict.
        """
        source = pretrained_model_link_or_path_or_dict
        source = _decoded(source) if isinstance(source, dict) else source
        token = single_file.set(True)
        try:
            return original(cls, source, **kwargs)
        finally:
            single_file.reset(token)

    return from_single_file


def _loading_part(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_single_file_sub_model(*args: Any, name: str, **kwargs: Any) -> Any:
        """A pipeline hands its quantization_config on to each part that is in the file."""
        if isinstance(kwargs.get("quantization_config"), SamebitsConfig) and is_left_alone(name):
            del kwargs["quantization_config"]
        return original(*args, name=name, **kwargs)

    return load_single_file_sub_model


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a compressed file, what is not packed has digests too.

        Raises:
            FormatError, DigestError: a damaged file; VersionError for a later version.
            InputError: DFloat11's.
        """
        tensors = original(checkpoint_file, *args, **kwargs)
        if str(checkpoint_file).endswith(SUFFIX):
            checkpoint = open_file(Path(checkpoint_file))
            for entry in checkpoint if checkpoint.is_packed else ():
                entry.check()
        return tensors

    return load_state_dict


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_single_file_checkpoint(pretrained_model_link_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """diffusers knows models by their tensors' names and shapes, and converts both: a compressed file is decoded.

        Raises:
            FormatError: a damaged packed tensor.
        """
        checkpoint = original(pretrained_model_link_or_path, *args, **kwargs)
        try:
            return _decoded(checkpoint)
        except SamebitsError as error:
            raise error.at(str(pretrained_model_link_or_path)) from None

    return load_single_file_checkpoint


def _decoded(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Its tensors as they were before the file was compressed; a plain checkpoint itself, which diffusers may change.

    Raises:
        FormatError: a damaged packed tensor.
    """
    if not any(map(original_name, checkpoint)):
        return checkpoint
    return dict(as_plain(*item) if isinstance(item[1], torch.Tensor) else item for item in checkpoint.items())


register()
