"""How fast samebits::linear is beside torch's F.linear in BF16, on the weight shapes of current models.

    python benchmarks/linear.py [--name linear] [--shapes 4096x4096,...] [--tokens 1,8,...]  writes results/<name>.json

Every product is compared with F.linear's as 16-bit words first. Times are medians of CUDA graph replays over more than
900 MB of distinct weights, BF16 and packed in the same run; "decoded first" is the product without the fused kernel:
decode, then F.linear.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import samebits
from common import Timing, encode_checked, significant, synthetic_matrix, write_results
from gpu import device_name, time_graph
from samebits.plans.dispatch import linear, plan_of

# Rows x columns, and the projections that have them.
SHAPES = {
    (1024, 4096): "k, v of Llama 3.1 8B, Qwen3 8B",
    (4096, 4096): "q, o of Llama 3.1 8B, Qwen3 8B",
    (6144, 4096): "q, k, v of Llama 3.1 8B in one",
    (5120, 5120): "q, o of Qwen3 14B",
    (5120, 4096): "o of Mistral Small 24B",
    (5120, 8192): "o of Qwen3 32B",
    (5376, 4096): "o of Gemma 3 27B",
    (8192, 8192): "q, o of Llama 3 70B",
    (10240, 8192): "q, k, v of Llama 3 70B in one",
    (12288, 4096): "gate, up of Qwen3 8B",
    (14336, 4096): "gate, up of Llama 3.1 8B",
    (4096, 14336): "down of Llama 3.1 8B",
    (17408, 5120): "gate, up of Qwen3 14B",
    (5120, 17408): "down of Qwen3 14B",
    (28672, 4096): "gate and up of Llama 3.1 8B in one",
    (21504, 5376): "gate, up of Gemma 3 27B",
    (25600, 5120): "gate, up of Qwen3 32B",
    (32768, 5120): "gate, up of Mistral Small 24B",
    (5120, 32768): "down of Mistral Small 24B",
    (28672, 8192): "gate, up of Llama 3 70B",
    (8192, 28672): "down of Llama 3 70B",
}
FEW_TOKENS = (1, 2, 4, 8, 16)
MANY_TOKENS = (32, 128, 512, 2048, 4096)
MANY_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # of these, also with many tokens
DISTINCT_BYTES = 900e6
REPEATS = 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="linear")
    parser.add_argument("--shapes", type=shapes, default=list(SHAPES))
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=None)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        few = arguments.tokens or FEW_TOKENS
        measured = measure(*shape, few + (MANY_TOKENS if shape in MANY_SHAPES and not arguments.tokens else ()))
        rows.append(few_row(shape, measured[: len(few)]))
        rows += measured[len(few) :]
    print(write_results(arguments.name, device_name(), rows))
    return 0


def shapes(text: str) -> list[tuple[int, int]]:
    return [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in text.split(","))]


def measure(rows: int, columns: int, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """The products of one weight, as rows of the table "many"."""
    weight = synthetic_matrix(rows, columns, device="cuda")
    packed = encode_checked(weight)
    dense = [weight, *(weight.clone() for _ in range(int(DISTINCT_BYTES / weight.nbytes)))]
    copies = [packed, *(replace(packed, data=packed.data.clone()) for _ in range(int(DISTINCT_BYTES / packed.nbytes)))]
    results = [measure_tokens(dense, copies, count) for count in tokens]
    for row in results:
        print(row, flush=True)
    return results


def measure_tokens(dense: list[torch.Tensor], copies: list[samebits.PackedTensor], tokens: int) -> dict[str, Any]:
    rows, columns = dense[0].shape
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    plan = plan_of(x, copies[0], None)
    expected = F.linear(x, dense[0]).view(torch.int16)
    if not torch.equal(linear(x, copies[0], None).view(torch.int16), expected):
        raise SystemExit(f"{rows} x {columns} with {tokens} tokens: not identical")
    bf16 = timed([partial(F.linear, x, weight) for weight in dense])
    ours = timed([partial(linear, x, packed, None) for packed in copies])
    decoded = timed([partial(decode_first, x, packed) for packed in copies]) if plan else ours
    return {
        "table": "many",
        "matrix": f"{rows} x {columns}",
        "tokens": tokens,
        "path": "fused" if plan else "decoded first",
        "split": plan.split if plan else None,
        "variant": plan.variant if plan else None,
        **microseconds("bf16_microseconds", bf16),
        **microseconds("samebits_microseconds", ours),
        **microseconds("decoded_first_microseconds", decoded),
        "speed": significant(bf16.median / ours.median),
    }


def few_row(shape: tuple[int, int], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table "few": a weight with each number of tokens."""
    row: dict[str, Any] = {"table": "few", "matrix": "{} x {}".format(*shape), "used_as": SHAPES.get(shape, "")}
    for product in measured:
        values = {key: value for key, value in product.items() if key not in ("table", "matrix", "tokens")}
        row |= {f"{key}_at_{product['tokens']}": value for key, value in values.items()}
    return row


def decode_first(x: torch.Tensor, packed: samebits.PackedTensor) -> torch.Tensor:
    return F.linear(x, samebits.decode(packed))


def timed(calls: list[Callable[[], object]]) -> Timing:
    return time_graph(calls, REPEATS)


def microseconds(key: str, timing: Timing) -> dict[str, float]:
    return {
        key: significant(timing.median * 1e6),
        f"{key}_fastest": significant(timing.fastest * 1e6),
        f"{key}_slowest": significant(timing.slowest * 1e6),
    }


if __name__ == "__main__":
    raise SystemExit(main())
