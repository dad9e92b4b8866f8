"""How fast samebits::linear is beside torch's F.linear in BF16, on the weight shapes of current models.

    python benchmarks/linear.py [--name linear] [--shapes 4096x4096,...] [--tokens 1,8,...] [--prefill 512,...]

It writes results/<name>.json. Every shape is measured with few tokens, MANY_SHAPES also with many; ``--tokens`` takes
the place of both.

Every product is compared with F.linear's as 16-bit words first. Times are medians of CUDA graph replays over more than
900 MB of distinct weights, BF16 and packed in the same run; "decoded first" is the product without the fused kernel:
decode, then F.linear. The table "prefill" has all seven products of a block of Llama 3.1 8B, one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import samebits
from common import DECODER_LAYERS, Timing, encode_checked, significant, synthetic_matrix, write_results
from gpu import DISTINCT_BYTES, device_name, distinct, measure_read_rate, time_graph
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
MANY_TOKENS = (32, 64, 128, 512, 2048, 4096)
MANY_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))  # of these, also with many tokens
PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096)
BLOCK = "Llama 3.1 8B"
REPEATS = 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="linear")
    parser.add_argument("--shapes", type=shapes, default=list(SHAPES))
    parser.add_argument("--tokens", type=counts, default=())
    parser.add_argument("--prefill", type=counts, default=PREFILL_TOKENS, help='an empty "" for none')
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        few = arguments.tokens or FEW_TOKENS
        many = MANY_TOKENS if shape in MANY_SHAPES and not arguments.tokens else ()
        rows += measure(synthetic_matrix(*shape, device="cuda"), few, many)
    rows += measure_block(list(DECODER_LAYERS[BLOCK].values()), arguments.prefill, "cuda") if arguments.prefill else []
    print(write_results(arguments.name, device_name(), rows))
    return 0


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def shapes(text: str) -> list[tuple[int, int]]:
    return [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in text.split(","))]


def measure(weight: torch.Tensor, few: tuple[int, ...], many: tuple[int, ...]) -> list[dict[str, Any]]:
    """The products of one weight: a row of the table "few", and a row of the table "many" for each of ``many``."""
    copies = [copy for (copy,) in distinct([encode_checked(weight)])]
    dense = [weight, *(weight.clone() for _ in range(int(DISTINCT_BYTES / weight.nbytes)))]
    results = []
    for tokens in few + many:
        results.append(measure_tokens(dense, copies, tokens))
        print(results[-1], flush=True)
    first = few_row(weight, results[: len(few)]) | {
        "packed_bytes": copies[0].nbytes,
        "read_tb_per_s": significant(measure_read_rate([copy.data for copy in copies], REPEATS) / 1e12),
    }
    return [first, *results[len(few) :]]


def measure_block(shapes: Sequence[tuple[int, int]], tokens: tuple[int, ...], device: str) -> list[dict[str, Any]]:
    """All products of a decoder layer one after the other, as rows of the table "prefill"."""
    weights = [synthetic_matrix(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes)]
    packed = [encode_checked(weight) for weight in weights]
    copies = distinct(packed)
    dense = [weights, *([weight.clone() for weight in weights] for _ in copies[1:])]
    rows = []
    for number in tokens:
        inputs = {columns: activations(number, columns, device) for _, columns in shapes}
        check_products(inputs, weights, packed)
        bf16 = timed([partial(dense_products, inputs, block) for block in dense])
        ours = timed([partial(packed_products, inputs, block) for block in copies])
        rows.append(
            {
                "table": "prefill",
                "tokens": number,
                "matrices": len(shapes),
                **microseconds("bf16_microseconds", bf16),
                **microseconds("samebits_microseconds", ours),
                "overhead": round(ours.median / bf16.median - 1, 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def check_products(
    inputs: dict[int, torch.Tensor], weights: list[torch.Tensor], packed: list[samebits.PackedTensor]
) -> None:
    """Leave with an error if a product's words are not F.linear's."""
    for weight, tensor in zip(weights, packed, strict=True):
        x = inputs[weight.shape[1]]
        if not torch.equal(linear(x, tensor, None).view(torch.int16), F.linear(x, weight).view(torch.int16)):
            raise SystemExit(f"{tuple(weight.shape)} with {x.shape[0]} tokens: not identical")


def dense_products(inputs: dict[int, torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(inputs[weight.shape[1]], weight)


def packed_products(inputs: dict[int, torch.Tensor], packed: Sequence[samebits.PackedTensor]) -> None:
    for tensor in packed:
        linear(inputs[tensor.shape[1]], tensor, None)


def measure_tokens(dense: list[torch.Tensor], copies: list[samebits.PackedTensor], tokens: int) -> dict[str, Any]:
    """A product, as a row of the table "many"."""
    rows, columns = dense[0].shape
    x = activations(tokens, columns, dense[0].device)
    plan = plan_of(x, copies[0], None)
    check_products({columns: x}, dense[:1], copies[:1])
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


def activations(tokens: int, columns: int, device: str | torch.device) -> torch.Tensor:
    return torch.randn(tokens, columns, device=device).bfloat16()


def few_row(weight: torch.Tensor, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table "few": a weight with each number of tokens."""
    rows, columns = weight.shape
    row: dict[str, Any] = {
        "table": "few",
        "matrix": f"{rows} x {columns}",
        "used_as": SHAPES.get((rows, columns), ""),
    }
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
