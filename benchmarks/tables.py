"""Put the tables made from results/ between a page's markers ``<!-- table: name.table -->`` and ``<!-- end -->``.

python benchmarks/tables.py            rewrite the tables of README.md and of pages in docs
python benchmarks/tables.py --check    exit code 1 if a page says something else than the results

Between ``<!-- plot: name -->`` and ``<!-- end -->`` comes docs/name.svg, which plots.py draws. What has not been
measured leaves nothing between its markers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import read_results
from glance import glance

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("families", "h100", "language-models", "offload", "parallel", "plans", "vllm")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in DOCUMENTS))
LIKE = {  # results of another card, whose tables are the same
    "h100": "h200",
    **{f"{name}-h100": name for name in ("linear", "generate", "diffusion", "training", "df11")},
}
SCRIPTS = {"h200": "gpu", "memory": "memory_compress", "profile": "token_profile"}  # of results named otherwise
MARKED = re.compile(r"(<!-- table: (\S+)\.(\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PLOT = re.compile(r"(<!-- plot: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]
Cell = str | Callable[[Row], str]  # a key, or what to make of the row


def megabytes(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / 1e6:,.1f} MB"


def gigabytes(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key] / 1e9:.2f} GB"


def decimals(key: str, count: int) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:,.{count}f}"


def speed_at(tokens: int) -> Callable[[Row], str]:
    """Of a row that not all numbers of tokens have."""
    key = f"speed_at_{tokens}"
    return lambda row: f"{row[key]:.2f}" if key in row else ""


def with_spread(key: str, count: int) -> Callable[[Row], str]:
    """The median, and from slowest to fastest."""
    keys = (key, f"{key}_slowest", f"{key}_fastest")
    return lambda row: "{} ({} to {})".format(*(f"{row[each]:,.{count}f}" for each in keys))


def speed_in_turns(row: Row) -> str:
    """The median turn's, and the slowest and fastest; without these where the forms ran one after the other."""
    return (with_spread if "speed_slowest" in row else decimals)("speed", 2)(row)


def quotient(key: str, other: str) -> Callable[[Row], str]:
    """Of two columns; nothing where one says nothing."""
    return lambda row: "" if row[key] is None or row[other] is None else f"{row[key] / row[other]:.2f}"


def gibibytes(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key] / (1 << 30):,.2f} GiB"


def tokens_that_fit(row: Row) -> str:
    return "does not fit" if row["bf16_tokens"] is None else f"{row['bf16_tokens']:,}"


