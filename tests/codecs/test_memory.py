"""Memory of decoded tensors is used again, and never while somebody may read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch.nn import functional as F

import samebits
from samebits.codecs import memory
from samebits.codecs.memory import empty


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a kilobyte are large here, and eight are kept."""
    monkeypatch.setattr(memory, "_LEAST", 1024)
    monkeypatch.setattr(memory, "_MOST", 8192)
    monkeypatch.setattr(memory, "_blocks", [])


def kept() -> int:
    return sum(block.memory.nbytes for block in memory._blocks)


def test_what_is_free_is_taken_again() -> None:
    first = empty((32, 32))
    assert (first.shape, first.dtype, first.is_contiguous()) == ((32, 32), torch.bfloat16, True)
    place = first.data_ptr()
    del first
    second = empty((8, 64))  # smaller
    assert second.data_ptr() == place
    del second
    assert empty((1024,)).data_ptr() == place
    assert kept() == 2048


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda tensor: tensor,
    "row": lambda tensor: tensor[3],
    "part": lambda tensor: tensor.detach().view(-1)[5:6],
    "method": lambda tensor: tensor.numpy,
    "array": lambda tensor: tensor.view(torch.int16).numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_what_is_held_is_not(holder: Callable[[torch.Tensor], object]) -> None:
    tensor = empty((32, 32))
    place, held = tensor.data_ptr(), holder(tensor)
    del tensor
    other = empty((32, 32))
    assert other.data_ptr() != place
    del held
    assert empty((32, 32)).data_ptr() == place


def test_what_autograd_keeps_is_not() -> None:
    weight = empty((32, 32)).fill_(2)
    place = weight.data_ptr()
    x = torch.ones(1, 32, dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, weight)
    del weight
    other = empty((32, 32)).fill_(7)
    assert other.data_ptr() != place
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad == 64).all()


def test_a_larger_one_takes_the_place_of_what_is_free() -> None:
    held = empty((1024,))
    free = empty((1024,))
    del free
    assert kept() == 4096
    larger = empty((2048,))
    assert kept() == 2048 + 4096
    del held, larger
    assert kept() == 2048 + 4096
    empty((4096,))
    assert kept() == 8192


def test_no_more_is_kept() -> None:
    held = [empty((1024,)) for _ in range(6)]
    assert len({tensor.data_ptr() for tensor in held}) == 6
    assert kept() == 8192
    too_large = empty((4097,))
    assert too_large.shape == (4097,)
    assert kept() == 8192


def test_what_is_free_outlives_what_is_never_kept() -> None:
    """As between the layers of two tokens, where a large output layer comes in between."""
    empty((1024,))
    empty((4097,))
    assert kept() == 2048


def test_what_is_to_stay_gets_its_own() -> None:
    """Or it would hold all of a larger block."""
    weights = torch.randn(64, 64).to(torch.bfloat16)
    packed = samebits.encode(weights)
    place = empty((8192,)).data_ptr()
    decoded = samebits.decode(packed)
    assert decoded.untyped_storage().nbytes() == decoded.nbytes
    assert decoded.data_ptr() != place
    assert torch.equal(decoded.view(torch.int16), weights.view(torch.int16))
    layer = torch.nn.Linear(64, 64).to(torch.bfloat16)
    samebits.compress(layer)
    samebits.decompress(layer)
    assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
    before = kept()
    empty((4096,))
    assert kept() >= before


def test_small_ones_are_left_to_the_c_library() -> None:
    empty((511,))
    assert kept() == 0


def test_threads_have_memory_of_their_own() -> None:
    start = Barrier(4)

    def run(number: int) -> bool:
        start.wait()
        right = True
        for _ in range(200):
            tensor = empty((600 + 100 * number,)).fill_(number)
            right &= bool((tensor == number).all())
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_tensors_decoded_one_after_the_other() -> None:
    every = [torch.randn(40, 64, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(4)]
    packed = [samebits.encode(tensor) for tensor in every]
    for _ in range(3):
        for tensor, each in zip(every, packed, strict=True):
            assert torch.equal(samebits.decode(each).view(torch.int16), tensor.view(torch.int16))
    both = [samebits.decode(each) for each in packed[:2]]
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(both, every[:2], strict=True))


FORKED = """
import os, signal
import numpy as np
import torch
import samebits
from samebits.codecs import memory

weight = torch.randn(2048, 1024).to(torch.bfloat16)
expected, packed = weight.view(torch.int16).numpy(), samebits.encode(weight)
memory._LEAST = 0
samebits.decode(packed)  # by threads, which the child does not have
with memory._lock:  # nor has it who would release this
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(not np.array_equal(samebits.decode(packed).view(torch.int16).numpy(), expected))
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_decodes() -> None:
    environment = {**os.environ, "SAMEBITS_THREADS": "4"}
    assert subprocess.run([sys.executable, "-c", FORKED], env=environment, timeout=300).returncode == 0
