"""All that cuBLAS's choice of an algorithm may depend on, other than the operands.

Either it stays the same in a process (Environment), or it is asked for at every call (blas_state).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import operator
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch.utils._device import DeviceContext

from samebits.kernels import nvrtc

_DRIVER = Path("/proc/driver/nvidia/version")
# Variables of torch and cuBLAS that are read at some unknown moment, mostly once.
_VARIABLES = re.compile(
    r"CUBLAS.*|TORCH_CUBLASLT.*|TORCH_LINEAR_FLATTEN_3D|DISABLE_ADDMM_CUDA_LT|NVIDIA_TF32_OVERRIDE|CUDA_MPS_.*"
)
_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
_TUNABLE = "_cuda_tunableop_is_enabled"
# Routines of products in whose place others may have put their own, as batch-invariant modes do.
_ROUTINES = ("linear", "matmul", "mm", "addmm", "bmm", "_grouped_mm")
_BACKENDS = ("", "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "AutogradCUDA", "Autograd")
_last: tuple[tuple[Any, ...], str | None] = ((), None)  # what blas_state found, and said
# Names in torch._C; not every version and build of torch has all of them.
_SETTINGS = (
    "_get_blas_preferred_backend",
    "_get_cublas_allow_bf16_reduced_precision_reduction",  # newer versions: with split-K or without
    "_get_deterministic_algorithms",
    "_get_sm_carveout_experimental",
    "_cuda_getCublasWorkspaceSize",
    "_cuda_getCublasLtWorkspaceSize",
    _TUNABLE,
)


@dataclass(frozen=True)
class Environment:
    """What a process cannot change: plans found in one environment mean nothing in another.

    Attributes:
        device: name and compute capability of the GPU.
        multiprocessors: those this process may use.
        driver: its CUDA version, and its own where Linux shows it.
        cublas: versions of cuBLAS and cuBLASLt as torch has loaded them.
        kernels: digest of the sources of samebits' kernels.
        variables: those of torch and cuBLAS, as the process had them at its first product.
    """

    device: str
    multiprocessors: int
    driver: str
    torch: str
    cublas: str
    kernels: str
    variables: dict[str, str]

    @classmethod
    @cache
    def of(cls, device: int) -> Environment:
        """That of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        return cls(name, properties.multi_processor_count, _driver(), torch.__version__, _cublas(), kernels_digest(),
                   variables())  # fmt: skip

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@cache
def variables() -> dict[str, str]:
    """What the environment variables of torch and cuBLAS were at the first call."""
    return {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


def casts(device_type: str) -> bool:
    """Whether autocast has products of BF16 made in another type; to BF16 it leaves them as they are."""
    if device_type == "meta":  # which torch cannot be asked about
        return False
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is not torch.bfloat16


def is_observed() -> bool:
    """Whether a mode sees, or replaces, what is asked of torch's functions; one that only says where is none."""
    count = torch._C._len_torch_function_stack()
    if not count:  # as nearly always
        return False
    return any(type(torch._C._get_function_stack_at(place)) is not DeviceContext for place in range(count))


def is_transformed() -> bool:
    """Whether torch's functions are asked for more than values: by torch.func, a mode, or a trace."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or is_observed()
        or torch._C._get_tracing_state() is not None
    )


def blas_state() -> str | None:
    """What may change between two calls, in words; None where no plan can be trusted."""
    global _last
    values, last = tuple(map(operator.call, getters())), _last
    if values != last[0]:
        last = _last = values, _described(values)
    return last[1]


@cache
def getters() -> tuple[Callable[[], Any], ...]:
    """What blas_state asks: the settings, then whether products are torch's own, then the variables for workspaces.

    Asking os.environ itself would take a microsecond for each.
    """
    kept: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    encoded = (os.environ.encodekey(name) for name in _WORKSPACES)
    replaced = frozenset(f"aten/{routine}/{backend}" for routine in _ROUTINES for backend in _BACKENDS)
    are_own = partial(replaced.isdisjoint, torch.library._impls)
    return *(getattr(torch._C, name) for name in _names()), are_own, *(partial(kept.get, name) for name in encoded)


def _names() -> list[str]:
    return [name for name in _SETTINGS if hasattr(torch._C, name)]


def _described(values: tuple[Any, ...]) -> str | None:
    """None if others make the products, or choose the algorithms, or a workspace was configured anew."""
    settings = dict(zip(_names(), values, strict=False))
    are_own, *workspaces = values[len(settings) :]
    configured = [os.fsdecode(value) if value is not None else None for value in workspaces]
    is_tuned = settings.pop(_TUNABLE, False)
    if is_tuned or not are_own or configured != [variables().get(name) for name in _WORKSPACES]:
        return None
    pairs = ((re.sub("^_(get_|cuda_get)", "", name), getattr(value, "name", value)) for name, value in settings.items())
    return " ".join(f"{name}={value}".replace(" ", "") for name, value in pairs)


def _driver() -> str:
    own = re.search(r"\d{3}(\.\d+)+", _DRIVER.read_text()) if _DRIVER.exists() else None
    return nvrtc.driver_version() + (f", {own[0]}" if own else "")


def _cublas() -> str:
    """From the libraries in use; where they are part of torch, its own version decides."""
    major = str(torch.version.cuda).partition(".")[0]
    try:
        cublas, cublas_lt = (
            ctypes.CDLL(f"{name}.so.{major}", mode=os.RTLD_NOLOAD) for name in ("libcublas", "libcublasLt")
        )
    except OSError:
        return f"linked into torch, CUDA {torch.version.cuda}"
    parts = [ctypes.c_int() for _ in range(3)]
    for index, part in enumerate(parts):
        cublas.cublasGetProperty(index, ctypes.byref(part))
    cublas_lt.cublasLtGetVersion.restype = ctypes.c_size_t
    return f"{'.'.join(str(part.value) for part in parts)}, Lt {cublas_lt.cublasLtGetVersion()}"


def kernels_digest() -> str:
    """Of what a plan's split and variant mean."""
    folders = (files("samebits.kernels").joinpath(name) for name in ("csrc", "linear"))
    sources = (source for folder in folders for source in folder.iterdir() if source.is_file())
    digest = hashlib.sha256()
    for source in sorted(sources, key=lambda source: source.name):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
