"""What stands for a CUDA graph on a CPU: it notes torch's operators once, and does these again, without any Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Of operators, and where each has written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[tuple[Callable[[], Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._noted.append((lambda: func(*args, **(kwargs or {})), output))
        return output

    @torch.no_grad()
    def play(self) -> None:
        for call, output in self._noted:
            for own, new in zip(tree_leaves(output), tree_leaves(call()), strict=True):
                if isinstance(own, torch.Tensor) and own.numel() and own.data_ptr() != new.data_ptr():
                    own.copy_(new)


class Tapes:
    """Captures onto tapes, and counts."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        tape = Tape()
        with tape:
            output = run()

        def replay() -> Any:
            self.replays += 1
            tape.play()
            return output

        return replay
