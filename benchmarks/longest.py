"""How much a model remembers before memory runs out, BF16 beside compressed; and what it takes at its peak.

    python benchmarks/longest.py                                     on a GPU, to results/longest.json
    python benchmarks/longest.py --models "Mistral Nemo 12B"
    python benchmarks/longest.py --models tiny --device cpu --name trial                no cap there, a few steps

Table "longest": tokens in the key-value cache, of all sequences together, when the memory of a smaller card is spent.
The card is emulated in memory alone, by torch.cuda.set_per_process_memory_fraction: it counts what torch takes,
weights included, and not the driver's own few hundred MB.

How they are counted: a prompt of PROMPT tokens is read. Then entries are put into the cache by its own ``update``,
random keys and values for STEP tokens or a 32nd of those it has, and the model generates the next token; again and
again until torch is out of memory. So the tokens in between take in the cache what they would take in any run, in the
same way (it grows by concatenation, whose copy counts), and the others are real decoding steps with all that these
need. The result is what the cache held after the last step that succeeded: up to 3 % less than possible. Reading so
long a prompt at once would take more, for its activations. Positions beyond those that a model was trained for count
like others; several sequences (``batch``) keep below them.

BF16 counts only where at least ROOM bytes are left beside its weights; else it does not fit, and there is no ratio.
``predicted_tokens`` are those of ``samebits estimate --context 1 --batch N --gpu M`` for a folder with the
config.json.

Table "peak": torch's max_memory_allocated while one sequence of CONTEXT tokens is generated, its prompt included,
beside the peak that ``samebits estimate --context CONTEXT`` predicts of config.json alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

import samebits
from common import PACKAGES, add_results, cpu_name, significant
from models import MODELS, build, config_of, forget, random_prompt
from samebits.integrations.model_memory import ModelMemory, model_memory
from samebits.nn.convert import Selection
from samebits.verify import repeatable_attention

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
STEP = 64  # tokens, at least
SHARE = 32  # of the tokens in the cache
CONTEXT = 4096  # tokens
GENERATED = 16  # of them
KEYS = ("model", "cap_bytes", "batch", "context")


def predicted(name: str) -> ModelMemory:
    """What ``samebits estimate`` knows of a model from its config alone."""
    with TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        return model_memory(Path(folder), Selection(), None)


@torch.no_grad()
def longest(model: Any, batch: int, device: str, most: int | None = None) -> int:
    """Tokens of each sequence in the cache when memory is spent, or from ``most`` on; 0 if not even a prompt fits."""
    held = 0
    try:
        cache = DynamicCache(config=model.config)
        token = random_prompt(model, batch, PROMPT, device)
        while most is None or held < most:
            output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            held = cache.get_seq_length()
            more = max(STEP, held // SHARE) - 1
            for number, layer in enumerate(cache.layers):
                shape = (*layer.keys.shape[:2], more, layer.keys.shape[3])
                entries = torch.randn(shape, dtype=layer.keys.dtype, device=device)
                cache.update(entries, entries, number)
    except torch.OutOfMemoryError:
        pass
    return held


def longest_under(cap: int, model: Any, batch: int, device: str) -> int | None:
    """Tokens of all sequences on a card of ``cap`` bytes; None where the weights leave less than ROOM."""
    forget(device)
    if device != "cuda":
        return batch * longest(model, batch, device, PROMPT + 2 * STEP)
    if cap - torch.cuda.memory_allocated() < ROOM:
        return None
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    try:
        return batch * longest(model, batch, device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        forget(device)


def measured_peak(model: Any, context: int, device: str) -> int | None:
    """Bytes, while a sequence of ``context`` tokens is generated; what is only needed once is done before."""
    prompt = random_prompt(model, 1, context - GENERATED, device)
    for tokens in (2, GENERATED):
        forget(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        inputs = prompt if tokens == GENERATED else prompt[:, :PROMPT]
        model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False)
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def rows(name: str, context: int, device: str) -> Iterator[dict[str, Any]]:
    """Both tables of a model; one model at a time is in memory."""
    memory = predicted(name)
    cap, batch, paper = CASES.get(name, (0, 1, None))
    model = build(name, device, packed=True, tight=True)
    samebits.prepare(model, sorted({1, batch, PROMPT, batch * PROMPT}))
    peak = measured_peak(model, context, device)
    yield {
        "table": "peak", "model": name, "context": context, "predicted_bytes": memory.peak(context, 1),
        "measured_bytes": peak, "off": None if peak is None else significant(memory.peak(context, 1) / peak - 1),
        "weights_bytes": memory.resident, "cache_bytes": memory.cache(context, 1), "layer_bytes": memory.decoded,
        "bf16_predicted_bytes": memory.plain_peak(context, 1),
    }  # fmt: skip
    if not cap:
        return
    ours = longest_under(cap, model, batch, device)
    del model
    forget(device)
    plain = None
    if memory.plain_peak(0, 0) + ROOM <= cap:
        plain = longest_under(cap, model := build(name, device, packed=False, tight=True), batch, device)
        del model
        forget(device)
    limits = memory.longest(cap - memory.peak(0, 0), batch), memory.longest(cap - memory.plain_peak(0, 0), batch)
    yield {
        "table": "longest", "model": name, "cap_bytes": cap, "batch": batch,
        "bf16_room_bytes": cap - memory.plain_peak(0, 0), "bf16_tokens": plain,
        "samebits_tokens": ours, "ratio": significant(ours / plain) if ours and plain else None, "paper_ratio": paper,
        "predicted_tokens": batch * max(0, limits[0] or 0), "bf16_predicted_tokens": batch * max(0, limits[1] or 0),
    }  # fmt: skip


@repeatable_attention()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="longest")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(DEFAULT_MODELS), help=", ".join(MODELS)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=CONTEXT, help="of the table peak")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    for name in options.models:
        found = []
        for row in rows(name, options.context, options.device):
            print(row, flush=True)
            found.append(row)
        print(add_results(options.name, device, found, KEYS, (*PACKAGES, "transformers")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
