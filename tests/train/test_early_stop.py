"""Training that a held-out figure ends early: decided on prompts apart from those that are reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.score import Score
from rlpost.train.parts import HeldOut
from rlpost.train.sampling import SamplingParts
from tests.says import Says
from tests.trainings import metrics, printed, train_in

SMALL = [
    *["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2", "env.max_completion_tokens=4"],
    *["env.eval_limit=20", "eval.every=1", "checkpoint.every=0"],
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
def test_reached_accuracy_ends_training_and_resuming(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    plays(monkeypatch, [0.0, 0.5, 0.9, 0.9], [0.9, 0.4, 0.4, 0.3], by_accuracy)
    words = ["steps=3", "eval.stop_at_accuracy=0.8"]
    assert run(tmp_path, *words, command=command) == 0
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["eval/accuracy_lenient"] for row in rows] == pytest.approx([0.9, 0.4, 0.4])
    assert [row["eval/deciding_accuracy_lenient"] for row in rows] == pytest.approx([0.0, 0.5, 0.9])
    assert (rows[0]["eval/prompts"], rows[0]["eval/deciding_prompts"]) == (10, 10)
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000002"
    if command is not TRAIN_GRPO:
        return
    says("train", printed(capsys, "early"))
    assert run(tmp_path, *words, resume="auto") == 0
    assert "eval.stop_at_accuracy=null" in printed(capsys, "nothing is")  # how to go on
    assert len(metrics(tmp_path)) == 3
    assert run(tmp_path, *words, "eval.stop_at_accuracy=null", resume="auto") == 0
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]


def test_reward_that_stops_rising_ends_training_resumed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    """The reward of the others rises all the while; the best so far is that of step 2."""
    deciding, reported = [0.1, 0.2, 0.5, 0.4, 0.5, 0.9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    plays(monkeypatch, deciding, reported, lambda right, share: Score(float(right)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, "steps=5", "eval.patience=2") == 0
    ended = printed(capsys, "ended early")
    says("train", ended)
    assert run(parts, "steps=3", "eval.patience=2") == 0
    assert run(parts, "steps=5", "eval.patience=2", resume="auto") == 0
    assert printed(capsys, "ended early") == ended
    for folder in (whole, parts):
        assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3, 4]
        assert (folder / "checkpoints/best").resolve().name == "step-000002"


def test_reached_reward_ends_training_after_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    """The accuracy is the main figure here and stays 0: the reward is looked at beside it."""

    def score(right: bool, share: float) -> Score:
        return Score(10.0 * share, accuracy_strict=0.0, accuracy_lenient=0.0)

    plays(monkeypatch, [0.4, 0.6, 0.9, 0.9], [0.9, 0.1, 0.1, 0.1], score)
    assert run(tmp_path, "steps=3", "eval.stop_at_reward=5") == 0
    says("train", printed(capsys, "ended early"))
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1]
    assert metrics(tmp_path)[-1]["eval/ends_training"] == 1.0
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000001"


def test_too_few_prompts_to_decide_are_refused(tmp_path: Path, says: Says) -> None:
    with says.refused("train", DataError, "19 prompts"):
        run(tmp_path, "steps=2", "eval.patience=2", "env.eval_limit=19")


def test_accuracy_that_is_not_measured_cannot_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    plays(monkeypatch, [0.5], [0.5], lambda right, share: Score(1.0))
    with says.refused("train", DataError, "eval.stop_at_accuracy"):
        run(tmp_path, "steps=2", "eval.stop_at_accuracy=0.5")
    assert not (tmp_path / "rollouts").exists()  # found by the evaluation before the first step


@pytest.mark.parametrize("key", ["eval.stop_at_accuracy", "eval.stop_at_reward", "eval.patience"])
def test_figure_without_evaluations_cannot_end_training(key: str) -> None:
    for more in ([], ["eval.every=1", "eval.enabled=false"]):
        with pytest.raises(ConfigError, match=re.escape(key)):
            compose(TRAIN_GRPO, [f"{key}=1", *more])


@pytest.mark.parametrize(
    ("prompts", "more", "few"), [(2, [], "2 prompts"), (62, ["eval.patience=1"], "31 prompts"), (32, [], "")]
)
def test_few_held_out_prompts_are_noted_at_the_start(
    prompts: int, more: list[str], few: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "steps=1", f"env.eval_limit={prompts}", *more) == 0
    noted = printed(capsys, "which is few")
    assert few in noted
    assert bool(few) == bool(noted)
