"""Products with routed experts: fused where that has the bits of torch's own operation, kept on disk, never guessed.

The kernel is played by torch's own operations; test_experts_gpu.py has the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import samebits
from samebits.errors import DeviceError, DtypeError, InputError
from samebits.kernels.ops import fields_of
from samebits.plans import calibrate_experts, experts, planner
from samebits.plans.calibrate_experts import multiply_decoded
from samebits.plans.experts import FEW_PAIRS, multiply_experts, searching_at_once
from samebits.plans.key import ExpertsKey, Operation
from samebits.plans.store import ExpertsOutcome, PlanStore
from tests.plans.conftest import ENVIRONMENT, new_planner

SHAPE = (4, 16, 640)
OPERATIONS = (Operation.BATCHED, Operation.GROUPED)
STATE = "state"


def product(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.bmm(weight[ids.long()], x.unsqueeze(-1)).squeeze(-1)


class Played:
    """A GPU whose kernel adds up as torch's operation of the day does.

    Attributes:
        wrong: variants whose bytes are others.
        times: of the variants that are right, in turn, and of decoding first.
        made: variants of all products so far.
        searches: what was timed, each time.
    """

    def __init__(self) -> None:
        self.wrong: set[int] = set()
        self.times = [5.0, 3.0, 4.0, 9.0]
        self.made: list[int] = []
        self.searches = 0
        self.is_capturing = False
        self.fits = True

    def product(
        self, x: torch.Tensor, packed: Any, ids: torch.Tensor, scales: object, y: torch.Tensor, variant: int
    ) -> None:
        assert scales is None
        self.made.append(variant)
        made = product(x, samebits.decode(packed), ids)
        y.copy_(-made if variant in self.wrong else made)

    def microseconds(self, candidates: Sequence[Sequence[Callable[[], torch.Tensor]]]) -> list[float]:
        self.searches += 1
        first, *others = [calls[0]() for calls in candidates]
        assert all(torch.equal(first.view(torch.int16), other.view(torch.int16)) for other in others)
        return [*self.times[: len(candidates) - 1], self.times[-1]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Played:
    made = Played()
    for module in (calibrate_experts, experts):
        monkeypatch.setattr(module, "experts_product", made.product)
        monkeypatch.setattr(module, "launch_of", lambda *_: made.fits or None)
    monkeypatch.setattr(calibrate_experts, "fitting_variants", lambda packed, pairs, sharing: [0, 1, 2])
    monkeypatch.setattr(calibrate_experts, "microseconds", made.microseconds)
    monkeypatch.setattr(calibrate_experts, "F", F_of_rows())
    monkeypatch.setattr(experts, "blas_state", lambda: STATE)
    monkeypatch.setattr(experts.nvrtc, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))
    new_process(monkeypatch)
    return made


class F_of_rows:  # noqa: N801
    """grouped_mm whose sums are those of torch.bmm, as on GPUs that have been seen."""

    @staticmethod
    def grouped_mm(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        assert weight.transpose(-2, -1).is_contiguous()
        ids = torch.searchsorted(offs, torch.arange(len(x), dtype=torch.int32), right=True)
        return product(x, weight.transpose(-2, -1), ids)


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    planner.mode.cache_clear()
    here = new_planner(ENVIRONMENT)(0)
    monkeypatch.setattr(experts, "Planner", type("Planner", (), {"of": staticmethod(lambda device: here)}))


@pytest.fixture
def packed() -> samebits.PackedTensor:
    return samebits.encode((0.02 * torch.randn(SHAPE)).to(torch.bfloat16))


def operands(pairs: int, operation: Operation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x = torch.randn(pairs, SHAPE[2]).to(torch.bfloat16)
    ids = torch.randint(SHAPE[0], (pairs,))
    if operation is Operation.BATCHED:
        return x, ids, None
    ids = ids.sort()[0].to(torch.int32)
    return x, ids, torch.bincount(ids, minlength=SHAPE[0]).cumsum(0, dtype=torch.int32)


def multiplied(packed: samebits.PackedTensor, pairs: int = 5, operation: Operation = Operation.BATCHED) -> torch.Tensor:
    x, ids, offsets = operands(pairs, operation)
    y = multiply_experts(x, packed, ids, offsets)
    assert torch.equal(y.view(torch.int16), product(x, samebits.decode(packed), ids).view(torch.int16))
    return y


def key_of(packed: samebits.PackedTensor, pairs: int = 5, operation: Operation = Operation.BATCHED) -> ExpertsKey:
    return ExpertsKey(operation, *packed.shape, pairs, STATE)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_fastest_that_is_right(played: Played, packed: samebits.PackedTensor, operation: Operation) -> None:
    multiplied(packed, operation=operation)
    assert played.made[-1] == 1
    played.wrong = {1}
    multiplied(packed, 6, operation)
    assert played.made[-1] == 2  # of 5 us and 3
    played.wrong = {0, 1, 2}
    played.made.clear()
    multiplied(packed, 7, operation)
    assert len(played.made) == 3  # compared once, never used
    stored = PlanStore(ENVIRONMENT).experts()
    assert stored == {
        key_of(packed, 5, operation): ExpertsOutcome(1, "", 3.0, 9.0),
        key_of(packed, 6, operation): ExpertsOutcome(2, "", 3.0, 9.0),
        key_of(packed, 7, operation): ExpertsOutcome(None, f"no variant gives the bits of {operation}"),
    }


def test_decoding_first_is_taken_where_it_is_faster(played: Played, packed: samebits.PackedTensor) -> None:
    played.times[-1] = 2.0
    multiplied(packed)
    played.made.clear()
    multiplied(packed)
    assert not played.made
    assert PlanStore(ENVIRONMENT).experts()[key_of(packed)].reason == "decoding first is faster"


def test_found_once_on_a_machine(
    played: Played, packed: samebits.PackedTensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    multiplied(packed)
    multiplied(packed)
    assert played.searches == 1
    new_process(monkeypatch)
    multiplied(packed)
    assert played.searches == 1
    played.wrong = {1}  # torch changed, and nothing that the key or the environment knows of
    new_process(monkeypatch)
    multiplied(packed)
    assert (played.searches, played.made[-1]) == (2, 2)
    assert "5 x 640 times 4 experts of 16 x 640, bmm: the plan on disk is not right here" in caplog.text


def test_nothing_is_found_while_a_graph_is_captured(played: Played, packed: samebits.PackedTensor) -> None:
    played.is_capturing = True
    multiplied(packed)
    assert not played.made
    played.is_capturing = False
    multiplied(packed)
    assert played.made[-1] == 1
    played.is_capturing = True
    multiplied(packed)
    assert played.made[-2:] == [1, 1]


@pytest.mark.parametrize("choice", ["cached", "off"])
def test_switched_off(
    played: Played, packed: samebits.PackedTensor, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(planner.MODE_VARIABLE, choice)
    new_process(monkeypatch)
    multiplied(packed)
    assert not played.made


@pytest.mark.parametrize("reason", ["no such kernel", "not enough memory"])
def test_failing_to_find_one(
    played: Played, packed: samebits.PackedTensor, reason: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    error = DeviceError(reason) if reason == "no such kernel" else torch.OutOfMemoryError("CUDA out of memory")

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(calibrate_experts, "experts_product", fail)
        multiplied(packed)
    assert reason in caplog.text
    assert not PlanStore(ENVIRONMENT).experts()


def test_without_memory_to_decode_first(
    played: Played, packed: samebits.PackedTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared, so there was memory for what torch reads; then a fused product is all that fits."""

    def fail(candidates: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calibrate_experts, "microseconds", fail)
    multiplied(packed)
    played.made.clear()
    multiplied(packed)
    assert played.made == [0]
    assert not PlanStore(ENVIRONMENT).experts()  # another process may have the memory


