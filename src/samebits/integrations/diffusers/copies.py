"""diffusers' models that are made from another, such as a ControlNet from its UNet, copy weights by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from samebits.errors import InputError
from samebits.integrations.diffusers.quantizer import forget
from samebits.nn.packed_module import packed_parameters
from samebits.nn.state import name_as_before

_MOTION = "motion_modules"
_METHODS = ("from_unet", "from_unet2d", "from_transformer")


def register() -> None:
    """Wrap the methods of all models there are, and of those to come."""
    ModelMixin.__init_subclass__ = classmethod(_init_subclass)
    classes = ModelMixin.__subclasses__()
    while classes:
        cls = classes.pop()
        _wrap(cls)
        classes += cls.__subclasses__()


def _init_subclass(cls: Any, /, **kwargs: Any) -> None:
    super(ModelMixin, cls).__init_subclass__(**kwargs)
    _wrap(cls)


def _wrap(cls: Any) -> None:
    for name in _METHODS:
        method = getattr(cls.__dict__.get(name), "__func__", None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(cls, name, classmethod(_copying(method)))
    for name, wrap in (("load_motion_modules", _loading_motion), ("save_motion_modules", _saving_motion)):
        method = cls.__dict__.get(name)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(cls, name, wrap(method))


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_model(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a compressed model too a plain one is made: its weights are decoded one by one as they are copied."""
        with _named_as_before((*args, *kwargs.values())):
            result = original(cls, *args, **kwargs)
        if next(packed_parameters(result), None) is None and "quantization_config" in result.config:
            forget(result)
        return result

    return from_model


def _loading_motion(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_motion_modules(self: Any, motion_adapter: Any, *args: Any, **kwargs: Any) -> Any:
        """diffusers loads block after block: what does not fit is found before the first."""
        both = self, motion_adapter
        own, others = ({name for name, *_ in packed_parameters(model) if _MOTION in name} for model in both)
        if own and own != others:
            mend = "samebits.decompress the model first, and compress it again afterwards"
            raise InputError("its motion modules are packed, and the adapter's are not, or not the same", mend=mend)
        with _named_as_before(() if own else (motion_adapter,)):
            return original(self, motion_adapter, *args, **kwargs)

    return load_motion_modules


def _saving_motion(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save_motion_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As an adapter of plain weights."""
        with _named_as_before((self,)):
            return original(self, *args, **kwargs)

    return save_motion_modules


def _named_as_before(models: Iterable[Any]) -> ExitStack:
    """Within it state dicts of parts of these models, too, have packed weights under their own names."""
    stack = ExitStack()
    for model in models:
        for _, owner, _ in packed_parameters(model) if isinstance(model, nn.Module) else ():
            hook = owner.register_state_dict_post_hook(name_as_before)  # type: ignore[no-untyped-call]
            stack.callback(hook.remove)
    return stack


register()
