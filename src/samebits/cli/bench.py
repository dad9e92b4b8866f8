"""samebits bench: one model compressed and as BF16, side by side on the device at hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from samebits import api
from samebits.bf16 import same_words
from samebits.cli.commands import open_source
from samebits.cli.console import compilation_noted, note, print_json, print_lines, print_table
from samebits.cli.failure import json_of
from samebits.cli.generate import Sampling, default_model, import_transformers, load_model, run_model, running
from samebits.errors import InputError, MismatchError
from samebits.format.container import Checkpoint, Entry
from samebits.format.packed import PackedTensor
from samebits.jobs.device import resolve_device
from samebits.jobs.options import CompressOptions
from samebits.sizes import size
from samebits.verify import original_bytes, repeatable_attention

_TENSOR_WORDS = 64 << 20  # tensors are measured until together they have about this many words
_REPEATS = 5
_GENERATIONS = 3
_NEW_TOKENS = 32
_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Coding:
    """Speeds over a model's tensors, in weights per second; each tensor was first proved to come back identical."""

    tensors: int
    weights: int
    bits_per_weight: float
    encode: float
    decode: float


@dataclass(frozen=True)
class Running:
    """One way to run a model: seconds to load, bytes of parameters and buffers, tokens per second at batch 1."""

    load_seconds: float
    resident_bytes: int
    tokens_per_second: float


@compilation_noted()
def bench(path: str | None, device: str, as_json: bool) -> None:
    device = resolve_device(device)
    checkpoint = open_source(path or default_model())
    source = checkpoint.path
    try:
        coding = measure_coding(checkpoint, device)
        models, not_run = _measure_models(checkpoint, device)
    except MismatchError as error:
        if as_json:
            sys.stdout.write(json_of(error))
        raise
    if as_json:
        running = {name: vars(model) for name, model in models.items()}
        found = {"models": running, "same_tokens": None if not_run else True, "not_run": not_run}
        print_json({"path": source, "device": device, "coding": vars(coding), **found})
        return
    print_lines(
        f"{source} on {device}: {coding.tensors} tensors measured, {coding.bits_per_weight:.2f} bits per weight",
        f"encode {coding.encode / 1e9:.2f} G weights/s, decode {coding.decode / 1e9:.2f} G weights/s",
    )
    if models:
        _print_models(models)


def _measure_models(checkpoint: Checkpoint, device: str) -> tuple[dict[str, Running], str | None]:
    """As measure_models; none, and why, if it is no causal language model."""
    try:
        return measure_models(checkpoint, device), None
    except InputError as error:
        reason = " ".join(str(error).split())
        note(f"note: no model was run: {reason}")
        return {}, reason


def _print_models(models: dict[str, Running]) -> None:
    rows = [
        (name, size(model.resident_bytes), f"{model.load_seconds:.2f} s", f"{model.tokens_per_second:.1f}")
        for name, model in models.items()
    ]
    print_table("the same tokens from both", ("model", "resident", "loading", "tokens/s"), rows)


def measure_coding(checkpoint: Checkpoint, device: str) -> Coding:
    """Encode and decode the first tensors of a checkpoint.

    Raises:
        InputError: it has no tensor to pack.
        MismatchError: one that does not come back identical.
    """
    weights = nbytes = tensors = 0
    encoding = decoding = 0.0
    for tensor in _tensors(checkpoint, device):
        packed = api.encode(tensor)
        _prove(tensor, packed)
        encoding += _seconds(partial(api.encode, tensor), device)
        decoding += _seconds(partial(api.decode, packed), device)
        tensors, weights, nbytes = tensors + 1, weights + tensor.numel(), nbytes + packed.nbytes
        if weights >= _TENSOR_WORDS:
            break
    if not tensors:
        raise InputError("no BF16 tensor to measure", where=str(checkpoint.path), mend="give a BF16 model")
    return Coding(tensors, weights, 8 * nbytes / weights, weights / encoding, weights / decoding)


def _tensors(checkpoint: Checkpoint, device: str) -> Iterator[torch.Tensor]:
    options = CompressOptions()
    for entry in checkpoint:
        if options.packs(entry):
            yield _original(entry).to(device, copy=True)


def _original(entry: Entry) -> torch.Tensor:
    return original_bytes(entry).view(torch.bfloat16).reshape(entry.shape)


def _prove(tensor: torch.Tensor, packed: PackedTensor) -> None:
    if not same_words(api.decode(packed), tensor):
        raise MismatchError(
            "a tensor did not come back identical", mend="report it with the output of `samebits doctor`"
        )


def _seconds(function: Callable[[], object], device: str, repeats: int = _REPEATS) -> float:
    """Median wall time of a call, the device's work included."""
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@repeatable_attention()
def measure_models(checkpoint: Checkpoint, device: str) -> dict[str, Running]:
    """Load and run the model both ways.

    Raises:
        InputError: it cannot be loaded.
        MismatchError: the two generate different tokens.
    """
    import_transformers()  # or it would count as loading
    from samebits.integrations.transformers.quantizer import SamebitsConfig

    path = str(checkpoint.path)
    packing = {} if checkpoint.is_packed else {"quantization_config": SamebitsConfig()}
    compressed, tokens = _run(lambda: load_model(path, dtype=torch.bfloat16, **packing), device)
    plain, expected = _run(lambda: _load_plain(path, checkpoint.is_packed), device)
    if tokens != expected:
        raise MismatchError("the two models generated different tokens", where=path, mend="report it as a bug")
    return {"samebits": compressed, "BF16": plain}


def _load_plain(path: str, is_packed: bool) -> Any:
    model = load_model(path, dtype=torch.bfloat16)
    return model.dequantize() if is_packed else model


def _run(load_model: Callable[[], Any], device: str) -> tuple[Running, list[int]]:
    start = time.perf_counter()
    model = load_model().to(device).eval()
    _synchronize(device)
    loading = time.perf_counter() - start
    resident = sum(t.nbytes for t in {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values())
    tokens = _generate(model, device)
    seconds = _seconds(lambda: _generate(model, device), device, _GENERATIONS)
    return Running(loading, resident, (len(tokens) - _PROMPT_TOKENS) / seconds), tokens


def _generate(model: Any, device: str) -> list[int]:
    prompt = torch.arange(1, _PROMPT_TOKENS + 1, device=device)[None] % model.config.get_text_config().vocab_size
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    with running(model.name_or_path):
        return run_model(model, inputs, Sampling(_NEW_TOKENS, None, 0))
