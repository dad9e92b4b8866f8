"""A GPU whose kernels are emulated, behind the doors of samebits.kernels.nvrtc: tensors on it are on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from samebits.format.header import align
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.structures import PackedStructure
from samebits.kernels.tables import table_words
from tests.kernels import emulator
from tests.kernels.emulator import Memory

SHARED_MEMORY = 232448  # of an H100, or an H200


@dataclass
class EmulatedDevice:
    """
    Attributes:
        multiprocessors: few, so that blocks have much to do.
        seed: see emulator.run.
        memory: tensors that kernels may touch; none: they may touch all.
        launched: names of kernels.
    """

    multiprocessors: int = 3
    seed: int = 0
    memory: list[torch.Tensor] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        doors: list[tuple[str, Any]] = [
            ("kernel", lambda file, name, device: (file, name)),
            ("launch", self._launch),
            ("launcher", self._launcher),
            ("multiprocessors", lambda device: self.multiprocessors),
            ("shared_memory", lambda device: SHARED_MEMORY),
            ("has_wgmma", lambda device: False),
            ("on_device", lambda device: nvrtc._ALREADY),
            ("current_stream", lambda device: 0),
        ]
        for name, instead in doors:
            patch.setattr(nvrtc, name, instead)
        patch.setattr(torch.cuda, "current_device", lambda: -1)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def table_of(self, packed: PackedTensor) -> torch.Tensor:
        """A decode table, as tables.cu makes it."""
        table = torch.zeros(table_words(packed.header), dtype=torch.int32)
        shared = 4 * (len(table) + align(packed.header.symbol_count, 4))
        name = f"make_table_{packed.code.name.lower()}"
        self.memory = [packed.data, table]
        self._launch(("tables.cu", name), 1, 512, shared, PackedStructure.of(packed), ctypes.c_void_p(table.data_ptr()))
        return table

    def _run(self, function: tuple[str, str], grid: int, threads: int, shared: int, pointers: int) -> None:
        self.launched.append(function[1])
        allowed = [Memory(each.data_ptr(), each.nbytes) for each in self.memory]
        emulator.run(*function, grid, threads, shared, pointers, allowed, self.seed)

    def _launch(
        self, function: tuple[str, str], grid: int, threads: int, shared: int, *arguments: Any, early: bool = False
    ) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._run(function, grid, threads, shared, ctypes.addressof(pointers))

    def _launcher(
        self, function: tuple[str, str], grid: int, threads: int, shared: int, stream: int, early: bool, device: int
    ) -> Callable[[int], None]:
        return partial(self._run, function, grid, threads, shared)
