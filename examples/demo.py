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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import where_bits_go
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import samebits
from samebits.cli.run import run
from samebits.format.container import Checkpoint

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


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Print how long the block took."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.2f} s")


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
def outputs(model: PreTrainedModel, windows: torch.Tensor, prompt: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Logits of the windows, and the tokens generated greedily after the prompt."""
    logits = model(input_ids=windows).logits
    mask = torch.ones_like(prompt)
    return [logits, model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)]


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compared as bytes: -0.0 differs from 0.0, and a NaN equals itself."""
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def peak_memory(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.max_memory_allocated() / 1e6:.1f} MB allocated on the GPU, both models loaded"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{peak / 1e6:.0f} MB for this process: Python, torch, and both models"


def compare_models(original: Path, packed: Path, options: argparse.Namespace) -> bool:
    """Load both folders with transformers, run both, print what was compared; True if not a bit differs."""
    tokenizer = AutoTokenizer.from_pretrained(packed)
    windows = text_windows(tokenizer, options.device)
    prompt = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(options.device)
    results = []
    for name, folder in (("BF16", original), ("samebits", packed)):
        with stage(f"{name}: loaded"):
            model = load(folder, options.device)
        print(f"{name}: {weight_bytes(model):,} bytes of weights in memory")
        with stage(f"{name}: {WINDOWS * WINDOW:,} tokens read, {options.tokens} generated"):
            results.append(outputs(model, windows, prompt, options.tokens))
    (logits, text), (packed_logits, packed_text) = results
    same = identical(logits, packed_logits) and identical(text, packed_text)
    print(f"{'identical' if same else 'NOT IDENTICAL'}: {logits.numel():,} logits, {text.numel()} tokens")
    print(f"\n{tokenizer.decode(packed_text[0], skip_special_tokens=True)}\n")
    return same


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

    command("compress", str(original), str(packed), "--overwrite")
    command("verify", str(packed), "--against", str(original))
    print("\nNow both with transformers, AutoModelForCausalLM.from_pretrained:")
    same = compare_models(original, packed, options)

    parts = draw_picture(original, packed, options.out)
    limit = f"the limit 8 + entropy is {parts.limit:.3f}"
    print(f"{parts.bits_per_weight:.3f} bits per packed weight, everything counted; {limit}")
    print(f"peak memory: {peak_memory(options.device)}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
