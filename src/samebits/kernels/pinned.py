"""Main memory that GPUs copy from by themselves, while they and the host do other things."""

from __future__ import annotations

import torch

PAGE = 4096  # bytes


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Pin memory where it is; whether that worked. torch's own allocator would round up to powers of two.

    Args:
        memory: uint8, on pages of its own.
    """
    from cuda.bindings import driver

    torch.cuda.synchronize(device)  # and its context is the current one
    size = -(-len(memory) // PAGE) * PAGE
    (code,) = driver.cuMemHostRegister(memory.data_ptr(), size, driver.CU_MEMHOSTREGISTER_PORTABLE)
    return int(code) == 0


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``, behind every copy from there."""
    from cuda.bindings import driver

    driver.cuMemHostUnregister(memory.data_ptr())
