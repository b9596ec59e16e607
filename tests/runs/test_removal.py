"""What goes from runs/, by which rule, and what never does."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from rlpost.record import BEGAN, STOPPED
from rlpost.runs.checkpoint import load_checkpoint, verify
from rlpost.runs.removal import Rule, removals, remove
from tests.command_line import CommandLine
from tests.run_folders import make_run, save_checkpoint_of, step_row, verdict
from tests.says import Says

ALL = frozenset(Rule)
TWO = [step_row(1, 0.5), step_row(2, 0.5)]
HALF = verdict(f"{BEGAN}: rlpost train grpo") + verdict(STOPPED)


pytestmark = pytest.mark.usefixtures("here")


def found(days: float = 30) -> list[tuple[str, str]]:
    return [(str(removal.path), removal.rule.name) for removal in removals(Path("runs"), ALL, days)]


def test_a_run_that_never_trained_a_step_goes_whole() -> None:
    make_run(Path("runs/failed"), [{"step": 0, "eval/reward": 0.5}], log=HALF)
    make_run(Path("runs/trained"), TWO, log=HALF)
    assert found() == [("runs/failed", "unstarted")]
    assert all(map(remove, removals(Path("runs"), ALL, 30)))
    assert [path.name for path in Path("runs").iterdir()] == ["trained"]


def test_checkpoints_go_but_for_the_last_and_the_best() -> None:
    run = make_run(Path("runs/a"), TWO, log=HALF)
    for step in (1, 2, 3, 4):
        save_checkpoint_of(run, step, best=2 if step > 1 else 1)
    left = run / "checkpoints" / ".step-000009.incomplete"
    left.mkdir()
    folder = "runs/a/checkpoints"
    assert found() == [(f"{folder}/{name}", "checkpoint") for name in ("step-000001", "step-000003", left.name)]
    assert all(map(remove, removals(Path("runs"), ALL, 30)))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "latest", "step-000002", "step-000004"]
    load_checkpoint(run / "checkpoints/latest")  # a run that was stopped goes on


def test_the_state_of_a_finished_run_goes_its_model_stays(rlpost: CommandLine) -> None:
    run = make_run(Path("runs/a"), TWO)
    newest = save_checkpoint_of(run, 2)
    [removal] = removals(Path("runs"), ALL, 30)
    size = sum(file.stat().st_size for file in (newest / "state").iterdir())
    assert (removal.path, removal.rule, removal.bytes) == (newest, Rule.state, size)
    assert remove(removal)
    verify(newest)
    assert not (newest / "state").exists()
    assert found() == []
    rlpost("train grpo --resume runs/a steps=9 --dry-run", 3)


def test_rollouts_go_by_their_age() -> None:
    run = make_run(Path("runs/a"), TWO, log=HALF)
    (run / "rollouts").mkdir()
    for step, age in ((1, 40), (2, 20)):
        file = run / "rollouts" / f"step-{step:06d}.parquet"
        file.write_bytes(bytes(100))
        os.utime(file, (time.time() - age * 86400, time.time() - age * 86400))
    (run / "rollouts" / "mine.parquet").write_bytes(b"")
    assert found() == [("runs/a/rollouts/step-000001.parquet", "rollouts")]
    assert [path for path, _ in found(days=10)] == [f"runs/a/rollouts/step-00000{step}.parquet" for step in (1, 2)]


def test_gc_leaves_a_run_in_use_alone() -> None:
    run = make_run(Path("runs/a"), log=HALF)
    planned = removals(Path("runs"), ALL, 30)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found() == []
        assert [remove(removal) for removal in planned] == [False]
    assert run.is_dir()
    assert [remove(removal) for removal in planned] == [True]
    assert [remove(removal) for removal in planned] == [False]  # gone


def test_nothing_outside_runs_is_touched(rlpost: CommandLine) -> None:
    outside = make_run(Path("elsewhere/a"), log=HALF)
    Path("runs").mkdir()
    Path("runs/link").symlink_to(outside.resolve())
    (Path("runs/sweep")).symlink_to(Path("elsewhere").resolve())
    inside = make_run(Path("runs/b"), TWO)
    save_checkpoint_of(inside, 2)
    (inside / "checkpoints/best").unlink(missing_ok=True)
    (inside / "checkpoints/best").symlink_to(outside.resolve())
    assert {path.split("/")[1] for path, _ in found()} == {"b"}
    rlpost("runs gc --yes")
    assert (outside / "command.txt").is_file()


def test_somebodys_own_checkpoints_without_a_record_stay() -> None:
    model = Path("runs/copied/checkpoints/step-000001/model")
    model.mkdir(parents=True)
    assert found() == []
    make_run(Path("runs/half"), log=HALF)
    Path("runs/half/checkpoints/step-000001/model").mkdir(parents=True)  # without its manifest
    assert found() == []


def test_gc_only_lists_without_yes(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/failed"), log=HALF)
    state = save_checkpoint_of(make_run(Path("runs/done"), TWO), 2) / "state"
    first, *lines = rlpost.lines("runs gc")
    assert "--yes" in first
    says("runs", "\n".join(sorted(" ".join(line.split()[2:]) for line in lines)))
    assert Path("runs/failed").is_dir()
    rlpost("runs gc --yes --keep-state")
    assert not Path("runs/failed").exists()
    assert state.is_dir()
    says("runs", rlpost("runs gc --keep-state"))


def test_as_json_each_thing_is_an_entry(rlpost: CommandLine) -> None:
    assert rlpost.json("runs gc") == {"bytes": 0, "removed": False, "items": []}
    run = make_run(Path("runs/failed"), log=HALF)
    size = sum(file.stat().st_size for file in run.iterdir())
    for words, removed in (("", False), ("--yes", True)):
        told = rlpost.json(f"runs gc {words}")
        [entry] = told["items"]
        assert (told["bytes"], told["removed"], entry["bytes"]) == (size, removed, size)
        assert (entry["run"], entry["path"], entry["rule"]) == ("runs/failed", "runs/failed", "unstarted")
    assert not run.exists()
