"""samebits generate: text from a compressed or plain causal language model, through transformers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import samebits
from samebits.cli.console import compilation_noted, note, print_json, print_lines
from samebits.errors import InputError
from samebits.format.folder import Folder, single_file
from samebits.integrations import INSTALL_TRANSFORMERS
from samebits.integrations.model_shapes import WRONG_CONFIG
from samebits.jobs.device import resolve_device
from samebits.jobs.source import is_hub_id

EXAMPLE = Path("examples/king-james/model")
_SOURCES = Path(samebits.__file__).parent
_MEND = "give a folder or hub id with the config, tokenizer and weights of a causal language model"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; ``temperature`` None: greedily."""

    max_new_tokens: int
    temperature: float | None
    seed: int

    def options(self) -> dict[str, Any]:
        if self.temperature is None:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": True, "temperature": self.temperature}


def default_model() -> str:
    """The example model of a source checkout.

    Raises:
        InputError: this is not a source checkout.
    """
    path = Path(__file__).parents[3] / EXAMPLE
    if not path.is_dir():
        mend = f"give a model folder or hub id, or clone the samebits repository, which has one in {EXAMPLE}"
        raise InputError("no model given, and this installation has no example model", mend=mend)
    return str(path)


def import_transformers() -> Any:
    """The transformers module, quiet, with our format registered.

    Raises:
        InputError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise InputError("transformers is not installed", mend=INSTALL_TRANSFORMERS) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder or hub id.

    Raises:
        InputError: transformers is missing or cannot load it.
    """
    return _load("AutoTokenizer", path)


def load_model(path: str, **options: Any) -> Any:
    """The causal language model of a folder or hub id, on the CPU.

    Raises:
        InputError: transformers is missing or cannot load it, or weights are missing, which would be random.
    """
    model, found = _load("AutoModelForCausalLM", path, output_loading_info=True, **options)
    missing = sorted(found["missing_keys"])
    if missing:
        names = missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        raise InputError(f"{type(model).__name__} needs weights that are missing: {names}", where=path, mend=_MEND)
    return model


def _load(auto_class: str, path: str, **options: Any) -> Any:
    factory = getattr(import_transformers(), auto_class)
    _check_path(path)
    try:
        return factory.from_pretrained(path, **options)
    except (*WRONG_CONFIG, SafetensorError) as error:
        if "out of memory" in str(error):
            raise
        raise InputError(f"transformers cannot load it ({error})", where=path, mend=_MEND) from None


def _check_path(text: str) -> None:
    """Refuse what is no model folder as other commands do, and what is no hub id before it is asked for there."""
    path = Path(text)
    if path.is_dir():
        if not any(path.glob("*.bin")):  # weights in another format, which transformers alone reads
            Folder.scan(path)
    elif path.exists():
        raise InputError("a file, not a model folder", where=text, mend=_MEND)
    elif not is_hub_id(text):
        single_file(path)


@compilation_noted()
def generate(path: str | None, prompt: str, sampling: Sampling, device: str, graphs: bool, as_json: bool) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError("not a text in UTF-8", where="--prompt", mend="convert it") from None
    path = path or default_model()
    device = resolve_device(device)
    tokenizer = load_tokenizer(path)
    model = load_model(path, dtype="auto").to(device).eval()
    with running(path):
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("the prompt has no tokens", where=path, mend="give a longer --prompt")
    start = time.monotonic()
    with running(path):
        tokens = run_model(model, inputs, sampling, graphs)
    seconds = time.monotonic() - start
    new = tokens[inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if as_json:
        print_json({"path": path, "prompt": prompt, "text": text, "tokens": new, "seconds": seconds, "device": device})
        return
    print_lines(*text.split("\n"))
    note(f"{len(new)} tokens in {seconds:.1f} s on {device}")


@contextmanager
def running(path: str) -> Iterator[None]:
    """Inside, a model or tokenizer runs, which what its files say, or too many tokens, may not let it.

    Raises:
        InputError: transformers or torch raised an error, and nothing of samebits did.
    """
    try:
        yield
    except WRONG_CONFIG as error:
        origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if "out of memory" in str(error) or origin.is_relative_to(_SOURCES):
            raise
        what = str(error).strip().split("\n", 1)[0]
        mend = "give fewer tokens than it has positions for, or fetch config.json and the files beside it again"
        raise InputError(f"the model cannot be run ({what})", where=path, mend=mend) from None


def run_model(model: Any, inputs: Any, sampling: Sampling, graphs: bool = False) -> list[int]:
    """Prompt and continuation as token ids.

    Args:
        graphs: with a static cache, each step replayed as a CUDA graph; on a CPU nothing changes.
    """
    torch.manual_seed(sampling.seed)
    options = {name: inputs[name] for name in ("input_ids", "attention_mask")} | sampling.options()
    if graphs and model.device.type == "cuda":
        options["cache_implementation"] = "static"
    # not inference_mode, in which products of one input are made one by one (docs/plans.md)
    with torch.no_grad(), samebits.cuda_graphs(model) if graphs else nullcontext():
        output = model.generate(**options)
    return [int(token) for token in output[0]]
