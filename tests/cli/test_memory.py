"""estimate --context: what a model takes in memory, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samebits.cli import app, memory
from samebits.cli.generate import default_model
from samebits.errors import InputError
from samebits.format.folder import CONFIG
from samebits.integrations.model_memory import MOST_TOKENS, ModelMemory, Weights, model_memory
from samebits.kernels.tables import MAX_TABLE_BYTES
from samebits.nn.selection import Selection
from samebits.sizes import parse_size, size
from tests.cli.conftest import Command
from tests.fresh import run_python

CACHE = 4 * 2 * 5 * 32 * 2  # layers, keys and values, heads, their size, bytes: of a token of the example

known: dict[tuple[bytes, Selection, Weights | None], ModelMemory] = {}


@pytest.fixture(autouse=True)
def _each_model_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often tests ask of one: it is what its configuration says, wherever that lies."""

    def once(folder: Path, selection: Selection, weights: Weights | None) -> ModelMemory:
        config = folder / CONFIG
        key = config.read_bytes() if config.is_file() else b"", selection, weights
        if key not in known:
            known[key] = model_memory(folder, selection, weights)
        return known[key]

    monkeypatch.setattr(memory, "model_memory", once)


@pytest.fixture
def example() -> Path:
    return Path(default_model())


@pytest.fixture
def config(example: Path, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes((example / "config.json").read_bytes())
    return tmp_path


def test_what_fits(samebits: Command, example: Path) -> None:
    arguments = ("estimate", example, "--context", 512, "--batch", 4, "--prompt", 16, "--gpu", "20MB")
    report = samebits(*arguments, "--json").json
    assert (report["context"], report["batch"], report["prompt"]) == (512, 4, 16)
    assert report["cache_bytes"] == 4 * 512 * CACHE
    resident = sum(report[part] for part in ("packed_bytes", "table_bytes", "other_bytes", "cache_bytes"))
    assert resident < report["peak_bytes"] < report["needed_bytes"] == resident + report["decoded_layer_bytes"]
    assert (report["fits"], report["bf16_fits"], report["has_activations"]) == (True, True, True)
    assert report["longest_context"] == (20_000_000 - report["needed_bytes"]) // (4 * CACHE) + 512
    assert report["longest_context"] > report["bf16_longest_context"]
    assert (
        report["packed_cache_peak_bytes"] - report["packed_cache_bytes"] == report["peak_bytes"] - report["cache_bytes"]
    )
    outcome = samebits(*arguments)
    assert (
        f"samebits fits into 20MB, 4.61 MB to spare; up to {report['longest_context']:,} tokens would fit\n"
        in outcome.out
    )
    assert f" to spare; up to {report['bf16_longest_context']:,} tokens would fit\n" in outcome.out


def test_more_tokens_than_the_model_has_positions(samebits: Command, config: Path) -> None:
    path = config / "config.json"
    positions = json.loads(path.read_text())["max_position_embeddings"]
    for context, expected in (
        (positions, ""),
        (positions + 1, f"note: {positions + 1:,} tokens, but the model's configuration has {positions:,} positions\n"),
    ):
        outcome = samebits("estimate", config, "--context", context, "--json")
        assert (outcome.json["positions"], outcome.err) == (positions, expected)
        assert samebits("estimate", config, "--context", context).err == expected
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": -1}))  # as XLNet has it: none
    outcome = samebits("estimate", config, "--context", 9, "--json")
    assert (outcome.json["positions"], outcome.err) == (None, "")


def test_json_has_every_figure_of_the_table(samebits: Command, example: Path) -> None:
    arguments = ("estimate", example, "--context", 512, "--batch", 4)
    report = samebits(*arguments, "--json").json
    weights, tables = report["packed_bytes"] + report["other_bytes"], report["table_bytes"]
    kinds = ("", "packed_cache_", "bf16_")
    activations, peaks = ([report[f"{kind}{part}_bytes"] for kind in kinds] for part in ("activation", "peak"))
    rows = {
        "weights": (weights, weights, report["bf16_weight_bytes"]),
        "their decode tables": (tables, tables, 0),
        "key-value cache": (report["cache_bytes"], report["packed_cache_bytes"], report["cache_bytes"]),
        "activations and decoded weights": activations,
        "peak": peaks,
        "peak where products have no plans": (report["needed_bytes"], report["packed_cache_needed_bytes"], peaks[2]),
    }
    lines = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in samebits(*arguments).out.splitlines()]
    assert {line[0]: line[1:] for line in lines if line} == {name: [*map(size, row)] for name, row in rows.items()}
    for row in range(2):
        assert sum(list(rows.values())[part][row] for part in range(4)) == peaks[row]


