"""samebits doctor --plans: the plans on disk."""

from __future__ import annotations

from collections.abc import Sequence

from samebits.cli.console import print_json, print_lines, print_table
from samebits.kernels.linear.experts import VARIANTS as EXPERTS_VARIANTS
from samebits.kernels.linear.launch import VARIANTS
from samebits.plans import store
from samebits.plans.environment import kernels_digest
from samebits.plans.key import ExpertsKey, PlanKey
from samebits.plans.store import ExpertsOutcome, GroupOutcome, Outcome


def show_plans(as_json: bool) -> None:
    """Every file of plans: for which environment, and what was found for which product."""
    files = [(path, store.read(path)) for path in store.stored_files()]
    if as_json:
        print_json(
            {
                "folder": str(store.folder()),
                "files": [{"path": str(path), **stored.to_json()} for path, stored in files],
            }
        )
        return
    count = sum(len(stored.outcomes) + len(stored.experts) for _, stored in files)
    print_lines(f"plans in {store.folder()}: {count}")
    for path, (environment, outcomes, groups, experts) in files:
        print_lines("", str(path), *(f"  {name}: {value}" for name, value in environment.items()))
        is_ours = environment.get("kernels") == kernels_digest()  # with others, a variant's number says something else
        for state in sorted({key.state for key in outcomes} | {key.state for key in experts}):
            rows = [_row(key, outcome, is_ours) for key, outcome in sorted(outcomes.items()) if key.state == state]
            if rows:
                print_table(state, _COLUMNS, rows)
            together = [_group_row(keys, groups[keys], is_ours) for keys in sorted(groups) if keys[0].state == state]
            if together:
                print_table("products of one input", _GROUP_COLUMNS, together)
            routed = [_experts_row(key, experts[key], is_ours) for key in sorted(experts) if key.state == state]
            if routed:
                print_table(f"routed experts, {state}", _EXPERTS_COLUMNS, routed)


def clear_plans(as_json: bool) -> None:
    """Delete them all; they are found again when they are needed."""
    files = store.clear()
    if as_json:
        print_json({"folder": str(store.folder()), "deleted_files": files})
    else:
        print_lines(f"plans in {store.folder()}: {files} files deleted")


_COLUMNS = ("weight", "tokens", "bias", "plan", "fused, us", "decode first, us", "others' weights, us a million")
_GROUP_COLUMNS = ("weights", "tokens", "made")
_EXPERTS_COLUMNS = ("experts", "pairs", "in place of", "plan", "fused, us", "decode first, us")


def _variant(number: int, is_ours: bool, variants: Sequence[object] = VARIANTS) -> str:
    return str(variants[number]) if is_ours and number < len(variants) else f"variant {number}"


def _group_row(keys: Sequence[PlanKey], group: GroupOutcome, is_ours: bool) -> list[str]:
    launch = "one by one" if group.variant is None else _variant(group.variant, is_ours)
    launch += "" if group.gained_us >= 0 else ", if it decodes others"
    rows = " + ".join(str(key.rows) for key in keys)
    return [f"{rows} x {keys[0].columns}", str(keys[0].tokens), launch]


def _experts_row(key: ExpertsKey, outcome: ExpertsOutcome, is_ours: bool) -> list[str]:
    plan, number = outcome.reason, outcome.fused
    if number is not None:
        plan = _variant(number, is_ours, EXPERTS_VARIANTS)
    experts = f"{key.experts} of {key.rows} x {key.columns}"
    return [experts, str(key.pairs), key.operation, plan, *map(_time, (outcome.fused_us, outcome.decode_us))]


def _time(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:.1f}"


def _row(key: PlanKey, outcome: Outcome, is_ours: bool) -> list[str]:
    plan = outcome.reason
    if outcome.fused:
        plan = f"split {outcome.fused.split}, {_variant(outcome.fused.variant, is_ours)}"
    times = map(_time, (outcome.fused_us, outcome.decode_us))
    carried = "" if outcome.carried_us is None else f"{1e6 * outcome.carried_us:.2f}"
    return [f"{key.rows} x {key.columns}", str(key.tokens), "yes" if key.has_bias else "", plan, *times, carried]
