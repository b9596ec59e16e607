"""Training that a held-out figure ends early: decided on prompts apart from those that are reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.score import Score
from rlpost.train.sampling import HeldOut, SamplingParts
from tests.trainings import metrics, train_in

SMALL = [
    "model=tiny",
    "policy=scripted",
    "prompts_per_step=1",
    "group_size=2",
    "env.max_completion_tokens=4",
    "env.eval_limit=20",
    "eval.every=1",
    "checkpoint.every=0",
]
Make = Callable[[bool, float], Score]


def run(folder: Path, *words: str, resume: str | None = None, command: Any = TRAIN_GRPO) -> int:
    own = ["topk_size=1"] if command is TRAIN_EXPERT_ITERATION else []
    return train_in(command, folder, [*SMALL, *own, *words], resume)


def plays(patch: pytest.MonkeyPatch, deciding: Sequence[float], reported: Sequence[float], score: Make) -> None:
    """Evaluation number n scores every second prompt by `deciding[n]`, the first among them, the others by `reported`.

    `score` is told whether one of that share of prompts is asked, and the share.
    """
    state = {"step": 0, "asked": 0}
    real = SamplingParts.measure

    def measure(parts: Any, ranks: Any, screen: Any, when: str) -> HeldOut:
        state.update(step=0 if when == "before training" else int(when.removeprefix("after step ")), asked=0)
        return real(parts, ranks, screen, when)

    def scored(self: ArithmeticEnv, conversation: Any) -> Score:
        place, decides = divmod(state["asked"], 2)
        state["asked"] += 1
        share = (deciding if decides else reported)[state["step"]]
        return score(place < round(10 * share), share)

    patch.setattr(SamplingParts, "measure", measure)
    patch.setattr(ArithmeticEnv, "score", scored)


def by_accuracy(right: bool, share: float) -> Score:
    return Score(float(right), accuracy_strict=float(right), accuracy_lenient=float(right))


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_EXPERT_ITERATION], ids=lambda command: command.name)
def test_an_accuracy_that_is_reached_ends_training_and_a_resumed_run_says_so(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plays(monkeypatch, [0.0, 0.5, 0.9, 0.9], [0.9, 0.4, 0.4, 0.3], by_accuracy)
    words = ["steps=3", "eval.stop_at_accuracy=0.8"]
    assert run(tmp_path, *words, command=command) == 0
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["eval/accuracy_lenient"] for row in rows] == pytest.approx([0.9, 0.4, 0.4])
    assert [row["eval/deciding_accuracy_lenient"] for row in rows] == pytest.approx([0.0, 0.5, 0.9])
    assert (rows[0]["eval/prompts"], rows[0]["eval/deciding_prompts"]) == (10, 10)
    said = capsys.readouterr().out
    starts = "ends    early by eval.stop_at_accuracy=0.8: 10 held-out prompts decide, 10 others are reported\n"
    assert starts in said
    why = "the accuracy on the 10 prompts that decide, 90.0% [56.8%, 98.9%], has reached eval.stop_at_accuracy=0.8"
    assert f"training ended early, after step 2: {why}\n" in said
    assert "before and after training on 10 held-out prompts, 95% intervals\n" in said
    assert "best: after step 2, 40.0% [15.2%, 70.7%] of 10 prompts" in said
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000002"
    if command is not TRAIN_GRPO:
        return
    assert run(tmp_path, *words, resume="auto") == 0
    said = capsys.readouterr().out
    assert f"nothing is left to do: 2 steps are done; it ended early: {why}; to go on to the last step all" in said
    assert f"--resume {tmp_path} eval.stop_at_accuracy=null" in said
    assert len(metrics(tmp_path)) == 3
    assert run(tmp_path, *words, "eval.stop_at_accuracy=null", resume="auto") == 0
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_reward_that_rises_no_more_ends_training_resumed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward of the others rises all the while; the best so far is that of step 2."""
    deciding, reported = [0.1, 0.2, 0.5, 0.4, 0.5, 0.9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    plays(monkeypatch, deciding, reported, lambda right, share: Score(float(right)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, "steps=5", "eval.patience=2") == 0
    why = "the reward on the 10 prompts that decide has not risen in 2 evaluations since step 2 (eval.patience=2)"
    said = capsys.readouterr().out
    assert f"training ended early, after step 4: {why}\n" in said
    assert "checkpoints/best is that of step 2, reward 0.300 [0.094, 0.625] of 10 prompts" in said  # 0.1 to 0.5 of 10
    assert run(parts, "steps=3", "eval.patience=2") == 0
    assert run(parts, "steps=5", "eval.patience=2", resume="auto") == 0
    assert f"training ended early, after step 4: {why}\n" in capsys.readouterr().out
    for folder in (whole, parts):
        assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3, 4]
        assert (folder / "checkpoints/best").resolve().name == "step-000002"


def test_a_reward_that_is_reached_ends_training_after_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The accuracy is the main figure here and stays 0: the reward is looked at beside it."""

    def score(right: bool, share: float) -> Score:
        return Score(10.0 * share, accuracy_strict=0.0, accuracy_lenient=0.0)

    plays(monkeypatch, [0.4, 0.6, 0.9, 0.9], [0.9, 0.1, 0.1, 0.1], score)
    assert run(tmp_path, "steps=3", "eval.stop_at_reward=5") == 0
    why = "the reward on the 10 prompts that decide, 6.000 (no interval), has reached eval.stop_at_reward=5"
    assert f"training ended early, after step 1: {why}\n" in capsys.readouterr().out
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1]
    assert metrics(tmp_path)[-1]["eval/ends_training"] == 1.0
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000001"


def test_too_few_prompts_for_both_are_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path, "steps=2", "eval.patience=2", "env.eval_limit=19")
    assert str(caught.value) == (
        "eval.patience is decided on half of the held-out prompts, and the other half is reported: 19 prompts are too "
        "few, it takes 20; raise eval.limit, or leave it out"
    )


def test_an_accuracy_that_is_not_measured_cannot_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, [0.5], [0.5], lambda right, share: Score(1.0))
    with pytest.raises(DataError, match=r"eval.stop_at_accuracy: this environment measures no accuracy: set env"):
        run(tmp_path, "steps=2", "eval.stop_at_accuracy=0.5")
    assert not (tmp_path / "rollouts").exists()  # found by the evaluation before the first step


@pytest.mark.parametrize("key", ["eval.stop_at_accuracy=0.5", "eval.stop_at_reward=0.5", "eval.patience=1"])
def test_what_cannot_end_training_is_refused(key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} needs evaluations between the first step and the last"):
        compose(TRAIN_GRPO, [key])
    with pytest.raises(ConfigError, match=f"{name} has nothing to go by while eval.enabled=false"):
        compose(TRAIN_GRPO, [key, "eval.every=1", "eval.enabled=false"])


def test_few_held_out_prompts_are_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "held-out figures will rest on {} prompts, which is few: where half are right, the 95% interval goes from "
    assert run(tmp_path / "few", "steps=1", "env.eval_limit=2") == 0
    assert few.format(2) + "6% to 94%; raise eval.limit\n" in capsys.readouterr().out
    assert run(tmp_path / "half", "steps=1", "env.eval_limit=62", "eval.patience=1") == 0
    assert few.format(31) in capsys.readouterr().out
    assert run(tmp_path / "enough", "steps=1", "env.eval_limit=32") == 0
    assert "which is few" not in capsys.readouterr().out
