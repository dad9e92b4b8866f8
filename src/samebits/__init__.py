"""samebits: any BF16 model in two thirds of the memory, with the same bits out.

Importing this package is free: torch, transformers and the GPU are touched at the first use of a name below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samebits.integrations.hooks import register_on_import

if TYPE_CHECKING:
    from samebits.api import decode, encode
    from samebits.errors import SamebitsError
    from samebits.format.packed import PackedTensor
    from samebits.integrations.graphs import cuda_graphs
    from samebits.integrations.transformers.cache import PackedCache
    from samebits.integrations.transformers.quantizer import SamebitsConfig
    from samebits.nn.convert import compress, decompress
    from samebits.nn.offload import offload, onload
    from samebits.nn.prepare import prepare
    from samebits.nn.single_file import SingleFile
    from samebits.nn.state import load_state_dict

__version__ = "0.1.0"
__all__ = [
    "PackedCache",
    "PackedTensor",
    "SamebitsConfig",
    "SamebitsError",
    "SingleFile",
    "__version__",
    "compress",
    "cuda_graphs",
    "decode",
    "decompress",
    "encode",
    "load_state_dict",
    "offload",
    "onload",
    "prepare",
]

_HOMES = {
    "encode": "samebits.api",
    "decode": "samebits.api",
    "PackedCache": "samebits.integrations.transformers.cache",
    "PackedTensor": "samebits.format.packed",
    "SamebitsConfig": "samebits.integrations.transformers.quantizer",
    "SamebitsError": "samebits.errors",
    "SingleFile": "samebits.nn.single_file",
    "compress": "samebits.nn.convert",
    "cuda_graphs": "samebits.integrations.graphs",
    "decompress": "samebits.nn.convert",
    "load_state_dict": "samebits.nn.state",
    "offload": "samebits.nn.offload",
    "onload": "samebits.nn.offload",
    "prepare": "samebits.nn.prepare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samebits' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_on_import()
