"""Whether samebits::linear gives exactly F.linear's bytes, over random products.

    python benchmarks/identity.py [--combinations 1000] [--seed 0] [--name identity]        writes results/<name>.json

Shapes, tokens, bias, the operands' addresses, dimensions and strides, and the values are drawn at random. Every result
is compared with F.linear on the dense weight as 16-bit words, and counted as fused or as decoded first. One word that
differs is a failure: exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import samebits
from common import synthetic_matrix, write_results
from linear import find_plan
from samebits.plans import dispatch
from samebits.plans.call import plan_of
from samebits.plans.probe import Probe

DEVICE = "cuda"
PROGRESS = 50  # combinations between two lines


@dataclass(frozen=True)
class Combination:
    """One product. ``operands`` is a name in OPERANDS, ``values`` one in VALUES."""

    rows: int
    columns: int
    tokens: int
    has_bias: bool
    operands: str
    values: str
    seed: int


def placed(shape: tuple[int, ...], words: int = 0) -> torch.Tensor:
    """Room for a contiguous bfloat16 tensor, ``words`` behind an address that any allocation may have."""
    count = torch.Size(shape).numel()
    return torch.empty(count + words, dtype=torch.bfloat16, device=DEVICE)[words:].view(shape)


# How the activations [tokens, columns] lie in memory: the tensor that F.linear gets, still to be filled.
OPERANDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "two dimensions": lambda m, k: placed((m, k)),
    "batch": lambda m, k: placed((m, 1, k)),
    "sequence": lambda m, k: placed((1, m, k)),
    "16 bytes further": lambda m, k: placed((m, k), 8),
    "2 bytes further": lambda m, k: placed((1, m, k), 1),
    "gaps between rows": lambda m, k: placed((m, k + 64))[:, :k],
    "last token": lambda m, k: placed((m, 3, k))[:, -1:],
    "transposed": lambda m, k: placed((k, m)).T,
    "four dimensions": lambda m, k: placed((1, 1, m, k)),
    "misaligned bias": lambda m, k: placed((m, 1, k)),
}
PLAIN = ("two dimensions", "batch", "sequence")  # half of all combinations


def spread(words: torch.Tensor, octaves: int) -> torch.Tensor:
    exponents = torch.randint(-octaves, octaves + 1, words.shape, device=DEVICE)
    return torch.ldexp(words.float(), exponents).to(torch.bfloat16)


def special(words: torch.Tensor) -> torch.Tensor:
    """Infinities, NaN, zeros of both signs and subnormals here and there."""
    rare = torch.tensor([0x7F80, 0xFF80, 0x7FC0, 0x0000, 0x8000, 0x0001, 0x8001], device=DEVICE).to(torch.int16)
    chosen = rare[torch.randint(len(rare), words.shape, device=DEVICE)].view(torch.bfloat16)
    return torch.where(torch.rand(words.shape, device=DEVICE) < 1e-3, chosen, words)


VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda words: words,
    "cancelling": lambda words: words,
    "wide range": lambda words: spread(words, 8),
    "extreme range": lambda words: spread(words, 120),
    "special values": special,
}


def combinations(count: int, seed: int) -> Iterator[Combination]:
    """The same for the same arguments."""
    chosen = random.Random(seed)
    for number in range(count):
        unusual = chosen.random() < 0.1
        columns = 8 * chosen.randint(1, 600) + (chosen.randint(0, 7) if unusual else 0)
        rows = 8 * chosen.randint(1, 1024) + (chosen.randint(0, 7) if unusual else 0)
        few = chosen.choice([1, 1, 1, chosen.randint(2, 16), chosen.randint(2, 16), chosen.randint(2, 16),
                             chosen.randint(17, 128), chosen.randint(17, 300)])  # fmt: skip
        yield Combination(
            rows=rows if chosen.random() < 0.95 else rows * 4,
            columns=columns if chosen.random() < 0.15 else 64 * chosen.randint(1, 128),
            tokens=few if chosen.random() < 0.95 else chosen.randint(301, 3000),
            has_bias=chosen.random() < 0.5,
            operands=chosen.choice(PLAIN if chosen.random() < 0.5 else list(OPERANDS)),
            values=chosen.choice(list(VALUES)),
            seed=number,
        )


def compare(combination: Combination) -> tuple[bool, int]:
    """Whether the product was fused, and how many words of the result differ from F.linear's."""
    case, device = combination, torch.device(DEVICE)
    torch.manual_seed(case.seed)
    if case.values == "cancelling" and case.columns % 2 == 0:
        probe = Probe.make(case.rows, case.columns, device, case.seed)
        weight, words = probe.weight, probe.cancelling(case.tokens, case.seed)
    else:
        weight = synthetic_matrix(case.rows, case.columns, seed=case.seed, device=DEVICE)
        words = VALUES[case.values](torch.randn(case.tokens, case.columns, device=DEVICE).to(torch.bfloat16))

    def operand() -> torch.Tensor:
        """Another one each time, as in a model; the same one again would not be made again by native code."""
        made = OPERANDS[case.operands](case.tokens, case.columns)
        return made.copy_(words.view(made.shape))

    x = operand()
    bias = placed((case.rows,), case.operands == "misaligned bias").normal_() if case.has_bias else None
    packed = samebits.encode(weight)
    expected = F.linear(x, weight, bias)
    find_plan(x, packed, bias)
    is_fused = plan_of(x, packed, bias) is not None
    results = [dispatch.linear_of_module(operand(), packed, bias) for _ in range(3)]
    again = dispatch.product_again(operand(), packed.data, bias)
    results += [dispatch.linear(x, packed, bias)] + ([] if again is None else [again])
    assert all(result.shape == expected.shape for result in results)
    return is_fused, sum(int((result.view(torch.int16) != expected.view(torch.int16)).sum()) for result in results)


def run(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of the table "identity": for each kind of operands and of values, and for all."""
    counts: Counter[tuple[str, str]] = Counter()
    for number, combination in enumerate(combinations(count, seed), 1):
        is_fused, different = compare(combination)
        outcome = "different" if different else "fused" if is_fused else "decoded_first"
        if different:
            print(f"{different} words differ, {'fused' if is_fused else 'decoded first'}: {combination}", flush=True)
        for name in ("all", f"operands: {combination.operands}", f"values: {combination.values}"):
            counts[name, outcome] += 1
        if number % PROGRESS == 0 or number == count:
            print(f"{number} of {count}: {counts['all', 'fused']} fused, {counts['all', 'decoded_first']} decoded "
                  f"first, {counts['all', 'different']} different", flush=True)  # fmt: skip
    outcomes = ("fused", "decoded_first", "different")
    names = sorted({name for name, _ in counts}, key=lambda name: (name != "all", name))
    return [
        {"table": "identity", "products": name, **{each: counts[name, each] for each in outcomes}} for name in names
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--combinations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="identity")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    with tempfile.TemporaryDirectory() as folder:  # shapes of nobody's model
        os.environ["SAMEBITS_CACHE"] = folder
        rows = run(arguments.combinations, arguments.seed)
    print(write_results(arguments.name, torch.cuda.get_device_name(), rows))
    return int(any(row["different"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
