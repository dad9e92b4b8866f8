"""The main job, end to end, on the embedded model: compress, verify, load, generate, and compare every bit.

    python examples/demo.py [--model FOLDER] [--out demo-out] [--device cpu|cuda] [--prompt TEXT] [--tokens N]

Needs no network. Exit code 1 if anything differs by one bit.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import where_bits_go
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import samebits
from samebits.cli.run import run
from samebits.format.container import Checkpoint
from samebits.jobs.summary import Sizes
from samebits.verify import repeatable_attention

HERE = Path(__file__).resolve().parent
MODEL = HERE / "king-james" / "model"
TEXT = HERE / "king-james" / "kjv.txt.gz"
WINDOWS, WINDOW = 16, 256  # of the text on which logits are compared


def command(*arguments: str) -> None:
    """Run a samebits command as a user would type it."""
    print(f"\n$ samebits {' '.join(arguments)}", flush=True)
    code = run(list(arguments))
    if code:
        sys.exit(code)


@dataclass(frozen=True)
class Run:
    """One of the two models at work: bytes, seconds, and what came out."""

    weight_bytes: int
    load_seconds: float
    seconds: float
    peak_bytes: int
    logits: torch.Tensor
    tokens: torch.Tensor


def load(folder: Path, device: str) -> PreTrainedModel:
    """Plain transformers, for a compressed folder as for any other."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes that parameters and buffers hold, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def text_windows(tokenizer: PreTrainedTokenizerBase, device: str) -> torch.Tensor:
    """Windows of the text the model was trained on: int64 [WINDOWS, WINDOW]."""
    with gzip.open(TEXT, "rt", encoding="utf-8") as file:
        verses = [next(file).split(" ", 1)[1] for _ in range(WINDOWS * WINDOW // 16)]
    tokens = tokenizer("".join(verses), verbose=False)["input_ids"][: WINDOWS * WINDOW]
    return torch.tensor(tokens, device=device).reshape(WINDOWS, WINDOW)


@torch.no_grad()
def run_model(folder: Path, windows: torch.Tensor, prompt: torch.Tensor, tokens: int) -> Run:
    """Load a model; logits of the windows, and the tokens generated greedily after the prompt."""
    device, mask = str(windows.device), torch.ones_like(prompt)
    if prompt.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = load(folder, device)
    loaded = time.perf_counter()
    logits = model(input_ids=windows).logits
    text = model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False).cpu()
    return Run(
        weight_bytes(model), loaded - start, time.perf_counter() - loaded, peak_bytes(device), logits.cpu(), text
    )


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compared as bytes: -0.0 differs from 0.0, and a NaN equals itself."""
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def peak_bytes(device: str) -> int:
    """On a GPU of torch's allocations since the last reset, else of this whole process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@repeatable_attention()
def run_both(original: Path, packed: Path, options: argparse.Namespace) -> tuple[Run, Run]:
    """Run both folders with plain transformers, and print what they wrote."""
    tokenizer = AutoTokenizer.from_pretrained(packed)
    windows = text_windows(tokenizer, options.device)
    prompt = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(options.device)
    for folder in (original, packed):  # imports and kernels, so that they are not timed
        run_model(folder, windows[:1], prompt, 1)
    plain, same = (run_model(folder, windows, prompt, options.tokens) for folder in (original, packed))
    print(f"\n{tokenizer.decode(same.tokens[0], skip_special_tokens=True)}\n")
    return plain, same


def report(sizes: Sizes, parts: where_bits_go.Anatomy, plain: Run, same: Run, options: argparse.Namespace) -> None:
    """All that was measured, BF16 beside samebits."""
    work = f"read {WINDOWS * WINDOW:,} tokens, write {options.tokens}"
    rows = [
        ("", "BF16", "samebits", ""),
        ("on disk", *map(megabytes, (sizes.original_bytes, sizes.stored_bytes)), f"{100 * sizes.ratio:.1f} %"),
        ("weights in memory", megabytes(plain.weight_bytes), megabytes(same.weight_bytes), ""),
        ("bits a weight", "16.000", f"{parts.bits_per_weight:.3f}", f"the limit, 8 + entropy, is {parts.limit:.3f}"),
        ("load", f"{plain.load_seconds:.2f} s", f"{same.load_seconds:.2f} s", ""),
        (work, f"{plain.seconds:.2f} s", f"{same.seconds:.2f} s", ""),
    ]
    if options.device.startswith("cuda"):
        rows.append(("peak memory on the GPU", megabytes(plain.peak_bytes), megabytes(same.peak_bytes), ""))
    for name, left, right, remark in rows:
        print(f"{name:<32}{left:>12}{right:>12}   {remark}".rstrip())
    print(f"peak memory of this process: {peak_bytes('cpu') / 1e6:.0f} MB, Python and torch included")


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def draw_picture(original: Path, packed: Path, out: Path) -> where_bits_go.Anatomy:
    plain = Checkpoint.open(original)
    parts = where_bits_go.anatomy(Checkpoint.open(packed), plain)
    title = "Where the bits of a language model go"
    for path in where_bits_go.draw(parts, where_bits_go.shown_words(plain), title, out / "where-the-bits-go"):
        print(f"picture: {path}")
    return parts


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a BF16 language model in a folder")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default="And it came to pass, when")
    parser.add_argument("--tokens", type=int, default=80)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packed = options.out / "model"
    original = Path(os.path.relpath(options.model))
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    print(f"samebits {samebits.__version__}, torch {torch.__version__}, on {device}")
    print("(a first run compiles the codec, once; later ones start at once)")

    command("compress", str(original), str(packed), "--overwrite")
    command("verify", str(packed), "--against", str(original))
    print("\nBoth with transformers, AutoModelForCausalLM.from_pretrained, from the same prompt:")
    plain, same = run_both(original, packed, options)
    parts = draw_picture(original, packed, options.out)
    sizes = Sizes.of(Checkpoint.open(packed))
    report(sizes, parts, plain, same, options)

    equal = identical(plain.logits, same.logits) and identical(plain.tokens, same.tokens)
    what = f"{sizes.original_bytes:,} bytes of weights, {same.logits.numel():,} logits, {same.tokens.numel()} tokens"
    print(f"{'identical' if equal else 'NOT IDENTICAL'}: {what}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
