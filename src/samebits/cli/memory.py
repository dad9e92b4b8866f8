"""samebits estimate --context: what a model takes while it generates, and what fits."""

from __future__ import annotations

from pathlib import Path

from samebits.cli.commands import open_source
from samebits.cli.console import print_json, print_lines, print_table, progress_bar
from samebits.df11.checkpoint import Df11Checkpoint
from samebits.format.folder import CONFIG, INDEX_SUFFIX
from samebits.format.safetensors_file import SUFFIX
from samebits.integrations.model_memory import BITS_PER_WEIGHT, ModelMemory, Weights, model_memory
from samebits.jobs import estimate as estimates
from samebits.jobs.options import CompressOptions
from samebits.nn.convert import Selection
from samebits.sizes import parse_size, size


def estimate_memory(
    source: str, options: CompressOptions, context: int, batch: int, gpu: str | None, exact: bool, as_json: bool
) -> None:
    limit = None if gpu is None else parse_size(gpu)
    path = Path(source)
    bare = (path / CONFIG).is_file() and not any(path.glob(f"*{SUFFIX}")) and not any(path.glob(f"*{INDEX_SUFFIX}"))
    folder, weights = (path, None) if bare else _weights(source, options, exact)
    selection = Selection(options.min_weights, options.include, options.exclude)
    memory = model_memory(folder, selection, weights)
    if as_json:
        print_json({"path": folder, "context": context, "batch": batch, **_figures(memory, context, batch, limit)})
        return
    _print(memory, f"{folder}: {context:,} tokens, batch {batch}", context, batch)
    if bare:
        print_lines(f"there are no weights to encode: {BITS_PER_WEIGHT} bits a packed weight are supposed")
    if limit is not None:
        _print_fit(memory, str(gpu), limit, context, batch)


def _weights(source: str, options: CompressOptions, exact: bool) -> tuple[Path, Weights]:
    checkpoint = open_source(source)
    if checkpoint.is_packed and not isinstance(checkpoint, Df11Checkpoint):  # which is packed anew when it is loaded
        return checkpoint.path, Weights.stored(checkpoint)
    with progress_bar("estimate") as progress:
        return checkpoint.path, Weights.estimated(
            estimates.estimate(checkpoint, options, exact=exact, progress=progress)
        )


def _figures(memory: ModelMemory, context: int, batch: int, limit: int | None) -> dict[str, object]:
    figures: dict[str, object] = {
        "packed_bytes": memory.weights.packed,
        "table_bytes": memory.tables,
        "other_bytes": memory.weights.other + memory.buffers,
        "cache_bytes": memory.cache(context, batch),
        "decoded_layer_bytes": memory.decoded,
        "peak_bytes": memory.peak(context, batch),
        "packed_cache_bytes": memory.packed_cache(context, batch),
        "packed_cache_peak_bytes": memory.packed_cache_peak(context, batch),
        "bf16_peak_bytes": memory.plain_peak(context, batch),
    }
    if limit is None:
        return figures
    room, plain_room = _rooms(memory, limit)
    return figures | {
        "gpu_bytes": limit,
        "fits": memory.peak(context, batch) <= limit,
        "bf16_fits": memory.plain_peak(context, batch) <= limit,
        "longest_context": memory.longest(room, batch),
        "packed_cache_longest_context": memory.longest(room, batch, packed_cache=True),
        "bf16_longest_context": memory.longest(plain_room, batch),
    }


def _rooms(memory: ModelMemory, limit: int) -> tuple[int, int]:
    """What is left for the cache, packed and in BF16."""
    return limit - memory.peak(0, 0), limit - memory.plain_peak(0, 0)


def _print(memory: ModelMemory, title: str, context: int, batch: int) -> None:
    weights, cache = memory.weights.packed + memory.weights.other + memory.buffers, memory.cache(context, batch)
    plain = memory.weights.plain + memory.buffers
    rows = [
        ("weights", weights, weights, plain),
        ("their decode tables", memory.tables, memory.tables, 0),
        ("key-value cache", cache, memory.packed_cache(context, batch), cache),
        ("one decoded layer at most", memory.decoded, memory.decoded, 0),
        ("peak", *_peaks(memory, context, batch)),
    ]
    head = ("without activations and the GPU's own", "samebits", "with PackedCache", "BF16")
    print_table(title, head, [(name, *map(size, sizes)) for name, *sizes in rows])


def _peaks(memory: ModelMemory, context: int, batch: int) -> tuple[int, int, int]:
    peak = memory.peak(context, batch)
    return peak, memory.packed_cache_peak(context, batch), memory.plain_peak(context, batch)


def _print_fit(memory: ModelMemory, gpu: str, limit: int, context: int, batch: int) -> None:
    room, plain_room = _rooms(memory, limit)
    longest = memory.longest(room, batch), memory.longest(room, batch, True), memory.longest(plain_room, batch)
    names = "samebits", "samebits with PackedCache", "BF16"
    for name, peak, tokens in zip(names, _peaks(memory, context, batch), longest, strict=True):
        fits = f"fits into {gpu}, {size(limit - peak)} to spare" if peak <= limit else f"does not fit into {gpu}"
        print_lines(f"{name} {fits}; {_longest(tokens)}")


def _longest(tokens: int | None) -> str:
    if tokens is None:
        return "its cache does not grow beyond that"
    return "its weights alone are too large" if tokens < 0 else f"{tokens:,} tokens would"
