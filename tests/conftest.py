"""What all tests share: hypothesis settings, and what happens to GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is on the hub, and to find that out takes seconds

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # torch's threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

settings.register_profile(
    "samebits",
    deadline=None,  # the first call compiles
    derandomize=True,  # the same examples on every machine
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("samebits")


def pytest_report_header() -> str:
    import torch

    if torch.version.cuda and not torch.cuda.is_available():
        return "torch is built for CUDA and finds no GPU: tests that play one will fail; CONTRIBUTING.md has the mend"
    return f"torch {torch.__version__}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Libraries and tests stay: what collects garbage, or looks at all objects, need not go through some millions.

    So samebits.compress does not find a module that was made while tests were collected: tests make theirs later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, unless they were asked for by ``-m gpu``: then they must not pass unseen."""
    if config.getoption("markexpr") == "gpu" or not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _repeatable_attention(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU whole models are compared, which have to agree with themselves."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    from samebits.verify import repeatable_attention

    with repeatable_attention():
        yield


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What samebits.cuda_graphs has captured so far."""
    from samebits.integrations import graphs as cuda_graphs

    found, captured = [], cuda_graphs.captured

    def noted(device: Any, run: Callable[[], Any]) -> Callable[[], Any]:
        found.append(captured(device, run))
        return found[-1]

    monkeypatch.setattr(cuda_graphs, "captured", noted)
    return found
