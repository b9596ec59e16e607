"""A signal, whatever is under way: what is abandoned, what is saved, what is said, and what resuming makes of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.data.conversation import Completion
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.policies.base import Request
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.settings import SamplingSettings
from rlpost.settings.run import RunRequest
from rlpost.train import expert_iteration, grpo, sft
from rlpost.train.sampled import SamplingSession
from rlpost.train.sft_session import SFTSession

SAMPLED = ["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2", "env.max_completion_tokens=4"]
SAMPLED += ["env.eval_limit=2", "eval.every=1", "checkpoint.every=0"]
TUNED = ["model=tiny", "minibatch_size=2", "env.limit=8", "env.eval_limit=2", "eval.every=1", "checkpoint.every=0"]
TIMED = ("time/", "memory/")
LOOPS: dict[str, tuple[Command[Any], Any, list[str]]] = {
    "grpo": (TRAIN_GRPO, grpo, SAMPLED),
    "expert_iteration": (TRAIN_EXPERT_ITERATION, expert_iteration, [*SAMPLED, "topk_size=1"]),
    "sft": (TRAIN_SFT, sft, TUNED),
}


def run(folder: Path, *words: str, loop: str = "grpo", resume: str | None = None) -> int:
    command, module, small = LOOPS[loop]
    composed = compose(command, [*small, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", loop], composed.yaml)
    return module.train(composed.settings, request)


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
            def measure(own: Any, now: str) -> Any:
                if now == when and pending:
                    look()
                    for number in [pending.pop() for _ in numbers]:
                        os.kill(os.getpid(), number)
                return original(own, now)

            return measure

        pending = list(reversed(numbers))
        for kind in (SamplingSession, SFTSession):
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


def test_what_is_due_is_saved_before_it_is_measured(
    tmp_path: Path, during: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def look() -> None:
        # It is written beside the evaluation, which waits here until it is there.
        deadline = time.monotonic() + 30
        while not seen and time.monotonic() < deadline:
            seen.extend(checkpoints(tmp_path))

    during("after step 1", signal.SIGINT, look=look)
    assert run(tmp_path, "steps=2", "checkpoint.every=1") == 130
    assert seen == ["step-000001"]
    assert "the evaluation after step 1 is abandoned, the last step is saved already" in capfd.readouterr().err


def test_the_last_evaluation_can_be_made_up(tmp_path: Path, during: Callable[..., None]) -> None:
    during("after step 1", signal.SIGINT)
    assert run(tmp_path, "steps=1") == 130
    assert run(tmp_path, "steps=1", resume="auto") == 0
    assert metrics(tmp_path)[-1]["eval/prompts"] == 2
    assert os.readlink(tmp_path / "checkpoints" / "best") == "step-000001"


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
    assert "stopping: nothing has been trained that is not saved, so this leaves without saving" in said.err
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
    assert "stopping: nothing has been trained" in capfd.readouterr().err  # though other output goes into the log


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


def test_saving_by_the_clock_changes_nothing_else(tmp_path: Path) -> None:
    words = ["policy=transformers", "deterministic=true", "steps=3", "eval.enabled=false", "checkpoint.keep_last=9"]
    assert run(tmp_path / "never", *words, "checkpoint.every_minutes=0") == 0
    assert run(tmp_path / "always", *words, "checkpoint.every_minutes=1e-9") == 0
    assert checkpoints(tmp_path / "never") == ["step-000003"]
    assert checkpoints(tmp_path / "always") == ["step-000001", "step-000002", "step-000003"]
    assert metrics(tmp_path / "always") == metrics(tmp_path / "never")
