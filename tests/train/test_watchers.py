"""The steps of a run, and what watches them: the built-in list, and watchers of plugins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.config.plugins import register_watcher
from rlpost.errors import CheckpointError, ConfigError, RewardError, WatcherError
from rlpost.model.packing import rows_of
from rlpost.runs.checkpoint import load_checkpoint
from rlpost.runs.folder import RunFolder
from rlpost.settings.commands import RunRequest
from rlpost.train import sft
from rlpost.train.assemble import GRPOParts, assemble_grpo
from rlpost.train.run import Evaluated, Run
from rlpost.train.sampling import SamplingParts
from rlpost.train.step import Step
from rlpost.train.training import run as run_training
from tests.says import Says
from tests.trainings import metrics, printed, train_in

SMALL = ["model=tiny", "policy=transformers", "prompts_per_step=2", "group_size=2", "env.max_completion_tokens=4"]
TUNED = ["model=tiny", "minibatch_size=2", "env.limit=8", "env.eval_limit=2"]
LOOPS = {TRAIN_GRPO: SMALL, TRAIN_SFT: TUNED}
NO_EVAL = "eval.enabled=false"


def request_of(folder: Path, words: list[str], command: Command[Any] = TRAIN_GRPO) -> tuple[Any, RunRequest]:
    composed = compose(command, words)
    typed = ["rlpost", *command.verb.split()]
    return composed.settings, RunRequest(folder, None, composed.overrides, typed, composed.yaml)


def test_changed_weights_that_were_not_pushed_are_an_error(tmp_path: Path) -> None:
    settings, request = request_of(tmp_path / "run", [*SMALL, "steps=2", NO_EVAL])

    def learn(run: Run[Any, GRPOParts], parts: GRPOParts) -> None:
        run.ranks.over(1)
        for step in run.steps():
            parts.collector.fill(2)
            rows = rows_of(parts.buffer.take(2))
            for number, row in enumerate(rows):
                row.advantage = (-1.0) ** number
            step.update(rows)
            assert step.has_unpushed_weights
            if step.number == 1:
                step.push(parts.collector)
                assert not step.has_unpushed_weights

    with pytest.raises(RuntimeError, match=r"step 2: .* step\.push"):
        run_training(settings, request, assemble_grpo, learn)


class Noting:
    """Notes each of its calls."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.calls: list[Any] = []
        made.append(self)

    def on_start(self, facts: Any) -> None:
        self.calls.append(("start", [fact.name for fact in facts][:2]))

    def on_step(self, step: Step) -> None:
        step.metrics["noting/steps"] = float(step.number)
        self.calls.append(("step", step.number))

    def on_evaluation(self, evaluation: Evaluated) -> None:
        self.calls.append(("evaluation", evaluation.step, evaluation.is_best))

    def on_end(self, outcome: Any) -> None:
        self.calls.append(("end", outcome.error))


made: list[Noting] = []


@pytest.mark.parametrize("command", LOOPS, ids=lambda command: command.name)
def test_watcher_sees_what_happens_and_adds_a_number(command: Command[Any], tmp_path: Path) -> None:
    register_watcher("noting", Noting)
    made.clear()
    assert train_in(command, tmp_path, [*LOOPS[command], "steps=2", "env.eval_limit=2"]) == 0
    [noting] = made
    assert [call[0] for call in noting.calls] == ["start", "evaluation", "step", "step", "evaluation", "end"]
    assert noting.calls[0] == ("start", ["model", "precision"])
    assert noting.calls[1] == ("evaluation", 0, False)
    assert noting.calls[-1] == ("end", None)
    assert [row.get("noting/steps") for row in metrics(tmp_path)] == [None, 1.0, 2.0]


