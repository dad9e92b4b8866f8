"""samebits doctor --plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from samebits.kernels.linear.experts import VARIANTS as EXPERTS_VARIANTS
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import LinearPlan
from samebits.plans.environment import kernels_digest
from samebits.plans.key import ExpertsKey, Operation, PlanKey
from samebits.plans.store import ExpertsOutcome, GroupOutcome, Outcome, PlanStore, folder
from tests.cli.conftest import Command
from tests.plans.conftest import ENVIRONMENT

KEY = PlanKey(4096, 1024, 8, True, "blas=Cublas")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))


@pytest.fixture
def stored() -> PlanStore:
    plans = PlanStore(ENVIRONMENT)
    plans.add(KEY, Outcome(LinearPlan(3, 1), "", 12.34, 30.0, 0.3456e-6))
    plans.add(KEY._replace(tokens=16), Outcome(None, "decoding first is faster", 31.0, 30.0))
    plans.add(KEY._replace(state="blas=Cublaslt"), Outcome(None, "no split gives cuBLAS's bits"))
    plans.add_group((KEY, KEY._replace(rows=512)), GroupOutcome(2, 1.5))
    return plans


def test_nothing_yet(samebits: Command) -> None:
    assert samebits("doctor", "--plans").out == f"plans in {folder()}: 0\n"
    assert samebits("doctor", "--plans", "--json").json == {"folder": str(folder()), "files": []}


def test_list(samebits: Command, stored: PlanStore) -> None:
    text = samebits("doctor", "--plans").out
    assert f"plans in {folder()}: 3\n\n{stored.path}\n  device: a device\n" in text
    assert "  cublas: 13.1.0\n" in text
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in text.splitlines() if "4096" in line]
    assert rows == [
        ["4096 x 1024", "8", "yes", "split 3, variant 1", "12.3", "30.0", "0.35"],
        ["4096 x 1024", "16", "yes", "decoding first is faster", "31.0", "30.0", ""],
        ["4096 + 512 x 1024", "8", "variant 2"],
        ["4096 x 1024", "8", "yes", "no split gives cuBLAS's bits", "", "", ""],
    ]
    assert 0 < text.index("blas=Cublas ") < text.index("blas=Cublaslt ")


def test_kernels_by_name(samebits: Command) -> None:
    """Where a plan was found for those of this version."""
    PlanStore(replace(ENVIRONMENT, kernels=kernels_digest())).add(KEY, Outcome(LinearPlan(3, 1), "", 12.34, 30.0))
    assert f"split 3, {VARIANTS[1]}" in samebits("doctor", "--plans").out


def test_groups_by_name(samebits: Command) -> None:
    plans = PlanStore(replace(ENVIRONMENT, kernels=kernels_digest()))
    plans.add(KEY, Outcome(LinearPlan(3, 99), "", 12.34, 30.0))  # of no kernel: a damaged file
    for rows, variant in ((8, 2), (16, None), (24, 99)):
        plans.add_group((KEY, KEY._replace(rows=rows)), GroupOutcome(variant))
    plans.add_group((KEY, KEY._replace(rows=32)), GroupOutcome(3, -2.0))
    text = samebits("doctor", "--plans").out
    for words in (f"{VARIANTS[2]} ", "one by one", "variant 99", "split 3, variant 99"):
        assert words in text
    assert f"{VARIANTS[3]}, if it decodes others " in text


def test_routed_experts(samebits: Command) -> None:
    plans = PlanStore(replace(ENVIRONMENT, kernels=kernels_digest()))
    key = ExpertsKey(Operation.BATCHED, 128, 1536, 2048, 8, "blas=Cublas")
    plans.add_experts(key, ExpertsOutcome(0, "", 12.34, 30.0))
    plans.add_experts(key._replace(pairs=16), ExpertsOutcome(99))  # of no kernel: a damaged file
    plans.add_experts(key._replace(operation=Operation.VLLM, state="vllm=0.26"), ExpertsOutcome(None, "too slow"))
    text = samebits("doctor", "--plans").out
    assert f"plans in {folder()}: 3\n" in text
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in text.splitlines() if "1536" in line]
    experts = "128 of 1536 x 2048"
    assert rows == [
        [experts, "8", "bmm", str(EXPERTS_VARIANTS[0]), "12.3", "30.0"],
        [experts, "16", "bmm", "variant 99", "", ""],
        [experts, "8", "vLLM", "too slow", "", ""],
    ]
    (file,) = samebits("doctor", "--plans", "--json").json["files"]
    assert file["experts"][0] == {**key._asdict(), "variant": 0, "reason": "", "fused_us": 12.34, "decode_us": 30.0}


def test_list_as_json(samebits: Command, stored: PlanStore) -> None:
    (file,) = samebits("doctor", "--plans", "--json").json["files"]
    assert file["path"] == str(stored.path)
    assert file["environment"] == vars(ENVIRONMENT)
    assert file["plans"][0] == {
        "rows": 4096, "columns": 1024, "tokens": 8, "has_bias": True, "state": "blas=Cublas",
        "plan": {"split": 3, "variant": 1}, "reason": "", "fused_us": 12.34, "decode_us": 30.0, "carried_us": 0.3456e-6,
    }  # fmt: skip
    assert [plan["plan"] for plan in file["plans"][1:]] == [None, None]
    assert [(len(group["products"]), group["variant"], group["gained_us"]) for group in file["groups"]] == [(2, 2, 1.5)]


def test_a_file_that_cannot_be_read(samebits: Command, stored: PlanStore) -> None:
    stored.path.write_text("{")
    outcome = samebits("doctor", "--plans")
    assert (outcome.code, f"plans in {folder()}: 0" in outcome.out) == (0, True)


def test_clear(samebits: Command, stored: PlanStore) -> None:
    assert samebits("doctor", "--plans", "--clear").out == f"plans in {folder()}: 1 files deleted\n"
    assert stored.read() == {}
    assert samebits("doctor", "--plans", "--clear", "--json").json == {"folder": str(folder()), "deleted_files": 0}


def test_clear_alone_is_refused(samebits: Command, stored: PlanStore) -> None:
    outcome = samebits("doctor", "--clear")
    assert outcome.code == 2
    assert "--clear goes with --plans" in outcome.error
    assert len(stored.read()) == 3