def that_fits(form: str, column: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: "does not fit" if row[f"{form}_cache_tokens"] is None else column(row)


def milliseconds(key: str) -> Callable[[Row], str]:
    """Of a time in seconds: the median, and from slowest to fastest."""
    keys = (f"{key}_seconds", f"{key}_seconds_slowest", f"{key}_seconds_fastest")
    return lambda row: "{:,.0f} ({:,.0f} to {:,.0f})".format(*(1e3 * row[key] for key in keys))


def yes(key: str) -> Callable[[Row], str]:
    return lambda row: "yes" if row[key] else "no"


def percent(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{100 * row[key]:.1f} %"


def peer_rate(row: Row) -> str:
    """What a decoder reached, why it reached nothing, or the roof, which has no spread."""
    if row["note"]:
        return str(row["note"])
    key = "decode_tb_per_s"
    return (with_spread if f"{key}_slowest" in row else decimals)(key, 2)(row)


def verdict(key: str) -> Callable[[Row], str]:
    return lambda row: {None: "", True: "same", False: "**no**"}[row[key]]


def experts_columns(*numbers: int) -> dict[str, Cell]:
    """By number of tokens."""
    return {
        "a layer of": "model",
        **{f"{tokens} token{'s' * (tokens > 1)}": speed_at(tokens) for tokens in numbers},
        "decoded first": lambda row: "{:.2f} to {:.2f}".format(row["decoded"][0], row["decoded"][-1]),
        "bytes": verdict("same"),
    }


def together(row: Row) -> str:
    """Of products of one input, where one launch makes them all."""
    return with_spread("together_microseconds", 1)(row) if row["launches"] else "one by one"


def same_tokens(row: Row) -> str:
    """A comparison with BF16 says nothing where BF16 does not repeat itself."""
    return "BF16 differs from itself" if row.get("bf16_repeats") is False else verdict("same_tokens")(row)


SPEED = "times BF16's speed, "  # behind it: of how many tokens
FEW_COLUMNS: dict[str, Cell] = {
    "matrix": "matrix",
    "used as": "used_as",
    "BF16, µs": decimals("bf16_microseconds_at_1", 1),
    "samebits, µs": decimals("samebits_microseconds_at_1", 1),
    "decode, then BF16, µs": decimals("decoded_first_microseconds_at_1", 1),
    **{f"{SPEED}{tokens} token{'s' * (tokens > 1)}": decimals(f"speed_at_{tokens}", 2) for tokens in (1, 2, 4, 8, 16)},
}
OFFLOAD_COLUMNS: dict[str, Cell] = {
    "model": "model",
    "cap": lambda row: f"{row['cap_bytes'] / 2**30:.0f} GiB, {row['card']}",
    "batch": "batch",
    "accelerate, tokens/s": decimals("accelerate_tokens_per_s", 2),
    "BF16 streamed, tokens/s": decimals("bf16_streamed_tokens_per_s", 2),
    "samebits, tokens/s": decimals("samebits_tokens_per_s", 2),
    "times accelerate's speed": decimals("samebits_speed", 2),
    "times BF16's, streamed": quotient("samebits_tokens_per_s", "bf16_streamed_tokens_per_s"),
    "tokens": verdict("samebits_same_tokens"),
    "accelerate, offloaded": gigabytes("accelerate_offloaded_bytes"),
}
SIZE_COLUMNS: dict[str, Cell] = {
    "weights": decimals("weights", 0),
    "BF16": megabytes("bf16_bytes"),
    "samebits": megabytes("packed_bytes"),
    "of BF16": percent("ratio"),
    "limit, bits": decimals("limit_bits_per_weight", 3),
    "samebits, bits": decimals("bits_per_weight", 3),
    "DFloat11, bits": decimals("dfloat11_bits_per_weight", 3),
}
GENERATE_COLUMNS: dict[str, Cell] = {
    "model": "model",
    "batch": "batch",
    "prompt": "prompt",
    "BF16, tokens/s": decimals("bf16_tokens_per_s", 1),
    "samebits, tokens/s": decimals("samebits_tokens_per_s", 1),
    "times BF16's speed": decimals("speed", 2),
    "BF16, first token, s": decimals("bf16_first_token_seconds", 3),
    "samebits, first token, s": decimals("samebits_first_token_seconds", 3),
    "BF16, peak": gigabytes("bf16_peak_bytes"),
    "samebits, peak": gigabytes("samebits_peak_bytes"),
    "tokens": same_tokens,
}
IN_TURNS: dict[str, Cell] = {  # the host decides, so the spread counts
    "BF16, tokens/s": with_spread("bf16_tokens_per_s", 0),
    "samebits, tokens/s": with_spread("samebits_tokens_per_s", 0),
    "times BF16's speed": speed_in_turns,
}
STEP_COLUMNS: dict[str, Cell] = {
    "BF16, ms": milliseconds("bf16"),
    "samebits, ms": milliseconds("samebits"),
    "more time": percent("more_time"),
    "BF16, peak": gigabytes("bf16_peak_bytes"),
    "samebits, peak": gigabytes("samebits_peak_bytes"),
    "less memory": percent("less_memory"),
}
COLUMNS: dict[str, dict[str, Cell]] = {
    "sizes.models": {"model": "name"} | SIZE_COLUMNS,
    "sizes.minilm": {"part": "name"} | SIZE_COLUMNS,
    "sizes.king-james": {"part": "name"} | SIZE_COLUMNS,
    "sizes.cache": {
        "states": "name",
        "words": decimals("weights", 0),
        "BF16": megabytes("bf16_bytes"),
        "packed": megabytes("packed_bytes"),
        "of BF16": percent("ratio"),
        "limit, bits": decimals("limit_bits_per_weight", 3),
        "packed, bits": decimals("bits_per_weight", 3),
    },
    "h200.codec": {
        "matrix": "matrix",
        "bits a weight": decimals("bits_per_weight", 2),
        "decode, TB/s of BF16": with_spread("decode_tb_per_s", 2),
        "roof, TB/s": decimals("roof_tb_per_s", 2),
        "of roof": percent("of_roof"),
        "encode, G weights/s": with_spread("encode_gweights_per_s", 1),
    },
    "h200.together": {
        "layer": "layer",
        "matrices": decimals("matrices", 0),
        "weights": decimals("weights", 0),
        "one by one, µs": with_spread("one_by_one_microseconds", 1),
        "one launch, µs": with_spread("together_microseconds", 1),
        "one launch, TB/s of BF16": decimals("together_tb_per_s", 2),
        "of roof": percent("of_roof"),
    },
    "linear.few": FEW_COLUMNS,
    "linear.more": FEW_COLUMNS,
    "linear.many": {"matrix": "matrix"}
    | {
        f"{SPEED * (tokens == 32)}{tokens:,} tokens": speed_at(tokens)
        for tokens in (32, 64, 128, 256, 512, 1024, 2048, 4096)
    },
    "linear.prefill": {
        "tokens": "tokens",
        "launches for several products": decimals("launches_of_several", 0),
        "BF16, µs": with_spread("bf16_microseconds", 0),
        "samebits, µs": with_spread("samebits_microseconds", 0),
        "more time than BF16": percent("overhead"),
    },
    "linear.together": {
        "model": "model",
        "layers": "layers",
        "tokens": "tokens",
        "BF16, µs": with_spread("bf16_microseconds", 1),
        "samebits one by one, µs": with_spread("one_by_one_microseconds", 1),
        "samebits together, µs": together,
        "times BF16's speed": quotient("bf16_microseconds", "together_microseconds"),
    },
    "peers.decode": {
        "matrix": "matrix",
        "decoder": "decoder",
        "bits a weight": decimals("bits_per_weight", 2),
        "decode, TB/s of BF16": peer_rate,
        "of roof": percent("of_roof"),
        "timed by": "timed_by",
    },
    "df11.forms": {
        "form": "form",
        "bits a weight": decimals("bits_per_weight", 2),
        "loading, s": with_spread("load_seconds", 2),
        "tokens/s": with_spread("tokens_per_s", 1),
        "tokens/s, in graphs": with_spread("graphs_tokens_per_s", 1),
    },
    "df11.decode": {
        "form": "form",
        "bits a weight": decimals("bits_per_weight", 2),
        "decode, TB/s of BF16": with_spread("decode_tb_per_s", 2),
        "roof, TB/s": decimals("roof_tb_per_s", 2),
        "of roof": percent("of_roof"),
    },
    "cpu.codec": {
        "weights": "name",
        "matrix": "matrix",
        "encode, G weights/s": with_spread("encode_gweights_per_s", 2),
        "decode, G weights/s": with_spread("decode_gweights_per_s", 2),
        "copy BF16, G weights/s": with_spread("copy_gweights_per_s", 2),
    },
    "cpu.df11": {
        "unit": "name",
        "weights": decimals("weights", 0),
        "bits a weight": decimals("bits_per_weight", 2),
        "encode, G weights/s": with_spread("encode_gweights_per_s", 2),
        "decode, G weights/s": with_spread("decode_gweights_per_s", 2),
    },
    "cpu.df11_job": {
        "checkpoint": "name",
        "weights": decimals("weights", 0),
        "compress, G weights/s": with_spread("compress_gweights_per_s", 2),
        "copying the result, G weights/s": with_spread("copy_gweights_per_s", 2),
    },
    "cpu.generate": {
        "model": "name",
        "BF16, tokens/s": with_spread("bf16_tokens_per_s", 0),
        "samebits, tokens/s": with_spread("packed_tokens_per_s", 0),
    },
    "families.families": {
        "family": "family",
        "class": "class",
        "kind": "kind",
        "packed tensors": "packed_tensors",
        "of its weights": percent("packed_of_weights"),
        "logits": verdict("logits"),
        "greedy": verdict("greedy"),
        "sampled": verdict("sampled"),
        "packed cache": verdict("packed_cache"),
        "": "note",
    },
    "parallel.parallel": {
        "divided": lambda row: {"auto": "layers", "tensor": "each matrix"}[row["placement"]],
        "batch": "batch",
        **IN_TURNS,
        "BF16, weights": gigabytes("bf16_weights_bytes"),
        "samebits, weights": gigabytes("samebits_weights_bytes"),
        "BF16, peak": gigabytes("bf16_peak_bytes"),
        "samebits, peak": gigabytes("samebits_peak_bytes"),
        "tokens": verdict("same_tokens"),
        "logits": verdict("same_logits"),
    },
    **{f"generate.{way}": GENERATE_COLUMNS for way in ("graphs", "preferred")},
    **{f"generate.{way}": GENERATE_COLUMNS | IN_TURNS for way in ("eager", "compile")},
    "vllm_generate.vllm": {
        "model": "model",
        "sequences": "batch",
        "BF16, tokens/s": with_spread("default_tokens_per_s", 0),
        "with fixed sums": with_spread("bf16_tokens_per_s", 0),
        "samebits, tokens/s": with_spread("samebits_tokens_per_s", 0),
        "times BF16's speed": decimals("speed", 2),
        "first token, ms, BF16": milliseconds("default_first_token"),
        "samebits": milliseconds("samebits_first_token"),
        "weights, BF16": gigabytes("bf16_weight_bytes"),
        "weights, samebits": gigabytes("samebits_weight_bytes"),
        "tokens and log-probabilities": verdict("same"),
    },
    "experts.experts": experts_columns(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "experts.prompts": experts_columns(300, 701, 1000, 1500, 3000, 6000),
    "vllm_generate.starts": {
        "model": "model",
        "start": lambda row: {1: "the first, caches empty", 2: "the second"}[row["start"]],
        "BF16, s": decimals("bf16_seconds", 0),
        "samebits, s": decimals("samebits_seconds", 0),
    },
    "vllm_generate.cards": {
        "model": "model",
        "card, GiB": decimals("card_gib", 0),
        "requests": "requests",
        "tokens in the cache, BF16": that_fits("bf16", decimals("bf16_cache_tokens", 0)),
        "samebits": that_fits("samebits", decimals("samebits_cache_tokens", 0)),
        "BF16, tokens/s": that_fits("bf16", with_spread("bf16_tokens_per_s", 0)),
        "samebits, tokens/s": that_fits("samebits", with_spread("samebits_tokens_per_s", 0)),
        "times BF16's speed": decimals("speed", 2),
    },
    "searches.searches": {
        "matrix": "matrix",
        "tokens": "tokens",
        "found": "found",
        "first search, s": decimals("first_seconds", 2),
        "again, s": decimals("seconds", 2),
        "with another's weight, s": decimals("shared_seconds", 2),
        "from disk, s": decimals("known_seconds", 4),
        "gained by each product, µs": decimals("gained_microseconds", 1),
    },
    "profile.steps": {
        "model": "model",
        "weights": "form",
        "batch": "batch",
        "way": "way",
        "step, ms": decimals("step_milliseconds", 2),
        "host, ms": decimals("host_milliseconds", 2),
        "fused products": decimals("fused_milliseconds", 2),
        "decoding": decimals("decoding_milliseconds", 2),
        "BF16 products": decimals("bf16_product_milliseconds", 2),
        "attention": decimals("attention_milliseconds", 2),
        "other kernels": decimals("other_milliseconds", 2),
        "GPU idle": decimals("idle_milliseconds", 2),
    },
    "profile.calls": {
        "model": "model",
        "matrix": "matrix",
        "nn.Linear, µs": decimals("linear_microseconds", 1),
        "packed, µs": decimals("packed_microseconds", 1),
    },
    "longest.longest": {
        "model": "model",
        "card": gibibytes("cap_bytes"),
        "sequences": "batch",
        "torch's allocator": "allocator",
        "left beside BF16": gibibytes("bf16_room_bytes"),
        "BF16, tokens": tokens_that_fit,
        "samebits, tokens": decimals("samebits_tokens", 0),
        "times as many": decimals("ratio", 2),
        "with PackedCache, tokens": decimals("packed_cache_tokens", 0),
        "times as many as BF16": decimals("packed_cache_ratio", 2),
        "DFloat11's paper": decimals("paper_ratio", 1),
        "predicted, tokens": decimals("predicted_tokens", 0),
        "BF16, predicted": decimals("bf16_predicted_tokens", 0),
    },
    "longest.cache": {
        "model": "model",
        "tokens": "context",
        "DynamicCache": gigabytes("dynamic_cache_bytes"),
        "PackedCache": gigabytes("packed_cache_bytes"),
        "of DynamicCache": percent("ratio"),
        "a step with DynamicCache, ms": with_spread("dynamic_cache_milliseconds", 1),
        "with PackedCache, ms": with_spread("packed_cache_milliseconds", 1),
        "kernels with DynamicCache, ms": decimals("dynamic_cache_kernel_milliseconds", 1),
        "with PackedCache": decimals("packed_cache_kernel_milliseconds", 1),
        "logits": verdict("same_logits"),
    },
    "longest.peak": {
        "model": "model",
        "tokens": "context",
        "weights": gigabytes("weights_bytes"),
        "key-value cache": gigabytes("cache_bytes"),
        "activations, decoded weights": gigabytes("beside_bytes"),
        "predicted peak": gigabytes("predicted_bytes"),
        "measured peak": gigabytes("measured_bytes"),
        "prediction off by": percent("off"),
        "without plans, predicted": gigabytes("needed_bytes"),
        "while plans are found, measured": gigabytes("first_bytes"),
        "BF16, predicted": gigabytes("bf16_predicted_bytes"),
    },
    "diffusion.steps": {
        "model": "model",
        "denoises": "input",
        "way": "way",
        **STEP_COLUMNS,
        "output": verdict("same_output"),
    },
    "training.steps": {
        "batch": "batch",
        "tokens": "sequence",
        "checkpointing": yes("checkpointing"),
        **STEP_COLUMNS,
        "gradients": verdict("same_gradients"),
        "trained adapters": verdict("same_adapters"),
    },
    "harness.harness": {
        "task": "task",
        "samples": "samples",
        "log-likelihoods": "log_likelihoods",
        "different": "different",
        "result": "metric",
        "BF16": decimals("bf16", 4),
        "samebits": decimals("samebits", 4),
    },
    "offload.resident": OFFLOAD_COLUMNS | {"samebits, peak": gigabytes("samebits_peak_bytes")},
    "offload.streamed": OFFLOAD_COLUMNS | {"samebits, streamed": gigabytes("samebits_offloaded_bytes")},
    "memory.memory": {
        "command": "command",
        "checkpoint": lambda row: f"{row['original_bytes'] / 1e9:.1f} GB",
        "processes": "processes",
        "peak anonymous memory": lambda row: f"{row['peak_anonymous_bytes'] / 1e9:.2f} GB",
    },
}


# What is said above a table, where it stands or falls with its numbers.
CAPTIONS = {
    "peers.decode": """\
Beside others on the same GPU, in one run, every output compared first: DFloat11's released kernel, and nvCOMP's ANS,
which decodes the exponents alone (its rate is that of the BF16 weights they belong to, its bits have sign and mantissa
added). DFloat11 decodes the seven matrices of a block in one launch, samebits in seven:""",
    "df11.forms": """\
The same model in each form (Llama 3.1 8B's shapes, 16 layers, synthetic weights), generating one token after the other;
the last column is with a static cache in `samebits.cuda_graphs`, without graphs the host decides. Tokens a second are
of a whole `generate`, its prompt included, and in graphs the capture:""",
    "df11.decode": "One layer of it decoded, each form by samebits' own kernel:",
    "parallel.parallel": """\
Llama 3.1 8B's shapes, synthetic weights, prompts of 128 tokens, eager; memory is that of the GPU that has most:""",
    "generate.preferred": """\
As above, with the attention that torch prefers, cuDNN's on Hopper. With several sequences or a long prompt BF16 writes
other tokens from run to run then, though not in any two, so there the last column says nothing:""",
    "generate.graphs": """\
Whole models of real shapes and synthetic weights through transformers' `generate`, BF16 and compressed in one run,
every token compared; a static cache, each decoding step replayed as one CUDA graph (`samebits.cuda_graphs`):""",
    "longest.longest": """\
Tokens in the key-value cache when memory runs out, on cards emulated in memory alone; BF16 counts where at least 1 GiB
is left beside its weights. With `samebits.PackedCache` the cache is packed as well, at no bit's cost:""",
    "diffusion.steps": """\
One denoising step of diffusion models in their real configurations, with synthetic weights, at batch 1, or 2
with guidance; the memory is that of the transformer or UNet alone, with its activations:""",
    "training.steps": """\
A training step of LoRA (PEFT, rank 16, all layers but the head, AdamW) on Llama 3.1 8B's configuration with synthetic
weights, with torch told to compute deterministically:""",
    "experts.experts": """\
Routed experts of one layer, from the router's choice to their sum, as vLLM makes them, uniform routes: times BF16's
speed by number of tokens, in CUDA graphs with other experts in each call:""",
    "experts.prompts": """\
The same of prompts, whose numbers of tokens nothing was found for:""",
    "linear.prefill": """\
All seven products of a decoder layer of Llama 3.1 8B's shapes, in a row; those of one input are made by one launch
where that is faster:""",
    "linear.together": """\
Layers of a model that share an input, behind small kernels like a norm's, which are not counted. One launch makes all
their products where that is faster, in a model as here:""",
}
JOINED = {"many": "matrix", "experts": "model", "prompts": "model"}  # tables: rows of several numbers of tokens are one
PLOTS = {
    "speed-by-tokens": "Speed of a linear layer beside BF16, by number of tokens",
    "bytes-by-matrix": "Bytes moved a second, beside what the memory allows",
    "growth": "Time by the size of a matrix",
}


def joined(rows: list[Row], key: str) -> list[Row]:
    """Of rows of a matrix or model and a number of tokens: one for each of ``key``, with ``speed_at_<tokens>``.

    ``decoded`` has the least and the largest speed of decoding first, ``same`` whether all were.
    """
    found: dict[str, Row] = {}
    for row in rows:
        one = found.setdefault(row[key], {key: row[key], "same": True, "decoded": []})
        one[f"speed_at_{row['tokens']}"] = row["speed"]
        one["same"] &= row.get("same", True)
        one["decoded"] = sorted([*one["decoded"], row.get("decoded_speed", 0.0)])
    return list(found.values())


def cell_text(cell: Cell, row: Row) -> str:
    if callable(cell):
        return cell(row)
    value = row[cell]
    return "" if value is None else str(value)


def table_text(name: str, table: str, root: str = "") -> str:
    """The table as Markdown, and a line that says where its numbers come from; nothing without results.

    ``root`` leads from the page to the repository's root.
    """
    if name == "glance":
        return glance(root)
    results = read_results(name)
    rows = [row for row in results["rows"] if row["table"] == table]
    if not rows:
        return ""
    dates = [row["date"] for row in rows]
    if table in JOINED:
        rows = joined(rows, JOINED[table])
    if {"model", "batch", "prompt"} <= rows[0].keys():  # in the order in which they were measured till here
        places = list(dict.fromkeys(row["model"] for row in rows))
        rows = sorted(rows, key=lambda row: (places.index(row["model"]), row["prompt"], row["batch"]))
    every_key, like = [key for key in rows[0] if key not in ("table", "date", "code")], LIKE.get(name, name)
    columns = COLUMNS.get(f"{like}.{table}") or {key.replace("_", " "): key for key in every_key}
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cell_text(cell, row) for cell in columns.values()] for row in rows]
    versions = ", ".join(f"{package} {number}" for package, number in results["versions"].items())
    file = f"benchmarks/results/{name}.json"
    made = f"`python benchmarks/{SCRIPTS.get(like, like)}.py`"
    measured = " to ".join(sorted({min(dates), max(dates)}))
    source = f"<sub>[{file}]({root}{file}), made by {made}: {results['device']}; {versions}; {measured}</sub>"
    caption = CAPTIONS.get(f"{like}.{table}")
    markdown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return (f"{caption}\n\n" if caption else "") + f"{markdown}\n{source}\n"


def plot_text(name: str, root: str) -> str:
    """The picture as Markdown; nothing where there is none."""
    file = f"docs/{name}.svg"
    return f"![{PLOTS[name]}]({root}{file})\n" if (ROOT / file).exists() else ""


def with_tables(text: str, root: str = "") -> str:
    """``text`` with every marked table and picture made anew."""
    text = MARKED.sub(lambda found: found[1] + table_text(found[2], found[3], root) + found[5], text)
    return PLOT.sub(lambda found: found[1] + plot_text(found[2], root) + found[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    checking = parser.parse_args().check
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        made = with_tables(text, "../" * (len(page.relative_to(ROOT).parts) - 1))
        if made != text and checking:
            stale.append(page)
        elif made != text:
            page.write_text(made, encoding="utf-8")
    for page in stale:
        print(f"{page} says something else than the results: run python benchmarks/tables.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
