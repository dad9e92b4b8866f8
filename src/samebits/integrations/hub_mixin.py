"""huggingface_hub's PyTorchModelHubMixin: a compressed model is saved as plain weights.

Its from_pretrained makes a new module, whose weights stay as they were made where the file has none of their names.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.hub_mixin import PyTorchModelHubMixin

from samebits.nn.convert import saving_plain


def register() -> None:
    mixin: Any = PyTorchModelHubMixin
    mixin._save_pretrained = saving_plain(mixin._save_pretrained)


register()
