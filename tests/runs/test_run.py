"""The run folder: what it holds, who may write to it, and how a run is asked to stop."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

import rlpost
from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.runs.checkpoint import save_checkpoint
from rlpost.runs.reader import RunState, read_run
from rlpost.runs.writer import Run
from rlpost.screen import Screen
from rlpost.settings.commands import RunRequest
from tests.screen.vt import Session

Batch = Callable[..., TensorDict]
FIGURES = {
    "reward/mean": 0.5,
    "completion/tokens_mean": 2.0,
    "tokens/generated": 4.0,
    "time/rollout": 1.0,
    "time/train": 1.0,
    "time/sync": 0.1,
}


def make(folder: Path, *, resume: str | None = None, total_steps: int = 4, config: str = "steps: 4\n") -> Run:
    request = RunRequest(folder, resume, ["steps=4", "env=arithmetic"], ["rlpost", "train", "a b"], config)
    screen = Screen(Console(file=io.StringIO(), soft_wrap=True))
    return Run(request, seed=11, total_steps=total_steps, screen=screen)


def printed(run: Run) -> str:
    assert isinstance(run.screen.console.file, io.StringIO)
    return run.screen.console.file.getvalue()


def save(run_folder: Path, step: int) -> Path:
    def write_model(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    return save_checkpoint(
        run_folder / "checkpoints", step, write_model=write_model, tensors={"a": torch.ones(2)}, state={}, keep_last=9
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# What it holds


def test_a_resume_that_is_refused_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder) as run:
        save(folder, 4)
        run.record(4, FIGURES)
    names = ("config.yaml", "overrides.txt", "command.txt", "environment.json", "metrics.jsonl")
    before = {name: (folder / name).read_bytes() for name in names}

    def refuse() -> None:
        with make(folder, resume="auto", total_steps=9, config="steps: 9\n") as run:
            assert run.resume_from is not None
            raise ConfigError("--resume: the run began with another seed; keep it")

    with pytest.raises(ConfigError, match="keep it"):
        refuse()
    assert {name: (folder / name).read_bytes() for name in names} == before
    assert "not resumed" in (folder / "log.txt").read_text()
    assert read_run(folder).state is RunState.finished


def test_a_resume_is_written_down_once_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder):
        save(folder, 4)
    with make(folder, resume="auto", total_steps=9, config="steps: 9\n") as run:
        run.forget_after(4)
        assert read_run(folder).config == {"steps": 9}
        assert read_run(folder).state is RunState.running
    assert (folder / "command.txt").read_text() == "rlpost train 'a b'\n" * 2


def test_the_run_folder_has_command_settings_and_environment(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with make(folder):
        assert (folder / "config.yaml").read_text() == "steps: 4\n"
        assert (folder / "overrides.txt").read_text() == "steps=4\nenv=arithmetic\n"
        assert (folder / "command.txt").read_text() == "rlpost train 'a b'\n"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["rlpost"] == rlpost.__version__
    assert environment["seed"] == 11
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(environment["packages"]) >= {"torch", "transformers", "vllm", "hydra-core"}
    assert environment["threads"] == torch.get_num_threads()


def test_a_step_is_recorded_in_metrics_rollouts_and_on_the_screen(tmp_path: Path, batch: Batch) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES, batch())
        run.record(2, FIGURES, batch(first=1))
    assert metrics(tmp_path) == [{"step": 1, **FIGURES}, {"step": 2, **FIGURES}]
    assert pq.read_table(tmp_path / "rollouts" / "step-000002.parquet")["group"].to_pylist() == [1, 1]
    assert [line for line in printed(run).splitlines() if line.startswith("step")][1].startswith(
        "step 2/4  reward 0.50"
    )


def test_values_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(0, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5, "e": 3})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 0, "a": null, "b": null, "c": null, "d": 1.5, "e": 3}\n'


def test_an_error_that_ends_the_run_is_in_its_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), make(tmp_path):
        raise ValueError("broken")
    assert "ERROR the run ended with ValueError: broken" in (tmp_path / "log.txt").read_text()


def ended_by(error: Exception, folder: Path, step: int = 0) -> Run:
    """A run that `error` ended after it recorded `step`."""
    run = make(folder)

    def end() -> None:
        with run:
            run.record(step, FIGURES)
            raise error

    with pytest.raises(type(error)):
        end()
    return run


def test_a_run_refused_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    run = ended_by(DataError("the prompt of row 3 is too long"), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert f"nothing was trained, so {tmp_path / 'new'} is removed\n" in printed(run)


def test_a_folder_that_was_there_before_a_refused_run_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    ended_by(DataError("the prompt of row 3 is too long"), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# Who may write


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rlpost.runs.writer import Run; from rlpost.screen import Screen\n"
        "from rlpost.settings.commands import RunRequest; from rlpost.errors import ConfigError\n"
        "try:\n"
        "    with Run(RunRequest(Path(sys.argv[1]), None, [], [], ''), seed=0, total_steps=1, screen=Screen()):\n"
        "        print('mine')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )

    def second() -> str:
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with make(tmp_path, config="first"):
        assert second() == f"{tmp_path} is in use by another rlpost process: give another --name"
        assert (tmp_path / "config.yaml").read_text() == "first"
    assert second() == "mine"


def test_the_lock_holds_within_one_process_too(tmp_path: Path) -> None:
    with make(tmp_path), pytest.raises(ConfigError, match="in use"), make(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"cannot write to .*file/run: .*give another --out"),
        make(tmp_path / "file" / "run"),
    ):
        pass


def test_a_step_that_cannot_be_recorded_says_how_to_go_on(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(CheckpointError, match=r"cannot write to .*--resume auto"):
            run.record(1, FIGURES)


# Going on


def test_nothing_is_resumed_unless_asked(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert make(tmp_path).resume_from is None


def test_auto_and_latest_take_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    (tmp_path / "checkpoints" / "step-000009").mkdir()  # never finished
    assert make(tmp_path, resume="auto").resume_from == newest
    assert make(tmp_path, resume="latest").resume_from == newest


def test_without_a_checkpoint_auto_begins_and_latest_is_refused(tmp_path: Path) -> None:
    assert make(tmp_path, resume="auto").resume_from is None
    with pytest.raises(CheckpointError, match="has no complete checkpoint; --resume auto"):
        _ = make(tmp_path, resume="latest").resume_from


def test_a_path_is_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    older = save(tmp_path / "run", 2)
    assert make(tmp_path / "new", resume=str(older)).resume_from == older
    newer = save(tmp_path / "run", 4)
    assert make(tmp_path / "new", resume=str(newer)).resume_from == newer
    assert make(tmp_path / "new", resume=str(tmp_path / "run")).resume_from == newer
    assert make(tmp_path / "new", resume=str(older.parent / "latest")).resume_from == older.parent / "latest"
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        _ = make(tmp_path / "new", resume=str(tmp_path)).resume_from


def test_a_checkpoint_that_keeps_the_model_alone_is_refused_by_its_name(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 2), save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step-000002 keeps the model alone: resume from latest"):
        _ = make(tmp_path, resume=str(older)).resume_from
    assert make(tmp_path, resume=str(newest)).resume_from == newest


def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (path / "model" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model/config\.json is not what was written"):
        _ = make(tmp_path, resume="auto").resume_from


def test_forget_after_drops_what_later_steps_wrote(tmp_path: Path, batch: Batch) -> None:
    with make(tmp_path) as run:
        for step in (1, 2, 3):
            run.record(step, FIGURES, batch())
        for step in (1, 3, 2):  # the last one written can be gone on from
            save(tmp_path, step)
        with (tmp_path / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 4, "reward/me')  # a crash in the middle of a line
        (tmp_path / "rollouts" / "step-mine.parquet").write_text("somebody's own")
        run.forget_after(2)
        assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
        run.record(3, FIGURES)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["step-000001.parquet", "step-000002.parquet", "step-mine.parquet"]
    assert make(tmp_path, resume="auto").resume_from == tmp_path / "checkpoints" / "step-000002"
    assert "removed later checkpoints: step-000003" in printed(run)


def test_a_metrics_line_that_is_not_utf8_is_dropped_on_resume(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES)
        with (tmp_path / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step": 2, "reward/mean": \xff}\n')
        (tmp_path / ".held-row.json").write_bytes(b'{"step": 2\xff')
        run.forget_after(2)
    assert [line["step"] for line in metrics(tmp_path)] == [1]


# Stopping


def test_steps_go_on_after_those_done_and_end_with_the_last(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert list(run.steps(done=0)) == [1, 2, 3, 4]
    assert list(run.steps(done=3)) == [4]
    assert list(run.steps(done=4)) == []


def test_checkpoints_are_due_every_n_at_the_end_and_when_stopping(tmp_path: Path) -> None:
    run = make(tmp_path, total_steps=7)
    assert [step for step in range(1, 8) if run.due(step, every=3)] == [3, 6, 7]
    assert [step for step in range(1, 8) if run.due(step, every=0)] == [7]
    run.exit_code = 130
    assert run.due(1, every=3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_the_step_under_way(
    tmp_path: Path, number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    done = []
    with make(tmp_path) as run:
        run.catch_signals()
        for step in run.steps(done=0):
            if step == 2:
                os.kill(os.getpid(), number)
            done.append(step)
    assert done == [1, 2]
    assert (run.stopping, run.exit_code) == (True, code)
    assert "this step is finished and saved first; Ctrl-C again leaves at once" in capfd.readouterr().err
    assert signal.getsignal(number) == before


STUBBORN = """
import sys, time
from pathlib import Path
from rlpost.runs.writer import Run
from rlpost.settings.commands import RunRequest
from rlpost.screen import Screen
with Run(RunRequest(Path(sys.argv[1]), None, [], [], ""), seed=0, total_steps=1, screen=Screen()) as run:
    run.catch_signals()
    for step in run.steps(done=0):
        print("in the step", flush=True)
        while not (run.stopping and len(sys.argv) == 2):
            time.sleep(0.01)
            if run.stopping and len(sys.argv) > 2:
                print("asked to stop", flush=True)
                time.sleep(60)
