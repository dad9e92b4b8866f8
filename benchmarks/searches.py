"""How long plans take to be found: what a first product of its kind waits for, or samebits.prepare.

    python benchmarks/searches.py [--name searches]        writes results/<name>.json, for Llama 3.1 8B's fused shapes

Each search is made three times, as if nothing were known of it: the first time its kernels are compiled, but for those
that are in the compiler's cache on disk, or that a search before has had compiled. ``shared_seconds`` is with the
weight of another search, as samebits.prepare does it, ``known_seconds`` what a plan on disk takes to be tried once, the
weight shared, too; None: no plan. ``gained_microseconds`` is what a product takes less under the plan than if the
weight is decoded first, so how many of them pay for the search; None: no plan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common import add_results, significant
from gpu import device_name
from samebits.plans.calibrate import ProbeWeights, calibrate, confirm
from samebits.plans.environment import blas_state
from samebits.plans.key import PlanKey

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
TOKENS = [1, 8, 32, 37, 128, 256, 512]
KEYS = ("matrix", "tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="searches")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    print(add_results(arguments.name, device_name(), list(measure(torch.device("cuda", 0))), KEYS))
    return 0


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of the table "searches"."""
    state = blas_state()
    assert state is not None
    for rows, columns in SHAPES:
        shared = ProbeWeights(device, keeps=True)
        for tokens in TOKENS:
            key = PlanKey(rows, columns, tokens, False, state)
            first, _ = timed(calibrate, key, ProbeWeights(device))
            seconds, outcome = timed(calibrate, key, ProbeWeights(device))
            calibrate(key, shared)  # which makes the weight, if it is the shape's first search
            next_one, _ = timed(calibrate, key, shared)
            known, is_right = timed(confirm, key, outcome.plan, shared) if outcome.plan else (None, True)
            assert is_right, f"the plan of {key} is not right the second time"
            row = {
                "table": "searches", "matrix": f"{rows} x {columns}", "tokens": tokens,
                "found": str(outcome.fused or outcome.reason), "first_seconds": significant(first),
                "seconds": significant(seconds), "shared_seconds": significant(next_one),
                "known_seconds": None if known is None else significant(known),
                "gained_microseconds": significant(outcome.gained_us) if outcome.plan else None,
            }  # fmt: skip
            print(row, flush=True)
            yield row


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds until it is done on the GPU, too, and what it gives."""
    start = time.perf_counter()
    result = function(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    raise SystemExit(main())
