"""One model as DFloat11's checkpoint, as samebits' and in BF16: size, decoding, loading, tokens a second.

    python benchmarks/df11.py [--layers 16] [--name df11]       five minutes; writes results/<name>.json, row by row

The model has Llama 3.1 8B's shapes, fewer layers and synthetic weights. It is written in all forms to a temporary
folder, and read from there while the system still has it in memory. Every form has to give the tokens of BF16. On a GPU
each has a process of its own, for what runs second in a process is slower, and generates WARM_UP times before it is
timed, for the host is slow at first: once with the cache that transformers has by default, and once with a static cache
in samebits.cuda_graphs. Of the latter a model of few layers says only how fast the host is. Decoding is of one layer's
seven matrices, over more than 900 MB of distinct bytes, beside the roof of gpu.py for the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import samebits
from common import (
    DECODER_LAYERS,
    Measured,
    Timing,
    add_results,
    encode_checked,
    runner,
    significant,
    synthetic_matrix,
    time_calls,
)
from dfloat11_kernel import DFloat11
from gpu import Roofs, device_name, distinct, measure_roofs
from peers import matrices, measure_samebits
from samebits.df11.unit import Unit
from samebits.format.container import Checkpoint
from samebits.jobs.compress import Compression
from samebits.jobs.compress_df11 import Df11Compression
from samebits.verify import repeatable_attention

Row = dict[str, Any]

LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
PROMPT = 16  # tokens
WARM_UP = 3  # calls
# Name: folder, and how it is loaded.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "BF16": ("bf16", {}),
    "samebits": ("samebits", {}),
    "DFloat11, packed while loading": ("df11", {}),
    "DFloat11, keep_format": ("df11", {"keep_format": True}),
}


class OwnKernel(DFloat11):
    """samebits' decoder of the layout."""

    name = "DFloat11's layout"

    def __init__(self, device: str) -> None:
        self.malformed = torch.zeros(1, dtype=torch.int32, device=device)

    def decode(self, unit: Unit, tensors: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        torch.ops.samebits.df11_decode(*tensors, output, self.malformed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="df11")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to make the temporary one: 4.9 GB and 1.02 GB a layer")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    layer = list(DECODER_LAYERS["Llama 3.1 8B"].values())
    keep = partial(add_results, arguments.name, device_name(), keys=("form", "layers"))
    print(keep(rows=measure_decoding(layer, arguments.repeats, "cuda")))
    if find_spec("transformers"):
        with TemporaryDirectory(dir=arguments.folder) as folder:
            write_forms(Path(folder), LLAMA | {"num_hidden_layers": arguments.layers}, "cuda")
            for row in measure_forms(Path(folder), arguments.tokens, arguments.repeats, "cuda"):
                keep(rows=[row])
    else:
        print("transformers is not installed: decoding only", file=sys.stderr)
    return 0


def measure_decoding(shapes: Sequence[tuple[int, int]], repeats: int, device: str) -> list[Row]:
    """The table "decode": matrices of these shapes in both forms."""
    weights = matrices(shapes, device)
    words = sum(weight.numel() for weight in weights)
    copies = distinct([encode_checked(weight) for weight in weights])
    roofs = measure_roofs([tensor.data for copy in copies for tensor in copy], words, repeats)
    ours = _decode_row("samebits", words, measure_samebits(copies, weights, repeats), roofs)
    del copies
    return [ours, _decode_row(OwnKernel.name, words, OwnKernel(device).measure(weights, repeats), roofs)]


def _decode_row(form: str, words: int, measured: Measured, roofs: Roofs) -> Row:
    roof = roofs.decode_seconds(measured.nbytes)
    row = {
        "table": "decode",
        "form": form,
        "bits_per_weight": round(8 * measured.nbytes / words, 4),
        **measured.timing.rates("decode_tb_per_s", 2 * words / 1e12),
        "decode_microseconds": significant(measured.timing.median * 1e6),
        "roof_tb_per_s": significant(2 * words / roof / 1e12),
        "of_roof": significant(roof / measured.timing.median),
    }
    print(row, flush=True)
    return row


def write_forms(folder: Path, config: Mapping[str, Any], device: str) -> None:
    """The model in BF16, and compressed in both ways."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config, architectures=["LlamaForCausalLM"], dtype="bfloat16"))
    model.config.save_pretrained(folder / "bf16")
    tensors = {
        name: synthetic_matrix(*tensor.shape, seed=seed, device=device).cpu()
        if tensor.dim() == 2
        else torch.ones(tensor.shape, dtype=torch.bfloat16)
        for seed, (name, tensor) in enumerate(model.state_dict().items())
    }
    save_file(tensors, folder / "bf16" / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(folder / "bf16")
    Compression(checkpoint, folder / "samebits").run()
    Df11Compression(checkpoint, folder / "df11").run()


def measure_forms(folder: Path, tokens: int, repeats: int, device: str) -> Iterator[Row]:
    """The table "forms", a row at a time.

    Raises:
        SystemExit: a form gives other tokens than BF16, so there is nothing worth measuring.
    """
    run = runner(device)
    expected: list[int] = []
    for form in FORMS:
        row, found = run(measure_form, folder, form, tokens, repeats, device)()
        expected = expected or found
        if found != expected:
            raise SystemExit(f"{form}: other tokens than BF16's")
        print(row, flush=True)
        yield row


@repeatable_attention()
def measure_form(folder: Path, form: str, tokens: int, repeats: int, device: str) -> tuple[Row, list[int]]:
    """A row of the table "forms", and what the form generates in both ways."""
    name, options = FORMS[form]
    weights = sum(entry.words for entry in Checkpoint.open(folder / "bf16"))
    prompt = torch.arange(1, PROMPT + 1, device=device)[None]
    load = partial(load_form, folder / name, device, options)
    loading = time_calls(load, repeats=repeats)
    model = load()
    ways = {"tokens_per_s": partial(generate, model, prompt, tokens)}
    ways["graphs_tokens_per_s"] = partial(generate_in_graphs, model, prompt, tokens)
    generated: list[int] = []
    rates: dict[str, float] = {}
    for key, way in ways.items():
        for _ in range(WARM_UP):
            way()
        generated += way()
        rates |= time_calls(way, repeats=repeats).rates(key, tokens)
    row = {
        "table": "forms",
        "form": form,
        "layers": model.config.num_hidden_layers,
        "bits_per_weight": round(8 * bytes_of(folder / name) / weights, 4),
        **_seconds("load_seconds", loading),
        **rates,
    }
    return row, generated


def load_form(folder: Path, device: str, options: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device}, **options)
    if device == "cuda":
        torch.cuda.synchronize()
    return model


@torch.no_grad()
def generate(model: Any, prompt: torch.Tensor, tokens: int, cache: str | None = None) -> list[int]:
    """Greedily, as many tokens as asked for."""
    options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    result: list[int] = model.generate(prompt, cache_implementation=cache, **options)[0].tolist()
    return result


def generate_in_graphs(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    with samebits.cuda_graphs(model):
        return generate(model, prompt, tokens, cache="static")


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _seconds(key: str, timing: Timing) -> dict[str, float]:
    return {
        key: significant(timing.median),
        f"{key}_slowest": significant(timing.slowest),
        f"{key}_fastest": significant(timing.fastest),
    }


if __name__ == "__main__":
    raise SystemExit(main())
