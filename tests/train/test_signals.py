"""A signal, whatever is under way: what is abandoned, what is saved, what is said, and what resuming makes of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.config.paths import LATEST, newest_checkpoint, unfinished_saves
from rlpost.data.conversation import Completion
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.policies.base import Request
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.record import STOPPED
from rlpost.runs.checkpoint import load_checkpoint, verify
from rlpost.screen import Screen
from rlpost.settings import SamplingSettings
from rlpost.settings.commands import RunRequest
from rlpost.train import watchers
from rlpost.train.rows import RowParts
from rlpost.train.sampling import SamplingParts
from rlpost.train.signals import Signals

SAMPLED = ["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2", "env.max_completion_tokens=4"]
SAMPLED += ["env.eval_limit=2", "eval.every=1", "checkpoint.every=0"]
TUNED = ["model=tiny", "minibatch_size=2", "env.limit=8", "env.eval_limit=2", "eval.every=1", "checkpoint.every=0"]
TIMED = ("time/", "memory/")
LOOPS: dict[str, tuple[Command[Any], list[str]]] = {
    "grpo": (TRAIN_GRPO, SAMPLED),
    "expert_iteration": (TRAIN_EXPERT_ITERATION, [*SAMPLED, "topk_size=1"]),
    "sft": (TRAIN_SFT, TUNED),
}


def run(folder: Path, *words: str, loop: str = "grpo", resume: str | None = None) -> int:
    command, small = LOOPS[loop]
    composed = compose(command, [*small, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", loop], composed.yaml)
    return command.train(composed.settings, request)


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`during("after step 2", signal.SIGTERM)`: that evaluation is under way when the signal comes."""

    def send(when: str, *numbers: int, look: Callable[[], None] = lambda: None) -> None:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def measure(own: Any, ranks: Any, screen: Any, now: str) -> Any:
                if now == when and pending:
                    look()
                    for number in [pending.pop() for _ in numbers]:
                        os.kill(os.getpid(), number)
                return original(own, ranks, screen, now)

            return measure

        pending = list(reversed(numbers))
        for kind in (SamplingParts, RowParts):
            monkeypatch.setattr(kind, "measure", around(kind.measure))

    return send


@pytest.mark.parametrize("loop", LOOPS)
def test_an_evaluation_is_abandoned_the_step_before_it_saved_and_resuming_makes_it_up(
    loop: str, tmp_path: Path, during: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, "steps=3", loop=loop) == 0
    during("after step 2", signal.SIGTERM)
    assert run(broken, "steps=3", loop=loop) == 143
    said = capfd.readouterr()
    assert "stopping: the evaluation after step 2 is abandoned, the last step is saved first; Ctrl-C again" in said.err
    assert "stopped after step 2; to go on: " in said.out
    rows = metrics(broken)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert not any(name.startswith("eval/") for name in rows[2])
    assert checkpoints(broken)[-1] == "step-000002"
    assert run(broken, "steps=3", loop=loop, resume="latest") == 0
    assert metrics(broken) == metrics(whole)
    assert not list(broken.glob(".held*"))
    names = [folder / "checkpoints" / "best" for folder in (whole, broken)]
    assert len({os.readlink(best) if best.is_symlink() else "" for best in names}) == 1


