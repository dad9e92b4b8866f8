"""How much a model remembers before memory runs out, BF16 beside compressed, with its cache packed too; what it takes
at its peak; and what a packed cache costs.

    python benchmarks/longest.py                                     on a GPU, to results/longest.json
    python benchmarks/longest.py --models "Mistral Nemo 12B"
    python benchmarks/longest.py --tables longest --allocator expandable_segments       torch's other way to take memory
    python benchmarks/longest.py --models tiny --device cpu --name trial                no cap there, a few steps

Table "longest": tokens in the key-value cache, of all sequences together, when the memory of a smaller card is spent.
The card is emulated in memory alone, by torch.cuda.set_per_process_memory_fraction: it counts what torch takes,
weights included, and not the driver's own few hundred MB.

How they are counted: a prompt of PROMPT tokens is read. Then entries are put into the cache by its own ``update``,
random keys and values for STEP tokens or a 128th of those it has, and the model generates the next token; again and
again until torch is out of memory. So the tokens in between take in the cache what they would take in any run, in the
same way (it grows by concatenation, whose copy counts), and the others are real decoding steps with all that these
need. The random words are made once, before all else: in a real run states for so many tokens do not come at once,
among what the cache frees and wants again. transformers' DynamicCache is measured with both models,
samebits.PackedCache with the compressed one; random entries are normal, and take about as many bits as those of trained
models. The result is what the cache held after the last step that succeeded: up to 1 % less than possible. Reading so
long a prompt at once would take more, for its activations. Positions beyond those that a model was trained for count
like others; several sequences (``batch``) keep below them.

torch's allocator decides how much of the memory left the cache can use: by default it takes segments of 20 MiB for
blocks below 10 MiB, whole ones above, and a growing cache leaves holes in them; with expandable_segments (torch's
PYTORCH_CUDA_ALLOC_CONF) it takes pages of 2 MiB and gives back each. Rows say which (``allocator``).

BF16 counts only where at least ROOM bytes are left beside its weights; else it does not fit, and there is no ratio.
``predicted_tokens`` are those of ``samebits estimate --context 1 --prompt 128 --batch N --gpu M`` for a folder with the
config.json.

Table "peak": torch's max_memory_allocated while one sequence of CONTEXT tokens is generated, its prompt included,
beside the peak that ``samebits estimate`` predicts of config.json alone: ``first_bytes`` of the first time, when plans
of products with one token are found meanwhile, and ``measured_bytes``, which is predicted, once all plans are there.

Table "cache", for the models of CACHED: the median time of a decoding step, eager, with so many tokens in the cache,
random ones but for the last STEPS, with DynamicCache and with PackedCache in turns; of it what the kernels of one step
take, by torch.profiler; the bytes of both; and whether the logits of all steps are the same.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

import samebits
from common import PACKAGES, Timing, add_results, cpu_name, runner, significant
from models import MODELS, build, config_of, forget, random_prompt
from samebits.integrations.model_memory import ModelMemory, model_memory
from samebits.integrations.model_memory import longest as fitting
from samebits.nn.selection import Selection
from samebits.verify import repeatable_attention
from token_profile import by_kind, kernels_of, wait

GIB = 1 << 30
# Memory of the card, sequences, and how many times more tokens DFloat11's paper reports, if it does.
CASES: dict[str, tuple[int, int, float | None]] = {
    "Mistral Nemo 12B": (24 * GIB, 1, 14.9),
    "Mistral Small 24B": (48 * GIB, 8, 5.7),
    "Qwen3 14B": (24 * GIB, 1, None),
    "tiny": (2 * GIB, 2, None),
}
DEFAULT_MODELS = ("Mistral Nemo 12B", "Mistral Small 24B", "Qwen3 14B", "Llama 3.1 8B", "Llama 3.3 70B")
ROOM = GIB
PROMPT = 128  # tokens
STEP = 32  # tokens, at least
SHARE = 128  # of the tokens in the cache
RANDOM_WORDS = 1 << 22  # more than so many tokens have in a layer's keys
CONTEXT = 4096  # tokens
GENERATED = 16  # of them
CACHED: dict[str, tuple[int, ...]] = {"Llama 3.1 8B": (4096, 32768, 131072), "tiny": (512,)}  # tokens
STEPS = 32
TABLES = ("peak", "cache", "longest")
KEYS = ("model", "cap_bytes", "batch", "context", "allocator")
ALLOCATORS = {"default": "", "expandable_segments": "expandable_segments:True"}


def predicted(name: str) -> ModelMemory:
    """What ``samebits estimate`` knows of a model from its config alone."""
    with TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        return model_memory(Path(folder), Selection(), None)


def random_words(count: int, device: str) -> torch.Tensor:
    return torch.randn(count, dtype=torch.bfloat16, device=device)


def fill(cache: DynamicCache, tokens: int, words: torch.Tensor) -> None:
    """With so many more random ones, made of ``words``, by its own ``update``."""
    for number, layer in enumerate(cache.layers):
        keys = layer.keys
        shape = (*keys.shape[:2], tokens, keys.shape[3])
        del keys
        entries = words[: math.prod(shape)].view(shape)
        cache.update(entries, entries, number)


@torch.no_grad()
def longest(
    model: Any, batch: int, device: str, most: int | None = None, cache_class: Callable[..., Any] = DynamicCache
) -> int:
    """Tokens of each sequence in the cache when memory is spent, or from ``most`` on; 0 if not even a prompt fits."""
    held = 0
    try:
        words = random_words(RANDOM_WORDS, device)
        cache = cache_class(config=model.config)
        token = random_prompt(model, batch, PROMPT, device)
        while most is None or held < most:
            output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            held = cache.get_seq_length()
            fill(cache, max(STEP, held // SHARE) - 1, words)
    except torch.OutOfMemoryError:
        pass
    return held


def longest_under(cap: int, model: Any, batch: int, device: str, **options: Any) -> int | None:
    """Tokens of all sequences on a card of ``cap`` bytes; None where the weights leave less than ROOM."""
    forget(device)
    if device != "cuda":
        return batch * longest(model, batch, device, PROMPT + 2 * STEP, **options)
    if cap - torch.cuda.memory_allocated() < ROOM:
        return None
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    try:
        return batch * longest(model, batch, device, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        forget(device)


def measured_peak(model: Any, context: int, device: str) -> int | None:
    """Bytes, while a sequence of ``context`` tokens is generated."""
    prompt = random_prompt(model, 1, context - GENERATED, device)
    forget(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GENERATED, do_sample=False)
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def peak_row(name: str, model: Any, memory: ModelMemory, context: int, device: str) -> dict[str, Any]:
    """Of table "peak"."""
    first = measured_peak(model, context, device)
    samebits.prepare(model, [1, context - GENERATED])
    peak = measured_peak(model, context, device)
    return {
        "table": "peak", "model": name, "context": context, "first_bytes": first, "measured_bytes": peak,
    } | predicted_peak(memory, context, peak)  # fmt: skip


def predicted_peak(memory: ModelMemory, context: int, measured: int | None) -> dict[str, Any]:
    """What ``samebits estimate`` says of it."""
    case = context, 1, context - GENERATED
    peak = memory.peak(*case)
    return {
        "predicted_bytes": peak, "off": None if measured is None else significant(peak / measured - 1),
        "weights_bytes": memory.resident, "cache_bytes": memory.cache(context, 1),
        "beside_bytes": peak - memory.resident - memory.cache(context, 1),
        "needed_bytes": memory.needed(*case), "bf16_predicted_bytes": memory.plain_peak(*case),
    }  # fmt: skip


@torch.no_grad()
def filled(model: Any, cache: DynamicCache, context: int, device: str) -> DynamicCache:
    """With a prompt, and random tokens behind it until STEPS more make ``context``."""
    model(input_ids=random_prompt(model, 1, PROMPT, device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    per_token = max(layer.keys[:, :, 0].numel() for layer in cache.layers)
    tokens = context - PROMPT - STEPS
    torch.manual_seed(0)
    fill(cache, tokens, random_words(tokens * per_token, device))
    return cache


@torch.no_grad()
def step(model: Any, cache: DynamicCache, number: int, device: str) -> torch.Tensor:
    """Logits of another token."""
    token = torch.full((1, 1), number + 1, device=device)
    output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
    wait(device)
    logits: torch.Tensor = output.logits.view(torch.int16)
    return logits


def cache_row(name: str, model: Any, context: int, device: str) -> dict[str, Any]:
    """Of table "cache"."""
    forget(device)
    plain = filled(model, DynamicCache(config=model.config), context, device)
    packed = filled(model, samebits.PackedCache(config=model.config), context, device)
    seconds: tuple[list[float], list[float]] = [], []
    same = True
    for number in range(STEPS):
        logits = []
        for cache, taken in zip((plain, packed), seconds, strict=True):
            start = time.perf_counter()
            logits.append(step(model, cache, number, device))
            taken.append(time.perf_counter() - start)
        same = same and torch.equal(*logits)
    plain_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    row = {
        "table": "cache", "model": name, "batch": 1, "context": context, "dynamic_cache_bytes": plain_bytes,
        "packed_cache_bytes": packed.nbytes, "ratio": significant(packed.nbytes / plain_bytes), "same_logits": same,
    }  # fmt: skip
    for key, cache, taken in zip(("dynamic_cache", "packed_cache"), (plain, packed), seconds, strict=True):
        kernels = kernels_of(partial(step, model, cache, STEPS, device), device)
        row |= Timing.of([1e3 * each for each in taken]).columns(f"{key}_milliseconds")
        row[f"{key}_kernel_milliseconds"] = significant(sum(by_kind(kernels).values())) if kernels else None
    return row


@repeatable_attention()
def longest_of(name: str, device: str, allocator: str, packed: bool) -> tuple[int | None, ...]:
    """Tokens of all sequences in transformers' cache, and in a packed one where the model is."""
    if device == "cuda" and ALLOCATORS[allocator]:
        torch._C._accelerator_setAllocatorSettings(ALLOCATORS[allocator])
    cap, batch, _ = CASES[name]
    model, caches = build(name, device, packed, tight=True), [DynamicCache]
    if packed:
        samebits.prepare(model, sorted({batch, batch * PROMPT}))
        caches.append(samebits.PackedCache)
    return tuple(longest_under(cap, model, batch, device, cache_class=each) for each in caches)


