"""Whether a kernel may start before the one in front of it has ended (programmatic dependent launch).

Such a kernel builds its decode table and loads its first chunks while the other one still runs, and waits before it
touches anything but the packed bytes. So nobody may be writing these: that is known from the second launch on.
"""

from __future__ import annotations

import weakref

import torch

Bytes = tuple[int, int]

# By id, the tensors on which a kernel has been launched, and their bytes then. Not as an attribute of the tensor: it
# would be copied and pickled with it, and say of other bytes what holds for these.
_settled: dict[int, tuple[weakref.ref[torch.Tensor], Bytes]] = {}


def bytes_of(data: torch.Tensor) -> Bytes:
    """Which bytes a tensor has: another pair once torch has changed them in place, or given it others."""
    return data._version, data.data_ptr()


def may_start_early(data: torch.Tensor) -> bool:
    """Whether ``data`` was complete before the kernel that is in front of the next launch on torch's current stream.

    The first launch on these bytes says no, and so waits for whatever wrote them; later ones stand behind it.
    """
    if data.is_inference():  # has no version
        return False
    key, its_bytes = id(data), bytes_of(data)
    known = _settled.get(key)
    if known and known[0]() is data and known[1] == its_bytes:
        return True
    if not torch.cuda.is_current_stream_capturing():  # a captured launch has not happened yet
        _settled[key] = weakref.ref(data, lambda _: _settled.pop(key, None)), its_bytes
    return False
