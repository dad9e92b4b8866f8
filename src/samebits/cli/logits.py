"""samebits verify --logits: two models over the same text, one after the other, every logit compared as bytes."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits.cli.commands import GIVE_CAST, open_source
from samebits.cli.console import print_json, print_lines, progress_bar
from samebits.cli.generate import load_config, load_model, load_tokenizer, running
from samebits.errors import InputError, MismatchError, ResourceError
from samebits.format.mapping import scratch
from samebits.format.safetensors_file import FLOATS, SUFFIX
from samebits.jobs.device import resolve_device
from samebits.progress import Progress
from samebits.sizes import size
from samebits.verify import first_difference, is_cast, repeatable_attention

WINDOW = 256  # tokens of a forward pass at most
RANDOM_TOKENS = 1024  # without a text
_ONE_MODEL = "compare two forms of one model"


@dataclass(frozen=True)
class LogitMismatch:
    """The first logit that differs.

    Attributes:
        position: of the text, in tokens.
        token: whose logit it is.
        found, expected: both values as hexadecimal words.
    """

    position: int
    token: int
    found: str
    expected: str

    def __str__(self) -> str:
        where = f"at position {self.position} the logit of token {self.token}"
        return f"{where} is {self.found} instead of {self.expected}"


@dataclass(frozen=True)
class LogitVerdict:
    """What was compared: ``positions`` times ``vocabulary`` logits of ``dtype``."""

    positions: int
    vocabulary: int
    dtype: str
    mismatch: LogitMismatch | None


def verify_logits(path: str, against: str, text: Path | None, cast: bool, device: str, as_json: bool) -> None:
    """Report whether both models give the same logits.

    Raises:
        MismatchError: they do not.
        InputError: a model or text that cannot be used.
        ResourceError: no space for the logits.
    """
    device = resolve_device(device)
    _check_dtypes(path, against, cast)
    window, vocabulary = _limits(path, against)
    tokens = _random_tokens(vocabulary) if text is None else read_tokens(against, text, vocabulary)
    with progress_bar("verify") as progress:
        verdict = compare(path, against, tokens.split(window), device, progress)
    count = verdict.positions * verdict.vocabulary
    if as_json:
        mismatch = vars(verdict.mismatch) if verdict.mismatch else None
        found = {**vars(verdict), "mismatch": mismatch, "identical": mismatch is None, "logits": count}
        cast_to = "bf16" if cast else None
        print_json({"path": path, "against": against, "cast": cast_to, "text": text, "device": device, **found})
    if verdict.mismatch:
        command = f"samebits verify {path} --against {against}{' --cast bf16' if cast else ''}"
        mend = f"`{command}` tells whether the weights differ"
        raise MismatchError(f"not identical: {verdict.mismatch}", where=path, mend=mend)
    if not as_json:
        what = f"{verdict.positions:,} tokens, {count:,} logits on {device}"
        original = f"{against} cast to BF16" if cast else against
        print_lines(f"{path}: the logits are identical to those of {original}, {what}")


def _check_dtypes(path: str, against: str, cast: bool) -> None:
    """Refuse a model that was rounded, without ``cast``: the other one, loaded in BF16 as well, gives the same logits.

    Raises:
        InputError: a weight has another dtype in ``path`` than in ``against``, or than ``cast`` makes of it.
    """
    if Path(against).is_dir() and not any(Path(against).glob(f"*{SUFFIX}")):
        return  # weights in another format, which transformers alone reads
    entries = open_source(path).entries
    for original in open_source(against):
        entry = entries.get(original.name, original)
        if original.dtype in FLOATS and entry.dtype != original.dtype and not (cast and is_cast(entry, original)):
            what = f"{entry.dtype} instead of {original.dtype}, and both would run in BF16"
            leave_out = "compare the weights instead: leave --logits out"
            raise InputError(what, where=entry.where, mend=GIVE_CAST if is_cast(entry, original) else leave_out)


def _limits(path: str, against: str) -> tuple[int, int]:
    """How many tokens both models read at once, and how many they know.

    Raises:
        InputError: they do not know as many.
    """
    ours, theirs = (load_config(each).get_text_config() for each in (path, against))
    if ours.vocab_size != theirs.vocab_size:
        what = f"its vocabulary is of {ours.vocab_size:,} tokens, that of {against} of {theirs.vocab_size:,}"
        raise InputError(what, where=path, mend=_ONE_MODEL)
    positions = [getattr(config, "max_position_embeddings", None) or WINDOW for config in (ours, theirs)]
    limits = [number for number in positions if number > 0]  # XLNet says -1: none
    return min([WINDOW, *limits]), ours.vocab_size


def _random_tokens(vocabulary: int) -> torch.Tensor:
    return torch.randint(max(1, vocabulary), (RANDOM_TOKENS,), generator=torch.Generator().manual_seed(0), device="cpu")


def read_tokens(model: str, text: Path, vocabulary: int) -> torch.Tensor:
    """A text as the model's tokenizer cuts it: int64 [tokens].

    Raises:
        InputError: it is not UTF-8, or empty, or has tokens that are not among the first ``vocabulary``.
    """
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("not a text in UTF-8", where=str(text), mend="convert it") from None
    tokenizer = load_tokenizer(model)
    with running(model):
        tokens = torch.tensor(tokenizer(words, verbose=False)["input_ids"], dtype=torch.int64, device="cpu")
    if not words or not len(tokens):  # a tokenizer may begin each text with a token of its own
        raise InputError("the text has no tokens", where=str(text), mend="give a longer one")
    if (last := int(tokens.max())) >= vocabulary:
        what = f"token {last:,}, which its tokenizer makes of {text}, is not in its vocabulary of {vocabulary:,}"
        raise InputError(what, where=model, mend="fetch the tokenizer again, or leave --text out")
    return tokens


@repeatable_attention()
def compare(path: str, against: str, windows: Sequence[torch.Tensor], device: str, progress: Progress) -> LogitVerdict:
    """Run ``against``, then ``path``, over the same tokens: a forward pass for each window.

    Raises:
        InputError: a model cannot be run, or their logits differ in shape or dtype.
    """
    model = _load(against, device)
    positions = sum(map(len, windows))
    expected, done = torch.empty(0, device="cpu"), 0
    for logits in _logits(model, windows):
        if not done:
            expected = _space(positions, logits)
        expected[done : done + len(logits)] = logits
        done += len(logits)
        progress(done * logits[0].nbytes, 2 * expected.nbytes)
    del model
    _free()
    model, done = _load(path, device), 0
    for logits in _logits(model, windows):
        mismatch = _first_mismatch(logits, expected[done : done + len(logits)], done)
        if mismatch:
            return LogitVerdict(done, expected.shape[1], str(expected.dtype), mismatch)
        done += len(logits)
        progress(expected.nbytes + done * logits[0].nbytes, 2 * expected.nbytes)
    return LogitVerdict(done, expected.shape[1], str(expected.dtype), None)


def _load(path: str, device: str) -> Any:
    return load_model(path, dtype=torch.bfloat16).to(device).eval()


def _logits(model: Any, windows: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Of each window [tokens, vocabulary], on the CPU."""
    for window in windows:
        with running(model.name_or_path), torch.inference_mode():
            logits = model(input_ids=window[None].to(model.device), use_cache=False).logits[0].cpu().contiguous()
        yield logits


def _space(positions: int, logits: torch.Tensor) -> torch.Tensor:
    """Room for the logits of all positions: [positions, vocabulary]."""
    shape = (positions, logits.shape[1])
    nbytes = positions * logits[0].nbytes
    try:
        return scratch(nbytes).view(logits.dtype).reshape(shape)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        mend = "give a shorter --text, or set TMPDIR to a folder with more space"
        raise ResourceError(f"no space for {size(nbytes)} of logits", where=error.filename, mend=mend) from None


def _first_mismatch(found: torch.Tensor, expected: torch.Tensor, start: int) -> LogitMismatch | None:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        described, wanted = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (found, expected))
        raise InputError(f"logits {described} instead of {wanted}", mend=_ONE_MODEL)
    words = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (found, expected)]
    first = first_difference(*words)
    if first is None:
        return None
    width = found.element_size()
    position, token = divmod(first // width, found.shape[1])
    value = slice(first // width * width, (first // width + 1) * width)
    return LogitMismatch(start + position, token, *("0x" + array[value][::-1].tobytes().hex() for array in words))


def _free() -> None:
    """Memory of a model that is no longer there, so that the next one fits."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
