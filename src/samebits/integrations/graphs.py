"""samebits.cuda_graphs: what a model does again and again is one launch, without Python for every layer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from samebits.errors import InputError
from samebits.integrations.replayed import Capture, replayed
from samebits.kernels.replay import fast_replay
from samebits.nn.packed_module import ACCELERATE, check_module

_log = logging.getLogger(__name__)


@contextmanager
def cuda_graphs(model: nn.Module) -> Iterator[None]:
    """Inside, a model's steps are captured as CUDA graphs and replayed, of BF16 models as of compressed ones.

    Of a transformers model that generates, the decoding steps of ``model.generate(...,
    cache_implementation="static")`` (docs/language-models.md). Of any other module, as the transformer or UNet of a
    diffusers pipeline, each call without gradients (docs/diffusers.md). What cannot be captured runs as it is, and the
    log says why.

    On a CPU it does nothing, nor for models that accelerate places on the GPU when they are called.

    Args:
        model: one of transformers or PEFT's around one, a pipeline's transformer or UNet, or any other module.

    Raises:
        InputError: it is no module, or not all of it is on one GPU, or it is one of several processes.
    """
    check_module(model, "give a model, of a pipeline its transformer or unet")
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if not any(device.type == "cuda" for device in devices):
        if hasattr(model, ACCELERATE):
            _log.warning(
                "samebits.cuda_graphs: nothing is replayed of a model that is in main memory between its calls"
            )
        yield
        return
    device, *others = devices
    if others:
        where = ", ".join(sorted(map(str, devices)))
        raise InputError(f"a CUDA graph of a model on {where}", mend="load all of it onto one GPU")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise InputError("a CUDA graph in one of several processes", mend="run it without samebits.cuda_graphs there")
    with _steps(model, partial(captured, device)):
        yield


def _steps(model: Any, capture: Capture) -> AbstractContextManager[None]:
    base = getattr(model, "get_base_model", lambda: model)()  # PEFT's
    if not _generates(base):
        return replayed(model, capture)
    from samebits.integrations.transformers.graphs import decoding_steps

    return decoding_steps(base, capture)


def _generates(model: Any) -> bool:
    """Whether it is of transformers, and writes tokens one after another."""
    if "transformers" not in sys.modules:
        return False
    from transformers import GenerationMixin

    return isinstance(model, GenerationMixin)


def captured(device: torch.device, run: Callable[[], Any]) -> Callable[[], Any]:
    """A function that replays ``run`` on a GPU, whichever is current, and gives the same tensors each time."""
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=_capture_stream(device)):
                output = run()
        finally:
            torch.cuda.set_stream(stream)  # which torch does not if the capture has failed
        start = fast_replay(graph)

    def replay() -> Any:
        start()
        return output

    return replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """torch's own is of the GPU that was current when it first captured."""
    return torch.cuda.Stream(device)
