"""torch's default device is for what its user makes: each tensor that samebits makes says where it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

SOURCE = Path(__file__).resolve().parents[1] / "src"
MAKING = {function.__name__ for function in _device_constructors()} - {"asarray", "as_tensor"}  # of what is somewhere


def calls_without_a_device(source: str) -> list[int]:
    """Lines of calls of torch's functions that make tensors, and are not told where."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    makes = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in MAKING
    ]
    return [call.lineno for call in makes if not any(each.arg in ("device", "out", None) for each in call.keywords)]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_each_tensor_says_where_it_is(path: Path) -> None:
    assert calls_without_a_device(path.read_text()) == []


def test_what_is_found() -> None:
    source = (
        "torch.empty(3)\ntorch.zeros(3, device=x)\ntorch.full((2,), 1.0, dtype=d)\ntorch.empty_like(x)\nnp.empty(3)"
    )
    assert calls_without_a_device(source) == [1, 3]
    assert torch.empty in _device_constructors()
