"""Plans on disk: what cannot be read does no harm, and several processes may write at once."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock

from samebits.kernels.linear.products import LinearPlan
from samebits.plans import store
from samebits.plans.environment import Environment
from samebits.plans.key import ExpertsKey, Operation, PlanKey
from samebits.plans.store import ExpertsOutcome, GroupOutcome, Outcome, PlanStore
from tests.fresh import context
from tests.plans.conftest import ENVIRONMENT

VERSION = 8
KEY = PlanKey(4096, 1024, 1, False, "blas=Cublas reduction=(True,True)")
OUTCOMES = {
    KEY: Outcome(LinearPlan(3, 1), "", 12.25, 30.5, 0.25e-6),
    KEY._replace(tokens=2, has_bias=True): Outcome(None, "decoding first is faster", 31.0, 30.5),
    KEY._replace(state="other"): Outcome(None, "no split gives cuBLAS's bits"),
}


GROUPS = {(KEY, KEY._replace(rows=8)): GroupOutcome(4, 2.5, 0.5e-6), (KEY, KEY): GroupOutcome(None)}
EXPERTS_KEY = ExpertsKey(Operation.GROUPED, 128, 1536, 2048, 64, KEY.state)
EXPERTS = {
    EXPERTS_KEY: ExpertsOutcome(0, "", 12.25, 30.5),
    EXPERTS_KEY._replace(operation=Operation.BATCHED): ExpertsOutcome(2, "decoding first is faster", 31.0, 30.5),
    EXPERTS_KEY._replace(pairs=8): ExpertsOutcome(None, "no variant gives the bits of grouped_mm"),
}


def filled(folder: Path) -> PlanStore:
    plans = PlanStore(ENVIRONMENT, folder)
    for keys, group in GROUPS.items():
        plans.add_group(keys, group)
    for key, outcome in OUTCOMES.items():
        plans.add(key, outcome)
    for experts, found in EXPERTS.items():
        plans.add_experts(experts, found)
    return plans


def test_there_and_back(tmp_path: Path) -> None:
    assert filled(tmp_path).read() == PlanStore(ENVIRONMENT, tmp_path).read() == OUTCOMES
    assert PlanStore(ENVIRONMENT, tmp_path).groups() == GROUPS
    assert PlanStore(ENVIRONMENT, tmp_path).experts() == EXPERTS
    assert [each.fused for each in EXPERTS.values()] == [0, None, None]
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix != ".lock"] == [".json"]


def test_a_file_is_read_again_where_it_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, other = OUTCOMES[KEY], KEY._replace(tokens=2)
    files: list[Path] = []
    original = store.read
    monkeypatch.setattr(store, "read", lambda path: files.append(path) or original(path))
    here, elsewhere = PlanStore(ENVIRONMENT, tmp_path), PlanStore(ENVIRONMENT, tmp_path)
    assert here.read() == {}
    here.add(KEY, found)
    files.clear()
    assert [here.read() for _ in range(3)] == [{KEY: found}] * 3
    assert len(files) == 1
    elsewhere.add(other, found)
    assert here.read() == {KEY: found, other: found}


def test_a_later_outcome_replaces_an_earlier_one(tmp_path: Path) -> None:
    plans = filled(tmp_path)
    plans.add(KEY, Outcome(None, "later"))
    plans.add_group((KEY, KEY), GroupOutcome(2, 1.0))
    plans.add_experts(EXPERTS_KEY, ExpertsOutcome(3))
    assert plans.experts() == {**EXPERTS, EXPERTS_KEY: ExpertsOutcome(3)}
    assert plans.read() == {**OUTCOMES, KEY: Outcome(None, "later")}
    assert plans.groups() == {**GROUPS, (KEY, KEY): GroupOutcome(2, 1.0)}


def test_another_environment_has_plans_of_its_own(tmp_path: Path) -> None:
    filled(tmp_path)
    newer = Environment(**{**vars(ENVIRONMENT), "cublas": "14.0.0"})
    assert PlanStore(newer, tmp_path).read() == {}


GOOD_ENTRY = {**KEY._asdict(), **asdict(OUTCOMES[KEY])}
GOOD_GROUP = {"products": [KEY._asdict()] * 2, "variant": 1, "gained_us": 3.5, "carried_us": None}


GOOD_EXPERTS = {**EXPERTS_KEY._asdict(), **asdict(EXPERTS[EXPERTS_KEY])}


def content(**changed: object) -> str:
    good = {"version": VERSION, "environment": {}, "plans": [GOOD_ENTRY], "groups": [GOOD_GROUP]}
    return json.dumps({**good, "experts": [GOOD_EXPERTS], **changed})


def without(part: str) -> str:
    return json.dumps({name: value for name, value in json.loads(content()).items() if name != part})


BROKEN = {
    "empty": "",
    "cut off": content()[:-40],
    "no object": "[1, 2]",
    "a number": "3",
    **{f"no {part}": without(part) for part in ("plans", "groups", "experts")},
    "plans of nothing": content(plans=[None]),
    "newer version": content(version=VERSION + 1),
    "too deep": '{"a":' * 100_000,
    "not UTF-8": b"\xff\xfe{}",
    "no number": content(environment={"gpu": float("nan")}),
    "too large a number": content(environment={"gpu": 1}).replace('"gpu": 1', '"gpu": 1e999'),
    **{
        f"{name} {value!r}": content(plans=[{**GOOD_ENTRY, name: value}])
        for name, value in [
            ("rows", 0), ("rows", "8"), ("columns", 1.5), ("tokens", True), ("has_bias", 1), ("state", None),
            ("plan", 3), ("plan", {"split": 0, "variant": 0}), ("plan", {"split": 2, "variant": -1}),
            ("plan", {"split": 2}), ("fused_us", "fast"), ("fused_us", 10**310),
        ]
    },
    **{
        f"group {name} {value!r}": content(groups=[{**GOOD_GROUP, name: value}])
        for name, value in [
            ("variant", -1), ("variant", "1"), ("gained_us", "much"), ("products", 3), ("products", [{}]),
            ("products", []), ("products", GOOD_GROUP["products"][:1]),
        ]
    },
    **{
        f"experts {name} {value!r}": content(experts=[{**GOOD_EXPERTS, name: value}])
        for name, value in [
            ("operation", "matmul"), ("operation", 1), ("experts", 0), ("rows", "8"), ("columns", 1.5), ("pairs", True),
            ("state", None), ("variant", -1), ("variant", "1"), ("decode_us", "slow"),
        ]
    },
}  # fmt: skip


def test_what_is_broken_was_whole(tmp_path: Path) -> None:
    plans = PlanStore(ENVIRONMENT, tmp_path)
    plans.path.write_text(content())
    assert (plans.read(), plans.experts()) == ({KEY: OUTCOMES[KEY]}, {EXPERTS_KEY: EXPERTS[EXPERTS_KEY]})
    assert len(plans.groups()) == 1


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_ignored_and_replaced(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans, broken = PlanStore(ENVIRONMENT, tmp_path), BROKEN[name]
    plans.path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    with caplog.at_level(logging.WARNING):
        assert plans.read() == plans.groups() == plans.experts() == {}
    assert str(plans.path) in caplog.text
    plans.add(KEY, OUTCOMES[KEY])
    assert plans.read() == {KEY: OUTCOMES[KEY]}


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    plans = PlanStore(ENVIRONMENT, tmp_path / "file" / "plans")
    with caplog.at_level(logging.WARNING):
        plans.add(KEY, OUTCOMES[KEY])
    assert "plans are not kept on disk" in caplog.text
    assert "SAMEBITS_CACHE" in caplog.text
    assert plans.read() == {}


def test_a_folder_where_nothing_can_be_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FileLock", Mock(side_effect=NotImplementedError("no flock")))
    plans = PlanStore(ENVIRONMENT, tmp_path)
    with caplog.at_level(logging.WARNING):
        plans.add(KEY, OUTCOMES[KEY])
    assert "plans are not kept on disk: no flock" in caplog.text
    assert plans.read() == {}


def test_no_home(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMEBITS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    plans = PlanStore(ENVIRONMENT)
    with caplog.at_level(logging.WARNING):
        plans.add(KEY, OUTCOMES[KEY])
    assert "plans are not kept on disk" in caplog.text
    assert plans.read() == {}
    assert not list(tmp_path.iterdir())


def test_others_may_read_plans(tmp_path: Path) -> None:
    """As the user's umask has it, for a folder that several share."""
    before = os.umask(0o027)
    try:
        plans = filled(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(plans.path.stat().st_mode) == 0o640


def test_a_lock_that_is_not_given_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = filled(tmp_path)
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.05)
    with FileLock(plans.path.with_suffix(".lock")), caplog.at_level(logging.WARNING):
        plans.add(KEY, Outcome(None, "later"))
        assert plans.read() == OUTCOMES
    assert "plans are not kept on disk" in caplog.text


