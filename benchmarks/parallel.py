"""Two GPUs: generation of a model whose layers, or whose matrices, are divided between them; compressed beside BF16.

    python benchmarks/parallel.py                                        on two GPUs, to results/parallel.json
    python benchmarks/parallel.py --placements auto
    python benchmarks/parallel.py --model tiny --device cpu --tokens 4 --name trial

A model of generate.py with synthetic weights is written once, in BF16, to a temporary folder (--folder says where: it
needs 2 bytes a weight). Each placement has processes of its own, which load from there, BF16 first, then compressed
while loading, and generate with both in turns, since the host decides:

    auto      one process, device_map="auto": whole layers on one GPU or the other
    tensor    two processes, DistributedConfig(tp_size=2): a part of each matrix on each GPU, by torchrun

On a CPU "auto" is one device and "tensor" two processes. tokens_per_s and speed are as in generate.py, with the eager
way; bytes are those of the GPU that has most: weights_bytes of the parameters, peak_bytes while generating, without
what the other form has. Tokens, and the logits behind the prompt, are compared as bytes, on every rank. A placement
takes some minutes; its rows are written when it is done, in place of those of the same case, device and versions.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from transformers.distributed import DistributedConfig

import generate
import samebits
from common import PACKAGES, add_results, cpu_name
from models import random_prompt
from samebits.verify import repeatable_attention

GPUS = 2
WAY = "eager"
PLACEMENTS = ("auto", "tensor")
KEYS = ("model", "placement", "batch", "prompt", "tokens")


def load(folder: Path, placement: str, packed: bool) -> Any:
    options: dict[str, Any] = {"quantization_config": samebits.SamebitsConfig()} if packed else {}
    if placement == "auto":
        options["device_map"] = "auto"
    else:
        options["distributed_config"] = DistributedConfig(tp_size=GPUS)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def weights_bytes(model: Any) -> int:
    """Of the device that has most, among those of this process."""
    found: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found[part.device] += part.nbytes
    return max(found.values())


@torch.inference_mode()
def logits_of(model: Any, setting: generate.Setting, device: str) -> torch.Tensor:
    """Of the last token of each prompt, as words: int16 [batch, vocabulary]."""
    prompt = random_prompt(model, setting.batch, setting.prompt, device)
    return model(prompt, logits_to_keep=1).logits.cpu().view(torch.int16)


class Form(NamedTuple):
    """A model, and what was found of each setting before another one was loaded."""

    model: Any
    peaks: list[int | None]
    logits: list[torch.Tensor]


def ready(folder: Path, placement: str, settings: list[generate.Setting], device: str, packed: bool) -> Form:
    """Loaded, with its plans, and run once in each setting."""
    start = time.monotonic()
    gpus = range(torch.cuda.device_count() if device == "cuda" else 0)
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    form = Form(load(folder, placement, packed), [], [])
    if packed:
        samebits.prepare(form.model, [setting.batch for setting in settings])
    for setting in settings:
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        generate.measure(form.model, setting, device)
        peaks = [torch.cuda.max_memory_allocated(gpu) - before[gpu] for gpu in gpus]
        form.peaks.append(max(peaks, default=None))
        form.logits.append(logits_of(form.model, setting, device))
    say(f"{placement}, {generate.kind(packed)}: ready after {time.monotonic() - start:.1f} s")
    return form


def say(text: str) -> None:
    """Once, of all ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def work(folder: Path, placement: str, settings: list[generate.Setting], device: str) -> list[dict[str, Any]]:
    """One rank's rows."""
    forms = [ready(folder, placement, settings, device, packed) for packed in (False, True)]
    rows = []
    for number, setting in enumerate(settings):
        turns: list[list[generate.Figures]] = [[], []]
        for _ in range(generate.TURNS):
            for form, found in zip(forms, turns, strict=True):
                found.append(generate.measure(form.model, setting, device))
        bf16, ours = figures = [generate.joined(found) for found in turns]
        row: dict[str, Any] = {"batch": setting.batch, "prompt": setting.prompt, "tokens": setting.tokens}
        for kind, form, found in zip(("bf16", "samebits"), forms, figures, strict=True):
            row |= found.step.rates(f"{kind}_tokens_per_s", setting.batch) | {f"{kind}_repeats": found.repeats}
            row |= {f"{kind}_weights_bytes": weights_bytes(form.model), f"{kind}_peak_bytes": form.peaks[number]}
        row |= generate.speed(bf16, ours) | generate.differences(bf16.tokens, ours.tokens)
        row["same_logits"] = torch.equal(*(form.logits[number] for form in forms))
        say(f"{placement}, {setting}: {bf16.rate:.1f} and {ours.rate:.1f} tokens/s")
        rows.append(row)
    return rows


def merge(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The first rank's times, the most memory, and whether all ranks got the same bits."""
    rows = []
    for found in zip(*ranks, strict=True):
        row = dict(found[0])
        for key in row:
            if key.endswith("_bytes") and row[key] is not None:
                row[key] = max(other[key] for other in found)
            elif key.startswith("same_") or key.endswith("_repeats"):
                row[key] = all(other[key] for other in found)
        rows.append(row)
    return rows


def run(folder: Path, placement: str, arguments: list[str], device: str) -> list[dict[str, Any]]:
    """The rows of a placement, from processes of their own."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else None
    ranks = GPUS if placement == "tensor" else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, *arguments, "--folder", str(folder), "--worker", placement]
    subprocess.run(command, env=environment, check=True)
    found = [json.loads((folder / f"{placement}-{rank}.json").read_text()) for rank in range(ranks)]
    return [{"placement": placement, **row} for row in merge(found)]


@repeatable_attention()
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="parallel")
    parser.add_argument("--model", default="Llama 3.1 8B")
    parser.add_argument("--placements", type=lambda text: text.split(","), default=list(PLACEMENTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=generate.numbers, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=32, help="generated, of each sequence")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder")
    parser.add_argument("--worker", choices=PLACEMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.placements} - {*PLACEMENTS}):
        parser.error(f"unknown placement {unknown[0]!r}, there are {', '.join(PLACEMENTS)}")
    if options.device == "cuda" and torch.cuda.device_count() < GPUS:
        parser.error(f"{GPUS} CUDA devices are needed")
    settings = [generate.Setting(WAY, batch, options.prompt, options.tokens) for batch in options.batches]
    if options.worker:
        rows = work(options.folder, options.worker, settings, options.device)
        (options.folder / f"{options.worker}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(rows))
        return 0
    with TemporaryDirectory(dir=options.folder) as scratch:
        model = generate.build(options.model, options.device, packed=False)
        model.save_pretrained(scratch)
        del model
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        device = f"{GPUS} x {torch.cuda.get_device_name()}" if options.device == "cuda" else cpu_name()
        all_same = True
        for placement in options.placements:
            rows = run(Path(scratch), placement, arguments, options.device)
            rows = [{"table": "parallel", "model": options.model, "gpus": GPUS, **row} for row in rows]
            all_same &= all(row["same_tokens"] and row["same_logits"] for row in rows)
            print(add_results(options.name, device, rows, KEYS, (*PACKAGES, "transformers")), flush=True)
    return int(not all_same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
