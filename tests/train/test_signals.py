"""A signal at any moment: what is abandoned, what is saved, what is shown, and what resuming makes of it."""

from __future__ import annotations

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
from rlpost.config.paths import LATEST
from rlpost.data.conversation import Completion
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.policies.base import Request
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.record import STOPPED
from rlpost.runs.checkpoint import load_checkpoint, verify
from rlpost.runs.reader import newest_checkpoint, unfinished_saves
from rlpost.screen import Screen
from rlpost.settings import SamplingSettings
from rlpost.train import watchers
from rlpost.train.rows import RowParts
from rlpost.train.sampling import SamplingParts
from rlpost.train.signals import Signals
from tests.says import Says
from tests.trainings import printed, train_in, untimed

pytestmark = pytest.mark.thorough

EVALUATED = ["env.eval_limit=2", "eval.every=1", "checkpoint.every=0"]
SAMPLED = ["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2", "env.max_completion_tokens=4"]
LOOPS: dict[str, tuple[Command[Any], list[str]]] = {
    "grpo": (TRAIN_GRPO, [*SAMPLED, *EVALUATED]),
    "expert_iteration": (TRAIN_EXPERT_ITERATION, [*SAMPLED, *EVALUATED, "topk_size=1"]),
    "sft": (TRAIN_SFT, ["model=tiny", "minibatch_size=2", "env.limit=8", *EVALUATED]),
}
Send = Callable[..., None]
WhileWriting = Callable[[int, Callable[[], None]], None]


def run(folder: Path, *words: str, loop: str = "grpo", resume: str | None = None) -> int:
    command, small = LOOPS[loop]
    return train_in(command, folder, [*small, *words], resume)


def answer(capfd: pytest.CaptureFixture[str]) -> str:
    """The lines that answer a signal."""
    shown = capfd.readouterr()
    lines = (shown.err + shown.out).splitlines()
    return "\n".join(line for line in lines if any(part in line for part in ("stop", "Ctrl-C", "Traceback")))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def last_saved(folder: Path) -> int:
    """The step of a run's newest checkpoint, which is whole."""
    return load_checkpoint(folder / "checkpoints" / LATEST)[1]["progress"]["step"]


def note_calls(patch: pytest.MonkeyPatch, owner: type, name: str, note: Callable[[], None]) -> None:
    """Let each call of that method be followed by `note()`."""
    original = getattr(owner, name)

    def noted(*given: Any) -> None:
        original(*given)
        note()

    patch.setattr(owner, name, noted)


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Send:
    """`during("after step 2", signal.SIGTERM)`: that evaluation has begun when the signal comes."""

    def send(when: str, number: int) -> None:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def measure(own: Any, ranks: Any, screen: Any, now: str) -> Any:
                if now == when and pending:
                    os.kill(os.getpid(), pending.pop())
                return original(own, ranks, screen, now)

            return measure

        pending = [number]
        for kind in (SamplingParts, RowParts):
            monkeypatch.setattr(kind, "measure", around(kind.measure))

    return send


@pytest.mark.parametrize("loop", LOOPS)
def test_abandoned_evaluation_is_made_up_after_its_step_is_saved(
    loop: str, tmp_path: Path, during: Send, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, "steps=3", loop=loop) == 0
    during("after step 2", signal.SIGTERM)
    assert run(broken, "steps=3", loop=loop) == 143
    says("train", answer(capfd))
    rows = untimed(broken)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert not any(name.startswith("eval/") for name in rows[2])
    assert checkpoints(broken)[-1] == "step-000002"
    assert run(broken, "steps=3", loop=loop, resume="latest") == 0
    assert untimed(broken) == untimed(whole)
    assert not list(broken.glob(".held*"))
    names = [folder / "checkpoints" / "best" for folder in (whole, broken)]
    assert len({os.readlink(best) if best.is_symlink() else "" for best in names}) == 1


