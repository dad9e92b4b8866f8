"""How fast does a CPU encode, decode and generate? Beside copying BF16 tensors and the BF16 model, in the same run.

    python benchmarks/cpu.py              writes results/cpu.json, a minute on two cores

Each round trip is checked before it is timed. Times are medians of nine calls, with the fastest and the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import samebits
from common import (
    DECODER_LAYERS,
    EXAMPLE_MODEL,
    checkpoint_tensors,
    cpu_name,
    encode_checked,
    minilm_folder,
    synthetic_matrix,
    time_calls,
    write_results,
)
from samebits.bf16 import words_of
from samebits.df11.unit import UnitPlan
from samebits.parallel import threads

NEW_TOKENS = 64
SHAPES = ((12288, 4096), (4096, 14336), (1024, 4096))
UNIT = "Llama 3.1 8B"  # whose layer is encoded as a unit of DFloat11


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
    rows = [row(name, tensor) for name, tensor in matrices()]
    print(write_results("cpu", cpu_name(), [*rows, df11_row(), generation_row()]))


if __name__ == "__main__":
    main()