class StopAfter:
    """Ends the run when three steps, in this attempt or an earlier one, have been seen."""

    def __init__(self, run: Run[Any, Any]) -> None:
        self.run = run
        self.seen = 0

    def on_step(self, step: Step) -> None:
        self.seen += 1
        if self.seen == 3:
            self.run.stop("enough seen")

    def state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_watcher_stops_a_run_and_goes_on_where_it_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register_watcher("stop-after", StopAfter)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [*TUNED, "steps=8", "checkpoint.every=1"]
    assert train_in(TRAIN_SFT, whole, words) == 0
    assert "enough seen" in printed(capsys, "after step 3")
    assert [row["step"] for row in metrics(whole)] == [0, 1, 2, 3]
    assert "eval/loss" in metrics(whole)[-1]  # the last step is measured and saved
    environment = json.loads((whole / "environment.json").read_text())
    assert (environment["total_steps"], environment["ended_early"]) == (3, "enough seen")

    record = RunFolder.record

    def full(own: RunFolder, number: int, *given: Any) -> None:
        if number == 3:
            raise CheckpointError("the disk is full")
        record(own, number, *given)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "record", full)
        with pytest.raises(CheckpointError, match="is full"):
            train_in(TRAIN_SFT, parts, words)
    _, state = load_checkpoint(parts / "checkpoints/latest")  # a step that is not recorded is not saved
    assert (state["progress"]["step"], state["watchers"]) == (2, {"stop-after": {"seen": 2}})
    assert train_in(TRAIN_SFT, parts, words, resume="auto") == 0
    assert [row["step"] for row in metrics(parts)] == [0, 1, 2, 3]
    capsys.readouterr()
    assert train_in(TRAIN_SFT, parts, words, resume="auto") == 0
    assert "enough seen" in printed(capsys, "nothing is")
    assert train_in(TRAIN_SFT, parts, [*words, "steps=9"], resume="auto") == 0
    assert metrics(parts)[-1]["step"] == 9


def failing(method: str) -> Callable[[Run[Any, Any]], Any]:
    def fail(*given: Any) -> None:
        raise KeyError("reward/mine")

    return lambda run: type("Failing", (), {method: staticmethod(fail)})()


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_evaluation", "state"])
def test_watcher_that_raises_ends_the_run_by_its_name(method: str, tmp_path: Path) -> None:
    register_watcher("mine", failing(method))
    with pytest.raises(WatcherError, match=rf"mine .* {method}: KeyError: 'reward/mine'"):
        train_in(TRAIN_SFT, tmp_path, [*TUNED, "steps=2", "checkpoint.every=1"])
    assert "Traceback" in (tmp_path / "log.txt").read_text()
    if method == "on_step":  # the step itself is not lost
        assert [row["step"] for row in metrics(tmp_path)] == [0, 1]
        assert load_checkpoint(tmp_path / "checkpoints/latest")[1]["progress"]["step"] == 1


def test_errors_of_an_optional_watcher_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    register_watcher("mine", failing("on_step"), optional=True)
    assert train_in(TRAIN_SFT, tmp_path, [*TUNED, "steps=3", NO_EVAL]) == 0
    says("train", printed(capsys, "the watcher mine"))


@pytest.mark.parametrize("command", LOOPS, ids=lambda command: command.name)
def test_evaluation_that_fails_does_not_lose_the_step(
    command: Command[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*LOOPS[command], "steps=2", "env.eval_limit=2", "checkpoint.every=0"]
    parts: Any = SamplingParts if command is TRAIN_GRPO else sft.RowParts
    measure = parts.measure

    def failing_at_last(own: Any, ranks: Any, screen: Any, when: str) -> Any:
        if when == "after step 2":
            raise RewardError("all rewards of the evaluation failed")
        return measure(own, ranks, screen, when)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "measure", failing_at_last)
        with pytest.raises(RewardError, match="all rewards"):
            train_in(command, tmp_path, words)
    assert "eval/rows" not in metrics(tmp_path)[-1]
    assert load_checkpoint(tmp_path / "checkpoints/latest")[1]["progress"]["step"] == 2
    assert train_in(command, tmp_path, words, resume="auto") == 0  # and measures now
    last = metrics(tmp_path)[-1]
    assert (last["step"], any(name.startswith("eval/") for name in last)) == (2, True)


def test_method_that_is_never_called_is_refused(tmp_path: Path) -> None:
    register_watcher("misspelt", failing("on_setp"))
    with pytest.raises(ConfigError, match="on_setp"):
        train_in(TRAIN_SFT, tmp_path, [*TUNED, "steps=1", NO_EVAL])


def test_loop_that_leaves_a_step_in_its_middle_is_an_error(tmp_path: Path) -> None:
    settings, request = request_of(tmp_path, [*TUNED, "steps=3", NO_EVAL], TRAIN_SFT)

    def learn(run: Run[Any, Any], parts: Any) -> None:
        for step in run.steps():
            if step.number == 2:
                break

    with pytest.raises(RuntimeError, match="step 2"):
        run_training(settings, request, sft.assemble, learn)


def test_failure_at_the_end_does_not_hide_why_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_watcher("mine", failing("on_end"))
    with monkeypatch.context() as patch:
        patch.setattr(sft, "sft_metrics", failing("x"))
        with pytest.raises(TypeError):
            train_in(TRAIN_SFT, tmp_path / "broken", [*TUNED, "steps=1", NO_EVAL])
    with pytest.raises(WatcherError, match="on_end"):
        train_in(TRAIN_SFT, tmp_path / "whole", [*TUNED, "steps=1", NO_EVAL])
