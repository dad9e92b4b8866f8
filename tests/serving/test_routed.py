"""Which variants fuse products of routed experts, as far as that needs no GPU: vLLM's kernel and ours are played."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.bf16 import same_words
from samebits.errors import DeviceError
from samebits.format.packed import PackedTensor
from samebits.integrations.vllm import routed
from samebits.integrations.vllm.routed import Choices, Chosen, RoutedWeight, Routing, multiplying_routed, weights
from samebits.kernels.linear.experts import is_supported
from samebits.plans.planner import Mode
from samebits.plans.store import PlanStore
from tests.plans.conftest import ENVIRONMENT

EXPERTS, EACH, HIDDEN, INNER = 4, 2, 256, 192
VARIANTS = range(3)


def products(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    pairs = ids.numel()
    x = x.repeat_interleave(pairs // len(x), 0).double()
    made = torch.einsum("pk,prk->pr", x, weight[ids.reshape(-1).long()].double())
    return (made if scales is None else made * scales.reshape(-1, 1)).to(torch.bfloat16)


def vllm_kernel(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    topk_weights: torch.Tensor | None,
    ids: torch.Tensor,
    mul_routed_weight: bool,
) -> None:
    """With the arguments of vLLM's that are looked at, and the others' routes."""
    write(C, products(A, B, ids, topk_weights if mul_routed_weight else None))


def write(target: torch.Tensor, made: torch.Tensor) -> None:
    """As kernels do, of which torch knows nothing."""
    assert target.is_contiguous()
    assert target.nbytes == made.nbytes
    ctypes.memmove(target.data_ptr(), made.contiguous().data_ptr(), made.nbytes)


@dataclass
class Played:
    """What plays the GPU's part, and what is asked of it.

    Attributes:
        wrong: variants whose bytes are others, of weights with so many rows.
        misfit: a variant that does not fit the weight that it is compared with.
        times: of fused products and of decoding first, in microseconds.
    """

    wrong: set[tuple[int, int]] = field(default_factory=set)
    times: tuple[float, float] = (1.0, 3.0)
    searches: int = 0
    capturing: bool = False
    misfit: int | None = None
    made: list[PackedTensor] = field(default_factory=list)

    def fits(self, variant: int) -> bool:
        return variant != self.misfit

    def product(
        self, x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, scales: Any, y: torch.Tensor, variant: int
    ) -> None:
        self.made.append(packed)
        made = products(x, samebits.decode(packed), ids, scales)
        write(y, -made if (packed.shape[1], variant) in self.wrong else made)

    def microseconds(self, calls: Sequence[Any]) -> list[float]:
        """Of variants the last one is the fastest."""
        if len(calls) == 2 and len(calls[0]) != len(calls[1]):
            self.searches += 1
            return list(self.times)
        return [float(len(calls) - i) for i in range(len(calls))]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played()
    monkeypatch.setattr(routed, "experts_product", made.product)
    monkeypatch.setattr(routed, "fitting_variants", lambda packed, pairs, sharing: list(VARIANTS))
    monkeypatch.setattr(routed, "launch_of", lambda header, pairs, sharing, variant, device: made.fits(variant))
    monkeypatch.setattr(routed, "microseconds", made.microseconds)
    monkeypatch.setattr(routed, "mode", lambda: Mode.ON)
    monkeypatch.setattr(routed, "_ROUTINGS", 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


@pytest.fixture
def layer() -> list[torch.Tensor]:
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    return [(0.02 * torch.randn(shape)).to(torch.bfloat16) for shape in shapes]


def choices_of(layer: list[torch.Tensor], store: PlanStore | None = None) -> Choices:
    multiply: Callable[..., None] = multiplying_routed(vllm_kernel)

    def run(x: torch.Tensor, routing: Routing, given: Sequence[Any]) -> torch.Tensor:
        first = x.new_empty(len(x), EACH, 2 * INNER)
        multiply(x, given[0], first, None, routing.ids, False)
        gate, up = first.view(-1, 2 * INNER).chunk(2, -1)
        second = x.new_empty(len(x), EACH, HIDDEN)
        multiply((gate * up).contiguous(), B=given[1], C=second, topk_weights=routing.scales, ids=routing.ids,
                 mul_routed_weight=True)  # fmt: skip
        return second.sum(1)

    packed = [samebits.encode(each) for each in layer]
    return Choices(packed, EACH, run, lambda routing: layer, store, "state")


def test_the_fastest_that_is_right(played: Played, layer: list[torch.Tensor]) -> None:
    choices = choices_of(layer)
    assert choices.of(3) == Chosen(2, 2)
    played.wrong |= {(2 * INNER, 2), (HIDDEN, 1)}
    assert choices.of(3) == Chosen(2, 2)  # known
    assert choices.of(4) == Chosen(1, 2)
    played.wrong |= {(2 * INNER, 0), (2 * INNER, 1)}
    assert choices.of(5) is None
    assert choices.known == {3: Chosen(2, 2), 4: Chosen(1, 2), 5: None}


def test_a_variant_that_cannot_be_compared(played: Played, layer: list[torch.Tensor]) -> None:
    played.misfit = 2
    assert choices_of(layer).of(3) == Chosen(1, 1)


@pytest.mark.parametrize("shape", [(4, 2048, 768), (4, 1536, 2048), (8, 640, 640), (8, 1280, 640)], ids=str)
def test_weights_and_what_they_are_compared_with_suit_the_kernel(shape: tuple[int, ...]) -> None:
    packed = samebits.encode((0.02 * torch.randn(shape)).to(torch.bfloat16))
    assert is_supported(packed.header)
    probe, encoded = routed.probe_of(packed.shape[1:], packed.device)
    assert is_supported(encoded.header)
    assert probe.weight.shape == shape[1:]


def test_what_is_compared_is_forgotten(played: Played, layer: list[torch.Tensor]) -> None:
    choices = choices_of(layer)
    assert choices.of(2, ahead=True)
    assert all("_probe" in vars(each) for each in choices._comparisons)
    choices.forget_probes()
    assert not any("_probe" in vars(each) for each in choices._comparisons)
    assert choices.of(3)
    assert not any("_probe" in vars(each) for each in choices._comparisons)


def test_the_same_bits_as_vllm(played: Played, layer: list[torch.Tensor]) -> None:
    choices, routing = choices_of(layer), Routing.random(6, EXPERTS, EACH, torch.device("cpu"), 1)
    x = torch.randn(6, HIDDEN).to(torch.bfloat16)
    chosen = choices.of(6)
    assert chosen
    expected = choices._run(x, routing, layer)
    assert torch.equal(choices._run(x, routing, weights(choices._packed, routing.ids, chosen)), expected)
    assert expected.isfinite().all()


def test_only_what_is_faster(played: Played, layer: list[torch.Tensor]) -> None:
    """Much slower once, ahead: not looked for with more tokens."""
    played.times = 3.0, 2.5
    choices = choices_of(layer)
    assert choices.of(3, ahead=True) is None
    played.times = 4.0, 2.0
    assert choices.of(4) is None
    played.times = 1.0, 2.0
    assert choices.of(5)
    played.times = 4.0, 2.0
    assert choices.of(8, ahead=True) is None
    played.times = 1.0, 2.0
    assert choices.of(9) is None
    assert played.searches == 4
    assert choices.of(7)


def test_kept_for_other_processes(
    played: Played, layer: list[torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried once, not trusted; also that decoding first is faster, and from how many tokens on nothing is worth it."""
    store = PlanStore(ENVIRONMENT, tmp_path)
    assert choices_of(layer, store).of(3) == Chosen(2, 2)
    played.times = 4.0, 2.0
    assert choices_of(layer, store).of(4, ahead=True) is None
    assert played.searches == 2
    again = choices_of(layer, store)
    assert (again.of(3), again.of(4, ahead=True), again.of(5)) == (Chosen(2, 2), None, None)
    assert played.searches == 2
    kept = {(key.operation, key.pairs, outcome.variant, outcome.reason) for key, outcome in store.experts().items()}
    assert kept == {("vLLM", 6, 2, ""), ("vLLM", 8, 2, "decoding first is faster")}
    played.wrong |= {(2 * INNER, 2), (HIDDEN, 0)}  # another vLLM, and nobody noticed
    played.times = 1.0, 3.0
    assert choices_of(layer, store).of(3) == Chosen(1, 2)
    assert "not right here and is replaced" in caplog.text
    assert played.searches == 3
    assert choices_of(layer, store).of(3) == Chosen(1, 2)
    assert played.searches == 3


