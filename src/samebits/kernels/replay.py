"""Replays of CUDA graphs whose kernels follow each other as fast as they can: csrc/replay.cu.

As soon as a process has launched some kernels on a second stream, and torch launches two there for each graph that it
captures, kernels in graphs begin 0.2 to 0.35 us later than before, of any graph and on any stream: seen on H200, with
driver 580. The launch in front of the replay decides over it: behind one that may start early (programmatic dependent
launch) they begin in time, whatever was launched before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from samebits.errors import DeviceError
from samebits.kernels import nvrtc

_log = logging.getLogger(__name__)


def fast_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """A function that replays a graph of the current GPU on torch's current stream."""
    device = torch.cuda.current_device()
    if not nvrtc.starts_early(device):
        return graph.replay
    try:
        kernel = nvrtc.kernel("replay.cu", "before_replay", device)
    except DeviceError as error:
        _log.info("graphs are replayed without a launch in front of them: %s", error)
        return graph.replay

    def replay() -> None:
        with nvrtc.on_device(device):
            nvrtc.launch(kernel, 1, 32, 0, early=True)
            graph.replay()

    return replay
