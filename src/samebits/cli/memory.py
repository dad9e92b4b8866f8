"""samebits estimate --context: what a model takes while it generates, and what fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samebits.cli.commands import note_patterns, open_source
from samebits.cli.console import print_json, print_lines, print_table, progress_bar
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
    if as_json:
        print_json({"path": Path(source), **vars(case), **figures})
        return
    _print(memory, f"{Path(source)}: {case.context:,} tokens, batch {case.batch}", case)
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


def _figures(memory: ModelMemory, case: Case, limit: int | None) -> dict[str, object]:
    context, batch, prompt = case.context, case.batch, case.prompt
    figures: dict[str, object] = {
        "packed_bytes": memory.weights.packed,
        "table_bytes": memory.tables,
        "other_bytes": memory.weights.other + memory.buffers,
        "cache_bytes": memory.cache(context, batch),
        "decoded_layer_bytes": memory.decoded,
        "peak_bytes": memory.peak(context, batch, prompt),
        "needed_bytes": memory.needed(context, batch, prompt),
        "packed_cache_bytes": memory.packed_cache(context, batch),
        "packed_cache_peak_bytes": memory.packed_cache_peak(context, batch, prompt),
        "bf16_peak_bytes": memory.plain_peak(context, batch, prompt),
        "has_activations": memory.forward is not None,
    }
    if limit is None:
        return figures
    ours, packed_cache, plain = (longest(needed, limit) for needed in _needed(memory, case).values())
    return figures | {
        "gpu_bytes": limit,
        "fits": memory.needed(context, batch, prompt) <= limit,
        "bf16_fits": memory.plain_peak(context, batch, prompt) <= limit,
        "longest_context": ours,
        "packed_cache_longest_context": packed_cache,
        "bf16_longest_context": plain,
    }


def _needed(memory: ModelMemory, case: Case) -> dict[str, Callable[[int], int]]:
    """Bytes that a card must have for a number of tokens."""
    batch, prompt = case.batch, case.prompt
    return {
        "samebits": lambda context: memory.needed(context, batch, prompt),
        "samebits with PackedCache": lambda context: memory.needed(context, batch, prompt, packed_cache=True),
        "BF16": lambda context: memory.plain_peak(context, batch, prompt),
    }


def _print(memory: ModelMemory, title: str, case: Case) -> None:
    context, batch, prompt = case.context, case.batch, case.prompt
    weights, cache = memory.weights.packed + memory.weights.other + memory.buffers, memory.cache(context, batch)
    plain, packed_cache = memory.weights.plain + memory.buffers, memory.packed_cache(context, batch)
    peak, packed_cache_peak = memory.peak(context, batch, prompt), memory.packed_cache_peak(context, batch, prompt)
    plain_peak = memory.plain_peak(context, batch, prompt)
    needed, packed_cache_needed = (memory.needed(context, batch, prompt, packed_cache=kept) for kept in (False, True))
    beside = peak - memory.resident - cache, packed_cache_peak - memory.resident - packed_cache
    rows: list[tuple[str, float, float, float]] = [
        ("weights", weights, weights, plain),
        ("their decode tables", memory.tables, memory.tables, 0),
        ("key-value cache", cache, packed_cache, cache),
        ("activations and decoded weights", *beside, plain_peak - plain - cache),
        ("peak", peak, packed_cache_peak, plain_peak),
        ("peak where products have no plans", needed, packed_cache_needed, plain_peak),
    ]
    head = ("without CUDA's own", "samebits", "with PackedCache", "BF16")
    print_table(title, head, [(name, *map(size, sizes)) for name, *sizes in rows])


def _print_fit(memory: ModelMemory, gpu: str, limit: int, case: Case) -> None:
    for name, needed in _needed(memory, case).items():
        spare = limit - needed(case.context)
        fits = f"fits into {gpu}, {size(spare)} to spare" if spare >= 0 else f"does not fit into {gpu}"
        print_lines(f"{name} {fits}; {_longest(longest(needed, limit))}")


def _longest(tokens: int | None) -> str:
    if tokens is None:
        return f"more than {MOST_TOKENS:,} tokens would fit"
    return "its weights alone are too large" if tokens < 0 else f"up to {tokens:,} token{'s' * (tokens != 1)} would fit"
