"""The GPU's benchmarks, on a machine without one: everything but the clock and the others' kernels is real."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import common
import dfloat11_kernel
import gpu
import growth
import linear
import nvcomp_ans
import peers
import samebits
import searches
import variants
from samebits.bf16 import words_of
from samebits.df11.unit import Unit
from samebits.kernels import residents
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import LinearPlan
from samebits.plans import dispatch, group
from samebits.plans.calibrate import ProbeWeights
from samebits.plans.key import PlanKey
from samebits.plans.store import Outcome
from tests.codecs.tensors import without_compact
from tests.plans.conftest import DecodeOnCpu

SECOND = common.Timing(1.0, 0.5, 2.0)


def run_all(calls: Sequence[Callable[[], object]], repeats: int, warm_seconds: float = 0.0) -> common.Timing:
    """In place of a clock: every call is made, and takes a second."""
    for call in calls:
        call()
    return SECOND


def run_candidates(
    candidates: Sequence[Sequence[Callable[[], object]]], repeats: int, warm_seconds: float = 0.0
) -> list[common.Timing]:
    return [run_all(calls, repeats, warm_seconds) for calls in candidates]


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, linear, peers, dfloat11_kernel, nvcomp_ans):
        for name in ("time_graph", "time_stream"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, run_all)
        if hasattr(module, "time_graphs"):
            monkeypatch.setattr(module, "time_graphs", run_candidates)
        if hasattr(module, "DISTINCT_BYTES"):
            monkeypatch.setattr(module, "DISTINCT_BYTES", 500_000)
    monkeypatch.setattr(gpu, "time_clock", lambda call, repeats: run_all([call], repeats))
    monkeypatch.setattr(nvcomp_ans, "side_stream", no_stream)
    monkeypatch.setattr(linear, "find_plan", lambda x, packed: None)
    monkeypatch.setattr(linear, "plan_of", lambda x, packed, bias: None)
    monkeypatch.setattr(linear, "linear", lambda x, packed, bias: F.linear(x, samebits.decode(packed), bias))
    monkeypatch.setattr(peers, "CASES", {"one": [(64, 256)], "block": [(64, 256), (32, 256), (256, 128)]})


@contextmanager
def no_stream() -> Iterator[int]:
    yield 1


def unit_on_cpu(self: Any, unit: Unit, tensors: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """In place of DFloat11's kernel, from the tensors that it would get."""
    arrays = dict(zip(dfloat11_kernel.ARGUMENTS, (tensor.numpy() for tensor in tensors), strict=True))
    words = Unit(**arrays, split_positions=unit.split_positions).decode()
    output.copy_(torch.from_numpy(words.view(np.int16)).view(torch.bfloat16))


class Nvcomp(ModuleType):
    """In place of nvidia.nvcomp: its functions as the benchmark calls them, compressing nothing."""

    __version__ = "6"
    ExecutionPolicy = SimpleNamespace(CONCURRENCY="c", LATENCY="l")
    flaw = 0  # added to every byte

    @staticmethod
    def as_array(source: torch.Tensor, cuda_stream: int = 0) -> torch.Tensor:
        return source

    def Codec(self, algorithm: str, cuda_stream: int, execution_policy: str) -> Any:  # noqa: N802  (as it is there)
        def decode(source: torch.Tensor, *, out: torch.Tensor, decompression_config: str) -> None:
            assert decompression_config == "config"
            out.copy_(source + self.flaw)

        assert algorithm == "ANS"
        return SimpleNamespace(encode=torch.clone, decompression_config=lambda encoded: "config", decode=decode)


def rows_of(rows: list[dict[str, Any]], decoder: str) -> dict[str, dict[str, Any]]:
    return {row["matrix"]: row for row in rows if row.get("decoder", "").startswith(decoder)}


