"""vLLM's offline engine: compressed beside BF16, in processes of their own, tokens and log-probabilities compared.

    python benchmarks/vllm_generate.py                                  on a GPU, to results/vllm_generate.json
    python benchmarks/vllm_generate.py --cards 24                       the same file: all requests that come at once
    python benchmarks/vllm_generate.py --starts                         the same file: how long it takes to start
    python benchmarks/vllm_generate.py --models tiny --batches 1,2 --tokens 8 --name trial       anywhere, in a minute

Real configurations, synthetic weights (models.py), which vLLM loads tensor by tensor from a loader of this file; no
tokenizer. Each form is one engine with vLLM's defaults but for the batch sizes that it captures CUDA graphs of, those
measured, for its cache of prefixes, which would skip the prompts, and for Inductor: it is told how to make and round
sums (FIXED), which it otherwise decides by timing, anew with each compilation. ``default`` is BF16 without that.

``tokens_per_s`` is of all sequences together behind the first token: the time of a whole call less the median time of
calls for one token, median, slowest and fastest of RUNS calls; ``speed`` is beside ``default``. ``same`` says whether
tokens and log-probabilities of the last calls are the same, these compared as the numbers they are; ``repeats`` whether
a form's own two are.
``load_seconds`` is until the engine is ready: loading, compiling, finding plans, capturing. ``weight_bytes`` is what
vLLM says the model takes, and ``cache_tokens`` how many fit into its key-value cache.

Rows of the table "cards" are of requests that all come at once, with prompts of CARD_PROMPT tokens, on a smaller card:
its memory is emulated (torch's limit, and vLLM's share of it), its speed is this one's. How many of them run together
depends on what the weights leave for the cache, so products have other numbers of tokens in either form, and what they
write may differ: it is not compared. ``cache_tokens`` is None where vLLM does not start for lack of memory.

Rows of the table "starts" are of engines with all of vLLM's defaults: seconds until they are ready, the first with
empty caches of vLLM's, torch's and samebits', the second with what that has left there.
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
FIXED = {"combo_kernels": True, "benchmark_combo_kernel": False, "deterministic": True, "emulate_precision_casts": True}
FORMS = {"default": (False, {}), "bf16": (False, FIXED), "samebits": (True, FIXED)}  # packed or not; Inductor's options
BATCHES = [1, 8, 32, 128, 256]
KEYS = ("model", "batch", "tokens")
CARD_KEYS = ("model", "card_gib", "requests")
START_KEYS = ("model", "start")
START_ROOM = 8192
CACHES = ("SAMEBITS_CACHE", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
CARD_REQUESTS = 128
CARD_PROMPT, CARD_TOKENS = 1024, 256
CARD_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]  # that graphs are captured of
CARD_STEP = 4096  # tokens at most
CARD_RUNS = 3
SHARE = 0.92  # of a card that vLLM takes, by default
HOST_SHARE = 0.5  # of a node's memory, on CPUs
NO_ROOM = ("No available memory for the cache", "KV cache is needed", "less than desired GPU memory", "out of memory")


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
    """A checkpoint's, by name; the same each time."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        yield from named(name, synthetic(parameter.shape, seed, device))


