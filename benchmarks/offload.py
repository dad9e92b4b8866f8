"""Models that do not fit on the card in BF16: offloaded by accelerate, beside samebits on the same memory.

    python benchmarks/offload.py                              all cases on a GPU, to results/offload.json
    python benchmarks/offload.py --cases 14b-24,14b-12 --batches 1,16
    python benchmarks/offload.py --cases tiny --device cpu --name trial

A card of a smaller size is emulated in memory only: torch may take no more than the cap (by
set_per_process_memory_fraction, and the peak is checked), while computing and the bus are those of the GPU at hand;
every row says so. Of the cap, RESERVE is left for the key-value cache, activations and one decoded layer; weights get
the rest. Three ways, each with a model of its own, real configurations and synthetic weights (generate.build):

    accelerate     BF16, placed by infer_auto_device_map and dispatch_model, as device_map="auto" does
    bf16_streamed  BF16, by samebits.offload: what streaming gives without packing
    samebits       packed, by samebits.offload: on the card as a whole where it fits ("resident"), else streamed

All have a static cache. What is on the card as a whole runs in samebits.cuda_graphs, which what is copied while it runs
cannot.

A batch generates TOKENS tokens after the first one, whose time contains the prompt, and GRAPH_TOKENS where graphs are;
tokens_per_s is of all its sequences together, from the median time between two tokens, by the GPU's own clock, without
the first SETTLED ones of graphs. It does so twice, the first time to warm up, but only once if that took more than LONG
seconds. ``same_tokens`` compares all tokens that the first way has; None stands where the memory was not enough. A row
that the file has already of the same case, batch, device and versions is replaced; all other rows of that device and
these versions stay.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from transformers import StaticCache, StoppingCriteriaList

import samebits
from common import PACKAGES, add_results, cpu_name, significant
from generate import SETTLED, Clock, Figures
from models import MODELS, build, random_prompt
from samebits.verify import repeatable_attention

GIB = 1 << 30
RESERVE = 3 * GIB
LONG = 3.0  # seconds
TOKENS = 4
GRAPH_TOKENS = 24
PROMPT = 32
ROOM = 64  # tokens of the cache
WAYS = ("accelerate", "bf16_streamed", "samebits")
KEYS = ("case", "batch")
EMULATED = "emulated in memory only"
_LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "architectures": ["LlamaForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
HALF_70B = "Llama 3.3 70B, 40 of its 80 layers"
MODELS.update({
    "Qwen3 32B": ("qwen3", {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    }),
    HALF_70B: ("llama", {**_LLAMA_70B, "num_hidden_layers": 40}),
    "tiny, 8 layers": ("llama", {**MODELS["tiny"][1], "num_hidden_layers": 8}),
})  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and the bytes that the card is to have."""

    model: str
    cap: int
    batches: tuple[int, ...] = (1, 4, 16, 64)
    reserve: int = RESERVE

    @property
    def weights(self) -> int:
        """Bytes that weights may take."""
        return self.cap - self.reserve


CASES = {
    "14b-24": Case("Qwen3 14B", 24 * GIB),
    "24b-40": Case("Mistral Small 24B", 40 * GIB),
    "32b-48": Case("Qwen3 32B", 48 * GIB),
    "14b-12": Case("Qwen3 14B", 12 * GIB, batches=(1, 16)),
    "70b-24": Case(HALF_70B, 24 * GIB, batches=(1, 16)),
    "tiny": Case("tiny, 8 layers", 1_500_000, batches=(2,), reserve=0),
}


@dataclass(frozen=True)
class Found:
    """What a way has found: bytes of weights that are not on the card, and figures by batch size; None: no memory."""

    offloaded_bytes: int
    figures: dict[int, Figures | None]


def generate(model: Any, batch: int, device: str, graphs: bool) -> Figures:
    """One run, with random prompts that are always the same."""
    prompt = random_prompt(model, batch, PROMPT, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens = 1 + (GRAPH_TOKENS if graphs else TOKENS)
    clock = Clock(device)
    with samebits.cuda_graphs(model) if graphs else nullcontext():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]),
            past_key_values=StaticCache(config=model.config, max_cache_len=ROOM), disable_compile=not graphs,
        )  # fmt: skip
    first, *others = clock.intervals()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Figures([first], others[SETTLED:] if graphs else others, batch, peak, output.tolist())