def write_many(folder: Path, process: int) -> None:
    plans = PlanStore(ENVIRONMENT, folder)
    for tokens in range(1, 21):
        plans.add(KEY._replace(rows=8 * process, tokens=tokens), Outcome(LinearPlan(process, tokens), "", 1.0, 2.0))
        assert KEY._replace(rows=8 * process, tokens=tokens) in plans.read()


def test_several_processes_at_once(tmp_path: Path) -> None:
    """Nobody's plans are lost, and nobody reads half a file."""
    workers = [context.Process(target=write_many, args=(tmp_path, process)) for process in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    stored = PlanStore(ENVIRONMENT, tmp_path).read()
    assert {key.rows: stored[key].plan.split for key in stored} == {8: 1, 16: 2, 24: 3}
    assert len(stored) == 60


def test_what_is_no_file_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A pipe is not waited for, what never ends not read, and a folder not removed."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    store.folder().mkdir(parents=True)
    pipe, large, inner, link = (store.folder() / f"{name}.json" for name in ("pipe", "large", "inner", "link"))
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, store._MAX_BYTES + 1)
    inner.mkdir()
    link.symlink_to("/dev/zero")
    for path in (pipe, large, inner, link):
        assert not store.read(path).outcomes
    assert caplog.text.count("cannot be read and are ignored") == 4
    assert store.clear() == 3
    assert [*store.folder().iterdir()] == [inner]


def test_where_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SAMEBITS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.folder() == tmp_path / "home" / ".cache" / "samebits" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    assert store.folder() == tmp_path / "home" / ".cache" / "samebits" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "samebits" / "plans"
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "own"))
    assert store.folder() == tmp_path / "own" / "plans"


def test_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    assert store.clear() == 0
    filled(store.folder())
    (store.folder() / "notes.txt").write_text("mine")
    assert store.clear() == 1
    assert [path.name for path in store.folder().iterdir()] == ["notes.txt"]


def test_what_cannot_be_replaced_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    plans = filled(tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level(logging.WARNING):
        plans.add(KEY, Outcome(None, "later"))
    assert "plans are not kept on disk: no space left" in caplog.text
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix != ".lock"] == [".json"]
    assert plans.read() == OUTCOMES
