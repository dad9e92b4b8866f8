"""Units found by architecture: every matrix of every block, in patterns that match no other."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.df11.config import Df11Config
from samebits.df11.patterns import architecture_of, auto_patterns, find_units, read_patterns
from samebits.errors import FormatError, InputError, SamebitsError

# Tensors of tiny models of diffusers 0.42: {model: {"config": {"_class_name": ...}, "shapes": {name: shape}}}.
DIFFUSERS: dict[str, Any] = json.loads((Path(__file__).parent / "diffusers.json").read_text())
BLOCK = re.compile(r"(.*blocks|.*layers)\.\d+\..*")
TINY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "vocab_size": 40, "pad_token_id": 0,
}  # fmt: skip
DECODER = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
ENDS: dict[str, list[str]] = {"lm_head": [], r"model\.embed_tokens": []}


def language_model(kind: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Config and names of matrices of a tiny model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **TINY, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return config.to_dict(), [n for n, p in model.named_parameters() if p.dim() == 2 and n not in tied]


def matrices(model: str) -> list[str]:
    shapes = DIFFUSERS[model]["shapes"]
    return [name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_language_models_as_published(kind: str) -> None:
    config, names = language_model(kind, tie_word_embeddings=False)
    patterns = auto_patterns(config, names)
    assert list(patterns.items()) == [*ENDS.items(), (r"model\.layers\.\d+", DECODER)]
    assert sorted(name for unit in find_units(patterns, names).values() for name in unit) == sorted(names)


def test_phi_4_has_fused_projections() -> None:
    config, names = language_model("phi3", tie_word_embeddings=False)
    fused = ["self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert auto_patterns(config, names) == {**ENDS, r"model\.layers\.\d+": fused}
    assert sorted(chain(*find_units(auto_patterns(config, names), names).values())) == sorted(names)


def test_gemma_3_leaves_its_tied_embeddings_and_what_sees() -> None:
    config, names = language_model("gemma3_text")
    assert auto_patterns(config, names) == {r"model\.layers\.\d+": DECODER}
    inner = [name.replace("model.", "language_model.model.", 1) for name in names]
    both = [*inner, "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"]
    assert auto_patterns({"model_type": "gemma3"}, both) == {r"language_model\.model\.layers\.\d+": DECODER}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tied_embeddings_stay_as_they_are(kind: str) -> None:
    config, names = language_model(kind, tie_word_embeddings=True)
    assert list(auto_patterns(config, names)) == [r"model\.layers\.\d+"]
    assert list(auto_patterns(config, [*names, "lm_head.weight"])) == [r"model\.layers\.\d+"]
    assert list(auto_patterns({**config, "tie_word_embeddings": False}, names)) == [r"model\.layers\.\d+"]


@pytest.mark.parametrize("model", DIFFUSERS)
def test_every_matrix_of_every_block_is_in_a_unit(model: str) -> None:
    patterns = auto_patterns(DIFFUSERS[model]["config"], matrices(model))
    units = find_units(patterns, DIFFUSERS[model]["shapes"])
    inside = sorted(name for name in matrices(model) if BLOCK.fullmatch(name))
    assert sorted(name for unit in units.values() for name in unit) == inside
    assert all(path.rpartition(".")[2].isdecimal() for path in units)
    Df11Config.parse(Df11Config(patterns).to_dict())


def test_flux_as_published() -> None:
    patterns = auto_patterns(DIFFUSERS["FLUX.1"]["config"], matrices("FLUX.1"))
    joint = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.add_k_proj", "attn.add_v_proj", "attn.add_q_proj",
             "attn.to_out.0", "attn.to_add_out"]  # fmt: skip
    feed_forwards = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
    single = ["norm.linear", "proj_mlp", "proj_out", "attn.to_q", "attn.to_k", "attn.to_v"]
    assert list(patterns.items()) == [
        (r"transformer_blocks\.\d+", ["norm1.linear", "norm1_context.linear", *joint, *feed_forwards]),
        (r"single_transformer_blocks\.\d+", single),
    ]


def test_blocks_that_differ_get_patterns_of_their_own() -> None:
    """In Stable Diffusion 3.5 the last block has less, and the first ones of Medium have a second attention."""
    large, medium = (
        auto_patterns(DIFFUSERS[model]["config"], matrices(model)) for model in ("SD 3.5 Large", "SD 3.5 Medium")
    )
    assert list(large) == [r"transformer_blocks\.(?:0|1)", r"transformer_blocks\.2"]
    assert list(medium) == [rf"transformer_blocks\.{numbers}" for numbers in ("(?:0|1)", "2", "3")]
    assert "attn2.to_q" in medium[r"transformer_blocks\.(?:0|1)"]
    assert "ff_context.net.2" not in medium[r"transformer_blocks\.3"]


def test_of_an_unknown_architecture_each_numbered_block_is_a_unit() -> None:
    names = ["embed.weight", "enc.layers.0.mlp.0.up.weight", "enc.layers.0.mlp.1.up.weight", "enc.layers.1.q.weight",
             "proj.0.weight", "dec.3.out.weight", "dec.3.table"]  # fmt: skip
    assert architecture_of({"model_type": "new"}) is None
    patterns = auto_patterns({"model_type": "new"}, names)
    assert patterns == {
        r"enc\.layers\.0": ["mlp.0.up", "mlp.1.up"],
        r"enc\.layers\.1": ["q"],
        r"dec\.\d+": ["out"],
    }
    assert list(find_units(patterns, names)) == ["enc.layers.0", "enc.layers.1", "dec.3"]


@pytest.mark.parametrize(("config", "names"), [({"model_type": "llama"}, ["x.0.weight"]), ({}, ["a.weight"]), ({}, [])])
def test_nothing_fits(config: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(InputError, match="--patterns"):
        auto_patterns(config, names)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({}, "no patterns"),
        ({r"blocks\.9": ["a"]}, "matches no module"),
        ({r"blocks\.\d": ["a", "x"]}, r"blocks\.0\.x\.weight is not there"),
        ({r"blocks\.\d": ["a", "a"]}, r"blocks\.0\.a\.weight is a weight of unit blocks\.0 already"),
        ({r"blocks\.0": ["a"], r"blocks\.0\.a": []}, r"a\.weight is a weight of unit blocks\.0 already"),
        ({r"blocks\.0": ["a"], r"blocks\.\d": ["b"]}, r"blocks\.0 is a unit already"),
        ({r"blocks\.\d": []}, r"blocks\.0\.weight is not there"),
        ({"(": []}, "no regular expression"),
    ],
)
def test_patterns_that_do_not_fit(patterns: dict[str, list[str]], message: str) -> None:
    names = [f"blocks.{number}.{name}.weight" for number in (0, 1) for name in "ab"]
    with pytest.raises(SamebitsError, match=message):
        find_units(patterns, names)


def test_patterns_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "patterns.json"
    path.write_text(json.dumps({**ENDS, "x": ["a"]}))
    assert read_patterns(path) == {**ENDS, "x": ["a"]}
    for text in ("[]", '{"x": "a"}', '{"x": [1]}', '{"x": [""]}', "{"):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"patterns\.json"):
            read_patterns(path)
    with pytest.raises(InputError, match="no such file"):
        read_patterns(tmp_path / "none.json")
