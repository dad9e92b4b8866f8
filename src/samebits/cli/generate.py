"""samebits generate: text from a compressed or plain causal language model, through transformers."""

from __future__ import annotations

import logging
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import samebits
from samebits.cli.console import compilation_noted, note, print_json, print_lines
from samebits.errors import InputError
from samebits.format.folder import Folder, single_file
from samebits.integrations import INSTALL_TRANSFORMERS
from samebits.integrations.model_shapes import WRONG_CONFIG, check_size
from samebits.jobs.device import resolve_device
from samebits.jobs.hub import find_on_hub, resolve_source

EXAMPLE = Path("examples/king-james/model")
_SOURCES = Path(samebits.__file__).parent
_MEND = "give a folder or hub id with the config, tokenizer and weights of a causal language model"
_OTHER_WEIGHTS = "these weights do not belong to this config.json; fetch both again"
_NO_CODE = "samebits runs no code of a model: load it in Python, if you trust it"
_OTHER_FILES = "fetch them again, or save the model anew (save_pretrained writes safetensors)"
_FEWER_TOKENS = "give fewer tokens than it has positions for, or fetch config.json and the files beside it again"
_UNCONVERTED = re.compile(r"^(\S+) +\| \S*CONVERSION", re.MULTILINE)  # in a report of transformers, in colour or not


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
    """The example model of the clone that runs, or whose root is the current folder.

    Raises:
        InputError: there is no such clone.
    """
    for root in (Path(__file__).parents[3], Path()):
        if (root / EXAMPLE).is_dir():
            return str(root / EXAMPLE)
    mend = "give a model folder or hub id, or go to the root of a clone of samebits"
    raise InputError(f"no model given, and the example model, {EXAMPLE}, is not here", mend=mend)


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


def load_config(path: str) -> Any:
    """The config of the causal language model of a folder or hub id.

    Raises:
        InputError: transformers is missing or cannot load it, or it is that of another kind of model, or says that it
            has more layers than any.
    """
    transformers = import_transformers()

    def load(place: str) -> Any:
        said, _ = transformers.PreTrainedConfig.get_config_dict(place)
        check_size(said, Path(path))
        return transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)

    config = _from_files(load, path)
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not has_code and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"{type(config).__name__.removesuffix('Config')} is no causal language model"
        raise InputError(what, where=path, mend=_MEND)
    return config


def load_model(path: str, **options: Any) -> Any:
    """The causal language model of a folder or hub id, on the CPU.

    Raises:
        InputError: transformers is missing or cannot load it, it is another kind of model, or weights are missing or
            have other shapes, which would be random.
    """
    load_config(path)
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # so that we can say which
    model, found = _load("AutoModelForCausalLM", path, **options)
    kind, missing, others = type(model).__name__, sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if others:
        name, shape, expected = others[0]
        what = f"{kind} needs weights of other shapes: {name} as {list(expected)}, not {list(shape)}{_more(others)}"
        raise InputError(what, where=path, mend=_OTHER_WEIGHTS)
    if missing:
        what = f"{kind} needs weights that are missing: {missing[0]}{_more(missing)}"
        raise InputError(what, where=path, mend=_MEND)
    if unused := sorted(found["unexpected_keys"]):
        note(f"note: {kind} does not use {unused[0]}{_more(unused)} of the weights in {path}")
    return model


def _more(found: Sequence[object]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


def _load(auto_class: str, path: str, **options: Any) -> Any:
    factory = getattr(import_transformers(), auto_class)
    return _from_files(partial(factory.from_pretrained, trust_remote_code=False, **options), path)


def _from_files(load: Callable[[str], Any], path: str) -> Any:
    """What ``load``, of transformers, makes of a model's files.

    Raises:
        InputError: it cannot.
    """
    place = _checked(path)
    with _kept_reports() as reports:
        try:
            return load(place)
        except (pickle.UnpicklingError, EOFError):
            what = "its weights are damaged, or of another kind than tensors"
            raise InputError(what, where=path, mend=_OTHER_FILES) from None
        except (*WRONG_CONFIG, SafetensorError) as error:
            if "out of memory" in str(error):
                raise
            if "trust_remote_code" in str(error):
                raise InputError("transformers would have to run code of it", where=path, mend=_NO_CODE) from None
            if names := _UNCONVERTED.findall("\n".join(reports)):
                what = f"transformers cannot convert the weights of {names[0]}{_more(names)}"
                raise InputError(what, where=path, mend=_OTHER_WEIGHTS) from None
            raise InputError(f"transformers cannot load it ({error})", where=path, mend=_MEND) from None


@contextmanager
def _kept_reports() -> Iterator[list[str]]:
    """Inside, what transformers reports of weights while it loads them, which nobody sees, and its errors refer to."""
    logger, reports = logging.getLogger("transformers.modeling_utils"), []

    def keep(record: logging.LogRecord) -> bool:
        reports.append(record.getMessage())
        return record.levelno >= logging.ERROR

    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addFilter(keep)
    try:
        yield reports
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)


def _checked(text: str) -> str:
    """Where transformers finds a model: on the hub, but for a revision or a folder there, which are downloaded here.

    Raises:
        InputError: what is no model folder, as other commands say it, or can be nothing on the hub.
    """
    path, on_hub = Path(text), find_on_hub(text)
    if on_hub is not None:
        return text if text == on_hub.repository else str(resolve_source(text))
    if path.is_dir():
        if not any(path.glob("*.bin")):  # weights in another format, which transformers alone reads
            Folder.scan(path)
    elif path.exists():
        raise InputError("a file, not a model folder", where=text, mend=_MEND)
    else:
        single_file(path)
    return text


@compilation_noted()
def generate(path: str | None, prompt: str, sampling: Sampling, device: str, graphs: bool, as_json: bool) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError("not a text in UTF-8", where="--prompt", mend="convert it") from None
    path = path or default_model()
    device = resolve_device(device)
    if graphs and device == "cpu":
        note("note: --graphs is for GPUs, and changes nothing on a CPU")
    load_config(path)  # of another kind of model there need be no tokenizer
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
def running(path: str, mend: str = _FEWER_TOKENS) -> Iterator[None]:
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
