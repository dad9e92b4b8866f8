"""benchmarks/df11.py on a tiny model and without a GPU: all of it but the clock."""

from __future__ import annotations

from pathlib import Path

import pytest

import df11
import dfloat11_kernel
import gpu
import peers
import samebits.df11.operator  # noqa: F401  (defines the operator)
import tables
from tests.benchmarks.test_without_gpu import run_all

TINY = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, peers, dfloat11_kernel):
        monkeypatch.setattr(module, "time_graph", run_all)
    for module in (gpu, dfloat11_kernel):
        monkeypatch.setattr(module, "DISTINCT_BYTES", 500_000)
    monkeypatch.setattr(df11, "WARM_UP", 0)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    df11.write_forms(folder, TINY, "cpu")
    return folder


def test_decoding_in_both_forms() -> None:
    rows = df11.measure_decoding([(64, 256), (256, 128)], 1, "cpu")
    assert [row["form"] for row in rows] == ["samebits", "DFloat11's layout"]
    assert all(row["decode_microseconds"] == 1e6 and row["bits_per_weight"] < 16 for row in rows)


def test_all_forms_of_a_model(forms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(df11.measure_forms(forms, 4, 1, "cpu"))
    assert [row["form"] for row in rows] == list(df11.FORMS)
    assert all(row["tokens_per_s"] > 0 and row["graphs_tokens_per_s"] > 0 for row in rows)
    assert rows[0]["bits_per_weight"] > max(row["bits_per_weight"] for row in rows[1:])
    source = {"device": "a device", "versions": {}, "rows": [row | {"date": "2026-01-01"} for row in rows]}
    monkeypatch.setattr(tables, "read_results", lambda name: source)
    assert "keep_format" in tables.table_text("df11", "forms")


def test_other_tokens_are_not_timed(forms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(df11, "generate", lambda model, *_, **__: [type(model.lm_head).__name__])
    with pytest.raises(SystemExit, match="samebits: other tokens"):
        list(df11.measure_forms(forms, 1, 1, "cpu"))