def place(model: Any, way: str, case: Case, device: str, disk: Path) -> int:
    """Put a model where it is to be; the bytes that are not on the card."""
    if way != "accelerate":
        return samebits.offload(model, case.weights, device=device).streamed_bytes
    memory = {"cpu": case.weights} if device == "cpu" else {0: case.weights, "cpu": 1 << 50}
    places = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=model._no_split_modules)
    elsewhere = [model.get_submodule(name) for name, where in places.items() if where != next(iter(memory))]
    for module in elsewhere:
        module.to("cpu")
    nbytes = sum(parameter.nbytes for module in elsewhere for parameter in module.parameters())
    dispatch_model(model, places, offload_dir=disk)
    return nbytes


def measure(way: str, case: Case, device: str) -> Found:
    """All batch sizes on one model, which is gone afterwards."""
    start = time.monotonic()
    figures: dict[int, Figures | None] = {}
    with TemporaryDirectory() as disk:
        model = build(case.model, device, packed=way == "samebits")
        if way == "samebits":  # before the cap: looking for plans takes memory of its own
            samebits.prepare(model, sorted({tokens for batch in case.batches for tokens in (batch, batch * PROMPT)}))
        offloaded = place(model, way, case, device, Path(disk))
        limit(case.cap, device)
        what = f"{case.model}, {case.cap / GIB:.0f} GiB, {way}"
        print(f"{what}: {offloaded / 1e9:.1f} GB offloaded after {time.monotonic() - start:.0f} s", flush=True)
        graphs = way == "samebits" and offloaded == 0 and device == "cuda"
        for batch in case.batches:
            figures[batch] = found = _figures(model, batch, case.cap, device, graphs)
            said = f"{found.rate:.2f} tokens/s" if found else "not enough memory"
            print(f"{what}, batch {batch}: {said}; {time.monotonic() - start:.0f} s", flush=True)
        del model
        limit(None, device)
    return Found(offloaded, figures)


def _figures(model: Any, batch: int, cap: int, device: str, graphs: bool) -> Figures | None:
    try:
        start = time.monotonic()
        found = generate(model, batch, device, graphs)
        found = found if time.monotonic() - start > LONG else generate(model, batch, device, graphs)
    except torch.OutOfMemoryError:
        return None
    return None if found.peak_bytes is not None and found.peak_bytes > cap else found


def limit(cap: int | None, device: str) -> None:
    """Give back what is not in use, and let torch have no more than ``cap`` bytes of the GPU; None: all.

    Building a model leaves gaps between its weights, which a model that is loaded has not: they do not count.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties().total_memory
        gaps = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap + gaps) / total) if cap else 1.0)


def rows(name: str, case: Case, ways: Sequence[str], device: str) -> Iterator[dict[str, Any]]:
    """A case's, one for each batch size."""
    found = {way: measure(way, case, device) for way in ways}
    fits = "samebits" in found and not found["samebits"].offloaded_bytes
    for batch in case.batches:
        row: dict[str, Any] = {"table": "resident" if fits else "streamed", "case": name, "model": case.model}
        row |= {"cap_bytes": case.cap, "card": EMULATED, "batch": batch, "prompt": PROMPT, "tokens": TOKENS}
        baseline = found[ways[0]].figures[batch]
        for way in ways:
            figures = found[way].figures[batch]
            row[f"{way}_offloaded_bytes"] = found[way].offloaded_bytes
            row |= figures.columns(way) if figures else {f"{way}_tokens_per_s": None, f"{way}_peak_bytes": None}
            if way != ways[0]:
                both = figures is not None and baseline is not None
                row[f"{way}_speed"] = significant(figures.rate / baseline.rate) if both else None
                row[f"{way}_same_tokens"] = _same(figures, baseline) if both else None
        yield row


def _same(figures: Figures, baseline: Figures) -> bool:
    return [row[: len(other)] for row, other in zip(figures.tokens, baseline.tokens, strict=True)] == baseline.tokens


@repeatable_attention()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="offload")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=[name for name in CASES if name != "tiny"]
    )
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--batches", type=lambda text: tuple(int(size) for size in text.split(",")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    same = True
    for name in options.cases:
        case = replace(CASES[name], batches=options.batches or CASES[name].batches)
        found = list(rows(name, case, options.ways, options.device))
        same &= all(value is not False for row in found for key, value in row.items() if key.endswith("same_tokens"))
        print(add_results(options.name, device, found, KEYS, (*PACKAGES, "transformers", "accelerate")), flush=True)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
