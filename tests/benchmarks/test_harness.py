"""What the comparison through lm-evaluation-harness is made of, without the harness."""

from __future__ import annotations

import json
from pathlib import Path

import harness


def sample(number: int, *answers: tuple[float, bool]) -> dict[str, object]:
    return {"doc_id": number, "resps": [[answer] for answer in answers]}


def test_log_likelihoods_are_compared_as_bytes() -> None:
    left = [sample(0, (-1.5, True), (-2.5, False)), sample(1, (0.0, True))]
    assert harness.different(left, left) == (3, 0)
    right = [sample(0, (-1.5, True), (-2.5000000000000004, False)), sample(1, (-0.0, True))]
    assert harness.different(left, right) == (3, 2)


def test_endings_have_one_that_is_the_verses_own() -> None:
    verses = harness.held_out_verses()[:50]
    rows = list(harness.endings(verses))
    assert len(rows) == 50
    for verse, row in zip(verses, rows, strict=True):
        assert len(set(row["choices"])) >= 2
        assert len(row["choices"]) == 4
        assert f"{row['query']} {row['choices'][row['gold']]}".split() == verse.split()


def test_tasks_are_local_files(tmp_path: Path) -> None:
    for task in harness.tasks(tmp_path):
        file = Path(task["dataset_kwargs"]["data_files"]["test"])
        assert len([json.loads(line) for line in file.read_text().splitlines()]) == harness.VERSES
