"""Every variant of a fused product beside F.linear: what a plan chooses from, for work on the kernels.

    python benchmarks/variants.py --shapes 5120x5120,4096x14336 --tokens 1,8,16 [--variants 0,7] [--split 1] [--wrong]

It prints a line for each product and writes nothing. Times are those of linear.py: medians in CUDA graphs over more
than 900 MB of distinct weights. A change of a kernel is judged beside the kernel before it, on one device, one process
behind the other, as devices differ by some percent and a compiler may have made something else of lines nearby:

    git worktree add ../before COMMIT
    for tree in ../before .; do PYTHONPATH=$tree/src python benchmarks/variants.py --shapes 14336x4096 --tokens 64; done

A variant is timed if its bytes are F.linear's; of one that gives others it is told which weights it reads wrongly:
products with the columns of the unit matrix are these weights themselves. With ``--wrong`` those are timed as well:
what a part of a kernel takes shows where a copy of it leaves the part out. Which split cuBLAS has is found by a plan,
which no kernel that is wrong has, and which takes seconds; ``--split`` says it.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch.nn import functional as F

import samebits
from common import encode_checked, synthetic_matrix
from gpu import DISTINCT_BYTES, distinct
from linear import SHAPES, activations, counts, find_plan, shapes, timed
from samebits.format.geometry import ROW_GROUP, STAGE
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import LinearPlan, fused_linear, variants
from samebits.plans.call import plan_of

SHOWN = 12  # places of wrong weights
UNIT_COLUMNS = 8  # of the unit matrix at once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes, default=list(SHAPES))
    parser.add_argument("--tokens", type=counts, default=(1, 8, 16))
    parser.add_argument("--variants", type=counts, default=tuple(range(len(VARIANTS))))
    parser.add_argument("--split", type=int, help="of K, for all shapes")
    parser.add_argument("--wrong", action="store_true", help="time variants that give other bits, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    for shape in arguments.shapes:
        weight = synthetic_matrix(*shape, device="cuda")
        measure(weight, arguments.tokens, arguments.variants, arguments.split, arguments.wrong)
    return 0


def measure(
    weight: torch.Tensor,
    tokens: tuple[int, ...],
    chosen: tuple[int, ...],
    split: int | None = None,
    wrong: bool = False,
) -> None:
    """Prints the products of one weight."""
    packed = encode_checked(weight)
    copies = [copy for (copy,) in distinct([packed])]
    dense = [weight, *(weight.clone() for _ in range(int(DISTINCT_BYTES / weight.nbytes)))]
    for number in tokens:
        x = activations(number, weight.shape[1], weight.device)
        plan = LinearPlan(split) if split else planned(x, packed)
        product = "{} x {}, {} tokens".format(*weight.shape, number)
        if plan is None:
            print(f"{product}: no plan", flush=True)
            continue
        [bf16] = timed([partial(F.linear, x, each) for each in dense])
        print(f"{product}, split {plan.split}: BF16 {1e6 * bf16.median:.1f} us", flush=True)
        for variant in variants(packed.header, number, plan.split):
            if variant in chosen:
                print(f"  {line(x, weight, copies, LinearPlan(plan.split, variant), wrong)}", flush=True)


def planned(x: torch.Tensor, packed: samebits.PackedTensor) -> LinearPlan | None:
    find_plan(x, packed)
    return plan_of(x, packed, None)


def line(
    x: torch.Tensor, weight: torch.Tensor, copies: list[samebits.PackedTensor], plan: LinearPlan, wrong: bool
) -> str:
    """What there is to say of one variant; the first copy's product is looked at."""
    name = f"{plan.variant:2} {VARIANTS[plan.variant]}"
    is_same = torch.equal(words(fused_linear(x, copies[0], None, plan)), words(F.linear(x, weight)))
    if not is_same and not wrong:
        return f"{name}: DIFFERENT; {wrong_weights(weight, copies[0], plan)}"
    [time] = timed([partial(fused_linear, x, packed, None, plan) for packed in copies])
    found = f"{1e6 * time.median:.1f} us ({1e6 * time.fastest:.1f} to {1e6 * time.slowest:.1f})"
    return f"{name}: {found}{'' if is_same else ', DIFFERENT'}"


def wrong_weights(weight: torch.Tensor, packed: samebits.PackedTensor, plan: LinearPlan) -> str:
    """Those that the kernel reads otherwise than they are, by row group and stage."""
    columns = weight.shape[1]
    read = torch.empty_like(weight)
    for first in range(0, columns, UNIT_COLUMNS):
        unit = torch.zeros(UNIT_COLUMNS, columns, dtype=weight.dtype, device=weight.device)
        unit[:, first : first + UNIT_COLUMNS].fill_diagonal_(1)
        read[:, first : first + UNIT_COLUMNS] = fused_linear(unit, packed, None, plan).T
    wrong = (words(read) != words(weight)).nonzero()
    places = sorted({(row // ROW_GROUP, column // STAGE) for row, column in wrong.tolist()})
    more = ", ..." if len(places) > SHOWN else ""
    shown = ", ".join(f"{group}/{stage}" for group, stage in places[:SHOWN])
    return (
        f"{len(wrong)} weights are read wrongly, of row group/stage {shown}{more}" if places else "all weights are read"
    )


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


if __name__ == "__main__":
    raise SystemExit(main())
