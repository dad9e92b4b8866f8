"""config.json's dfloat11_config: what it says of units, and what it may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samebits.df11.config import KEY, Df11Config
from samebits.errors import FormatError, SamebitsError, VersionError

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "df11"
ENTRY = json.loads((VECTORS / "tiny-llama" / "config.json").read_text())[KEY]


def test_it_is_read_and_written_as_the_original_package_does() -> None:
    written = Df11Config.parse(ENTRY).to_dict()
    assert json.dumps(written) == json.dumps(ENTRY)


def test_patterns_name_the_weights_of_a_unit_in_order() -> None:
    config = Df11Config.parse(ENTRY)
    names = config.weights("model.layers.17")
    assert names is not None
    assert names[0] == "model.layers.17.self_attn.q_proj.weight"
    assert names[-1] == "model.layers.17.mlp.down_proj.weight"
    assert config.weights("lm_head") == ["lm_head.weight"]
    assert config.weights("model.layers.17.mlp") is None
    assert config.weights("model_layers.17") is None


@pytest.mark.parametrize("version", ["0.2.0", "0.3.1", "0.3.2", "0.5.0", "0.4"])
def test_versions_of_one_layout(version: str) -> None:
    assert Df11Config.parse({**ENTRY, "version": version}).version == version


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.1.0"},
        {"version": "0.6.0"},
        {"version": "1.0.0"},
    ],
)
def test_other_versions_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(VersionError):
        Df11Config.parse({**ENTRY, **change})


def test_pickles_are_called_what_they_are() -> None:
    with pytest.raises(VersionError, match="pickles"):
        Df11Config.parse({**ENTRY, "version": "0.1.0"})


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {**ENTRY, "version": None},
        {**ENTRY, "version": "new"},
        {**ENTRY, "threads_per_block": [256]},
        {**ENTRY, "bytes_per_thread": 4},
        {**ENTRY, "pattern_dict": None},
        {**ENTRY, "pattern_dict": {"lm_head": "weight"}},
        {**ENTRY, "pattern_dict": {"lm_head": [1]}},
        {**ENTRY, "pattern_dict": {"lm_head": [""]}},
        {**ENTRY, "pattern_dict": {"layers": ["a", "a"]}},
    ],
)
def test_malformed_entries(entry: object) -> None:
    with pytest.raises(FormatError):
        Df11Config.parse(entry)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "(a+)+", "(a|a)*b", "(?x)(a|a) *b", "a*a*a*a*b", "a?a?a?a?a", "a{99999999999999999999}"),
        *("(?:a|.)" * 40 + "b", "(" + "(a|.)" * 40 + ")b", "a*a*a*(?:" + "|".join("b" * 40) + ")"),
        *(".*.*.*" + "()" * 1000 + "!", ".*.*.*" + r"\B" * 1000 + "!", r"(a*)\1", "a\\"),
    ],
)
def test_patterns_that_cannot_be_used(pattern: str) -> None:
    with pytest.raises(SamebitsError, match=r"pattern|expression"):
        Df11Config({pattern: []})


def test_patterns_in_use() -> None:
    numbers = "|".join(map(str, range(400)))
    three = r"down_blocks\.\d+\.attentions\.\d+\.transformer_blocks\.\d+"
    config = Df11Config(
        {r"z\\1": [], three: [], r"blocks\.(?:0|1)\.\d+": ["a"], r"x\.[0-9]+": [], rf"y\.\d+\.(?:{numbers})": []}
    )
    assert config.weights("y.12.399") == ["y.12.399.weight"]
    assert config.weights("blocks.1.12") == ["blocks.1.12.a.weight"]
    assert config.weights("x.3") == ["x.3.weight"]
