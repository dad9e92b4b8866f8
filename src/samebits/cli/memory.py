"""samebits estimate --context: what a model takes while it generates, and what fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.cli.commands import note_patterns, open_source
from samebits.cli.console import note, print_json, print_lines, print_table, progress_bar
from samebits.cli.generate import import_transformers, running
from samebits.df11.checkpoint import Df11Checkpoint
from samebits.format.folder import CONFIG, INDEX_SUFFIX
from samebits.format.safetensors_file import SUFFIX
from samebits.integrations.model_memory import BITS_PER_WEIGHT, MOST_TOKENS, ModelMemory, Weights, longest, model_memory
from samebits.jobs import estimate as estimates
from samebits.jobs.hub import CONFIGS, find_on_hub, resolve_source
from samebits.jobs.options import CompressOptions
from samebits.nn.selection import Selection
from samebits.sizes import parse_size, size


@dataclass(frozen=True)
class Case:
    """What is generated.

    Attributes:
        context: tokens of each sequence.
        prompt: those that the first forward pass reads; None: all.
    """

    context: int
    batch: int
    prompt: int | None


def estimate_memory(
    source: str, options: CompressOptions, case: Case, gpu: str | None, exact: bool, as_json: bool
) -> None:
    limit = None if gpu is None else parse_size(gpu)
    import_transformers()
    folder, weights = _folder_and_weights(source, options, exact)
    selection = Selection(options.min_weights, options.include, options.exclude)
    with running(str(folder / CONFIG), mend="fetch it again"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and transformers, which have no values here
        memory = model_memory(folder, selection, weights)
        figures = _figures(memory, case, limit)  # follows every forward pass that is told of
    if memory.positions and memory.positions < case.context:
        note(f"note: {case.context:,} tokens, but the model's configuration has {memory.positions:,} positions")
    if as_json:
        print_json({"path": Path(source), **vars(case), "positions": memory.positions, **figures})
        return
    _print(figures, f"{Path(source)}: {case.context:,} tokens, batch {case.batch}")
    if weights is None:
        print_lines(f"no weights were encoded: {BITS_PER_WEIGHT} bits a packed weight are supposed")
    if memory.forward is None:
        print_lines("its forward pass needs weights to be followed: no activations are counted, and one decoded layer")
    if limit is not None:
        _print_fit(memory, str(gpu), limit, case)


def _folder_and_weights(source: str, options: CompressOptions, exact: bool) -> tuple[Path, Weights | None]:
    """Where config.json is, and what is known of its weights: nothing where there are none, or on the hub."""
    path = Path(source)
    if find_on_hub(source) is not None and not exact:
        return resolve_source(source, only=CONFIGS), None
    if (path / CONFIG).is_file() and not any(path.glob(f"*{SUFFIX}")) and not any(path.glob(f"*{INDEX_SUFFIX}")):
        return path, None
    return _weights(source, options, exact)


def _weights(source: str, options: CompressOptions, exact: bool) -> tuple[Path, Weights]:
    checkpoint = open_source(source)
    if checkpoint.is_packed and not isinstance(checkpoint, Df11Checkpoint):  # which is packed anew when it is loaded
        return checkpoint.path, Weights.stored(checkpoint)
    note_patterns(source, checkpoint, options)
    with progress_bar("estimate") as progress:
        return checkpoint.path, Weights.estimated(
            estimates.estimate(checkpoint, options, exact=exact, progress=progress)
        )


def _figures(memory: ModelMemory, case: Case, limit: int | None) -> dict[str, Any]:
    context, batch, prompt = case.context, case.batch, case.prompt
    cache, packed_cache = memory.cache(context, batch), memory.packed_cache(context, batch)
    peak, packed_cache_peak = memory.peak(context, batch, prompt), memory.packed_cache_peak(context, batch, prompt)
    plain, plain_peak = memory.weights.plain + memory.buffers, memory.plain_peak(context, batch, prompt)
    figures = {
        "packed_bytes": memory.weights.packed,
        "table_bytes": memory.tables,
        "other_bytes": memory.weights.other + memory.buffers,
        "cache_bytes": cache,
        "activation_bytes": peak - memory.resident - cache,
        "decoded_layer_bytes": memory.decoded,
        "peak_bytes": peak,
        "needed_bytes": memory.needed(context, batch, prompt),
        "packed_cache_bytes": packed_cache,
        "packed_cache_activation_bytes": packed_cache_peak - memory.resident - packed_cache,
        "packed_cache_peak_bytes": packed_cache_peak,
        "packed_cache_needed_bytes": memory.needed(context, batch, prompt, packed_cache=True),
        "bf16_weight_bytes": plain,
        "bf16_activation_bytes": plain_peak - plain - cache,
        "bf16_peak_bytes": plain_peak,
        "has_activations": memory.forward is not None,
    }
    if limit is None:
        return figures
    ours, with_packed_cache, in_bf16 = (longest(needed, limit) for needed in _needed(memory, case).values())
    return figures | {
        "gpu_bytes": limit,
        "fits": figures["needed_bytes"] <= limit,
        "bf16_fits": plain_peak <= limit,
        "longest_context": ours,
        "packed_cache_longest_context": with_packed_cache,
        "bf16_longest_context": in_bf16,
    }


def _needed(memory: ModelMemory, case: Case) -> dict[str, Callable[[int], int]]:
    """Bytes that a card must have for a number of tokens."""
    batch, prompt = case.batch, case.prompt
    return {
        "samebits": lambda context: memory.needed(context, batch, prompt),
        "samebits with PackedCache": lambda context: memory.needed(context, batch, prompt, packed_cache=True),
        "BF16": lambda context: memory.plain_peak(context, batch, prompt),
    }


def _print(figures: Mapping[str, Any], title: str) -> None:
    weights, tables = figures["packed_bytes"] + figures["other_bytes"], figures["table_bytes"]
    rows: list[tuple[str, int, int, int]] = [
        ("weights", weights, weights, figures["bf16_weight_bytes"]),
        ("their decode tables", tables, tables, 0),
        ("key-value cache", figures["cache_bytes"], figures["packed_cache_bytes"], figures["cache_bytes"]),
        ("activations and decoded weights", *_of_each(figures, "activation")),
        ("peak", *_of_each(figures, "peak")),
        ("peak where products have no plans", figures["needed_bytes"], figures["packed_cache_needed_bytes"],
         figures["bf16_peak_bytes"]),
    ]  # fmt: skip
    head = ("without CUDA's own", "samebits", "with PackedCache", "BF16")
    print_table(title, head, [(name, *map(size, sizes)) for name, *sizes in rows])


def _of_each(figures: Mapping[str, Any], part: str) -> tuple[int, int, int]:
    return figures[f"{part}_bytes"], figures[f"packed_cache_{part}_bytes"], figures[f"bf16_{part}_bytes"]


def _print_fit(memory: ModelMemory, gpu: str, limit: int, case: Case) -> None:
    for name, needed in _needed(memory, case).items():
        spare = limit - needed(case.context)
        fits = f"fits into {gpu}, {size(spare)} to spare" if spare >= 0 else f"does not fit into {gpu}"
        print_lines(f"{name} {fits}; {_longest(longest(needed, limit))}")


def _longest(tokens: int | None) -> str:
    if tokens is None:
        return f"more than {MOST_TOKENS:,} tokens would fit"
    return "its weights alone are too large" if tokens < 0 else f"up to {tokens:,} token{'s' * (tokens != 1)} would fit"
