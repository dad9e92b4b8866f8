"""samebits doctor --plans: the plans on disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from samebits.cli.console import print_json, print_lines, print_table
from samebits.plans import store
from samebits.plans.environment import kernels_digest
from samebits.plans.key import PlanKey
from samebits.plans.store import Outcome


def show_plans(as_json: bool) -> None:
    """Every file of plans: for which environment, and what was found for which product."""
    files = [(path, *store.read(path)) for path in store.stored_files()]
    if as_json:
        print_json({"folder": str(store.folder()), "files": [_as_json(*file) for file in files]})
        return
    print_lines(f"plans in {store.folder()}: {sum(len(outcomes) for _, _, outcomes in files)}")
    for path, environment, outcomes in files:
        print_lines("", str(path), *(f"  {name}: {value}" for name, value in environment.items()))
        is_ours = environment.get("kernels") == kernels_digest()  # with others, a variant's number says something else
        for state in sorted({key.state for key in outcomes}):
            rows = [_row(key, outcome, is_ours) for key, outcome in sorted(outcomes.items()) if key.state == state]
            print_table(state, _COLUMNS, rows)


def clear_plans(as_json: bool) -> None:
    """Delete them all; they are found again when they are needed."""
    files = store.clear()
    if as_json:
        print_json({"folder": str(store.folder()), "deleted_files": files})
    else:
        print_lines(f"plans in {store.folder()}: {files} files deleted")


_COLUMNS = ("weight", "tokens", "bias", "plan", "fused, us", "decode first, us")


def _as_json(path: object, environment: dict[str, Any], outcomes: dict[PlanKey, Outcome]) -> dict[str, Any]:
    plans = [{**key._asdict(), **asdict(outcome)} for key, outcome in sorted(outcomes.items())]
    return {"path": str(path), "environment": environment, "plans": plans}


def _row(key: PlanKey, outcome: Outcome, is_ours: bool) -> list[str]:
    plan = outcome.reason
    if outcome.fused:
        plan = str(outcome.fused) if is_ours else f"split {outcome.fused.split}, variant {outcome.fused.variant}"
    times = ["" if time is None else f"{time:.1f}" for time in (outcome.fused_us, outcome.decode_us)]
    return [f"{key.rows} x {key.columns}", str(key.tokens), "yes" if key.has_bias else "", plan, *times]
