"""Two GPUs: generation of a model whose layers, or whose matrices, are divided between them; compressed beside BF16.

    python benchmarks/parallel.py                                        on two GPUs, to results/parallel.json
    python benchmarks/parallel.py --placements auto
    python benchmarks/parallel.py --model tiny --device cpu --tokens 4 --name trial

A model of generate.py with synthetic weights is written once, in BF16, to a temporary folder (--folder says where: it
needs 2 bytes a weight). Each placement has processes of its own, which load from there, BF16 first, then compressed
while loading:

    auto      one process, device_map="auto": whole layers on one GPU or the other
    tensor    two processes, DistributedConfig(tp_size=2): a part of each matrix on each GPU, by torchrun

On a CPU "auto" is one device and "tensor" two processes. tokens_per_s is as in generate.py, with the eager way; bytes
are those of the GPU that has most: weights_bytes of the parameters, peak_bytes while generating. Tokens, and the logits
behind the prompt, are compared as bytes, on every rank. A placement takes a minute or two; its rows are written when it
is done, in place of those of the same case, device and versions.
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
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

import generate
import samebits
from common import PACKAGES, add_results, cpu_name, significant
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


def peak_bytes(device: str) -> int | None:
    devices = range(torch.cuda.device_count() if device == "cuda" else 0)
    return max((torch.cuda.max_memory_allocated(index) for index in devices), default=None)


@torch.inference_mode()
def logits_of(model: Any, setting: generate.Setting, device: str) -> torch.Tensor:
    """Of the last token of each prompt, as words: int16 [batch, vocabulary]."""
    prompt = random_prompt(model, setting.batch, setting.prompt, device)
    return model(prompt, logits_to_keep=1).logits.cpu().view(torch.int16)


def measure(folder: Path, placement: str, settings: list[generate.Setting], device: str, packed: bool) -> list[Any]:
    """A row's figures, the tokens and the logits of every setting, on one model, which is gone afterwards."""
    start = time.monotonic()

    def say(done: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            kind = "samebits" if packed else "BF16"
            print(f"{placement}, {kind}: {done} after {time.monotonic() - start:.1f} s", flush=True)

    model = load(folder, placement, packed)
    if packed:
        samebits.prepare(model, [setting.batch for setting in settings])
    say("ready")
    found = []
    for setting in settings:
        for index in range(torch.cuda.device_count() if device == "cuda" else 0):
            torch.cuda.reset_peak_memory_stats(index)
        figures = generate.measure(model, setting, device)
        row = figures.step.rates("tokens_per_s", setting.batch) | {"weights_bytes": weights_bytes(model)}
        found.append((row | {"peak_bytes": peak_bytes(device)}, figures.tokens, logits_of(model, setting, device)))
        say(f"{setting}: {figures.rate:.1f} tokens/s,")
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def work(folder: Path, placement: str, settings: list[generate.Setting], device: str) -> list[dict[str, Any]]:
    """One rank's rows."""
    plain, ours = (measure(folder, placement, settings, device, packed) for packed in (False, True))
    rows = []
    for setting, (bf16, tokens, logits), (compressed, our_tokens, our_logits) in zip(
        settings, plain, ours, strict=True
    ):
        row: dict[str, Any] = {"batch": setting.batch, "prompt": setting.prompt, "tokens": setting.tokens}
        for kind, figures in (("bf16", bf16), ("samebits", compressed)):
            row |= {f"{kind}_{key}": value for key, value in figures.items()}
        row["speed"] = significant(compressed["tokens_per_s"] / bf16["tokens_per_s"])
        same = {"same_tokens": tokens == our_tokens, "same_logits": torch.equal(logits, our_logits)}
        rows.append(row | same)
    return rows


def merge(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The first rank's times, the most memory, and whether all ranks got the same bits."""
    rows = []
    for found in zip(*ranks, strict=True):
        row = dict(found[0])
        for key in row:
            if key.endswith("_bytes") and row[key] is not None:
                row[key] = max(other[key] for other in found)
            elif key.startswith("same_"):
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
