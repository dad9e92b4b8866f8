"""Only bytes that were there before may be read while the kernel in front still runs."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from samebits.kernels import residents
from samebits.kernels.residents import may_start_early, resident


@pytest.fixture(autouse=True)
def _no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; torch without CUDA cannot be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_from_the_second_launch_on() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    assert [may_start_early(data) for _ in range(3)] == [False, True, True]


def test_not_after_the_bytes_changed() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    may_start_early(data)
    data.fill_(1)
    assert [may_start_early(data) for _ in range(2)] == [False, True]


def test_not_after_other_bytes_took_their_place() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    may_start_early(data)
    data.data = torch.ones(8, dtype=torch.uint8)
    assert [may_start_early(data) for _ in range(2)] == [False, True]


def test_copies_start_anew() -> None:
    data = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    before = pickle.dumps(data)
    may_start_early(data)
    assert pickle.dumps(data) == before
    for other in (copy.deepcopy(data), pickle.loads(before), data.clone(), data.detach()):
        assert not may_start_early(other)


def test_a_captured_launch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [may_start_early(data) for _ in range(2)] == [False, False]


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        data = torch.zeros(8, dtype=torch.uint8)
    assert [may_start_early(data) for _ in range(2)] == [False, False]


def test_two_threads_know_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them keeps, launches of the other read."""
    data, inside = torch.zeros(8, dtype=torch.uint8), Barrier(2)

    def both_look() -> bool:
        inside.wait(60)
        return False

    monkeypatch.setattr(residents, "_is_gathered", both_look)
    with ThreadPoolExecutor(2) as pool:
        first, second = [future.result() for future in [pool.submit(resident, data) for _ in range(2)]]
    assert first is second is resident(data) is not None


def test_what_may_be_gathered_does_not_tell() -> None:
    """fully_shard has a tensor's bytes come and go without a word, and makes a class of each module's."""
    known, data = (torch.zeros(8, dtype=torch.uint8) for _ in range(2))
    assert [may_start_early(known) for _ in range(2)] == [False, True]
    made = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert [may_start_early(data) for _ in range(2)] == [False, False]
    assert resident(data) is None
    assert may_start_early(known)  # of before, which is not what is gathered
    del made
    gc.collect()
    assert resident(data) is not None


def test_forgets_tensors_that_are_gone() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    may_start_early(data)
    key = id(data)
    assert key in residents.residents
    del data
    gc.collect()
    assert key not in residents.residents


def test_forgets_what_was_known_of_other_bytes() -> None:
    """Products that know of each other's weights in a circle would stay for good, as native code's are not searched."""
    data = torch.zeros(8, dtype=torch.uint8)
    before = residents.resident(data)
    assert before is not None
    gradient = residents.gradients[id(data)]
    for known in (before, gradient):
        known.shortcuts[1], known.training[1], known.prefetched = before, before, (before, data)
    before.carriers[1] = before
    data.add_(1)
    after = residents.resident(data)
    assert after is not None
    assert after is not before
    assert after.has_changed
    assert not before.carriers
    for known in (before, gradient):
        assert (known.shortcuts, known.training, known.prefetched) == ({}, {}, None)