@pytest.mark.parametrize(
    ("loop", "number", "code"),
    [("grpo", signal.SIGHUP, 129), ("expert_iteration", signal.SIGTERM, 143), ("sft", signal.SIGTERM, 143)],
    ids=LOOPS,
)
def test_signal_before_the_first_step_leaves_and_saves_nothing(
    loop: str, number: int, code: int, tmp_path: Path, during: Send, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    before = signal.getsignal(number)
    during("before training", number)
    assert run(tmp_path, "steps=3", loop=loop) == code
    says("train", answer(capfd))
    assert STOPPED in (tmp_path / "log.txt").read_text()
    assert (checkpoints(tmp_path), (tmp_path / "metrics.jsonl").exists()) == ([], False)
    assert signal.getsignal(number) == before


def test_signal_while_the_policy_starts_closes_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ScriptedPolicy, "start", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(ScriptedPolicy, "close", lambda self: closed.append("policy"))
    monkeypatch.setattr(ArithmeticEnv, "close", lambda self: closed.append("env"))
    assert run(tmp_path, "steps=3") == 143
    assert closed == ["policy", "env", "env"]
    assert "stopping: " in capfd.readouterr().err  # though other output goes into the log


def test_step_in_progress_is_finished_and_saved_and_not_measured(
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
    assert [any(name.startswith("eval/") for name in row) for row in untimed(tmp_path)] == [True, False]
    assert checkpoints(tmp_path) == ["step-000001"]


# While it loads


def never_loaded(*given: Any, **how: Any) -> None:
    """A stand-in for loading the model: SIGTERM comes while it waits."""
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Event().wait(30)
    raise AssertionError("the signal has ended nothing")


def stopped_while_loading(folder: Path, *words: str, loop: str = "grpo") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlpost.model.trainable.load_model", never_loaded)
        assert run(folder, *words, loop=loop, resume="auto") == 143


@pytest.mark.parametrize("loop", LOOPS)
def test_run_stopped_while_its_model_loads_can_be_begun(
    loop: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    stopped_while_loading(tmp_path, "steps=1", loop=loop)
    says("train", answer(capfd))
    assert STOPPED in (tmp_path / "log.txt").read_text()
    assert not (tmp_path / "checkpoints").exists()
    assert run(tmp_path, "steps=1", loop=loop, resume="auto") == 0
    assert checkpoints(tmp_path) == ["step-000001"]


def test_run_stopped_while_it_resumes_is_left_as_it_was(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, "steps=2") == 0
    assert run(broken, "steps=1") == 0
    before = untimed(broken)
    stopped_while_loading(broken, "steps=2")
    assert untimed(broken) == before
    assert newest_checkpoint(broken) == broken / "checkpoints" / "step-000001"
    assert last_saved(broken) == 1
    assert run(broken, "steps=2", resume="auto") == 0
    assert untimed(broken)[-1] == untimed(whole)[-1]


# While a checkpoint is written


@pytest.fixture
def while_writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[WhileWriting]:
    """`while_writing(2, do)`: once, half of that step's checkpoint is written when `do` is called.

    The rest is written when a signal has been answered. One that comes when the run is over ends no suite.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answered = threading.Event()
    save_model = watchers.save_model

    def write(step: int, do: Callable[[], None]) -> None:
        def slow(model: Any, tokenizer: Any, folder: Path) -> None:
            save_model(model, tokenizer, folder)
            if pending and folder.parent.name.startswith(f".step-{pending[0]:06d}."):
                pending.clear()
                do()
                assert answered.wait(30)

        pending = [step]
        monkeypatch.setattr(watchers, "save_model", slow)

    note_calls(monkeypatch, Screen, "show_stopping", answered.set)
    yield write
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("loop", LOOPS)
def test_checkpoint_in_progress_is_whole_before_the_run_ends(
    loop: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    while_writing: WhileWriting,
    capfd: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    whole, broken, killed = (tmp_path / name for name in ("whole", "broken", "killed"))
    words = ["steps=4", "checkpoint.every=1", "checkpoint.keep_last=9", "eval.enabled=false"]
    assert run(whole, *words, loop=loop) == 0
    newest: list[Path | None] = []
    begun = threading.Semaphore(0)

    def send() -> None:
        newest.extend([newest_checkpoint(broken), (broken / "checkpoints" / LATEST).resolve()])
        # The folder that a kill leaves now. The rollouts of step 3 may be renamed during the copy.
        shutil.copytree(broken, killed, symlinks=True, ignore=shutil.ignore_patterns("*.parquet.*.incomplete"))
        assert all(begun.acquire(timeout=30) for _ in range(3))  # the third has begun
        os.kill(os.getpid(), signal.SIGTERM)

    note_calls(monkeypatch, Screen, "begin_step", begun.release)
    while_writing(2, send)
    assert run(broken, *words, loop=loop) == 143
    assert newest == [broken / "checkpoints" / "step-000001"] * 2
    says("train", answer(capfd))
    assert checkpoints(broken) == ["step-000001", "step-000002", "step-000003"]
    for path in (broken / "checkpoints").glob("step-*"):
        verify(path)
    assert last_saved(broken) == 3
    assert not unfinished_saves(broken / "checkpoints")

    [left] = unfinished_saves(killed / "checkpoints")
    for folder in (broken, killed):
        assert run(folder, *words, loop=loop, resume="latest") == 0
        assert untimed(folder) == untimed(whole)
        assert not unfinished_saves(folder / "checkpoints")
    resumed = printed(capfd, str(killed))
    assert str(left) in resumed
    assert f"{killed}/checkpoints/step-000001" in resumed


def test_closed_output_ends_the_run_as_a_closed_terminal_does(tmp_path: Path) -> None:
    words = [*SAMPLED, "steps=100000", "eval.enabled=false", "checkpoint.every=0", "--out", str(tmp_path)]
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


def test_save_in_progress_ends_before_an_evaluation_is_abandoned(
    tmp_path: Path, during: Send, while_writing: WhileWriting
) -> None:
    while_writing(1, lambda: None)
    during("after step 1", signal.SIGTERM)
    assert run(tmp_path, "steps=3", "checkpoint.every=1") == 143
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000001"
    assert last_saved(tmp_path) == 1
    assert not any(name.startswith("eval/") for name in untimed(tmp_path)[-1])


def test_signal_while_the_last_step_is_saved_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    while_writing: WhileWriting,
    capfd: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    over = threading.Event()

    def send() -> None:
        assert over.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    note_calls(monkeypatch, Signals, "steps_end", over.set)
    while_writing(1, send)
    assert run(tmp_path, "steps=1", "eval.enabled=false") == 0  # there is nothing left that it could stop
    says("train", answer(capfd))
    assert last_saved(tmp_path) == 1
