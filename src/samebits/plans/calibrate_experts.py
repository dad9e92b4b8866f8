"""Find how rows are multiplied with the experts that they are routed to: fused in a variant, or decoded first.

Right is a variant that gives every byte of torch's own operation on every probe; the fastest of these is taken, if it
is faster than decoding what the operation reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional as F

from samebits.api import encode
from samebits.bf16 import same_words
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.experts import VARIANTS, experts_product, is_supported, launch_of, may_be_fastest
from samebits.kernels.nvrtc import compile_all
from samebits.kernels.ops import decode_experts, decode_rows
from samebits.plans.calibrate import UNSUPPORTED
from samebits.plans.key import ExpertsKey, Operation
from samebits.plans.probe import Probe
from samebits.plans.store import ExpertsOutcome
from samebits.plans.timing import microseconds

PROBES = 4  # the first one plain, the others of sums that cancel
_ROUTES = 12  # that are timed in turn: experts that a cache does not have
_DECODED = 4  # of these, with which decoding first is timed: it writes far more than the cache has


def multiply_decoded(
    x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, offsets: torch.Tensor | None
) -> torch.Tensor:
    """As torch makes it, of what has to be decoded for that; on any device.

    Args:
        x: bfloat16 [pairs, K].
        packed: of the experts' matrices [experts, N, K].
        ids: int32 or int64 [pairs], the expert of each row.
        offsets: int32 [experts]: each expert's rows end there, and ids are in order; then grouped_mm is asked for.
            None: torch.bmm of the matrices gathered.

    Returns:
        bfloat16 [pairs, N].
    """
    if offsets is None:
        return _batched(x, decode_rows(packed, ids))
    return F.grouped_mm(x, decode_experts(packed, ids).transpose(-2, -1), offs=offsets)


def _batched(x: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    return torch.bmm(gathered, x.unsqueeze(-1)).squeeze(-1)


@torch.inference_mode(False)  # whose tensors have no decode tables, and take longer
@torch.no_grad()
def calibrate_experts(key: ExpertsKey, packed: PackedTensor) -> ExpertsOutcome:
    """Compare all variants, and time those that are right.

    Args:
        packed: experts of these, that are timed with.

    Raises:
        DeviceError: the kernels cannot be built or launched.
        torch.OutOfMemoryError: what torch's own operation reads does not fit.
    """
    possible = fitting_variants(packed, key.pairs, 1)
    if not possible:
        return ExpertsOutcome(None, UNSUPPORTED)
    right = _agreeing(key, possible, packed.device)
    if not right:
        return ExpertsOutcome(None, f"no variant gives the bits of {key.operation}")
    return _fastest(key, packed, right)


@torch.inference_mode(False)  # as for calibrate_experts
@torch.no_grad()
def confirm_experts(key: ExpertsKey, variant: int, packed: PackedTensor) -> bool:
    """Whether a variant that was found by another process is right here, too."""
    return variant in fitting_variants(packed, key.pairs, 1) and _agreeing(key, [variant], packed.device) == [variant]


def _agreeing(key: ExpertsKey, variants: Sequence[int], device: torch.device) -> list[int]:
    """Those with torch's bytes. One expert stands for all: what one adds up does not depend on the others."""
    probe, encoded = probe_of((key.rows, key.columns), device)
    is_grouped = key.operation is Operation.GROUPED
    weight = probe.weight.expand(key.experts if is_grouped else key.pairs, -1, -1).contiguous()
    zeros = torch.zeros(key.pairs, dtype=torch.int32, device=device)
    variants = [each for each in variants if launch_of(encoded.header, key.pairs, 1, each, encoded.data.get_device())]
    for seed in range(PROBES):
        x = probe.cancelling(key.pairs, seed) if seed else probe.plain(key.pairs, seed)
        if is_grouped:
            expected = F.grouped_mm(x, weight.transpose(-2, -1), offs=_offsets(_routes(key, seed, device), key.experts))
        else:
            expected = _batched(x, weight)
        variants = [each for each in variants if same_words(_fused(x, encoded, zeros, each), expected)]
    return variants


def _fastest(key: ExpertsKey, packed: PackedTensor, right: Sequence[int]) -> ExpertsOutcome:
    x = torch.ones(key.pairs, key.columns, dtype=torch.bfloat16, device=packed.device)
    routes = [_routes(key, seed, packed.device) for seed in range(_ROUTES)]
    ends = [_offsets(ids, key.experts) if key.operation is Operation.GROUPED else None for ids in routes]
    fused = [[partial(_fused, x, packed, ids, variant) for ids in routes] for variant in right]
    first = [partial(multiply_decoded, x, packed, *each) for each in list(zip(routes, ends, strict=True))[:_DECODED]]
    try:
        *fused_us, decode_us = microseconds([*fused, first])
    except torch.OutOfMemoryError:  # of what is decoded first
        return ExpertsOutcome(right[0])
    best = min(range(len(right)), key=fused_us.__getitem__)
    reason = "" if fused_us[best] < decode_us else "decoding first is faster"
    return ExpertsOutcome(right[best], reason, fused_us[best], decode_us)


def _fused(x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, variant: int) -> torch.Tensor:
    y = torch.empty(len(x), packed.shape[1], dtype=torch.bfloat16, device=x.device)
    experts_product(x, packed, ids, None, y, variant)
    return y


def _routes(key: ExpertsKey, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(key.experts, (key.pairs,), dtype=torch.int32, device=device, generator=generator)
    return ids.sort()[0] if key.operation is Operation.GROUPED else ids


def _offsets(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.bincount(ids, minlength=experts).cumsum(0, dtype=torch.int32)


def probe_of(shape: tuple[int, int], device: torch.device) -> tuple[Probe, PackedTensor]:
    """Of one expert, for the kernel: as trained weights are, if these take the quad code."""
    for even in Probe.kinds(*shape):
        probe = Probe.make(*shape, device, even=even)
        packed = encode(probe.weight.unsqueeze(0))
        if is_supported(packed.header):
            break
    return probe, packed


def fitting_variants(packed: PackedTensor, pairs: int, sharing: int) -> list[int]:
    """Those that fit and are worth trying, compiled; ``sharing``: as launch_of has it."""
    device = packed.data.get_device()
    found = {
        number: launch
        for number in range(len(VARIANTS))
        if may_be_fastest(pairs, packed.shape[0], number)
        and (launch := launch_of(packed.header, pairs, sharing, number, device))
    }
    compile_all({source for launch in found.values() for source in launch.sources}, device)
    return list(found)
