"""What vLLM finds without being asked, and what it is told where it cannot go on."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization import get_quantization_config

from samebits.errors import InputError
from samebits.integrations.vllm import plugin, weights


def test_vllm_finds_it() -> None:
    [found] = entry_points(group="vllm.general_plugins", name="samebits")
    assert found.load() is plugin.register


def test_registered_twice() -> None:
    plugin.register()
    first = get_quantization_config("samebits")
    plugin.register()
    assert get_quantization_config("samebits") is first
    assert first().get_supported_act_dtypes() == [torch.bfloat16]


def test_old_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.25.1")
    with pytest.warns(UserWarning, match=r"needs vLLM 0\.26 or newer, and leaves 0\.25\.1 alone"):
        plugin.register()


@pytest.mark.parametrize("fails", [False, True])
def test_hidden_modules_come_back(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("hidden", "hidden.part", "hiddenly")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    seen: list[str] = []

    def look(argument: Any) -> Any:
        seen.extend(name for name in names if name in sys.modules)
        return 1 / argument

    call = plugin._without("hidden", look)
    if fails:
        with pytest.raises(ZeroDivisionError):
            call(0)
    else:
        assert call(2) == 0.5
    assert seen == ["hiddenly"]
    assert all(name in sys.modules for name in names)


def test_moved_layers_are_refused() -> None:
    """An operator that finds nothing at an address must not read what is there."""
    with pytest.raises(InputError, match="no longer where it was loaded to"):
        torch.ops.samebits.vllm_product(torch.ones(1, 4), torch.zeros(weights.HANDLE, dtype=torch.uint8), None, 4)