def test_the_step_of_an_abandoned_evaluation_is_saved(
    tmp_path: Path, during: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    during("after step 1", signal.SIGINT)
    assert run(tmp_path, "steps=2", "checkpoint.every=0") == 130
    assert checkpoints(tmp_path) == ["step-000001"]
    assert "the evaluation after step 1 is abandoned, the last step is saved first" in capfd.readouterr().err


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_before_anything_is_trained_a_signal_leaves_and_saves_nothing(
    loop: str,
    number: int,
    code: int,
    tmp_path: Path,
    during: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(number)
    during("before training", number)
    assert run(tmp_path, "steps=3", loop=loop) == code
    said = capfd.readouterr()
    assert "stopping: there is nothing new to save; Ctrl-C again" in said.err
    assert "stopped before the first step; to go on: the same command with --resume auto" in said.out
    assert "Traceback" not in said.out + said.err
    assert "INFO the run was stopped" in (tmp_path / "log.txt").read_text()
    assert (checkpoints(tmp_path), metrics(tmp_path) if (tmp_path / "metrics.jsonl").is_file() else []) == ([], [])
    assert signal.getsignal(number) == before


def test_a_signal_while_the_policy_starts_closes_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ScriptedPolicy, "start", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(ScriptedPolicy, "close", lambda self: closed.append("policy"))
    monkeypatch.setattr(ArithmeticEnv, "close", lambda self: closed.append("env"))
    assert run(tmp_path, "steps=3") == 143
    assert closed == ["policy", "env", "env"]
    assert "stopping: there is nothing new to save" in capfd.readouterr().err  # though other output goes into the log


def test_a_step_under_way_is_finished_and_saved_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ScriptedPolicy.generate

    def generate(self: ScriptedPolicy, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        if sampling.temperature:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)  # a closing terminal sends it more than once
        return original(self, requests, sampling)

    monkeypatch.setattr(ScriptedPolicy, "generate", generate)
    assert run(tmp_path, "steps=3") == 129
    assert [any(name.startswith("eval/") for name in row) for row in metrics(tmp_path)] == [True, False]
    assert checkpoints(tmp_path) == ["step-000001"]


# While it loads


def never_loaded(*given: Any, **how: Any) -> None:
    """A stand-in for loading the model: SIGTERM comes while it waits."""
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Event().wait(30)
    raise AssertionError("the signal has ended nothing")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_signal_while_the_model_is_loading_leaves_a_run_that_can_be_begun(
    loop: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlpost.model.trainable.load_model", never_loaded)
        assert run(tmp_path, "steps=1", loop=loop) == 143
    said = capfd.readouterr()
    assert "stopping: there is nothing new to save; Ctrl-C again" in said.err
    assert "stopped before the first step; to go on: the same command with --resume auto" in said.out
    assert "Traceback" not in said.out + said.err
    assert "INFO the run was stopped" in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "checkpoints").exists()
    assert run(tmp_path, "steps=1", loop=loop, resume="auto") == 0
    assert checkpoints(tmp_path) == ["step-000001"]


def test_a_signal_while_a_run_that_goes_on_is_loading_leaves_it_as_it_was(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, "steps=2") == 0
    assert run(broken, "steps=1") == 0
    before = metrics(broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlpost.model.trainable.load_model", never_loaded)
        assert run(broken, "steps=2", resume="auto") == 143
    assert metrics(broken) == before
    assert newest_checkpoint(broken) == broken / "checkpoints" / "step-000001"
    load_checkpoint(broken / "checkpoints" / LATEST)
    assert run(broken, "steps=2", resume="auto") == 0
    assert metrics(broken)[-1] == metrics(whole)[-1]


# While a checkpoint is being written


@pytest.fixture
def while_writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """`while_writing(2, do)`: once, half of that step's checkpoint is there when `do` is called.

    The rest is written when a signal has been answered. One that comes when the run is over ends no suite.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answered = threading.Event()
    show_stopping, save_model = Screen.show_stopping, watchers.save_model

    def noted(self: Screen, answer: str) -> None:
        show_stopping(self, answer)
        answered.set()

    def write(step: int, do: Callable[[], None]) -> None:
        def slow(model: Any, tokenizer: Any, folder: Path) -> None:
            save_model(model, tokenizer, folder)
            if pending and folder.parent.name.startswith(f".step-{pending[0]:06d}."):
                pending.clear()
                do()
                assert answered.wait(30)

        pending = [step]
        monkeypatch.setattr(watchers, "save_model", slow)

    monkeypatch.setattr(Screen, "show_stopping", noted)
    yield write
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_that_is_being_written_is_whole_before_a_signal_ends_the_run(
    loop: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    while_writing: Callable[[int, Callable[[], None]], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole, broken, killed = (tmp_path / name for name in ("whole", "broken", "killed"))
    words = ["steps=4", "checkpoint.every=1", "checkpoint.keep_last=9", "eval.enabled=false"]
    assert run(whole, *words, loop=loop) == 0
    newest: list[Path | None] = []
    begun, begin_step = threading.Semaphore(0), Screen.begin_step

    def noted(self: Screen) -> None:
        begin_step(self)
        begun.release()

    def send() -> None:
        newest.extend([newest_checkpoint(broken), (broken / "checkpoints" / LATEST).resolve()])
        # The folder that a kill leaves now. The rollouts of step 3 may be renamed during the copy.
        shutil.copytree(broken, killed, symlinks=True, ignore=shutil.ignore_patterns("*.parquet.*.incomplete"))
        assert all(begun.acquire(timeout=30) for _ in range(3))  # the third is under way
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Screen, "begin_step", noted)
    while_writing(2, send)
    assert run(broken, *words, loop=loop) == 143
    assert newest == [broken / "checkpoints" / "step-000001"] * 2
    said = capfd.readouterr()
    assert "stopping: this step is finished and saved first" in said.err
    assert "stopped after step 3; to go on: " in said.out
    assert checkpoints(broken) == ["step-000001", "step-000002", "step-000003"]
    for path in (broken / "checkpoints").glob("step-*"):
        verify(path)
    _, state = load_checkpoint(broken / "checkpoints" / LATEST)
    assert state["progress"]["step"] == 3
    assert not unfinished_saves(broken / "checkpoints")

    [left] = unfinished_saves(killed / "checkpoints")
    for folder in (broken, killed):
        assert run(folder, *words, loop=loop, resume="latest") == 0
        assert metrics(folder) == metrics(whole)
        assert not unfinished_saves(folder / "checkpoints")
    said = capfd.readouterr().out
    assert f"{left} is not whole" in said
    assert f"resuming after step 1 from {killed}/checkpoints/step-000001" in said


def test_a_reader_of_the_output_that_leaves_ends_the_run_as_a_closed_terminal_does(tmp_path: Path) -> None:
    words = [*SAMPLED, "steps=100000", "eval.enabled=false", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "rlpost", "train", "grpo", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        assert any(line.split()[:1] == ["step"] and "reward" in line for line in training.stdout)
        training.stdout.close()
        errors = training.stderr.read()
        assert (training.wait(120), "Traceback" in errors) == (129, False)
    assert newest_checkpoint(tmp_path) is not None
    assert STOPPED in (tmp_path / "log.txt").read_text()


def test_an_evaluation_is_abandoned_while_its_step_is_being_written_which_ends_first(
    tmp_path: Path,
    during: Callable[..., None],
    while_writing: Callable[[int, Callable[[], None]], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    while_writing(1, lambda: None)
    during("after step 1", signal.SIGTERM)
    assert run(tmp_path, "steps=3", "checkpoint.every=1") == 143
    assert "the evaluation after step 1 is abandoned, the last step is saved first" in capfd.readouterr().err
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000001"
    load_checkpoint(tmp_path / "checkpoints" / LATEST)


def test_a_signal_while_the_last_step_is_being_written_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    while_writing: Callable[[int, Callable[[], None]], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    over = threading.Event()
    steps_end = Signals.steps_end

    def noted(self: Signals) -> None:
        steps_end(self)
        over.set()

    def send() -> None:
        assert over.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Signals, "steps_end", noted)
    while_writing(1, send)
    assert run(tmp_path, "steps=1", "eval.enabled=false") == 0  # there is nothing left that it could stop
    assert "the training is done, and ends once it is saved; Ctrl-C again leaves at once" in capfd.readouterr().err
    _, state = load_checkpoint(tmp_path / "checkpoints" / LATEST)
    assert state["progress"]["step"] == 1
