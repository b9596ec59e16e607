"""Nothing is silent for long: what is being waited for is said now and then, in a pipe too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost import output
from rlpost.cli.main import run
from rlpost.data.conversation import Completion
from rlpost.output import Heartbeat, Pace
from rlpost.policies.base import Request
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.screen.state import State
from rlpost.settings import SamplingSettings
from rlpost.train import watchers
from tests.says import Says

SMALL = ["model=tiny", "policy=scripted", "env.max_completion_tokens=4"]
TRAIN = [*SMALL, "prompts_per_step=1", "group_size=2", "env.eval_limit=2", "steps=1", "checkpoint.every=0"]
EVERY = output.EVERY  # as it is where no test changes it


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "EVERY", 0.02)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """An event that is set once a text has been said by a heartbeat."""
    waited: dict[str, threading.Event] = {}
    original = Heartbeat.__init__

    def noting(self: Heartbeat, line: Callable[[], str], say: Callable[[str], None]) -> None:
        def noted(text: str) -> None:
            say(text)
            for begin, event in waited.items():
                if begin in text:
                    event.set()

        original(self, line, noted)

    monkeypatch.setattr(Heartbeat, "__init__", noting)
    return lambda begin: waited.setdefault(begin, threading.Event())


def test_a_long_wait_is_said_after_30_seconds_then_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ticks, said = SimpleNamespace(now=0.0), [], []
    monkeypatch.setattr(output, "EVERY", EVERY)
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(output, "Ticker", lambda tick, every: ticks.append(tick) or SimpleNamespace(stop=lambda: None))
    with Heartbeat(lambda: "sampling", lambda text: said.append(clock.now)) as beating:
        for second in range(1200):
            clock.now = float(second)
            ticks[0]()
        assert said == [30.0, 90.0, 210.0, 450.0, 750.0, 1050.0]
        beating.restart()  # a step's line, at 1199 s
        clock.now = 1229.0
        ticks[0]()
        assert said[-1] == 1229.0


def test_a_line_says_how_far_how_fast_and_how_much_longer(says: Says) -> None:
    says("train", Pace(0.0, 120, 500, 6000).line("evaluating", 30.0))
    says("train", Pace(0.0, 0, 500, None).line("evaluating", 12.0))
    says("train", Pace(0.0).line("loading packaged:smollm2", 20.4))


def test_the_screen_knows_what_is_under_way_in_a_step(says: Says) -> None:
    clock = iter([0.0, 0.0, 1.0, 13.0, 40.0, 52.0])
    state = State(now=lambda: next(clock))
    assert state.progress_line() == ""
    state.begin(2, 9)
    state.begin_step()
    state.begin_phase("sampling", "64 completions", 40, 64, 600)
    says("train", state.progress_line())
    state.begin_phase("scoring", "64 completions")
    says("train", state.progress_line())


def slow(monkeypatch: pytest.MonkeyPatch, greedy: threading.Event, drawn: threading.Event) -> None:
    """Sampling that goes on until it was said to be under way."""
    original = ScriptedPolicy.generate

    def generate(self: ScriptedPolicy, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        made = original(self, requests, sampling)
        if self.on_ended is not None:
            self.on_ended(1)
        assert (drawn if sampling.temperature else greedy).wait(60)
        return made

    monkeypatch.setattr(ScriptedPolicy, "generate", generate)


def test_a_training_in_a_pipe_says_how_far_evaluations_and_steps_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beats: Callable[[str], threading.Event],
    capfd: pytest.CaptureFixture[str],
) -> None:
    greedy, drawn = "\nevaluating 1 of 2, ", "\nstep 1: sampling 1 of 2 completions, "
    slow(monkeypatch, beats(greedy.strip("\n")), beats(drawn.strip("\n")))
    assert run(["train", "grpo", *TRAIN, "--out", str(tmp_path / "r")]) == 0
    out = capfd.readouterr().out
    assert greedy in out
    assert drawn in out


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_evaluation_says_on_stderr_how_far_it_is(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beats: Callable[[str], threading.Event],
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = beats("evaluating 1 of 3, ")
    slow(monkeypatch, said, said)
    assert run(["eval", *SMALL, "env.limit=3", "--out", str(tmp_path / "e"), *more]) == 0
    captured: Any = capfd.readouterr()
    assert "\nevaluating 1 of 3, " in f"\n{captured.err}"
    assert "evaluating" not in captured.out


def test_a_long_save_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beats: Callable[[str], threading.Event],
    capfd: pytest.CaptureFixture[str],
) -> None:
    said, save_model = beats("step 2: saving checkpoint, "), watchers.save_model

    def slow(model: Any, tokenizer: Any, folder: Path) -> None:
        if folder.parent.name.startswith(".step-000001."):
            assert said.wait(60)
        save_model(model, tokenizer, folder)

    monkeypatch.setattr(watchers, "save_model", slow)
    words = ["steps=2", "checkpoint.every=1", "eval.enabled=false"]
    assert run(["train", "grpo", *TRAIN, *words, "--out", str(tmp_path / "r")]) == 0
    assert "\nstep 2: saving checkpoint, " in capfd.readouterr().out
