"""huggingface_hub's PyTorchModelHubMixin: a compressed model is saved as plain weights.

Its from_pretrained makes a new module, whose weights stay as they were made where the file has none of their names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub.hub_mixin import PyTorchModelHubMixin

from samebits.nn.convert import plain


def register() -> None:
    mixin: Any = PyTorchModelHubMixin
    mixin._save_pretrained = _saving(mixin._save_pretrained)


def _saving(original: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    @wraps(original)
    def _save_pretrained(self: Any, save_directory: Path) -> None:
        original(plain(self), save_directory)

    return _save_pretrained


register()