def test_a_weight_whose_chunks_are_larger_is_decoded_first(played: Played, packed: samebits.PackedTensor) -> None:
    multiplied(packed)
    played.made.clear()
    played.fits = False
    multiplied(packed)
    assert not played.made


def test_many_pairs_that_come_back(played: Played, packed: samebits.PackedTensor) -> None:
    for pairs in (FEW_PAIRS + 1, FEW_PAIRS + 2, FEW_PAIRS + 1):  # prompts
        multiplied(packed, pairs, Operation.GROUPED)
    assert not played.made
    for _ in range(8):
        multiplied(packed, FEW_PAIRS + 1, Operation.GROUPED)
    assert played.searches == 1
    multiplied(packed, FEW_PAIRS + 1, Operation.GROUPED)
    assert (played.searches, played.made[-2:]) == (1, [1, 1])


def test_many_pairs_that_will_come_back(played: Played, packed: samebits.PackedTensor) -> None:
    with searching_at_once():
        multiplied(packed, FEW_PAIRS + 1, Operation.GROUPED)
    assert (played.searches, played.made[-1]) == (1, 1)
    multiplied(packed, FEW_PAIRS + 2, Operation.GROUPED)
    assert played.searches == 1


CASES = ["many", "none", "strided", "misaligned", "state", "float32", "packed bytes", "ids", "int16", "columns"]


