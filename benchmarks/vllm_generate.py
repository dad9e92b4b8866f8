"""vLLM's offline engine: compressed beside BF16, in processes of their own, tokens and log-probabilities compared.

    python benchmarks/vllm_generate.py                                  on a GPU, to results/vllm_generate.json
    python benchmarks/vllm_generate.py --models tiny --batches 1,2 --tokens 8 --name trial       anywhere, in a minute

Real configurations, synthetic weights (models.py), which vLLM loads tensor by tensor from a loader of this file; no
tokenizer. Each form is one engine with vLLM's defaults but for the batch sizes that it captures CUDA graphs of, those
measured, and for its cache of prefixes, which would skip the prompts.

``tokens_per_s`` is of all sequences together behind the first token: the time of a whole call less the median time of
calls for one token, median, slowest and fastest of RUNS calls. ``same`` says whether tokens and log-probabilities of
the last calls are the same, these compared as the numbers they are; ``repeats`` whether BF16's own two are.
``load_seconds`` is until the engine is ready: loading, compiling, finding plans, capturing. ``weight_bytes`` is what
vLLM says the model takes, and ``cache_tokens`` how many fit into its key-value cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from common import PACKAGES, Timing, add_results, cpu_name, in_own_process, significant
from models import MODELS, config_of, synthetic
from samebits.integrations.vllm import plugin

RUNS = 5
PROMPT = 128
ROOM = 512  # tokens of a sequence
LOADER = "synthetic"
KEYS = ("model", "batch", "tokens")


@dataclass(frozen=True)
class Found:
    """Of one batch size.

    Attributes:
        whole, first: seconds of calls for all tokens, and for one.
        outputs: digests of the last two calls' tokens and log-probabilities.
    """

    batch: int
    tokens: int
    whole: list[float]
    first: list[float]
    outputs: tuple[str, str]

    @property
    def step(self) -> Timing:
        """Seconds from a token to the next."""
        return Timing.of([(seconds - median(self.first)) / (self.tokens - 1) for seconds in self.whole])


@dataclass(frozen=True)
class Engine:
    """What one form gave."""

    load_seconds: float
    weight_bytes: int | None
    cache_tokens: int
    found: list[Found]


def tensors(config: Any, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's, by the names that transformers gives them; the same each time."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        yield name, synthetic(parameter.shape, seed, device)


def register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.platforms import current_platform

    @register_model_loader(LOADER)
    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            pass

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            return tensors(model_config.hf_config, current_platform.device_type)


def run(name: str, packed: bool, batches: list[int], tokens: int) -> Engine:
    """One engine, in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams

    plugin.register()  # as vLLM does where samebits is installed
    register_loader()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        llm = LLM(
            folder, load_format=LOADER, quantization="samebits" if packed else None, skip_tokenizer_init=True,
            max_model_len=ROOM, enable_prefix_caching=False, max_num_seqs=max(batches),
            compilation_config={"cudagraph_capture_sizes": batches},
        )  # fmt: skip
    load_seconds = time.perf_counter() - start
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    cache = llm.llm_engine.vllm_config.cache_config
    found = []
    for batch in batches:
        ids = torch.randint(config_of(name).vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
        prompts = [{"prompt_token_ids": row} for row in ids.tolist()]

        def generate(count: int, prompts: Any = prompts) -> tuple[float, str]:
            sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0)
            begin = time.perf_counter()
            outputs = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False)]
            seconds = time.perf_counter() - begin
            values = [
                (each.token_ids, [[one.logprob.hex() for one in place.values()] for place in each.logprobs])
                for each in outputs
            ]
            return seconds, hashlib.sha256(repr(values).encode()).hexdigest()[:16]

        generate(tokens)
        first = [generate(1)[0] for _ in range(RUNS)]
        runs = [generate(tokens) for _ in range(RUNS)]
        found.append(Found(batch, tokens, [seconds for seconds, _ in runs], first, (runs[-2][1], runs[-1][1])))
        print(f"{name}, {'samebits' if packed else 'BF16'}: {found[-1]}", flush=True)
    memory = getattr(worker.model_runner, "model_memory_usage", None)  # on GPUs
    return Engine(load_seconds, memory, cache.num_gpu_blocks * cache.block_size, found)


def rows(name: str, bf16: Engine, ours: Engine) -> Iterator[dict[str, Any]]:
    for plain, packed in zip(bf16.found, ours.found, strict=True):
        row: dict[str, Any] = {"table": "vllm", "model": name, "batch": plain.batch, "tokens": plain.tokens}
        for key, engine, found in (("bf16", bf16, plain), ("samebits", ours, packed)):
            row |= found.step.rates(f"{key}_tokens_per_s", found.batch)
            row |= Timing.of(found.first).columns(f"{key}_first_token_seconds")
            row |= {
                f"{key}_repeats": found.outputs[0] == found.outputs[1], f"{key}_outputs_digest": found.outputs[1],
                f"{key}_weight_bytes": engine.weight_bytes, f"{key}_cache_tokens": engine.cache_tokens,
                f"{key}_load_seconds": significant(engine.load_seconds),
            }  # fmt: skip
        speed = plain.step.median / packed.step.median
        yield row | {"speed": significant(speed), "same": plain.outputs[1] == packed.outputs[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="vllm_generate")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["Llama 3.1 8B"], help=", ".join(MODELS))
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128, help="generated, of each sequence")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    packages = (*PACKAGES, "transformers", plugin.distribution() or "vllm")
    all_same = True
    for name in options.models:
        bf16, ours = (in_own_process(run, name, packed, options.batches, options.tokens)() for packed in (False, True))
        found = list(rows(name, bf16, ours))
        all_same &= all(row["same"] for row in found)
        print(add_results(options.name, device, found, KEYS, packages), flush=True)
    return int(not all_same)


if __name__ == "__main__":
    raise SystemExit(main())