def longest_row(name: str, memory: ModelMemory, device: str, allocator: str) -> dict[str, Any]:
    """Of table "longest". Each form has a process of its own: what one leaves allocated would count in the other."""
    cap, batch, paper = CASES[name]
    run = runner(device)
    ours, packed = run(longest_of, name, device, allocator, packed=True)()
    plain, plain_bytes = None, memory.weights.plain + memory.buffers
    if plain_bytes + ROOM <= cap:
        [plain] = run(longest_of, name, device, allocator, packed=False)()
    ratio, packed_ratio = (significant(most / plain) if most and plain else None for most in (ours, packed))
    return {
        "table": "longest", "model": name, "cap_bytes": cap, "batch": batch, "allocator": allocator,
        "bf16_room_bytes": cap - plain_bytes, "bf16_tokens": plain,
        "samebits_tokens": ours, "ratio": ratio, "packed_cache_tokens": packed, "packed_cache_ratio": packed_ratio,
        "paper_ratio": paper,
    } | predicted_tokens(memory, cap, batch)  # fmt: skip


def rows(name: str, tables: Collection[str], context: int, device: str, allocator: str) -> Iterator[dict[str, Any]]:
    """Those of a model; one model at a time is in memory."""
    memory, cached = predicted(name), CACHED.get(name, ()) if "cache" in tables else ()
    if cached or "peak" in tables:
        model = build(name, device, packed=True, tight=True)
        if "peak" in tables:
            yield peak_row(name, model, memory, context, device)
        for tokens in cached:
            yield cache_row(name, model, tokens, device)
        del model
        forget(device)
    if name in CASES and "longest" in tables:
        yield longest_row(name, memory, device, allocator)


def predicted_tokens(memory: ModelMemory, cap: int, batch: int) -> dict[str, Any]:
    """What ``samebits estimate`` says would fit."""
    ours = fitting(lambda context: memory.needed(context, batch, PROMPT), cap)
    plain = fitting(lambda context: memory.plain_peak(context, batch, PROMPT), cap)
    return {"predicted_tokens": batch * max(0, ours or 0), "bf16_predicted_tokens": batch * max(0, plain or 0)}


@repeatable_attention()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="longest")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(DEFAULT_MODELS), help=", ".join(MODELS)
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--allocator", choices=tuple(ALLOCATORS), default="default", help="for the table longest")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=CONTEXT, help="of the table peak")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    for name in options.models:
        for row in rows(name, options.tables, options.context, options.device, options.allocator):
            print(row, flush=True)
            print(add_results(options.name, device, [row], KEYS, (*PACKAGES, "transformers")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
