"""Tensor parallelism: ranks hold packed parts of the weights, and compute what ranks with plain parts compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.errors import InputError
from samebits.integrations import numbers
from samebits.integrations.transformers import parallel
from samebits.nn.packed_module import PackedModule
from tests.df11.checkpoints import VECTORS
from tests.integrations import ranks
from tests.integrations.models import Reference, assert_same_bits, assert_same_checkpoint, compress_folder, make
from tests.integrations.torchrun import RANKS, ROOT, TWO_GPUS, torchrun

DF11 = "df11"  # a checkpoint in DFloat11's layout
NAMES = ["llama", "llama-tied", "qwen3", DF11]
NAMES += ["mixtral"] if numbers(version("transformers")) >= parallel.MOE_MINIMUM else []
WIDE = "wide"  # on GPUs: large enough for fused products
SOURCES = ["while loading", "from a folder"]


@dataclass(frozen=True)
class Launched:
    """What torchrun left: a folder, what each rank found, and what all of them printed."""

    folder: Path
    found: list[dict[str, Any]]
    printed: str


def launch(originals: Callable[[str], Reference], folder: Path, device: str) -> Launched:
    names = NAMES if device == "cpu" else [*NAMES, WIDE]
    for name in names:
        source = originals(name).folder
        (folder / name).mkdir()
        (folder / name / "plain").symlink_to(source, target_is_directory=True)
        if name == DF11:
            (folder / name / "packed").symlink_to(VECTORS / "tiny-llama", target_is_directory=True)
        else:
            compress_folder(source, folder / name / "packed")
    make("llama", folder / "example", vocab_size=3072)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "example" / file).symlink_to(ROOT / "examples" / "king-james" / "model" / file)
    printed = torchrun(device, ranks.__file__, folder, *names)
    return Launched(folder, [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)], printed)


@pytest.fixture(scope="module")
def originals(references, plain: Reference, tmp_path_factory) -> Callable[[str], Reference]:
    """The uncompressed models by name."""

    def original(name: str) -> Reference:
        if name == WIDE:
            sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16}
            return make("llama", tmp_path_factory.mktemp(name), **sizes)
        return plain if name == DF11 else references(name)

    return original


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def launched(request: pytest.FixtureRequest, originals, tmp_path_factory) -> Launched:
    return launch(originals, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("source", [*SOURCES, "dequantized"])
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_on_every_rank(launched, name: str, source: str) -> None:
    for found in launched.found:
        expected, result = found[name]["plain"], found[name][source]
        assert_same_bits(result["logits"], expected["logits"])
        assert result["tokens"].tolist() == expected["tokens"].tolist()


@pytest.mark.parametrize("launched", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_with_a_graph_for_gradients(launched, name: str) -> None:
    """transformers takes another way then."""
    for found in launched.found:
        for source in SOURCES:
            assert_same_bits(found[name][source]["with_gradients"], found[name]["plain"]["with_gradients"])


@pytest.mark.parametrize("launched", [pytest.param("cuda", marks=TWO_GPUS)], indirect=True)
@pytest.mark.parametrize("source", SOURCES)
def test_products_that_may_be_fused(launched, source: str) -> None:
    test_same_bits_on_every_rank(launched, WIDE, source)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_a_packed_half(launched, originals, name: str, source: str) -> None:
    model = originals(name).model
    layers = {path for path, _ in model.named_parameters() if "_proj" in path and "norm" not in path}
    matrices = {path for path in layers if model.get_parameter(path).dim() > 1}
    for found in launched.found:
        packed = found[name][source]["packed"]
        assert matrices <= packed.keys()
        for path in matrices:
            shape, nbytes = packed[path]
            words = model.get_parameter(path).numel()
            assert 2 * torch.Size(shape).numel() == words
            assert nbytes < 0.8 * words  # of 2 bytes each, half of them
        assert not found[name]["plain"]["packed"]


@pytest.mark.parametrize("name", NAMES)
def test_saved_whole(launched, originals, name: str) -> None:
    saved, plain = launched.folder / name / "saved", originals(name)
    assert_same_checkpoint(saved, plain.folder)
    model = plain.load(saved)
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedModule)
    plain.assert_same(model)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_are_refused(launched, name: str) -> None:
    """Before anything has changed: what else is found was computed behind that."""
    for found in launched.found:
        said = found[name]["refusal"]
        assert "weight: adapters cannot be put on a compressed model that is split over devices;" in said
        assert said.endswith(" []")


def test_example(launched) -> None:
    assert launched.printed.startswith(ranks.PROMPT)


@pytest.mark.parametrize("option", ["fsdp_size", "pp_size", "ep_size", "dp_replicate_size", "enable_expert_parallel"])
def test_other_kinds_of_parallelism_are_refused(llama: Reference, llama_folder: Path, option: str) -> None:
    config = llama.model_class.config_class.from_pretrained(llama_folder)
    config.distributed_config = SimpleNamespace(tp_size=2, **{option: 2})
    with pytest.raises(InputError, match=f"cannot be split over devices by {option}"):
        llama.load(llama_folder, config=config)


def test_experts_are_refused_where_they_would_be_wrong(references, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "version", lambda name: "5.17.0")
    with pytest.raises(InputError, match=r"experts cannot be split over devices before transformers 5\.23"):
        parallel.bind_late(references("mixtral").model)