print("saved", flush=True)
sys.exit(run.exit_code)
"""


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STUBBORN, str(folder), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in the step\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_process_finishes_its_step_and_has_the_exit_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(tmp_path)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert (out, process.returncode) == ("saved\n", code)


@pytest.mark.parametrize(
    ("first", "second", "code"), [("INT", "INT", 130), ("TERM", "TERM", 143), ("INT", "TERM", 143)]
)
def test_a_second_signal_leaves_at_once(tmp_path: Path, first: str, second: str, code: int) -> None:
    process = start(tmp_path, "stubborn")
    process.send_signal(signal.Signals[f"SIG{first}"])
    assert process.stdout is not None
    assert process.stdout.readline() == "asked to stop\n"
    process.send_signal(signal.Signals[f"SIG{second}"])
    out, err = process.communicate(timeout=45)  # the step would have gone on for a minute
    assert (out, process.returncode) == ("", code)
    assert err.endswith("left at once, without saving\n")


def test_repeated_sighup_is_one_request_and_another_signal_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with make(tmp_path) as run:
        run.catch_signals()
        for step in run.steps(done=0):
            assert step == 1
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):  # as the end of a session sends them
                os.kill(os.getpid(), number)
            assert left == []
            os.kill(os.getpid(), signal.SIGTERM)
    assert (left, run.exit_code) == ([143], 129)


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with make(tmp_path) as run:
            run.catch_signals()
            os.kill(os.getpid(), signal.SIGHUP)
            assert not run.stopping
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_after_the_last_step_changes_nothing_that_is_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with make(tmp_path) as run:
        run.catch_signals()
        assert list(run.steps(done=4)) == []
        os.kill(os.getpid(), signal.SIGINT)
    assert run.exit_code == 0
    assert "the training is done, and ends once it is saved" in capfd.readouterr().err
    assert read_run(tmp_path).state is RunState.finished


ON_A_TERMINAL = """
import sys, time
from pathlib import Path
from rlpost.runs.writer import Run
from rlpost.settings.commands import RunRequest
from rlpost.screen import Screen
folder = Path(sys.argv[1])
screen = Screen()
with Run(RunRequest(folder, None, [], [], ""), seed=0, total_steps=1, screen=screen) as run, screen:
    run.catch_signals()
    screen.open(title="a run", about="", total_steps=1, log=folder / "log.txt")
    for step in run.steps(done=0):
        print("in the step", flush=True)
        screen.note("in the step")
        while not run.stopping:
            time.sleep(0.01)
        run.record(step, {"reward/mean": 1.0})
        screen.note("saved")
        print("saved", flush=True)
        (folder / "saved").write_text("")
