"""What tests of the fused layer multiply on a GPU is what its kernels take, which can be seen without one."""

from __future__ import annotations

import pytest

import samebits
from samebits.format.geometry import Code
from tests.codecs.tensors import always_quad
from tests.kernels.weights import KINDS, SHAPES, weight_of


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_packed_with_the_quad_code(kind: str) -> None:
    with always_quad():
        found = {shape: samebits.encode(weight_of(kind, *shape)).code for shape in SHAPES}
    assert found == dict.fromkeys(SHAPES, Code.QUAD)
