"""What the encoder on a GPU leaves to others; see test_cuda_encode.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.codecs.encode import CpuCounter
from samebits.codecs.plan import make_plan
from samebits.errors import DeviceError
from samebits.kernels import encode
from tests.codecs import zoo


@pytest.mark.parametrize(("columns", "is_refused"), [((1 << 31) - 65, False), ((1 << 31) - 64, True)])
def test_the_most_columns(columns: int, is_refused: bool) -> None:
    """A warp goes through a row in steps of 32 words, whose numbers must not overflow behind the last one."""
    tensor = torch.empty(8, columns, dtype=torch.bfloat16, device="meta")
    with pytest.raises(DeviceError if is_refused else ValueError, match="too large" if is_refused else "meta"):
        encode.encode_cuda(tensor)


def test_streams_whose_words_offsets_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though with its planes the tensor would be smaller."""
    words = zoo.normal((64, 1024))
    plan = make_plan(words.shape, CpuCounter(words.ravel(), words.shape))
    assert plan is not None
    tensor = torch.zeros((), dtype=torch.bfloat16).expand(1 << 17, 1 << 18)
    counter: Any = SimpleNamespace(tensor=tensor, source=lambda shifts, window: None)
    monkeypatch.setattr(encode, "_book", lambda plan, device: (None, None))
    monkeypatch.setattr(encode, "_launch", lambda *arguments, shared: None)
    monkeypatch.setattr(encode, "_to_host", lambda *tensors: (400, 1 << 32, 0))
    assert encode._pack(counter, plan, torch.zeros(1)) is None
