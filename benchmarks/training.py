"""LoRA training with PEFT: a compressed base beside the BF16 base in one run, gradients and adapters compared as bytes.

    python benchmarks/training.py                                       all of it on a GPU, to results/training.json
    python benchmarks/training.py --batches 1 --sequence 1024
    python benchmarks/training.py --model tiny --device cpu --sequence 16 --name trial

A real configuration with synthetic weights (generate.build), random tokens, adapters of rank RANK in BF16 on all linear
layers but the head, AdamW. A step is forward, backward and the optimizer's; its time is the median of REPEATS, after
some that warm up, and peak_bytes is what torch allocated at most, weights included. On a GPU BF16 and compressed have
a process each, for what runs second in a process is slower, and plans are found ahead (samebits.prepare).

torch is told to compute deterministically, and to raise an error where it cannot: if it only warns, the backward pass
of its flash attention does not repeat itself. cuDNN's attention never does, so torch takes another one
(samebits.verify.repeatable_attention).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import generate
import samebits
from common import PACKAGES, Timing, cpu_name, runner, significant, time_calls, write_results
from samebits.verify import repeatable_attention

RANK = 16
WARM_UP = 4  # steps, behind the one whose gradients are compared
REPEATS = 15
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    batch: int
    sequence: int
    checkpointing: bool


@dataclass(frozen=True)
class Figures:
    """Of some steps; bytes on a GPU only; gradients of the first step and adapters after the last, on the CPU."""

    timing: Timing
    peak_bytes: int | None
    gradients: Tensors
    adapters: Tensors


def adapted(name: str, device: str, packed: bool) -> Any:
    """The model with adapters that change it: made with zeros, as usual, half of their gradients would be zero."""
    base = generate.build(name, device, packed)
    base.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(base, config, autocast_adapter_dtype=False).train()


def trainable(model: Any) -> Tensors:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def measure(model: Any, setting: Setting, device: str) -> Figures:
    """Train the adapters as they are."""
    tokens = torch.randint(
        model.config.vocab_size, (setting.batch, setting.sequence), generator=torch.Generator().manual_seed(1)
    ).to(device)
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-4)
    model.gradient_checkpointing_disable()
    if setting.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    call = partial(model, input_ids=tokens, labels=tokens, use_cache=False)

    def step() -> None:
        optimizer.zero_grad()
        call().loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    if device == "cuda":
        with torch.no_grad():
            samebits.prepare(model, call=call)
    step()
    gradients = {name: parameter.grad.cpu() for name, parameter in trainable(model).items()}
    for _ in range(WARM_UP):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timing = time_calls(step, repeats=REPEATS)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    adapters = {name: parameter.detach().cpu().clone() for name, parameter in trainable(model).items()}
    return Figures(timing, peak, gradients, adapters)


@contextmanager
def repeatable() -> Iterator[None]:
    """In which torch computes deterministically."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, before its first product
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write every decoded weight twice
    try:
        with repeatable_attention():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@repeatable()
def measure_all(name: str, settings: list[Setting], device: str, packed: bool) -> list[Figures]:
    """Every setting from the same adapters, on one model."""
    model = adapted(name, device, packed)
    fresh = copy.deepcopy(trainable(model))
    found = []
    for setting in settings:
        with torch.no_grad():
            for key, parameter in trainable(model).items():
                parameter.copy_(fresh[key])
        found.append(measure(model, setting, device))
        print(name, "samebits" if packed else "BF16", setting, f"{found[-1].timing.median:.4f} s", flush=True)
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
    return found


def rows(
    name: str, settings: list[Setting], device: str, run: Callable[..., Callable[[], Any]] = partial
) -> Iterator[dict[str, Any]]:
    """BF16 first, then compressed, each setting beside the other; ``run`` is partial or in_own_process."""
    plain = run(measure_all, name, settings, device, packed=False)()
    packed = run(measure_all, name, settings, device, packed=True)()
    for setting, left, right in zip(settings, plain, packed, strict=True):
        yield {
            "table": "steps", "model": name, "rank": RANK, "batch": setting.batch, "sequence": setting.sequence,
            "checkpointing": setting.checkpointing,
            **left.timing.columns("bf16_seconds"), **right.timing.columns("samebits_seconds"),
            "more_time": significant(right.timing.median / left.timing.median - 1),
            "bf16_peak_bytes": left.peak_bytes, "samebits_peak_bytes": right.peak_bytes,
            "less_memory": None if not left.peak_bytes or not right.peak_bytes
            else significant(1 - right.peak_bytes / left.peak_bytes),
            "same_gradients": same_bytes(left.gradients, right.gradients),
            "same_adapters": same_bytes(left.adapters, right.adapters),
        }  # fmt: skip


def same_bytes(left: Tensors, right: Tensors) -> bool:
    """Of tensors that say something."""
    if not all(tensor.isfinite().all() and tensor.any() for tensor in left.values()):
        raise SystemExit("a tensor of the BF16 model is zero or not finite, so there is nothing worth comparing")
    is_alike = left.keys() == right.keys()
    return is_alike and all(torch.equal(left[key].view(torch.int16), right[key].view(torch.int16)) for key in left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="training")
    parser.add_argument("--model", choices=generate.MODELS, default="Llama 3.1 8B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=generate.numbers, default=[1, 4])
    parser.add_argument("--sequence", type=int, default=2048)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    settings = [
        Setting(batch, options.sequence, checkpointing) for batch in options.batches for checkpointing in (False, True)
    ]
    found = list(rows(options.model, settings, options.device, runner(options.device)))
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    print(write_results(options.name, device, found, (*PACKAGES, "transformers", "peft")))
    return int(not all(row["same_gradients"] and row["same_adapters"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
