"""Shapes of a model's weights from its class, built without memory: for checkpoints that do not hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from samebits.df11.config import KEY
from samebits.errors import InputError
from samebits.format.folder import CONFIG, read_json
from samebits.integrations import INSTALL_TRANSFORMERS

WRONG_CONFIG = (
    StrictDataclassError, OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, AssertionError,
    ImportError, RuntimeError,
)  # what libraries raise for one  # fmt: skip
_LAYERS = re.compile(r"(n|num|encoder|decoder)_(\w+_)?layers?$")  # as configs name their number
_MAX_LAYERS = 10_000  # of a model; a class with more would take forever to build


def model_shapes(folder: Path, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Shapes of those of the weights ``names`` that the model of a folder's config.json has.

    Empty without a config.json, if it names no model, or if the library for it is not installed.

    Raises:
        InputError: the library cannot make the model.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    check_size(config, folder)
    try:
        if config.get("architectures") and find_spec("transformers"):
            return _of_transformers(folder, names)
        if config.get("_class_name") and find_spec("diffusers"):
            return _of_diffusers(config, names)
    except WRONG_CONFIG as error:
        raise _unmade(error, folder) from None
    return {}


def check_size(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse the config.json of a folder whose model would take forever to build.

    Raises:
        InputError
    """
    for key, value in config.items():
        if isinstance(value, dict):
            check_size(value, folder)
        elif _LAYERS.match(key) and isinstance(value, int) and value > _MAX_LAYERS:
            raise InputError(f"{key} is {value}", where=str(folder / CONFIG), mend="fetch config.json again")


def meta_model(folder: Path) -> Any:
    """The transformers model that a folder's config.json names, in bfloat16 on the meta device; None if it names none.

    Raises:
        InputError: transformers is not installed, or cannot make the model.
    """
    config = read_json(folder / CONFIG)
    if "_class_name" in config:  # as diffusers names it
        mend = "give a language model's folder, or leave --context out"
        raise InputError(f"{config['_class_name']} has no context", where=str(folder / CONFIG), mend=mend)
    check_size(config, folder)
    if not find_spec("transformers"):
        raise InputError("transformers is not installed", mend=INSTALL_TRANSFORMERS)
    try:
        return _meta_model(folder)
    except WRONG_CONFIG as error:
        raise _unmade(error, folder) from None


def _unmade(error: Exception, folder: Path) -> InputError:
    mend = "fetch config.json again, or install a version of the library that knows the model"
    return InputError(f"its model cannot be made ({error})", where=str(folder / CONFIG), mend=mend)


def _meta_model(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model_class = _class_in(transformers, (config.architectures or [""])[0], transformers.PreTrainedModel)
    if model_class is None:
        return None
    with torch.device("meta"):
        return model_class._from_config(config, dtype=torch.bfloat16)


def _of_transformers(folder: Path, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = _meta_model(folder)
    return {} if model is None else shapes_in(model, get_model_conversion_mapping(model), names)


def shapes_in(model: Any, conversions: Sequence[Any], names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a checkpoint's weights ``names`` in a transformers model that loads them with ``conversions``."""
    from samebits.integrations.transformers.names import Names

    renaming = Names(model, conversions)
    targets = {name: renaming.target(name) for name in names}
    return {
        name: tuple(renaming.parameters[target].shape)
        for name, (target, pattern) in targets.items()
        if pattern is None and target in renaming.parameters
    }


def _class_in(library: ModuleType, name: str, base: type) -> Any:
    """The subclass of ``base`` that a config names, None if it names something else, which is not to be called."""
    found = getattr(library, name, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def _of_diffusers(config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    import diffusers

    model_class = _class_in(diffusers, config["_class_name"], diffusers.ModelMixin)
    if model_class is None:
        return {}
    with torch.device("meta"):
        parameters = model_class.from_config({k: v for k, v in config.items() if k != KEY}).state_dict()
    return {name: tuple(parameters[name].shape) for name in names if name in parameters}
