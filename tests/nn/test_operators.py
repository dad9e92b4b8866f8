"""Every operator of torch that takes BF16, with a packed weight at each place of samples that torch's own tests have.

What it gives is what it gives of the plain weight, and so are gradients of all else that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from samebits.codecs import encode
from samebits.errors import InputError
from samebits.nn.lazy import LazyTensor, LazyWeight
from samebits.nn.recipe import Piece, Recipe

pytest.importorskip("expecttest", reason="torch's samples of its operators need expecttest")

with patch.object(torch.backends, "disable_global_flags"):  # for all tests of this process
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 6  # of each operator
OPERATORS = {
    f"{op.name}.{op.variant_test_name}".rstrip("."): op
    for op in op_db
    if torch.bfloat16 in op.dtypes and "jiterator" not in op.name  # whose kernels read an address past the dispatcher
}
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
WITH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# These write to an argument: with all samples, or with one.
WRITING = {
    "cauchy", "exponential", "geometric", "log_normal", "normal.in_place", "uniform", "_native_batch_norm_legit",
    "_batch_norm_with_update", "nn.functional.embedding", "nn.functional.embedding_bag", "nn.functional.instance_norm",
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _all_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small."""
    monkeypatch.setattr(encode, "gains", lambda header: True)


@pytest.fixture(autouse=True)
def _samples_are_of_no_unittest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch finds in most of a test's time: for each iterator it reads the sources of all functions that run."""
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)


def packed_weight(tensor: torch.Tensor) -> LazyWeight | None:
    """None of what has no packed form: a tensor without words."""
    packed = encode.encode_cpu(tensor.detach().cpu().contiguous())
    if packed.is_raw:
        return None
    stride = () if tensor.is_contiguous() else tuple(tensor.stride())
    recipe = Recipe(tuple(tensor.shape), (Piece("weight", packed.header),), requires_grad=False, stride=stride)
    return LazyWeight(recipe, [packed.data.to(tensor.device)])


Call = Callable[[torch.Tensor], Any]


def calls(op: Any, device: str, *, gradients: bool) -> Iterator[tuple[Call, torch.Tensor, LazyWeight]]:
    """Each sample with each of its BF16 tensors as weight: how to call it with that, plain, and packed."""
    for sample in islice(op.sample_inputs(device, torch.bfloat16, requires_grad=gradients), SAMPLES):
        values, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        for place, value in enumerate(values):
            if not (is_strided(value) and value.dtype is torch.bfloat16 and value.dim()):
                continue
            packed = packed_weight(value)
            if packed is None:
                continue

            def call(weight: torch.Tensor, place: int = place, values: Any = values, structure: Any = structure) -> Any:
                torch.manual_seed(0)
                own = [copied(each) if isinstance(each, torch.Tensor) else each for each in values]
                own[place] = weight
                first, args, kwargs = tree_unflatten(own, structure)
                given = op.op(first, *args, **kwargs)
                return gradients_of(own, given) if gradients else given

            yield call, nn.Parameter(copied(value).detach(), requires_grad=False), packed


def is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def gradients_of(values: list[Any], given: Any) -> list[torch.Tensor | None]:
    """Of all tensors among ``values``.

    Raises:
        RuntimeError: there are none.
    """
    outputs = [each.abs().sum() for each in tree_leaves(given) if isinstance(each, torch.Tensor) and each.requires_grad]
    torch.autograd.backward(outputs)
    return [each.grad for each in values if isinstance(each, torch.Tensor) and each.is_leaf]


def same(left: Any, right: Any) -> bool:
    """As bytes, and lying in memory alike."""
    lefts, rights = tree_leaves(left), tree_leaves(right)
    return len(lefts) == len(rights) and all(map(same_value, lefts, rights))


def same_value(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor):
        return bool(left == right or (left != left and right != right))
    if isinstance(right, LazyTensor):
        right = right.decode()
    if (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
        return False
    if left.layout is not torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if left.stride() != right.stride():
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    words = WITH_INTEGERS[left.element_size()]
    return torch.equal(left.contiguous().view(words), right.contiguous().view(words))


_ATTEMPTS = 30  # sums that a GPU adds up in any order (grid_sample's gradients) are often the same twice


def assert_same(name: str, call: Call, plain: torch.Tensor, packed: LazyWeight) -> bool:
    """Whether there was something to compare: torch computes it of the plain weight, and always the same."""
    try:
        expected = call(plain.clone())
    except Exception:
        return False
    try:
        found = call(packed)
    except InputError as error:
        if name in WRITING and "cannot be changed" in str(error):
            return True
        raise
    if same(expected, found):
        return True
    again = (call(plain.clone()) for _ in range(_ATTEMPTS))
    assert any(not same(expected, each) for each in again)  # or torch does not always say the same either
    return False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in OPERATORS if "empty" not in name])
def test_same_output(name: str, device: str) -> None:
    compared = 0
    for call, plain, packed in calls(OPERATORS[name], device, gradients=False):
        for mode in MODES:
            with mode():
                compared += assert_same(name, call, plain, packed)
    skip_without(compared)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name, op in OPERATORS.items() if op.supports_autograd])
def test_same_gradients(name: str, device: str) -> None:
    compared = 0
    for call, plain, packed in calls(OPERATORS[name], device, gradients=True):
        compared += assert_same(name, call, plain, packed)
    skip_without(compared)


def skip_without(compared: int) -> None:
    if not compared:
        pytest.skip("torch computes none of its samples with a BF16 weight")