def test_a_prompt_that_is_read_at_once_takes_more(samebits: Command, example: Path) -> None:
    arguments = ("estimate", example, "--context", 512, "--gpu", "20MB", "--json")
    at_once, behind = samebits(*arguments).json, samebits(*arguments, "--prompt", 16).json
    assert at_once["cache_bytes"] == behind["cache_bytes"]
    assert at_once["peak_bytes"] > behind["peak_bytes"]
    assert at_once["longest_context"] < behind["longest_context"]


def test_what_does_not_fit(samebits: Command, example: Path) -> None:
    outcome = samebits("estimate", example, "--context", 512, "--gpu", "10MB")
    assert "BF16 does not fit into 10MB; its weights alone are too large\n" in outcome.out
    report = samebits("estimate", example, "--context", 1, "--json").json
    for missing, text in (
        (1, "does not fit into {}; its weights alone are too large"),
        (0, "fits into {}, 0 B to spare; up to 1 token would fit"),
    ):
        limit = f"{report['needed_bytes'] - missing}B"
        assert f"samebits {text.format(limit)}\n" in samebits("estimate", example, "--context", 1, "--gpu", limit).out


def test_a_packed_cache_holds_more(samebits: Command, example: Path) -> None:
    arguments = ("estimate", example, "--context", 100_000, "--prompt", 128, "--gpu", "1GB")
    report = samebits(*arguments, "--json").json
    tokens = report["packed_cache_longest_context"]
    assert 1.05 < tokens / report["longest_context"] < 1.2  # one layer of four is decoded
    lines = samebits(*arguments).out.splitlines()
    [line] = [line for line in lines if line.startswith("samebits with PackedCache fits into 1GB, ")]
    assert line.endswith(f" to spare; up to {tokens:,} tokens would fit")


def test_a_config_that_no_model_can_be_made_of(samebits: Command, config: Path) -> None:
    path = config / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 0}))
    outcome = samebits("estimate", config, "--context", 9)
    assert (outcome.code, f"{path}: its model cannot be made (" in outcome.error) == (2, True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "320", "its model cannot be made (Validation error for field 'hidden_size'"),
        ("intermediate_size", -1, "its model cannot be made (Trying to create tensor with negative dimension"),
        ("architectures", [1], "its model cannot be made ("),
        *((key, 10**9, f"{key} is 1000000000; fetch") for key in ("num_hidden_layers", "n_layer", "decoder_layers")),
        ("sliding_window", "x", "the model cannot be run (new(): invalid data type 'str'); fetch it again\n"),
        ("sliding_window", [1], "the model cannot be run ("),
        ("sliding_window", 1.5, "the model cannot be run (slice indices must be integers"),
    ],
)
def test_a_config_with_wrong_values(samebits: Command, config: Path, key: str, value: object, message: str) -> None:
    """Some of which only show where the model runs."""
    path = config / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    outcome = samebits("estimate", config, "--context", 9)
    assert (outcome.code, f"{path}: {message}" in outcome.error) == (2, True)


def test_what_libraries_say_of_a_config_is_not_shown(config: Path) -> None:
    """transformers of the token, torch of a model without any weights."""
    path = config / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": -1, "hidden_size": 0}))
    assert run_python("from samebits.cli import main; main()", "estimate", str(config), "--context", "9") == ""


