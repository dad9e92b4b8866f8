"""Where a token's time goes: one decoding step, BF16 and compressed, eager and as a CUDA graph.

    python benchmarks/token_profile.py                               on a GPU, to results/profile.json
    python benchmarks/token_profile.py --models "Qwen3 14B" --batches 1,64
    python benchmarks/token_profile.py --models tiny --device cpu --name trial            no kernels there

Table "steps": the step is the model's forward for one token a sequence, with a static cache of ROOM tokens, so that
eager and graph run the same kernels. ``step_milliseconds`` is the wall's median over REPEATS, ``host_milliseconds`` the
part of it until the host has launched all (in eager mode the Python of the model). torch.profiler says what the GPU did
in one more step, by KINDS of kernels; a kernel that starts before the one in front ends counts from there. What is left
of the step is ``idle_milliseconds``. Once it has run, the profiler makes every launch of the process slower: all times
are taken before. On a GPU BF16 and compressed have a process each: what runs second in a process is slower.

Table "kernels" has the NAMED names of kernels that take most of a step: how many, medians of one and of the gap between
the end of what ran before and its start, negative where they overlap.

Table "calls": microseconds of the host for one call of a linear layer of each shape, nn.Linear and packed.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import StaticCache

import samebits
from common import PACKAGES, add_results, cpu_name, runner, significant
from generate import numbers
from models import MODELS, build, random_prompt
from samebits.integrations.graphs import captured
from samebits.verify import repeatable_attention

CONTEXT = 128  # tokens
ROOM = 256  # tokens of the cache
REPEATS = 10
CALLS = 50  # of a layer, before the host waits for the GPU
NAMED = 12
LONGEST_NAME = 80
# The first that is found in a kernel's name.
KINDS = {
    "fused": re.compile(r"^linear_|^arrange"),
    "decoding": re.compile(r"^decode"),
    "attention": re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE),
    "bf16_product": re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|dot_kernel", re.IGNORECASE),
    "other": re.compile(""),
}
Kernel = tuple[str, float, float]  # name, start and end in microseconds


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if pattern.search(kernel))


def one_by_one(kernels: list[Kernel]) -> Iterator[Kernel]:
    """In their order; one that starts before those in front have ended counts from there, so no moment counts twice."""
    busy_until = 0.0
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        start = max(start, busy_until)
        busy_until = max(start, end)
        yield name, start, busy_until


def by_kind(kernels: list[Kernel]) -> dict[str, float]:
    """Milliseconds of each kind; no moment counts twice."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, start, end in one_by_one(kernels):
        found[kind_of(name)] += (end - start) / 1e3
    return found


