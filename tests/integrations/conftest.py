from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

import samebits
from samebits.df11.checkpoint import open_checkpoint
from samebits.jobs.decompress import Decompression
from samebits.jobs.options import RunOptions
from samebits.nn import recipe
from tests.df11.checkpoints import VECTORS, originals
from tests.integrations.models import ARCHITECTURES, MIN_WEIGHTS, Reference, make, outputs
from tests.jobs.checkpoints import stored


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory):
    """Reference models by name, each made once."""
    return cache(lambda name: make(name, tmp_path_factory.mktemp(name) / "plain"))


@pytest.fixture(params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, references) -> Reference:
    return references(request.param)


@pytest.fixture
def llama(references) -> Reference:
    return references("llama")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """DFloat11's tiny-llama as decompressed: its tensors are proved to be those that the original encoder was given."""
    folder = tmp_path_factory.mktemp("df11") / "plain"
    Decompression(open_checkpoint(VECTORS / "tiny-llama"), folder, RunOptions(device="cpu")).run()
    assert stored(folder) == originals("tiny-llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(0, 1024, (2, 20), generator=torch.Generator().manual_seed(0))
    return Reference(folder, model, tokens, *outputs(model, tokens))


@pytest.fixture
def config() -> samebits.SamebitsConfig:
    return samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)


@pytest.fixture
def llama_folder(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> Path:
    """A compressed folder in a single file."""
    llama.load(quantization_config=config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of packed tensors in the order in which modules decode them whole."""
    return watched(monkeypatch, "decoded_weight")


@pytest.fixture
def row_decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The same of those of which rows, or other entries of the first dimension, are decoded."""
    return watched(monkeypatch, "decode_rows")


@pytest.fixture
def expert_decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The same of those of which the experts are decoded that are routed to."""
    return watched(monkeypatch, "decode_experts")


def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    original = getattr(recipe, name)

    def counting(packed, *args):
        shapes.append(tuple(packed.shape))
        return original(packed, *args)

    monkeypatch.setattr(recipe, name, counting)
    return shapes