@pytest.mark.parametrize("options", [(), ("--min-weights", 1024)], ids=str)
def test_of_a_compressed_folder_counts_what_is_packed_there(
    samebits: Command, example: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """Whatever options say it would be: here one matrix of each layer, and the embedding, which the head decodes."""
    chosen = ("--include", "*.up_proj.*", "--include", "*embed*", "--min-weights", 1)
    assert samebits("compress", example, tmp_path / "packed", *chosen).code == 0
    before = samebits("estimate", example, "--context", 9, "--exact", "--json", *chosen).json
    report = samebits("estimate", tmp_path / "packed", "--context", 9, "--json", *options).json
    assert report["table_bytes"] == 5 * MAX_TABLE_BYTES
    assert report["decoded_layer_bytes"] == 2 * 320 * 3072
    assert report == before | {"path": report["path"]}


def test_patterns_of_no_name_are_noted(samebits: Command, example: Path) -> None:
    outcome = samebits("estimate", example, "--context", 9, "--exclude", "*embed*", "--exclude", "head.*")
    assert (outcome.code, outcome.err) == (0, f"note: --exclude head.* is the name of no tensor in {example}\n")


def test_without_weights(samebits: Command, example: Path, config: Path) -> None:
    there, supposed = (samebits("estimate", path, "--context", 9, "--json").json for path in (example, config))
    assert supposed["peak_bytes"] == pytest.approx(there["peak_bytes"], rel=0.01)
    assert supposed["bf16_peak_bytes"] == there["bf16_peak_bytes"]
    assert "10.75 bits a packed weight are supposed" in samebits("estimate", config, "--context", 9).out


def test_an_index_without_its_weights(samebits: Command, config: Path) -> None:
    """Is no folder that never had any."""
    (config / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model.safetensors"}}')
    outcome = samebits("estimate", config, "--context", 9)
    assert (outcome.code, "model.safetensors" in outcome.error) == (2, True)


def test_unusable_input(samebits: Command, example: Path) -> None:
    assert "go with --context" in samebits("estimate", example, "--gpu", "1GB").error
    assert "is no size" in samebits("estimate", example, "--context", 9, "--gpu", "much").error
    assert "no config.json" in samebits("estimate", example / "model.safetensors", "--context", 9).error


@pytest.mark.parametrize("option", ["--context", "--prompt", "--batch"])
def test_more_than_can_be_asked_about(samebits: Command, config: Path, option: str) -> None:
    arguments = {"--context": 1} | {option: app._MOST_SEQUENCES if option == "--batch" else app._MOST_TOKENS}
    assert samebits("estimate", config, *(word for pair in arguments.items() for word in pair)).code == 0
    arguments[option] += 1
    outcome = samebits("estimate", config, *(word for pair in arguments.items() for word in pair))
    assert (outcome.code, f"Invalid value for '{option}'" in outcome.error) == (2, True)


def test_the_most_tokens_are_those_of_the_search(samebits: Command, config: Path) -> None:
    assert app._MOST_TOKENS == MOST_TOKENS
    outcome = samebits("estimate", config, "--context", 9, "--gpu", "9999TB")
    assert " to spare; more than 16,777,216 tokens would fit\n" in outcome.out


def test_a_forward_pass_too_large_to_be_followed(samebits: Command, config: Path) -> None:
    path = config / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 1 << 24}))
    outcome = samebits("estimate", config, "--context", MOST_TOKENS, "--batch", 1 << 16)
    message = "samebits: a forward pass of 65,536 x 16,777,216 tokens is too large to be followed; give fewer\n"
    assert (outcome.code, outcome.error) == (2, message)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("24GiB", 24 << 30), ("80 gb", 80 * 10**9), ("1.5MB", 1_500_000), ("7B", 7)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "24", "GiB", "-1GB", "1e9B", "24Gi", "9" * 400 + "B"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="is no size"):
        parse_size(text)


def test_a_dfloat11_checkpoint_is_as_it_is_when_it_was_loaded(samebits: Command, example: Path, tmp_path: Path) -> None:
    """Packed anew, so it takes what its original takes."""
    assert samebits("compress", example, tmp_path / "df11", "--format", "df11").code == 0
    reports = [samebits("estimate", path, "--context", 100, "--json").json for path in (example, tmp_path / "df11")]
    original, df11 = ({name: value for name, value in report.items() if name != "path"} for report in reports)
    assert df11 == original
