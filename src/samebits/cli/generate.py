"""samebits generate: text from a compressed or plain causal language model, through transformers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits.cli.console import note, print_json, print_lines
from samebits.errors import InputError
from samebits.jobs.device import resolve_device

EXAMPLE = Path("examples/king-james/model")


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
        raise InputError("transformers is not installed", mend="pip install 'samebits[transformers]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load(auto_class: str, path: str, **options: Any) -> Any:
    """``transformers.<auto_class>.from_pretrained(path)``.

    Raises:
        InputError: transformers is missing or cannot load it.
    """
    factory = getattr(import_transformers(), auto_class)
    try:
        return factory.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        mend = "give a folder or hub id with the config, tokenizer and weights of a causal language model"
        raise InputError(f"transformers cannot load it ({error})", where=path, mend=mend) from None


def generate(path: str | None, prompt: str, sampling: Sampling, device: str, as_json: bool) -> None:
    path = path or default_model()
    device = resolve_device(device)
    tokenizer = load("AutoTokenizer", path)
    model = load("AutoModelForCausalLM", path, dtype="auto").to(device).eval()
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("the prompt has no tokens", where=path, mend="give a longer --prompt")
    start = time.monotonic()
    tokens = run_model(model, inputs, sampling)
    seconds = time.monotonic() - start
    new = tokens[inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if as_json:
        print_json({"path": path, "prompt": prompt, "text": text, "tokens": new, "seconds": seconds, "device": device})
        return
    print_lines(text)
    note(f"{len(new)} tokens in {seconds:.1f} s on {device}")


def run_model(model: Any, inputs: Any, sampling: Sampling) -> list[int]:
    """Prompt and continuation as token ids."""
    torch.manual_seed(sampling.seed)
    names = ("input_ids", "attention_mask")
    with torch.inference_mode():
        output = model.generate(**{name: inputs[name] for name in names}, **sampling.options())
    return [int(token) for token in output[0]]
