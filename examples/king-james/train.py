"""Train the small Llama that the demo runs on, from the King James text beside this file.

    python examples/king-james/train.py --out examples/king-james/model --device cuda

Needs torch and transformers, no network. Every 20th chapter is held out; the weights kept are those of the lowest
held-out loss. They are trained in float32 (bfloat16 autocast) and stored as bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gzip
import json
import math
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
VOCABULARY = 3072
WINDOW = 256
HELD_OUT_EVERY = 20
PROMPTS = ("In the beginning", "And the LORD said unto", "Blessed are")


def read_chapters(path: Path) -> list[str]:
    """Chapters as text, a verse a line, from lines ``Gen1:1 In the beginning ...`` (a gzip file or plain text)."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        verses = [line.rstrip("\n").split(" ", 1) for line in file]
    by_chapter = groupby(verses, key=lambda verse: verse[0].rsplit(":", 1)[0])
    return ["\n".join(text for _, text in chapter) for _, chapter in by_chapter]


def train_tokenizer(chapters: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; a text starts with <s>, and </s> ends a chapter."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(chapters, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=2 * WINDOW
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> torch.Tensor:
    """All chapters behind each other as int64 token ids, 1-D."""
    ids = [[*chapter, tokenizer.eos_token_id] for chapter in tokenizer(chapters, verbose=False)["input_ids"]]
    return torch.tensor([token for chapter in ids for token in chapter])


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=832,
        num_hidden_layers=4,
        num_attention_heads=10,
        num_key_value_heads=5,
        max_position_embeddings=2 * WINDOW,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, probability: float) -> list[torch.utils.hooks.RemovableHandle]:
    """Dropout after the embedding and on every residual branch, which Llama itself does not have."""

    def drop(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, probability, module.training)

    branches = ("embed_tokens", "o_proj", "down_proj")
    modules = [module for name, module in model.named_modules() if name.endswith(branches)]
    return [module.register_forward_hook(drop) for module in modules]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices, none for the norms' scales."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def token_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats; windows: int64 [batch, WINDOW + 1]."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def random_windows(stream: torch.Tensor, batch: int) -> torch.Tensor:
    starts = torch.randint(len(stream) - WINDOW, (batch, 1), device=stream.device)
    return stream[starts + torch.arange(WINDOW + 1, device=stream.device)]


@torch.no_grad()
def held_out_loss(model: nn.Module, stream: torch.Tensor, batch: int) -> float:
    """Mean loss over all whole windows of the held-out stream."""
    model.eval()
    windows = stream.unfold(0, WINDOW + 1, WINDOW)
    total = sum(token_loss(model, part).item() * len(part) for part in windows.split(batch))
    model.train()
    return total / len(windows)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 4 %, then a half cosine down to 2 %."""
    warm_up = max(1, steps // 25)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def optimise(model: nn.Module, stream: torch.Tensor, options: argparse.Namespace) -> Iterator[int]:
    """Train, and yield the number of steps done every ``options.evaluate_every`` steps and at the end."""
    groups = parameter_groups(model, options.weight_decay)
    optimiser = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_factor(step, options.steps))
    for step in range(1, options.steps + 1):
        token_loss(model, random_windows(stream, options.batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % options.evaluate_every == 0 or step == options.steps:
            yield step


def train(model: LlamaForCausalLM, training: torch.Tensor, held_out: torch.Tensor, options: argparse.Namespace) -> int:
    """Leave the model with its best weights; returns the step they are from."""
    best_loss, best_step, best_weights = math.inf, 0, model.state_dict()
    start = time.perf_counter()
    for step in optimise(model, training, options):
        loss = held_out_loss(model, held_out, options.batch)
        print(f"step {step:5d}  held-out loss {loss:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
        if loss < best_loss:
            best_loss, best_step, best_weights = loss, step, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return best_step


def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """What the model writes greedily after each prompt."""
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=60, do_sample=False)
        yield tokenizer.decode(tokens[0], skip_special_tokens=True)


def record(options: argparse.Namespace, best_step: int, loss: float, tokens: int) -> dict[str, object]:
    """What training.json says about a run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "options": {name: value for name, value in vars(options).items() if name not in ("text", "out", "device")},
        "training_tokens": tokens,
        "best_step": best_step,
        "held_out_loss": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 2),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=HERE / "kjv.txt.gz", help="lines 'reference text', .gz or plain")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, made if needed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {WINDOW} tokens a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1611)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    chapters = read_chapters(options.text)
    held_out = chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    tokenizer = train_tokenizer(chapters)
    training, test = (token_stream(tokenizer, part).to(options.device) for part in (chapters, held_out))
    model = build_model(tokenizer).to(options.device).train()
    print(f"{model.num_parameters():,} parameters, {len(training):,} training and {len(test):,} held-out tokens")

    dropout = add_dropout(model, options.dropout)
    best_step = train(model, training, test, options)
    for handle in dropout:
        handle.remove()
    model = model.to(torch.bfloat16).eval()
    loss = held_out_loss(model, test, options.batch)
    model.eval()

    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    report = record(options, best_step, loss, len(training))
    (options.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"stored weights: held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}, from step {best_step}")
    for text in samples(model, tokenizer):
        print(f"---\n{text}")


if __name__ == "__main__":
    main()
