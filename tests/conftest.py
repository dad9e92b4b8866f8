"""What all tests share: the clause marker, hypothesis settings, and what happens to GPU tests without a GPU."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "samebits",
    deadline=None,  # the first call compiles
    derandomize=True,  # the same examples on every machine
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("samebits")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "clause(*numbers): the clauses of FORMAT.md that the test checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, unless they were asked for by ``-m gpu``: then they must not pass unseen."""
    if config.getoption("markexpr") == "gpu" or not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