def by_name(kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Rows of the table "kernels", but for the step that they are of."""
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    lasting, gaps = defaultdict(list), defaultdict(list)
    busy_until = kernels[0][1] if kernels else 0.0
    for name, start, end in kernels:
        lasting[name[:LONGEST_NAME]].append(end - start)
        gaps[name[:LONGEST_NAME]].append(start - busy_until)
        busy_until = max(busy_until, end)

    def median(times: list[float]) -> float:
        return significant(statistics.median(times))

    names = sorted(lasting, key=lambda name: -sum(lasting[name]))[:NAMED]
    return [{"rank": rank, "kernel": name, "launches": len(lasting[name]), "microseconds": median(lasting[name]),
             "gap_microseconds": median(gaps[name])} for rank, name in enumerate(names, 1)]  # fmt: skip


def kernels_of(run: Callable[[], object], device: str) -> list[Kernel]:
    """What the GPU does in ``run``."""
    if device != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


def milliseconds(run: Callable[[], object], device: str) -> tuple[float, float]:
    """Medians of one run's time: until the host is done, and until the device is."""
    host, whole = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        host.append(time.perf_counter() - start)
        wait(device)
        whole.append(time.perf_counter() - start)
    return 1e3 * statistics.median(host), 1e3 * statistics.median(whole)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def decoding_step(model: Any, batch: int, device: str) -> Callable[[], Any]:
    """The forward for one more token of each sequence; every call takes one of ROOM - CONTEXT places in the cache."""
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    prompt = random_prompt(model, batch, CONTEXT, device)
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    mask = (torch.arange(ROOM, device=device) <= CONTEXT).expand(batch, 1, 1, ROOM).contiguous()
    positions = torch.full((batch, 1), CONTEXT, device=device)
    return partial(model, input_ids=prompt[:, -1:].clone(), attention_mask=mask, position_ids=positions,
                   past_key_values=cache, use_cache=True)  # fmt: skip


def steps(model: Any, batches: list[int], device: str) -> Iterator[tuple[int, str, Callable[[], Any]]]:
    """Every batch and way, and what runs the step, warmed up."""
    for batch in batches:
        step = decoding_step(model, batch, device)
        for way in ("eager", "graph"):
            step(), step()
            wait(device)
            yield batch, way, captured(model.device, step) if way == "graph" and device == "cuda" else step


def call_microseconds(model: Any, device: str) -> dict[tuple[int, int], float]:
    """Of one call of a linear layer at one token, by its shape: what the host needs, the median.

    Of a copy, so that nothing is learned from it about the model: that layers of one input are not asked for together.
    """
    found: dict[tuple[int, int], float] = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or (module.out_features, module.in_features) in found:
            continue
        x = torch.zeros(1, 1, module.in_features, dtype=torch.bfloat16, device=device)
        alone, times = copy.deepcopy(module), []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            for _ in range(CALLS):
                alone(x)
            times.append((time.perf_counter() - start) / CALLS)
            wait(device)
        found[module.out_features, module.in_features] = 1e6 * statistics.median(times[1:])
    return found


def built(name: str, packed: bool, batches: list[int], device: str) -> Any:
    model = build(name, device, packed)
    if packed:
        samebits.prepare(model, sorted({1, *batches, *(batch * CONTEXT for batch in batches)}))
    return model


FORMS = {"BF16": False, "samebits": True}


class Measured(NamedTuple):
    """What is found of one form of a model.

    Attributes:
        times: milliseconds by batch and way, of the host and of all.
        calls: microseconds of one call of a linear layer, by its shape.
        kernels: by batch and way.
    """

    times: dict[tuple[int, str], tuple[float, float]]
    calls: dict[tuple[int, int], float]
    kernels: dict[tuple[int, str], list[Kernel]]


@repeatable_attention()
@torch.no_grad()
def measured(name: str, packed: bool, batches: list[int], device: str) -> Measured:
    model = built(name, packed, batches, device)
    times = {(batch, way): milliseconds(run, device) for batch, way, run in steps(model, batches, device)}
    calls = call_microseconds(model, device)
    kernels = {(batch, way): kernels_of(run, device) for batch, way, run in steps(model, batches, device)}
    return Measured(times, calls, kernels)


def rows(
    names: list[str], batches: list[int], device: str, run: Callable[..., Callable[[], Measured]] = partial
) -> Iterator[dict[str, Any]]:
    """All tables; ``run`` is partial or in_own_process."""
    for name in names:
        found = {form: run(measured, name, packed, batches, device)() for form, packed in FORMS.items()}
        plain, packed_calls = (each.calls for each in found.values())
        for (outputs, inputs), microseconds in plain.items():
            yield {
                "table": "calls", "model": name, "matrix": f"{outputs} x {inputs}",
                "linear_microseconds": significant(microseconds),
                "packed_microseconds": significant(packed_calls[outputs, inputs]),
            }  # fmt: skip
        for form, each in found.items():
            for (batch, way), kernels in each.kernels.items():
                host, whole = each.times[batch, way]
                kinds = by_kind(kernels)
                case = {"model": name, "form": form, "batch": batch, "way": way, "context": CONTEXT}
                parts = {"step": whole, "host": host, **kinds, "idle": max(0.0, whole - sum(kinds.values()))}
                row = case | {f"{key}_milliseconds": significant(value) for key, value in parts.items()}
                print(row, flush=True)
                yield {"table": "steps"} | row
                yield from ({"table": "kernels"} | case | kernel for kernel in by_name(kernels))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="profile")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["Llama 3.1 8B"], help=", ".join(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    run = runner(options.device)
    found = list(rows(options.models, options.batches, options.device, run))
    keys = ("model", "form", "batch", "way", "matrix", "rank")
    print(add_results(options.name, device, found, keys, (*PACKAGES, "transformers")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