screen.line("stopped")
print("stopped")
sys.exit(run.exit_code)
"""


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_terminal_that_is_closed_does_not_keep_a_run_from_saving(tmp_path: Path, term: str) -> None:
    running = Session(ON_A_TERMINAL, [str(tmp_path)], TERM=term)
    running.until_shown("in the step")
    running.hang_up()
    running.process.send_signal(signal.SIGHUP)
    assert running.process.wait(120) == 129
    assert (tmp_path / "saved").is_file()
    assert "the run was stopped" in (tmp_path / "log.txt").read_text()


# What an evaluation adds


def test_a_line_waits_for_its_evaluation_and_survives_a_crash_in_it(tmp_path: Path, batch: Batch) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES)
        run.record(2, FIGURES, batch(), evaluation_follows=True)
        assert [row["step"] for row in metrics(tmp_path)] == [1]
        run.add_evaluation({"eval/loss": 0.5})
        assert metrics(tmp_path)[1] == {"step": 2, **FIGURES, "eval/loss": 0.5}
    run = make(tmp_path)
    run.record(3, FIGURES, evaluation_follows=True)  # and the process dies
    with make(tmp_path, resume="auto") as run:
        save(tmp_path, 3)
        run.forget_after(3)
        assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3]
        assert not run.owes_evaluation(2)
        assert not run.owes_evaluation(4)
        assert run.owes_evaluation(3)
        assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert metrics(tmp_path)[2] == {"step": 3, **FIGURES}  # nothing was added, and nothing is lost


def test_a_checkpoint_is_due_before_every_minutes_have_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(
        "rlpost.runs.writer.time", SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
    )
    run = make(tmp_path, total_steps=9)
    due = []
    for step in run.steps(done=0):
        clock.now += 70.0  # with one more such step: 140, 210, 280, 350 s after what was saved
        if run.due(step, 0, 5.0):
            due.append(step)
            run.saved()
        assert not run.due(step, 0, 0.0) or step == 9
    assert due == [4, 8, 9]


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_SFT, TRAIN_EXPERT_ITERATION], ids=lambda each: each.name)
def test_by_default_a_crash_loses_at_most_five_minutes(command: Command[Any]) -> None:
    assert compose(command, []).settings.checkpoint.every_minutes == 5.0


# What somebody else wrote


def test_an_error_with_any_text_is_logged_printable_and_keeps_the_status(tmp_path: Path) -> None:
    program = r"""
