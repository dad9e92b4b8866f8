"""lm-evaluation-harness on the example model, BF16 and compressed: is every log-likelihood the same number?

    pip install lm-eval
    python benchmarks/harness.py [--device cuda]     to results/harness.json

Two tasks from the chapters that the model was not trained on, without a network: which of four endings is a verse's
own (multiple choice), and how likely each verse is (rolling log-likelihood). Every figure that the harness gets from a
model is compared as the bytes of a 64-bit number. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

import samebits
from common import EXAMPLE_MODEL, PACKAGES, cpu_name, write_results
from samebits.verify import repeatable_attention

TEXT = EXAMPLE_MODEL.parent / "kjv.txt.gz"
HELD_OUT_EVERY = 20  # chapters, as in train.py
VERSES = 100
BATCH = 8

Samples = list[dict[str, Any]]


def held_out_verses() -> list[str]:
    """Verses of the chapters that training left out."""
    with gzip.open(TEXT, "rt", encoding="utf-8") as file:
        verses = [line.rstrip("\n").split(" ", 1) for line in file]
    chapters = [list(chapter) for _, chapter in groupby(verses, key=lambda verse: verse[0].rsplit(":", 1)[0])]
    return [text for chapter in chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] for _, text in chapter]


def endings(verses: list[str]) -> Iterator[dict[str, Any]]:
    """Half a verse, its own second half and three others', and which is its own."""
    random_ = random.Random(0)
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in (verse.split() for verse in verses)]
    for beginning, own in halves:
        others = [other for _, other in random_.sample(halves, 8) if other != own][:3]
        place = random_.randrange(4)
        choices = [" ".join(ending) for ending in (*others[:place], own, *others[place:])]
        yield {"query": " ".join(beginning), "choices": choices, "gold": place}


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A task of the harness on a file of these rows."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(file)}, "cache_dir": str(folder)}
    local = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    return {"task": name, **local, **options}


def tasks(folder: Path) -> list[dict[str, Any]]:
    verses = held_out_verses()[:VERSES]
    choose = {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"}
    rolling = [{"metric": "word_perplexity"}]
    return [
        write_task(folder, "endings", list(endings(verses)), output_type="multiple_choice", **choose),
        write_task(
            folder, "verses", [{"verse": verse} for verse in verses], output_type="loglikelihood_rolling",
            doc_to_text="", doc_to_target="verse", metric_list=rolling,
        ),
    ]  # fmt: skip


def evaluate(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """What the harness finds: results and samples by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    found = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH), tasks=tasks(folder), bootstrap_iters=0
    )
    assert found is not None
    return {"results": found["results"], "samples": found["samples"]}


def numbers(value: Any) -> Iterator[float]:
    """The log-likelihoods in a model's answers, however they are nested; not whether a choice was the likeliest."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)
    elif not isinstance(value, bool):
        yield float(value)


def different(left: Samples, right: Samples) -> tuple[int, int]:
    """Log-likelihoods of the same samples: how many, and how many differ in any bit."""
    assert [sample["doc_id"] for sample in left] == [sample["doc_id"] for sample in right]
    found = [
        struct.pack("d", one) != struct.pack("d", other)
        for both in zip(left, right, strict=True)
        for one, other in zip(*(numbers(sample["resps"]) for sample in both), strict=True)
    ]
    return len(found), sum(found)


@repeatable_attention()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    logging.disable(logging.WARNING)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE_MODEL)
    found = []
    for options in ({}, {"quantization_config": samebits.SamebitsConfig()}):
        model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE_MODEL, dtype=torch.bfloat16, **options)
        with tempfile.TemporaryDirectory() as folder:
            found.append(evaluate(model.to(device).eval(), tokenizer, Path(folder)))
    plain, packed = found
    rows = []
    for task, metric in (("endings", "acc,none"), ("verses", "word_perplexity,none")):
        count, differing = different(plain["samples"][task], packed["samples"][task])
        row = {"table": "harness", "task": task, "samples": len(plain["samples"][task])}
        row |= {"log_likelihoods": count, "different": differing, "metric": metric.partition(",")[0]}
        rows.append(row | {"bf16": plain["results"][task][metric], "samebits": packed["results"][task][metric]})
        print(rows[-1])
    name = torch.cuda.get_device_name() if device.startswith("cuda") else cpu_name()
    print(write_results("harness", name, rows, (*PACKAGES, "transformers", "lm_eval")))
    return int(any(row["different"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
