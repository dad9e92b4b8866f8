"""Commands whose source is on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samebits.cli.generate import default_model
from tests.cli.conftest import Command
from tests.jobs.checkpoints import write_folder
from tests.jobs.hub import Hub

MODEL = "some/pipeline@v1/language_model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """With a pipeline, whose folders are the example model and another one."""
    shutil.copytree(default_model(), tmp_path / MODEL)
    write_folder(tmp_path / "some" / "pipeline@v1" / "transformer")
    (tmp_path / "some" / "pipeline@v1" / "model_index.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    return Hub(tmp_path, monkeypatch)


def test_inspect_downloads_no_weights(samebits: Command, hub: Hub) -> None:
    report, local = (samebits("inspect", source, "--json").json for source in (MODEL, default_model()))
    assert report == local | {"path": MODEL}
    for arguments in ((), ("--tensors",)):
        outcome = samebits("inspect", MODEL, *arguments)
        assert (outcome.out.startswith(f"{MODEL} "), outcome.err) == (True, "")
    assert not hub.downloaded
    assert sum(hub.bytes_read.values()) < 50_000


def test_estimate_says_what_it_downloads(samebits: Command, hub: Hub) -> None:
    outcome = samebits("estimate", MODEL, "--exclude", "none")
    assert outcome.out.startswith(f"{MODEL}: 10.82 MB -> ")
    notes = (
        f"note: downloading 11.02 MB of {MODEL}\n",
        f"note: --exclude none is the name of no tensor in {MODEL}\n",
    )
    assert outcome.err == "".join(notes)
    assert samebits("estimate", MODEL, "--json").json["path"] == MODEL


def test_memory_is_told_from_the_config_alone(samebits: Command, hub: Hub) -> None:
    report, local = (samebits("estimate", source, "--context", 9, "--json").json for source in (MODEL, default_model()))
    assert (report["path"], report["bf16_peak_bytes"]) == (MODEL, local["bf16_peak_bytes"])
    assert report["peak_bytes"] == pytest.approx(local["peak_bytes"], rel=0.01)
    outcome = samebits("estimate", MODEL, "--context", 9)
    assert outcome.out.startswith(f"{MODEL}: 9 tokens, batch 1")
    assert "10.75 bits a packed weight are supposed" in outcome.out
    assert set(hub.downloaded) == {f"language_model/{name}.json" for name in ("config", "generation_config")}


def test_memory_is_told_from_the_weights_where_all_are_to_be_encoded(samebits: Command, hub: Hub) -> None:
    arguments = ("--context", 9, "--json", "--exact")
    report, local = (samebits("estimate", source, *arguments).json for source in (MODEL, default_model()))
    assert report == local | {"path": MODEL}


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("estimate",), ("estimate", "--context", 9), ("verify",), ("compress", "destination"), ("bench",)],
)
def test_a_pipeline_is_none_of_its_models(samebits: Command, hub: Hub, command: tuple[object, ...]) -> None:
    name, *arguments = command
    outcome = samebits(name, "some/pipeline@v1", *arguments)
    assert outcome.code == 2
    assert outcome.error.endswith(f"; give one of these: {MODEL}, some/pipeline@v1/transformer\n")
    assert not hub.downloaded


def test_generate_from_a_folder(samebits: Command, hub: Hub) -> None:
    arguments = ("--greedy", "--max-new-tokens", 3, "--device", "cpu", "--json")
    report, local = (samebits("generate", source, *arguments).json for source in (MODEL, default_model()))
    assert (report["path"], report["tokens"]) == (MODEL, local["tokens"])
