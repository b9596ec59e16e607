"""Run folders read back."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from rlpost.errors import ConfigError
from rlpost.record import BEGAN, FAILED, FINISHED, STOPPED, MetricsFile
from rlpost.runs.reader import (
    RunState,
    find_run,
    find_runs,
    is_running,
    read_run,
)
from tests.run_folders import evaluation, make_run, step_row, verdict
from tests.says import Says

ROWS = [{"step": 0, **evaluation(0.1, 0.0, 0.2)}, step_row(1, 0.25), step_row(2, 0.75, **evaluation(0.6, 0.5, 0.7))]


pytestmark = pytest.mark.usefixtures("here")


def test_a_record_holds_what_the_files_say() -> None:
    record = read_run(make_run(Path("runs/a"), ROWS))
    assert (record.state, record.steps_done, record.total_steps) == (RunState.finished, 2, 2)
    assert record.series("reward/mean") == [0.25, 0.75]
    assert record.last("reward/mean") == 0.75
    assert record.seconds == 8.0
    before, after = record.evaluation(before=True), record.evaluation(before=False)
    assert before is not None
    assert after is not None
    assert (before["eval/accuracy_lenient"], after["eval/accuracy_lenient"]) == (0.1, 0.6)


@pytest.mark.parametrize(
    ("log", "state", "error"),
    [
        (verdict(BEGAN) + verdict(FINISHED), RunState.finished, ""),
        (verdict(BEGAN) + verdict(STOPPED), RunState.stopped, ""),
        (verdict(BEGAN) + verdict(f"{FAILED} KeyboardInterrupt: "), RunState.stopped, ""),
        (verdict(BEGAN) + verdict(f"{FAILED} ValueError: no"), RunState.failed, "ValueError: no"),
        (verdict(f"{FAILED} ValueError: no") + verdict(BEGAN) + "noise\n", RunState.killed, ""),
        (verdict(FINISHED) + verdict(BEGAN), RunState.killed, ""),
        (f"the model said: {FINISHED}\n", RunState.unknown, ""),
    ],
)
def test_the_log_has_the_last_word_on_how_a_run_ended(log: str, state: RunState, error: str) -> None:
    record = read_run(make_run(Path("a"), ROWS[:2], log=log))
    assert (record.state, record.error) == (state, error)


def test_without_a_log_only_a_run_with_all_its_steps_is_finished() -> None:
    whole, part = make_run(Path("whole"), ROWS), make_run(Path("part"), ROWS[:2])
    for run in (whole, part):
        (run / "log.txt").unlink()
    assert [read_run(run).state for run in (whole, part)] == [RunState.finished, RunState.unknown]


def test_a_run_is_running_while_its_lock_is_held() -> None:
    run = make_run(Path("a"), ROWS)
    assert not is_running(run)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_running(run)
        assert read_run(run).state is RunState.running
    assert not is_running(run)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # would raise were it held


def test_lines_that_are_not_whole_are_counted_and_left_out() -> None:
    run = make_run(Path("a"), ROWS)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('[1, 2]\n{"no step": 1}\n{"step": 3, "reward/me')
    record = read_run(run)
    assert (record.steps_done, record.damaged_lines) == (2, 3)


def test_an_empty_folder_and_broken_files_make_an_empty_record() -> None:
    Path("empty").mkdir()
    broken = make_run(Path("broken"))
    (broken / "config.yaml").write_text("{")
    (broken / "environment.json").write_text("[")
    for run in (Path("empty"), broken):
        record = read_run(run)
        assert (record.metrics, record.config, record.environment, record.total_steps) == ([], {}, {}, None)
        assert (record.steps_done, record.last("reward/mean"), record.evaluation(before=True)) == (0, None, None)


def test_a_choice_is_the_users_or_the_default_of_the_command() -> None:
    record = read_run(make_run(Path("a"), overrides=["model=tiny", "env.digits=3"]))
    assert (record.choice("model"), record.choice("env"), record.choice("optim")) == ("tiny", "arithmetic", "adamw")
    (Path("a") / "command.txt").write_text("something else\n")
    assert read_run(Path("a")).choice("env") is None


def test_runs_are_found_one_level_down_too_the_newest_first() -> None:
    for age, name in enumerate(["new", "sweep/0", "old", "sweep/deeper/0"]):
        run = make_run(Path("runs") / name)
        for file in run.iterdir():
            os.utime(file, (1000.0 - age, 1000.0 - age))
    (Path("runs") / "no run").mkdir()
    assert find_runs(Path("runs")) == [Path("runs/new"), Path("runs/sweep/0"), Path("runs/old")]
    assert find_runs(Path("runs/old")) == [Path("runs/old")]
    assert find_run(None) == Path("runs/new")


def test_a_run_is_found_by_name_and_by_path() -> None:
    make_run(Path("runs/sums"))
    make_run(Path("runs/sweep/0"))
    make_run(Path("else/where"))
    assert [find_run(n) for n in ("sums", "runs/sums", "./runs/sums", "sweep/0", "else/where")] == [
        *[Path("runs/sums")] * 3,
        Path("runs/sweep/0"),
        Path("else/where"),
    ]


def test_an_unknown_run_gets_the_nearest(says: Says) -> None:
    says.refusals("runs", ConfigError, find_run, [None])
    make_run(Path("runs/sums"))
    Path("plain").mkdir()
    says.refusals("runs", ConfigError, find_run, ["smus", "bananas", "runs/smus", "../x", "plain"])


def test_a_growing_file_gives_each_whole_line_once() -> None:
    path = Path("metrics.jsonl")
    file = MetricsFile(path)
    assert file.new_rows() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert file.new_rows() == [{"step": 1}, {"step": 2}]
    assert file.new_rows() == []
    with path.open("a") as stream:
        stream.write('ep": 3}\n')
    assert file.new_rows() == [{"step": 3}]
