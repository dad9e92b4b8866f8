"""Where the work is done."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from samebits.errors import DeviceError


def can_build_kernels() -> bool:
    """Whether the packages that compile and launch kernels are installed."""
    return bool(find_spec("cuda") and find_spec("cuda.core"))


def resolve_device(device: str) -> str:
    """The device, "cpu" or "cuda", behind "auto", "cpu" or "cuda"; "auto" takes a GPU if kernels can be built for it.

    Raises:
        DeviceError: "cuda" without a GPU.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise DeviceError("no CUDA device is available", mend="use --device cpu, or see `samebits doctor`")
    if device == "auto":
        return "cuda" if available and can_build_kernels() else "cpu"
    return str(device)