def test_peers_that_are_not_installed_are_reported() -> None:
    rows = peers.measure_all({"DFloat11": None, "nvCOMP": None}, 1, "cpu")
    for name in ("DFloat11", "nvCOMP"):
        missing = rows_of(rows, name)
        assert list(missing) == ["one", "block"]
        assert {row["note"] for row in missing.values()} == {"not installed"}
        assert {row["decode_tb_per_s"] for row in missing.values()} == {None}


def test_rates_of_ours_and_the_roof() -> None:
    rows = peers.measure_all({}, 1, "cpu")
    [one, block] = rows_of(rows, "samebits").values()
    assert one["decode_tb_per_s"] == common.significant(2 * 64 * 256 / 1e12)
    assert block["decode_tb_per_s"] == common.significant(2 * (64 + 32 + 128) * 256 / 1e12)
    assert (one["decode_tb_per_s_fastest"], one["note"]) == (2 * one["decode_tb_per_s"], None)
    roof = rows_of(rows, "roof")["one"]
    assert one["of_roof"] == pytest.approx(one["decode_tb_per_s"] / roof["decode_tb_per_s"], rel=1e-3)
    assert [row["matrix"] for row in rows if row["table"] == "roofs"] == ["one", "block"]


def test_peers_get_the_weights_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dfloat11_kernel.DFloat11, "decode", unit_on_cpu)
    rows = peers.measure_all(
        {"a": dfloat11_kernel.DFloat11(b""), "b": nvcomp_ans.NvcompAns(Nvcomp("nvcomp"))}, 1, "cpu"
    )
    for decoder in ("DFloat11", "nvCOMP"):
        assert [row["note"] for row in rows_of(rows, decoder).values()] == [None, None]
    weights = peers.matrices(peers.CASES["block"], "cpu")
    unit = Unit.encode(np.concatenate([words_of(weight).ravel() for weight in weights]), [w.numel() for w in weights])
    nbytes = sum(getattr(unit, name).nbytes for name in dfloat11_kernel.ARGUMENTS)
    assert rows_of(rows, "DFloat11")["block"]["bits_per_weight"] == round(8 * nbytes / unit.words, 4)
    assert rows_of(rows, "nvCOMP")["block"]["bits_per_weight"] == 16  # nothing was compressed


def test_a_peer_with_another_result_gets_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcomp = Nvcomp("nvcomp")
    nvcomp.flaw = 1
    rows = peers.measure_all({"nvCOMP": nvcomp_ans.NvcompAns(nvcomp)}, 1, "cpu")
    for row in rows_of(rows, "nvCOMP").values():
        assert row["note"] == "failed: its output differs from the exponents"
        assert row["decode_tb_per_s"] is None


def test_a_package_that_is_nowhere_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dfloat11_kernel, nvcomp_ans):
        monkeypatch.setattr(module, "PACKAGE", "samebits_benchmarks_none")
    assert set(peers.installed().values()) == {None}


def test_dfloat11_is_found_where_it_was_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dfloat11").mkdir()
    (tmp_path / "dfloat11" / "__init__.py").write_text("raise ImportError('wants CuPy')")
    (tmp_path / "dfloat11" / "decode.ptx").write_bytes(b".version 8.2")
    (tmp_path / "dfloat11-0.5.0.dist-info").mkdir()
    (tmp_path / "dfloat11-0.5.0.dist-info" / "METADATA").write_text("Name: dfloat11\nVersion: 0.5.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = dfloat11_kernel.DFloat11.installed()
    assert found is not None
    assert (found.name, found.ptx) == ("DFloat11's kernel, 0.5.0", b".version 8.2")


def test_nvcomp_is_found_where_it_was_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    package = tmp_path / "nvidia" / "nvcomp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from nvidia.nvcomp.impl import *\n__version__ = '6.0'")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="impl"):
        nvcomp_ans.NvcompAns.installed()
    (package / "impl.py").touch()
    found = nvcomp_ans.NvcompAns.installed()
    assert found is not None
    assert found.name == "nvCOMP ANS, exponents alone, 6.0"
    monkeypatch.delitem(sys.modules, "nvidia.nvcomp")