import logging, sys
from pathlib import Path
from rlpost.errors import PolicyError
from rlpost.runs.writer import Run
from rlpost.screen import Screen
from rlpost.settings.commands import RunRequest
with Run(RunRequest(Path(sys.argv[1]), None, [], [], ""), seed=0, total_steps=1, screen=Screen()):
    logging.getLogger("rlpost").warning("a reward said: %s", "\x1b[2J\ud800\x07")
    raise PolicyError("bad: \x1b]0;t\x07 \udfff")
"""
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, check=False)
    assert b"Logging error" not in ended.stderr
    logged = (folder / "log.txt").read_text(encoding="utf-8")
    assert r"a reward said: \x1b[2J\ud800\x07" in logged
    assert r"bad: \x1b]0;t\x07 \udfff" in logged
    assert all(character.isprintable() or character == "\n" for character in logged)
    assert read_run(folder).state is RunState.failed


def test_a_run_says_which_checkpoints_it_passes_over(tmp_path: Path) -> None:
    with make(tmp_path / "run"):
        save(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoints" / "step-000003").mkdir()
    (tmp_path / "run" / "checkpoints" / ".step-000004.incomplete").mkdir()
    run = make(tmp_path / "run", resume="latest")
    with run:
        assert run.resume_from == tmp_path / "run" / "checkpoints" / "step-000002"
    said = printed(run)
    for name in ("step-000003", ".step-000004.incomplete"):
        assert f"{name} is not whole" in said.replace("\n", " ")
        assert f"{name} is not whole" in (tmp_path / "run" / "log.txt").read_text()
