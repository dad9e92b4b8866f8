"""Generation with transformers' ``generate``: compressed beside BF16 in one run, the tokens compared as bytes.

    python benchmarks/generate.py                                          all of it on a GPU, to results/generate.json
    python benchmarks/generate.py --models "Llama 3.1 8B" --batches 1,8 --prompts 128 --ways eager,graphs
    python benchmarks/generate.py --models tiny --device cpu --batches 1 --prompts 16 --name trial

Real configurations, synthetic weights (common.synthetic_matrix), made module by module and packed at once, so that the
compressed model never exists in BF16. One model at a time is in memory. Ways to run:

    eager      a cache that grows, Python for every layer
    graphs     a static cache, the decoding step as CUDA graphs
    compile    a static cache, the decoding step through torch.compile, as transformers does by itself

On a CPU "graphs" and "compile" have a static cache only. Each figure is the median of REPEATS runs after one that warms
up; the first token's time contains the prompt, tokens_per_s counts the tokens after it, of all sequences.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

import samebits
from common import PACKAGES, cpu_name, significant, synthetic_matrix, write_results

LLAMA = {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
# model_type, and what its config says besides.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "Qwen3 14B": ("qwen3", {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    }),
    "Mistral Nemo 12B": ("mistral", {
        "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072,
        "sliding_window": None,
    }),
    "Mistral Small 24B": ("mistral", {
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 32768,
        "sliding_window": None,
    }),
    "tiny": ("llama", {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    }),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"disable_compile": True},
    "graphs": {"cache_implementation": "static", "compile_config": CompileConfig(backend="cudagraphs", mode="default")},
    "compile": {"cache_implementation": "static"},
}
DEFAULT_MODELS = ("Llama 3.1 8B", "Qwen3 14B")
REPEATS = 3


def build(name: str, device: str, packed: bool) -> Any:
    """A model with synthetic weights, the same whether packed or not."""
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **options, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for path, module in list(model.named_modules()):
        if module._buffers:  # rotary frequencies, from the config
            with torch.device(device):
                model.set_submodule(path, type(module)(config=config))
    for seed, module in enumerate(model.modules()):
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[leaf] = torch.nn.Parameter(_weights(parameter.shape, seed, device))
        if packed and module._parameters and not module._modules:
            samebits.compress(module)
    return model.eval()


def _weights(shape: torch.Size, seed: int, device: str) -> torch.Tensor:
    """Matrices are random; what has one dimension belongs to norms."""
    if len(shape) == 2:
        return synthetic_matrix(*shape, seed=seed, device=device)
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Takes the time when the first token is there, and stops nothing."""

    def __init__(self, device: str) -> None:
        self.device, self.first = device, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.first:
            self.first = now(self.device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def now(device: str) -> float:
    """Seconds, with the device's work done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Setting:
    """What is generated, and how."""

    way: str
    batch: int
    prompt: int
    tokens: int

    def inputs(self, vocabulary: int, device: str) -> torch.Tensor:
        """Random prompts: int64 [batch, prompt]."""
        shape = (self.batch, self.prompt)
        return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(self.prompt)).to(device)


@dataclass(frozen=True)
class Figures:
    """Seconds to the first token; tokens a second after it; bytes at the peak; all tokens, on the CPU."""

    first_token: float
    rate: float
    peak_bytes: int | None
    tokens: torch.Tensor


@torch.inference_mode()
def measure(model: Any, setting: Setting, device: str) -> Figures:
    """Generate REPEATS times, after once to warm up."""
    prompt = setting.inputs(model.config.vocab_size, device)
    options = {"max_new_tokens": setting.tokens, "min_new_tokens": setting.tokens, "do_sample": False}
    firsts, rates = [], []
    for repeat in range(1 + REPEATS):
        if device == "cuda" and repeat == 1:
            torch.cuda.reset_peak_memory_stats()
        clock = Clock(device)
        start = now(device)
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=StoppingCriteriaList([clock]),
            **options, **WAYS[setting.way],
        )  # fmt: skip
        end = now(device)
        if repeat:
            firsts.append(clock.first - start)
            rates.append(setting.batch * (setting.tokens - 1) / (end - clock.first))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Figures(statistics.median(firsts), statistics.median(rates), peak, tokens.cpu())


def measure_all(name: str, settings: list[Setting], device: str, packed: bool) -> list[Figures]:
    """Every setting on one model, which is gone afterwards."""
    model = build(name, device, packed)
    if packed:
        samebits.prepare(model, sorted({setting.batch for setting in settings}))
    found = []
    for setting in settings:
        torch.compiler.reset()
        found.append(measure(model, setting, device))
        print(name, "samebits" if packed else "BF16", setting, f"{found[-1].rate:.1f} tokens/s", flush=True)
    del model
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def rows(name: str, settings: list[Setting], device: str) -> Iterator[dict[str, Any]]:
    """BF16 first, then compressed, each setting beside the other."""
    plain = measure_all(name, settings, device, packed=False)
    packed = measure_all(name, settings, device, packed=True)
    for setting, bf16, ours in zip(settings, plain, packed, strict=True):
        row = {"table": "generate", "model": name, **vars(setting)}
        for key, found in (("bf16", bf16), ("samebits", ours)):
            row[f"{key}_tokens_per_s"] = significant(found.rate)
            row[f"{key}_first_token_seconds"] = significant(found.first_token)
            row[f"{key}_peak_bytes"] = found.peak_bytes
        yield row | {"speed": significant(ours.rate / bf16.rate), "same_tokens": torch.equal(ours.tokens, bf16.tokens)}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="generate")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(DEFAULT_MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--prompts", type=numbers, default=[128, 2048])
    parser.add_argument("--tokens", type=int, default=64, help="generated, of each sequence")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    settings = [
        Setting(way, batch, prompt, options.tokens)
        for way in options.ways
        for prompt in options.prompts
        for batch in options.batches
    ]
    found = [row for name in options.models for row in rows(name, settings, options.device)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    print(write_results(options.name, device, found, (*PACKAGES, "transformers")))
    return int(not all(row["same_tokens"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
