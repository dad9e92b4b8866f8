"""sentence-transformers with a compressed model in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertTokenizer

import samebits
from tests.integrations.models import MIN_WEIGHTS, Reference, assert_same_bits, compress_folder

sentence_transformers = pytest.importorskip("sentence_transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "in", "the", "beginning"]


def make(folder: Path, **options: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    torch.manual_seed(0)
    transformer = Transformer(str(folder), model_kwargs={"dtype": torch.bfloat16, **options})
    return sentence_transformers.SentenceTransformer(modules=[transformer, Pooling(64), Dense(64, 32)], device="cpu")


def encoded(model: Any) -> torch.Tensor:
    result: torch.Tensor = model.encode(["in the beginning", "the"], convert_to_tensor=True)
    return result


def test_own_modules_are_saved_plain(references, tmp_path: Path) -> None:
    references("bert").model.save_pretrained(tmp_path / "plain")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "plain")
    model = make(tmp_path / "plain")
    model[2].bfloat16()
    expected = encoded(model)
    assert "2.linear.weight" in samebits.compress(model, min_weights=MIN_WEIGHTS).packed
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(
        str(tmp_path / "saved"), device="cpu", model_kwargs={"dtype": torch.bfloat16}
    )
    assert_same_bits(encoded(model), expected)
    assert_same_bits(loaded[2].linear.weight, model[2].linear.weight.clone())
    loaded[2].bfloat16()
    assert_same_bits(encoded(loaded), expected)


@pytest.mark.parametrize("way", ["folder", "while loading", "in place"])
def test_the_same_embeddings(references, way: str, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    plain: Reference = references("bert")
    folder = tmp_path / "plain"
    plain.model.save_pretrained(folder)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    expected = make(folder)
    if way == "folder":
        model = make(compress_folder(folder, tmp_path / "packed"))
    elif way == "while loading":
        model = make(folder, quantization_config=config)
    else:
        model = make(folder)
        samebits.compress(model, min_weights=MIN_WEIGHTS)
    assert any(parameter.dtype == torch.uint8 for parameter in model.parameters())
    assert {parameter.data_ptr() for parameter in model.parameters()} == {
        parameter.data_ptr() for _, parameter in model.named_parameters()
    }
    assert model.dtype == torch.bfloat16
    assert_same_bits(encoded(model), encoded(expected))