def test_only_what_is_on_disk(
    played: Played, layer: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PlanStore(ENVIRONMENT, tmp_path)
    choices_of(layer, store).of(3)
    monkeypatch.setattr(routed, "mode", lambda: Mode.CACHED)
    choices = choices_of(layer, store)
    assert (choices.of(3), choices.of(4)) == (Chosen(2, 2), None)
    assert played.searches == 1


def test_more_tokens_are_looked_for_ahead_alone(played: Played, layer: list[torch.Tensor]) -> None:
    choices = choices_of(layer)
    assert choices.of(65) is None
    assert choices.of(65, ahead=True)
    assert choices.of(65)


@pytest.mark.parametrize(
    ("experts", "each", "most", "rungs"),
    [
        (128, 8, 1000, [144, 192, 288, 384, 576, 768, 1000]),
        (64, 6, 512, [128, 192, 256, 384, 512]),
        (8, 2, 144, [144]),
        (8, 2, 145, [144, 145]),
        (8, 2, 64, [64]),
        (2, 2, 500, [144, 192, 288, 384, 500]),
    ],
)
def test_rungs_leave_room_for_experts_with_more(experts: int, each: int, most: int, rungs: list[int]) -> None:
    first, second = (torch.zeros(experts, 8, 8, dtype=torch.bfloat16) for _ in range(2))
    choices = Choices([samebits.encode(first), samebits.encode(second)], each, never, never)
    assert choices.rungs(most) == rungs


def never(*args: Any) -> Any:
    raise AssertionError("nothing is multiplied")


def test_rungs(played: Played, layer: list[torch.Tensor]) -> None:
    """Stand for fewer tokens, when they are used, if that is right for how vLLM's kernel is compiled then."""
    choices, compared = choices_of(layer), []
    for rung in (128, 256):
        choices.find_rung(rung)
    choices.known[130] = None  # of a graph: decoding is faster
    assert fused(choices, layer, 100, played) == (False, False)
    choices.climb()
    for tokens in (100, 130, 128, 200, 257):
        compared.append(fused(choices, layer, tokens, played))
    assert compared == [(True, True), (False, False), (True, True), (True, True), (False, False)]
    before = dict(choices._comparisons[0]._right)
    assert fused(choices, layer, 112, played) == (True, True)  # of a kind that was compared
    assert choices._comparisons[0]._right == before
    played.wrong |= {(2 * INNER, 2)}
    choices._comparisons[0]._right.clear()
    assert fused(choices, layer, 104, played) == (False, True)
    assert fused(choices, layer, 120, played) == (False, True)


@torch.inference_mode()
def test_rungs_in_an_engine(played: Played, layer: list[torch.Tensor]) -> None:
    """Whose tensors are those of inference, and which compares in between."""
    choices = choices_of(layer)
    choices.find_rung(128)
    choices.climb()
    choices.forget_probes()
    assert fused(choices, layer, 101, played) == (True, True)
    assert fused(choices, layer, 103, played) == (True, True)
    assert not any("_probe" in vars(each) for each in choices._comparisons)


def test_rungs_end_where_decoding_first_is_faster(played: Played, layer: list[torch.Tensor]) -> None:
    choices = choices_of(layer)
    choices.find_rung(128)
    played.times = 3.0, 2.5
    choices.find_rung(256)
    played.times = 1.0, 3.0
    choices.find_rung(512)
    assert played.searches == 2
    assert not choices.known
    choices.known[512] = Chosen(1, 1)  # of a graph
    choices.find_rung(1024)
    choices.climb()
    assert choices.known == {128: Chosen(2, 2), 256: None, 512: Chosen(1, 1), 1024: None}


def fused(choices: Choices, layer: list[torch.Tensor], tokens: int, played: Played) -> tuple[bool, bool]:
    """Whether either product of so many tokens is, whose bytes are vLLM's."""
    routing = Routing.random(tokens, EXPERTS, EACH, torch.device("cpu"), tokens)
    x = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
    given = choices.weights(choices._packed, routing.ids)
    expected = choices._run(x, routing, layer)
    if given is None:
        return False, False
    played.made.clear()
    assert torch.equal(choices._run(x, routing, given), expected)
    made = [packed.shape[1] for packed in played.made if any(packed is each for each in choices._packed)]
    return 2 * INNER in made, HIDDEN in made


@pytest.mark.parametrize("error", [DeviceError("no compiler", mend="install one"), torch.OutOfMemoryError()])
def test_what_cannot_be_compared_in_between(
    error: Exception, played: Played, layer: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    choices = choices_of(layer)
    choices.find_rung(128)
    choices.climb()

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(routed, "experts_product", fail)
        for tokens in (101, 103):
            assert fused(choices, layer, tokens, played) == (False, False)
    assert caplog.text.count("decoded first") == 2  # of each product once
    played.capturing = True
    assert fused(choices, layer, 104, played) == (False, False)
    played.capturing = False
    assert fused(choices, layer, 104, played) == (True, True)


def test_no_rungs_where_plans_are_off(
    played: Played, layer: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = choices_of(layer)
    choices.find_rung(128)
    choices.climb()
    assert fused(choices, layer, 101, played) == (True, True)
    monkeypatch.setattr(routed, "mode", lambda: Mode.OFF)
    assert fused(choices, layer, 101, played) == (False, False)


def test_scales_of_the_router_do_not_hide_what_is_wrong(played: Played, layer: list[torch.Tensor]) -> None:
    choices = choices_of(layer)
    choices.find_rung(128)
    choices.climb()
    choices._comparisons[1]._right.clear()
    played.wrong |= {(HIDDEN, 2)}
    routing = Routing.random(101, EXPERTS, EACH, torch.device("cpu"), 1)
    given = choices.weights(choices._packed, routing.ids)
    assert given
    choices._run(torch.ones(101, HIDDEN).bfloat16(), routing._replace(scales=routing.scales * torch.nan), given)
    assert [*choices._comparisons[1]._right.values()] == [False]


def test_operands_that_no_probe_is_like(played: Played, layer: list[torch.Tensor]) -> None:
    """Not aligned, with gaps, or not of all of the layer's pairs."""
    comparison, calls = routed.Comparison(layer[0].shape, torch.device("cpu")), []
    memory, y = torch.ones(9 * HIDDEN).bfloat16(), torch.empty(8, EACH, 2 * INNER, dtype=torch.bfloat16)
    x = memory[: 8 * HIDDEN].view(8, HIDDEN)
    given = {"A": x, "B": None, "C": y, "mul_routed_weight": False}

    def original(**given: Any) -> None:
        calls.append(given["B"])

    assert not comparison.is_right(original, {**given, "A": memory[1 : 8 * HIDDEN + 1].view(8, HIDDEN)}, 0)
    assert not calls
    packed = samebits.encode(layer[0])
    cases = [
        (x, 9),
        (memory[1 : 8 * HIDDEN + 1].view(8, HIDDEN), 8),
        (memory.as_strided((8, HIDDEN), (HIDDEN + 8, 1)), 8),
    ]
    for a, tokens in cases:
        weight = RoutedWeight(packed, torch.zeros(tokens, EACH, dtype=torch.int32), 0)
        weight.multiply(original, {**given, "A": a})
    assert [same_words(each, layer[0]) for each in calls] == [True] * 3
    assert not played.made
    RoutedWeight(packed, torch.zeros(8, EACH, dtype=torch.int32), 0).multiply(original, given)
    assert len(played.made) == 1


def test_kinds_of_vllms_kernel() -> None:
    """As Triton tells arguments apart: the same for numbers that it compiles one kernel for."""
    config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 32}
    memory = torch.empty(64 * 64)

    def kind(tokens: int, start: int = 0, **others: Any) -> object:
        a = memory[start : start + 8 * tokens].view(tokens, 8)
        y = torch.empty(tokens, 2, 24)
        return routed.kind_of({"A": a, "B": object(), "C": y, "config": config, "top_k": 2, "mul": False} | others)

    assert kind(17) == kind(19) == kind(33)
    assert kind(16) == kind(48)
    different = [
        kind(17), kind(16), kind(24), kind(1), kind(65), kind(17, start=1), kind(17, top_k=1), kind(17, mul=True),
        kind(17, block_shape=[128, 128]), kind(17, config={**config, "BLOCK_SIZE_K": 64}),
        kind(17, A=torch.empty(17, 8, dtype=torch.bfloat16)), kind(17, A=memory.view(64, 64)[:17, :8]),
    ]  # fmt: skip
    assert len({*different}) == len(different)


def test_nothing_is_looked_for_during_a_capture(played: Played, layer: list[torch.Tensor]) -> None:
    choices = choices_of(layer)
    assert choices.of(2)
    played.capturing = True
    assert choices.of(2)
    assert choices.of(3) is None
    played.capturing = False
    assert choices.of(3)


@pytest.mark.parametrize("setting", [Mode.OFF, Mode.CACHED])
def test_nothing_is_looked_for_where_that_is_off(
    setting: Mode, played: Played, layer: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "mode", lambda: setting)
    assert choices_of(layer).of(3) is None
    assert not played.searches


@pytest.mark.parametrize("error", [DeviceError("no compiler", mend="install one"), torch.OutOfMemoryError()])
def test_what_cannot_be_tried_is_decoded_first(
    error: Exception, played: Played, layer: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(routed, "experts_product", fail)
    assert choices_of(layer).of(3) is None
    assert "decoded first" in caplog.text


def test_what_vllm_asks_of_a_weight(layer: list[torch.Tensor]) -> None:
    packed = samebits.encode(layer[0])
    weight = RoutedWeight(packed, torch.zeros(1), 0)
    assert (weight.shape, weight.size(), weight.size(2)) == (layer[0].shape, layer[0].shape, HIDDEN)
    assert [weight.stride(dim) for dim in (0, 1, 2, -1)] == [*layer[0].stride(), 1]