@pytest.mark.parametrize("case", CASES)
def test_operands_without_plans(
    played: Played, packed: samebits.PackedTensor, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids, _ = operands({"many": FEW_PAIRS + 1, "none": 0}.get(case, 4), Operation.BATCHED)
    if case == "strided":
        x = torch.cat([x, x], 1)[:, : SHAPE[2]]
    elif case == "misaligned":
        x = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(x.shape)
    elif case == "state":
        monkeypatch.setattr(experts, "blas_state", lambda: None)
    elif case == "packed bytes":
        data = torch.cat([packed.data.new_zeros(4), packed.data])[4:]
        assert data.data_ptr() % 16
        packed = samebits.PackedTensor(packed.header, data)
    wrong = {
        "float32": (x.float(), ids),
        "ids": (x, ids.repeat(2)),
        "int16": (x, ids.short()),
        "columns": (x[:, 1:], ids),
    }
    if case in wrong:  # refused as where nothing is fused
        with pytest.raises((RuntimeError, DtypeError)):
            multiply_experts(wrong[case][0].contiguous(), packed, wrong[case][1], None)
    else:
        made = multiply_experts(x, packed, ids, None)
        assert torch.equal(made.view(torch.int16), product(x, samebits.decode(packed), ids).view(torch.int16))
    assert not played.made


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_operator(packed: samebits.PackedTensor, operation: Operation) -> None:
    x, ids, offsets = operands(5, operation)
    arguments = x, packed.data, list(packed.shape), fields_of(packed.header), ids, offsets
    weight = samebits.decode(packed)
    made = torch.ops.samebits.experts(*arguments)
    expected = product(x, weight, ids)
    if offsets is not None:
        expected = F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    assert torch.equal(made.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(multiply_decoded(x, packed, ids, offsets).view(torch.int16), expected.view(torch.int16))
    torch.library.opcheck(torch.ops.samebits.experts.default, arguments)


def test_operands_that_do_not_fit(packed: samebits.PackedTensor) -> None:
    x, ids, _ = operands(5, Operation.BATCHED)
    fields = fields_of(packed.header)
    with pytest.raises(InputError, match="bytes"):
        torch.ops.samebits.experts(x, packed.data[:-4], list(packed.shape), fields, ids, None)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for wrong in ((x[:, :-1], ids), (x, ids[:-1]), (x.unsqueeze(0), ids)):
            with pytest.raises(RuntimeError, match="an input"):
                torch.ops.samebits.experts(wrong[0], packed.data, list(packed.shape), fields, wrong[1], None)
