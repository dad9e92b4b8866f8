"""Small checkpoints with a bit of everything, and bytes to compare them by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

CONFIG = {"architectures": ["ExampleForCausalLM"], "dtype": "bfloat16", "hidden_size": 256}
Tensors = dict[str, torch.Tensor]


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """BF16 as a trained layer has it."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(torch.bfloat16)


def random_words(count: int) -> torch.Tensor:
    """BF16 that cannot be packed: every pattern, NaN payloads and all."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-32768, 32768, (count,), generator=generator, dtype=torch.int16).view(torch.bfloat16)


def shards() -> list[Tensors]:
    """Three shards: matrices, experts, odd sizes, other dtypes, tensors that do not gain, an empty and a 0-d one."""
    return [
        {
            "model.embed_tokens.weight": weights(500, 128),
            "model.layers.0.q_proj.weight": weights(128, 128, seed=1),
            "model.layers.0.q_proj.bias": weights(128, seed=2),
            "model.layers.0.odd": weights(67, 77, seed=3),
        },
        {
            "model.layers.0.experts": weights(3, 64, 64, seed=4),
            "model.layers.0.random": random_words(5000),
            "model.layers.0.steps": torch.arange(7),
            "model.layers.0.mask": torch.arange(3, dtype=torch.uint8),
            "model.layers.0.scale": torch.tensor(0.5),
            "model.layers.0.empty": torch.empty(0, 4, dtype=torch.bfloat16),
        },
        {"lm_head.weight": weights(500, 128, seed=5), "model.norm.weight": torch.ones(128, dtype=torch.bfloat16)},
    ]


def tensors() -> Tensors:
    """All shards' tensors."""
    return {name: tensor for shard in shards() for name, tensor in shard.items()}


def write_file(path: Path, content: Tensors | None = None) -> Path:
    """A single safetensors file."""
    save_file(content or tensors(), path, metadata={"format": "pt"})
    return path


def write_folder(folder: Path, *, sharded: bool = True, config: bool = True) -> Path:
    """A model folder as transformers writes it, with a tokenizer, a subfolder, and the weights in another format."""
    (folder / "extra").mkdir(parents=True)
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    if sharded:
        for name, shard in zip(names, shards(), strict=True):
            write_file(folder / name, shard)
        weight_map = {key: name for name, shard in zip(names, shards(), strict=True) for key in shard}
        total = sum(tensor.nbytes for tensor in tensors().values())
        index = {
            "metadata": {"total_parameters": 7, "total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    else:
        write_file(folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"model": "example"}')
    (folder / "extra" / "notes.txt").write_text("notes")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    return folder


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """dtype, shape and a hash of the bytes of every tensor, as the safetensors library reads them."""
    result = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                tensor = opened.get_tensor(name)
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                result[name] = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).hexdigest())
    return result


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