def test_dfloat11_blocks_hold_all_their_words() -> None:
    weights = common.synthetic_matrix(512, 256)
    unit = Unit.encode(words_of(weights).ravel(), [weights.numel()])
    positions = unit.output_positions.view("<u4")
    assert unit.blocks == len(positions) - 1 == -(-unit.encoded_exponent.size // (8 * dfloat11_kernel.THREADS))
    most = max(int(b) - int(a) for a, b in pairwise(positions))
    assert dfloat11_kernel.shared_bytes(unit) == 512 * 4 + 4 + 2 * most


def test_products_of_a_weight_and_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = linear.measure(common.synthetic_matrix(64, 256), (1, 2), (32,))
    assert [(row["table"], row["matrix"]) for row in rows] == [("few", "64 x 256"), ("many", "64 x 256")]
    assert (rows[0]["speed_at_1"], rows[0]["speed_at_2"], rows[1]["tokens"]) == (1, 1, 32)
    assert rows[0]["packed_bytes"] == samebits.encode(common.synthetic_matrix(64, 256)).nbytes
    monkeypatch.setattr(linear, "BLOCK_INPUTS", (("up", "gate"), ("down",)))
    blocks = linear.measure_block({"up": (64, 256), "gate": (64, 256), "down": (256, 128)}, (4, 8), "cpu")
    assert [(row["tokens"], row["matrices"], row["overhead"]) for row in blocks] == [(4, 3, 0), (8, 3, 0)]


def test_searches_are_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[PlanKey] = []

    def calibrate(key: PlanKey, weights: ProbeWeights) -> Outcome:
        searched.append(key)
        return Outcome(LinearPlan(1), "", 5.0, 12.0) if key.tokens < 16 else Outcome(None, "none is right")

    monkeypatch.setattr(searches, "calibrate", calibrate)
    monkeypatch.setattr(searches, "blas_state", lambda: "settings")
    monkeypatch.setattr(searches, "confirm", lambda key, plan, weights: True)
    monkeypatch.setattr(searches, "SHAPES", [(64, 256)])
    monkeypatch.setattr(searches, "TOKENS", [1, 16])
    rows = list(searches.measure(torch.device("cpu")))
    assert [key.tokens for key in searched] == [1] * 4 + [16] * 4
    assert [row["known_seconds"] is None for row in rows] == [False, True]
    assert [row["gained_microseconds"] for row in rows] == [7, None]
    assert [row["found"] for row in rows] == [str(LinearPlan(1)), "none is right"]


def one_launch(monkeypatch: pytest.MonkeyPatch, flaw: int = 1) -> None:
    """In place of a GPU's products: the first of a group, which has 64 rows, makes one launch, and each is right."""

    def product(x: torch.Tensor, packed: samebits.PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        kept = residents.resident(packed.data)
        if packed.shape[0] == 64 and kept:
            kept.followers = kept.followers or group.Group()
            kept.followers.chosen[PlanKey(*packed.shape, x.shape[0], False, "settings")] = mock.Mock(more_us=0.0)
        return F.linear(x, samebits.decode(packed), bias) * flaw

    monkeypatch.setattr("samebits.nn.product._is_plain", lambda tensor: True)
    monkeypatch.setattr(dispatch, "linear_of_module", product)


@pytest.mark.parametrize("tokens", [1, 512, 1024])
def test_many_tokens_are_timed_on_a_warm_device(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    seen: list[float] = []

    def time_graphs(candidates: Sequence[object], repeats: int, warm_seconds: float) -> list[common.Timing]:
        seen.append(warm_seconds)
        return [SECOND for _ in candidates]

    monkeypatch.setattr(linear, "time_graphs", time_graphs)
    monkeypatch.setattr(linear, "BLOCK_INPUTS", (("up",),))
    weight = common.synthetic_matrix(64, 256)
    linear.measure_tokens([weight], [samebits.encode(weight)], tokens)
    list(linear.measure_block({"up": (64, 256)}, (tokens,), "cpu"))
    assert len(seen) == 2
    assert set(seen) == {linear.WARM_SECONDS if tokens >= 1024 else 0.0}


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some seconds, the first part of which is not timed; or of two calls that take longer."""
    now, made = 0.0, ""

    def call(name: str, first: float, others: float) -> None:
        nonlocal now, made
        now += others if made.endswith(name) else first
        made += name

    monkeypatch.setattr(gpu, "time", mock.Mock(perf_counter=lambda: now))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    short, long = gpu.time_turns([partial(call, "a", 0.5, 0.25), partial(call, "b", 5.0, 4.0)])
    assert made == 3 * "aaaaabb"
    assert (short, long) == (common.Timing.of([0.25]), common.Timing.of([4.0]))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_one_input(monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    """A second for each product, and for each small kernel."""

    def seconds(calls: Sequence[Callable[[], object]], repeats: int, warm_seconds: float) -> common.Timing:
        assert not warm_seconds
        run_all(calls, repeats)
        most = linear.SMALL_KERNELS + max(len(call.args[1]) for call in calls)
        return common.Timing(most, most - 0.5, most + 0.5)

    def each(candidates: Sequence[Any], repeats: int, warm_seconds: float) -> list[common.Timing]:
        return [seconds(calls, repeats, warm_seconds) for calls in candidates]

    monkeypatch.setattr(linear, "time_graphs", each)
    group = linear.Group("a model", "its layers", 256, (64, 32, 32), has_bias)
    [alone, two] = linear.measure_group(group, (1, 2), "cpu")
    assert (alone["model"], alone["layers"]) == ("a model", "its layers")
    assert (alone["tokens"], two["tokens"], alone["launches"], two["launches"]) == (1, 2, 0, 0)
    one_launch(monkeypatch)
    [row] = linear.measure_group(group, (1,), "cpu")
    assert row["launches"] == 1
    for name in ("bf16", "one_by_one", "together"):
        key = f"{name}_microseconds"
        assert (row[key], row[f"{key}_fastest"], row[f"{key}_slowest"]) == (3e6, 2.5e6, 3.5e6)
    assert alone == row | {"launches": 0}


def test_products_of_one_input_with_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    one_launch(monkeypatch, flaw=2)
    with pytest.raises(SystemExit, match="not identical"):
        list(linear.measure_group(linear.Group("", "", 256, (64, 32)), (1,), "cpu"))


def test_what_was_not_measured_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    old = [{"table": "few", "matrix": "a", "date": "2026-01-01"}, {"table": "together", "model": "b", "tokens": 1}]
    new = {"table": "together", "model": "b", "tokens": 1, "launches": 1}
    for rows in (old, [new]):
        common.add_results("linear", "a device", rows, linear.KEYS)
    first, second = common.read_results("linear")["rows"]
    assert first == old[0]
    today = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "code": common.code_digest()}
    assert second == new | today
    assert linear.shapes("") == []


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 4090", "4090"), ("other", "gpu")],
)
def test_results_of_another_card_have_another_name(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu, "SHAPES", [])
    monkeypatch.setattr(gpu, "LAYERS", {})
    monkeypatch.setattr(gpu, "device_name", lambda: f"{device}, driver 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert gpu.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


@pytest.mark.parametrize("flaw", [0, 1])
def test_weights_decoded_together(flaw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Played(DecodeOnCpu):
        def __call__(self, *every: torch.Tensor) -> list[torch.Tensor]:
            decoded = super().__call__(*every)
            decoded[-1].view(torch.int16)[-1, -1] += flaw
            return decoded

    monkeypatch.setattr(gpu, "DecodeTogether", Played)
    weights = [common.synthetic_matrix(rows, 256) for rows in (64, 32, 128)]
    with without_compact():
        if flaw:
            with pytest.raises(SystemExit, match="a layer, together: not identical"):
                gpu.measure_together("a layer", weights, 1)
            return
        row = gpu.measure_together("a layer", weights, 1)
    assert (row["layer"], row["matrices"], row["weights"]) == ("a layer", 3, 224 * 256)
    assert row["one_by_one_microseconds"] == row["together_microseconds"] == 1e6
    assert row["together_tb_per_s"] == common.significant(2 * 224 * 256 / 1e12)


def test_a_product_with_other_bits_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "linear", lambda x, packed, bias: F.linear(x, samebits.decode(packed)) * 2)
    weight = common.synthetic_matrix(64, 256)
    with pytest.raises(SystemExit, match="not identical"):
        linear.measure_tokens([weight], [samebits.encode(weight)], 4)
    one_launch(monkeypatch, flaw=2)
    monkeypatch.setattr(linear, "BLOCK_INPUTS", (("up",),))
    with pytest.raises(SystemExit, match="not identical"):
        list(linear.measure_block({"up": (64, 256)}, (4,), "cpu"))


def test_growth_has_every_time() -> None:
    row = growth.measure(common.synthetic_matrix(64, 256))
    times = {key: value for key, value in row.items() if key.endswith("_microseconds")}
    assert times.pop("roof_microseconds") > 1e6
    assert times == dict.fromkeys(times, pytest.approx(1e6, rel=1e-3))
    assert row["weights"] == 64 * 256
    assert json.dumps(row)
    assert [growth.ROWS[0] * growth.COLUMNS, growth.ROWS[-1] * growth.COLUMNS] == [2**20, 2**29]


def test_variants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One variant is right, one reads a weight of row group 3, stage 2 wrongly, one adds in another order."""
    weight = common.synthetic_matrix(64, 256)

    def fused(x: torch.Tensor, packed: samebits.PackedTensor, bias: None, plan: LinearPlan) -> torch.Tensor:
        read = samebits.decode(packed)
        if plan.variant == 7:
            read[25, 130] *= 2
        y = F.linear(x, read)
        return y if plan.variant != 3 or len(x) == variants.UNIT_COLUMNS else y + y

    monkeypatch.setattr(variants, "fused_linear", fused)
    monkeypatch.setattr(variants, "variants", lambda header, tokens, split: [0, 3, 7, 9])
    monkeypatch.setattr(variants, "find_plan", lambda x, packed: None)
    monkeypatch.setattr(variants, "plan_of", lambda x, packed, bias: LinearPlan(2) if len(x) < 5 else None)
    monkeypatch.setattr(variants, "timed", lambda calls: [run_all(calls, 1)])
    monkeypatch.setattr(variants, "DISTINCT_BYTES", 100_000)
    variants.measure(weight, (1, 5), (0, 3, 7))
    assert capsys.readouterr().out.splitlines() == [
        "64 x 256, 1 tokens, split 2: BF16 1000000.0 us",
        f"   0 {VARIANTS[0]}: 1000000.0 us (500000.0 to 2000000.0)",
        f"   3 {VARIANTS[3]}: DIFFERENT; all weights are read",
        f"   7 {VARIANTS[7]}: DIFFERENT; 1 weights are read wrongly, of row group/stage 3/2",
        "64 x 256, 5 tokens: no plan",
    ]
    variants.measure(weight, (5,), (0, 7), split=3, wrong=True)
    assert capsys.readouterr().out.splitlines() == [
        "64 x 256, 5 tokens, split 3: BF16 1000000.0 us",
        f"   0 {VARIANTS[0]}: 1000000.0 us (500000.0 to 2000000.0)",
        f"   7 {VARIANTS[7]}: 1000000.0 us (500000.0 to 2000000.0), DIFFERENT",
    ]


def test_code_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes in a source, or its name, is another code; what lies beside is none."""
    monkeypatch.setattr(common.samebits, "__file__", str(tmp_path / "__init__.py"))
    found = []
    for name, content in (("a.py", "1"), ("a.py", "2"), ("csrc/b.cuh", "1"), ("csrc/c.cuh", "1"), ("c.pyc", "1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        found.append(common.code_digest())
    assert [len(code) for code in found] == 5 * [12]
    assert len({*found}) == 4
    assert found[3] == found[4]
