"""Whether a kernel may start before the one in front of it has ended (programmatic dependent launch).

Such a kernel builds its decode table and loads its first chunks while the other one still runs, and waits before it
touches anything but the packed bytes. So nobody may be writing these: that is known from the second launch on.
"""

from __future__ import annotations

import torch

_MARK = "_samebits_settled"  # a packed tensor's bytes carry the version at which a kernel has been launched on them


def may_start_early(data: torch.Tensor) -> bool:
    """Whether ``data`` was complete before the kernel that is in front of the next launch on torch's current stream.

    The first launch on these bytes says no, and so waits for whatever wrote them; later ones stand behind it.
    """
    if data.is_inference():  # has no version
        return False
    version = data._version
    if getattr(data, _MARK, None) == version:
        return True
    if not torch.cuda.is_current_stream_capturing():  # a captured launch has not happened yet
        setattr(data, _MARK, version)
    return False