def named(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """As checkpoints have it: there each expert has matrices of its own."""
    place, experts, leaf = name.partition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if not experts:
        yield name, tensor
        return
    for number, matrix in enumerate(tensor):
        for part, rows in zip(parts[leaf], matrix.chunk(len(parts[leaf])), strict=True):
            yield f"{place}{experts}{number}.{part}.weight", rows


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


def started(name: str, packed: bool, folder: str, **arguments: Any) -> tuple[Any, float]:
    """An engine in this process, and the seconds until it was ready; ``folder``: for the model's configuration."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    from vllm import LLM

    if not torch.cuda.is_available():
        arguments.setdefault("gpu_memory_utilization", HOST_SHARE)
    plugin.register()  # as vLLM does where samebits is installed
    register_loader()
    config_of(name).save_pretrained(folder)
    start = time.perf_counter()
    llm = LLM(
        folder, load_format=LOADER, quantization="samebits" if packed else None, skip_tokenizer_init=True,
        enable_prefix_caching=False, **arguments,
    )  # fmt: skip
    return llm, time.perf_counter() - start


def captures(sizes: list[int], **options: Any) -> dict[str, Any]:
    """Arguments for graphs of so many tokens, compiled with options of Inductor's."""
    config = {"cudagraph_capture_sizes": sizes, "inductor_compile_config": options}
    return {"max_num_seqs": max(sizes), "compilation_config": config}


def cache_tokens(llm: Any) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def prompts_of(name: str, count: int, length: int) -> list[dict[str, list[int]]]:
    ids = torch.randint(config_of(name).vocab_size, (count, length), generator=torch.Generator().manual_seed(count))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def run(name: str, form: str, batches: list[int], tokens: int) -> Engine:
    """One engine, in this process."""
    from vllm import SamplingParams

    packed, inductor = FORMS[form]
    with tempfile.TemporaryDirectory() as folder:
        llm, load_seconds = started(name, packed, folder, max_model_len=ROOM, **captures(batches, **inductor))
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    found = []
    for batch in batches:
        prompts = prompts_of(name, batch, PROMPT)

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
        print(f"{name}, {form}: {found[-1]}", flush=True)
    memory = getattr(worker.model_runner, "model_memory_usage", None)  # on GPUs
    return Engine(load_seconds, memory, cache_tokens(llm), found)


def run_card(name: str, packed: bool, gib: float, requests: int) -> tuple[list[float], int] | None:
    """Seconds of runs, and tokens in the cache, of an engine in this process, on a card of ``gib``; None: no room."""
    from vllm import SamplingParams

    memory = {}
    if torch.cuda.is_available():
        share = gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        memory["gpu_memory_utilization"] = SHARE * share
    sizes = [size for size in CARD_SIZES if size <= requests]
    try:
        with tempfile.TemporaryDirectory() as folder:
            llm, _ = started(
                name, packed, folder, max_model_len=CARD_PROMPT + CARD_TOKENS, max_num_batched_tokens=CARD_STEP,
                **memory, **captures(sizes),
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        if not any(text in str(error) for text in NO_ROOM):
            raise
        print(f"{name}, {gib} GiB: {error}", flush=True)
        return None
    sampling = SamplingParams(temperature=0, max_tokens=CARD_TOKENS, ignore_eos=True, detokenize=False)
    prompts, seconds = prompts_of(name, requests, CARD_PROMPT), []
    for _ in range(1 + CARD_RUNS):
        begin = time.perf_counter()
        made = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        assert all(len(each.outputs[0].token_ids) == CARD_TOKENS for each in made)
    return seconds[1:], cache_tokens(llm)


def card_row(name: str, gib: float, requests: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "table": "cards", "model": name, "card_gib": gib, "requests": requests, "prompt": CARD_PROMPT,
        "tokens": CARD_TOKENS,
    }  # fmt: skip
    timings = {}
    for key, packed in (("bf16", False), ("samebits", True)):
        found = in_own_process(run_card, name, packed, gib, requests)()
        row[f"{key}_cache_tokens"] = found and found[1]  # None: does not start
        if found:
            timings[key] = Timing.of(found[0])
            row |= timings[key].rates(f"{key}_tokens_per_s", requests * CARD_TOKENS)
    both = len(timings) == 2
    return row | {"speed": significant(timings["bf16"].median / timings["samebits"].median) if both else None}


def start(name: str, packed: bool, cache: str) -> float:
    """Seconds until an engine was ready that kept everything in a folder."""
    os.environ |= {key: os.path.join(cache, key) for key in CACHES}
    room = min(START_ROOM, config_of(name).max_position_embeddings)
    return started(name, packed, os.path.join(cache, "model"), max_model_len=room)[1]  # the place tells caches apart


def start_rows(name: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as bf16, tempfile.TemporaryDirectory() as ours:
        for number in (1, 2):
            seconds = [in_own_process(start, name, packed, cache)() for packed, cache in ((False, bf16), (True, ours))]
            named = zip(("bf16_seconds", "samebits_seconds"), map(significant, seconds), strict=True)
            yield {"table": "starts", "model": name, "start": number} | dict(named)


def rows(name: str, engines: dict[str, Engine]) -> Iterator[dict[str, Any]]:
    for each in zip(*(engine.found for engine in engines.values()), strict=True):
        by_form = dict(zip(engines, each, strict=True))
        row: dict[str, Any] = {"table": "vllm", "model": name, "batch": each[0].batch, "tokens": each[0].tokens}
        for key, found in by_form.items():
            engine = engines[key]
            row |= found.step.rates(f"{key}_tokens_per_s", found.batch)
            row |= Timing.of(found.first).columns(f"{key}_first_token_seconds")
            row |= {
                f"{key}_repeats": found.outputs[0] == found.outputs[1], f"{key}_outputs_digest": found.outputs[1],
                f"{key}_weight_bytes": engine.weight_bytes, f"{key}_cache_tokens": engine.cache_tokens,
                f"{key}_load_seconds": significant(engine.load_seconds),
            }  # fmt: skip
        speed = by_form["default"].step.median / by_form["samebits"].step.median
        same = by_form["bf16"].outputs[1] == by_form["samebits"].outputs[1]
        yield row | {"speed": significant(speed), "same": same}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="vllm_generate")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["Llama 3.1 8B"], help=", ".join(MODELS))
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=BATCHES)
    parser.add_argument("--tokens", type=int, default=128, help="generated, of each sequence")
    parser.add_argument("--cards", type=lambda text: [float(each) for each in text.split(",")], help="GiB of memory")
    parser.add_argument("--starts", action="store_true", help="how long they take")
    parser.add_argument("--requests", type=int, default=CARD_REQUESTS, help="at once, with --cards")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    packages = (*PACKAGES, "transformers", plugin.distribution() or "vllm")
    all_same = True
    for name in options.models:
        if options.starts:
            for row in start_rows(name):
                print(add_results(options.name, device, [row], START_KEYS, packages), row, flush=True)
            continue
        if options.cards:
            found = [card_row(name, gib, options.requests) for gib in options.cards]
            print(add_results(options.name, device, found, CARD_KEYS, packages), flush=True)
            continue
        engines = {form: in_own_process(run, name, form, options.batches, options.tokens)() for form in FORMS}
        found = list(rows(name, engines))
        all_same &= all(row["same"] for row in found)
        print(add_results(options.name, device, found, KEYS, packages), flush=True)
    return int(not all_same)


if __name__ == "__main__":
    raise SystemExit(main())
