"""How fast does a CPU encode, decode and generate? Beside copying BF16 tensors and the BF16 model, in the same run.

    python benchmarks/cpu.py [--name cpu]        writes results/<name>.json, three minutes on two cores; 6 GB of disk

Each round trip is checked before it is timed. Times are medians of nine calls, with the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import samebits
from common import (
    DECODER_LAYERS,
    EXAMPLE_MODEL,
    Timing,
    checkpoint_tensors,
    cpu_name,
    encode_checked,
    minilm_folder,
    synthetic_matrix,
    time_calls,
    write_results,
)
from samebits.bf16 import words_of
from samebits.df11.checkpoint import open_checkpoint
from samebits.df11.unit import UnitPlan
from samebits.jobs.compress_df11 import Df11Compression
from samebits.jobs.options import RunOptions
from samebits.parallel import threads
from samebits.verify import verify_against

NEW_TOKENS = 64
SHAPES = ((12288, 4096), (4096, 14336), (1024, 4096))
UNIT = "Llama 3.1 8B"  # whose layer is encoded as a unit of DFloat11
LAYERS = 5  # of the checkpoint that becomes one in DFloat11's layout: 1.1 G weights


def matrices() -> Iterator[tuple[str, torch.Tensor]]:
    for rows, columns in SHAPES:
        yield "synthetic", synthetic_matrix(rows, columns)
    for name, file in (("all-MiniLM-L6-v2", minilm_folder()), ("king-james", EXAMPLE_MODEL)):
        tensors = checkpoint_tensors(file / "model.safetensors")
        yield f"{name}, embedding", max((tensor for _, tensor in tensors), key=torch.numel)


def row(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    packed = encode_checked(tensor)
    target = torch.empty_like(tensor)
    billions = tensor.numel() / 1e9
    return {
        "table": "codec",
        "name": name,
        "matrix": " x ".join(map(str, tensor.shape)),
        "threads": threads(),
        "bits_per_weight": round(packed.bits_per_weight, 3),
        **time_calls(lambda: samebits.encode(tensor)).rates("encode_gweights_per_s", billions),
        **time_calls(lambda: samebits.decode(packed)).rates("decode_gweights_per_s", billions),
        **time_calls(lambda: target.copy_(tensor)).rates("copy_gweights_per_s", billions),
    }


def df11_row() -> dict[str, Any]:
    """A layer as one unit of DFloat11, encoded and decoded; the words are compared first."""
    shapes = DECODER_LAYERS[UNIT].values()
    matrices = [words_of(synthetic_matrix(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    unit = UnitPlan.of(matrices).encode(matrices)
    if not np.array_equal(unit.decode(), np.concatenate(matrices)):
        raise SystemExit("the unit decodes to other words")
    billions = unit.words / 1e9
    stored = sum(tensor.nbytes for tensor in unit.tensors().values())
    return {
        "table": "df11",
        "name": f"a layer of {UNIT}'s shapes, synthetic weights",
        "matrices": len(matrices),
        "weights": unit.words,
        "threads": threads(),
        "bits_per_weight": round(8 * stored / unit.words, 3),
        **time_calls(lambda: UnitPlan.of(matrices).encode(matrices)).rates("encode_gweights_per_s", billions),
        **time_calls(unit.decode).rates("decode_gweights_per_s", billions),
    }


def df11_job_row() -> dict[str, Any]:
    """samebits compress --format df11 from files to files; what it wrote is compared with the source first."""
    patterns = {r"layers\.\d+": list(DECODER_LAYERS[UNIT])}
    with tempfile.TemporaryDirectory() as folder:
        source, packed, copy = (Path(folder) / name for name in ("source", "packed", "copy"))
        write_layers(source)

        def compress() -> None:
            Df11Compression(open_checkpoint(source), packed, patterns, RunOptions(device="cpu")).run()

        compress()
        if not verify_against(open_checkpoint(packed), open_checkpoint(source)).identical:
            raise SystemExit("the compressed checkpoint decodes to other words")
        copying = time_filling(copy, lambda: shutil.copytree(packed, copy))
        compressing = time_filling(packed, compress)
        weights = sum(entry.words for entry in open_checkpoint(source))
    return {
        "table": "df11_job",
        "name": f"{LAYERS} layers of {UNIT}'s shapes, synthetic weights",
        "weights": weights,
        "threads": threads(),
        **compressing.rates("compress_gweights_per_s", weights / 1e9),
        **copying.rates("copy_gweights_per_s", weights / 1e9),
    }


def write_layers(folder: Path) -> None:
    """A checkpoint of LAYERS layers that are all the same, with a file for each."""
    folder.mkdir()
    shapes = DECODER_LAYERS[UNIT]
    matrices = {name: synthetic_matrix(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    for layer in range(LAYERS):
        tensors = {f"layers.{layer}.{name}.weight": matrix for name, matrix in matrices.items()}
        save_file(tensors, folder / f"layer-{layer}.safetensors")


def time_filling(folder: Path, fill: Callable[[], object]) -> Timing:
    """As time_calls, of what makes ``folder``; that it is removed before does not count."""
    seconds = []
    for _ in range(9):
        shutil.rmtree(folder, ignore_errors=True)
        start = time.perf_counter()
        fill()
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds)


def generation_row() -> dict[str, Any]:
    """Tokens a second of the embedded model at batch 1, plain and packed; the tokens are compared first."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    plain = load(EXAMPLE_MODEL, dtype=torch.bfloat16)
    packed = load(EXAMPLE_MODEL, quantization_config=samebits.SamebitsConfig())
    prompt = torch.tensor([[plain.config.bos_token_id]])
    mask = torch.ones_like(prompt)

    def generate(model: Any) -> torch.Tensor:
        lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        return model.generate(prompt, attention_mask=mask, do_sample=False, **lengths)

    if not torch.equal(generate(plain), generate(packed)):
        raise SystemExit("the packed model generates other tokens")
    return {
        "table": "generate",
        "name": "king-james",
        "threads": threads(),
        **time_calls(lambda: generate(plain)).rates("bf16_tokens_per_s", NEW_TOKENS),
        **time_calls(lambda: generate(packed)).rates("packed_tokens_per_s", NEW_TOKENS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="cpu")
    options = parser.parse_args()
    rows = [row(name, tensor) for name, tensor in matrices()]
    print(write_results(options.name, cpu_name(), [*rows, df11_row(), df11_job_row(), generation_row()]))


if __name__ == "__main__":
    main()
