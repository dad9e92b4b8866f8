"""The table at the README's top: one figure of each kind, taken from results/ as tables.py's others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common import read_results

HEAD = ("measured on an H200", "BF16", "samebits", "DFloat11")
Line = tuple[str, str, str, str]
Row = dict[str, Any]
_GENERATED = (
    ("graphs", "Llama 3.1 8B", 1), ("graphs", "Llama 3.1 8B", 64), ("compile", "Llama 3.1 8B", 1),
    ("graphs", "Llama 3.3 70B", 1), ("graphs", "Qwen3 30B-A3B", 8),
)  # fmt: skip


def glance(root: str = "") -> str:
    """As Markdown. Each line's results must be there; ``root`` leads from the page to the repository's root."""
    lines = [HEAD, ("---", "---:", "---:", "---:"), *_lines()]
    names = ("sizes", "peers", "linear", "df11", "generate", "longest", "offload", "diffusion")
    files = ", ".join(f"[{name}]({root}benchmarks/results/{name}.json)" for name in names)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n<sub>Taken from {files}</sub>\n"


def _lines() -> Iterator[Line]:
    sizes = _rows("sizes", table="models")[:2]
    yield (
        f"bits a weight: {' / '.join(row['name'] for row in sizes)}", "16",
        " / ".join(f"{row['bits_per_weight']:.2f}" for row in sizes),
        " / ".join(f"{row['dfloat11_bits_per_weight']:.2f}" for row in sizes),
    )  # fmt: skip
    decoders = {row["decoder"].split(",")[0]: row for row in _rows("peers", table="decode", matrix="12288 x 4096")}
    ours, other = (decoders[name]["decode_tb_per_s"] for name in ("samebits", "DFloat11's kernel"))
    yield "decoding 12288 x 4096 to memory, TB/s of BF16", "", f"{ours:.2f}", f"{other:.2f}"
    speeds = [row["speed_at_1"] for row in _rows("linear", table="few")]
    yield f"speed of a product with one token, {len(speeds)} shapes", "1", f"{min(speeds):.2f} to {max(speeds):.2f}", ""
    forms = {row["form"]: row["graphs_tokens_per_s"] for row in _rows("df11", table="forms")}
    yield (
        "16 layers of Llama 3.1 8B in graphs, prompt and capture included, tokens/s", f"{forms['BF16']:.0f}",
        f"{forms['samebits']:.0f}",
        f"{forms['DFloat11, keep_format']:.0f} (by a kernel of ours)",
    )  # fmt: skip
    said = {"graphs": "in graphs", "compile": "compiled"}
    for way, model, batch in _GENERATED:
        row = _row("generate", table=way, model=model, batch=batch, prompt=128)
        each = (f"{row[f'{form}_tokens_per_s']:,.0f}, {_gb(row, form)}" for form in ("bf16", "samebits"))
        at_once = f"{batch} sequences" if batch > 1 else "one sequence"
        yield f"{model} {said[way]}, {at_once}, tokens/s and memory", *each, ""
    row = _row("offload", table="resident", case="14b-24", batch=1)
    yield (
        f"{row['model']} in 24 GiB (emulated), tokens/s",
        f"{row['accelerate_tokens_per_s']:.2f} (accelerate's offload), {row['bf16_streamed_tokens_per_s']:.1f} (ours)",
        f"{row['samebits_tokens_per_s']:.0f}", "",
    )  # fmt: skip
    row = _row("longest", table="longest", model="Mistral Nemo 12B", allocator="expandable_segments")
    yield (
        f"tokens that {row['model']} remembers in 24 GiB (emulated)", f"{row['bf16_tokens']:,}",
        f"{row['packed_cache_tokens']:,}, with its cache packed", "",
    )  # fmt: skip
    row = _row("diffusion", table="steps", model="FLUX.1-dev", way="replayed")
    each = (f"{1e3 * row[f'{form}_seconds']:.0f} ms, {_gb(row, form)}" for form in ("bf16", "samebits"))
    yield "a step of FLUX.1-dev, 1024 x 1024, and its memory", *each, ""


def _gb(row: Row, form: str) -> str:
    return f"{row[f'{form}_peak_bytes'] / 1e9:.1f} GB"


def _row(name: str, **columns: object) -> Row:
    [row] = _rows(name, **columns)
    return row


def _rows(name: str, **columns: object) -> list[Row]:
    return [row for row in read_results(name)["rows"] if columns.items() <= row.items()]
