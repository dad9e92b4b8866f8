"""Which input a thread's last products were made of, and what was made for those that will be asked for next."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from samebits.kernels import nvrtc
from samebits.kernels.linear.products import LinearPlan
from samebits.kernels.residents import Bytes

Made = tuple[Any, Any, LinearPlan, torch.Tensor]  # a product with its group and weight, see together.py; for recall.c


class Turn(Bytes):
    """An input, while it is unchanged.

    Attributes:
        where: the launch of its first product.
        state: torch's settings at that.
        first: packed bytes of that.
        made: what was made with it and not asked for yet, by id of the packed bytes.
    """

    __slots__ = ("first", "made", "state", "where")

    def __init__(self, x: torch.Tensor, where: nvrtc.Where, state: str, data: torch.Tensor) -> None:
        super().__init__(x)
        self.where, self.state, self.first = where, state, weakref.ref(data)
        self.made: dict[int, Made] = {}


class Turns(threading.local):
    """One for each thread.

    Attributes:
        last: whose products were asked for last.
        windows: launches behind which is noted what is asked for, see prefetch.py; every call is made as usual then.
        graph: the CUDA graph that was captured when a product was last asked for, as nvrtc.Where counts them.
        captured: packed bytes that it has so far, by id.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):
            nothing = torch.empty(0, device="cpu")
        self.last = Turn(nothing, nvrtc.Where(0, 0), "", nothing)
        self.windows: tuple[Any, ...] = ()
        self.graph, self.captured = 0, set[int]()
