"""A training that learns nothing is explained, once while it runs and at its end, with the likely reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.rewards.score import Score
from tests.says import Says
from tests.trainings import printed, train_in

SMALL = ["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2"]
SMALL += ["eval.enabled=false", "checkpoint.every=0"]


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[float]]:
    """The rewards of the completions of each prompt in turn, the last ones for ever; accuracy is 0."""
    given: list[Sequence[float]] = []

    def score(self: ArithmeticEnv, conversation: object) -> Score:
        row = given[min(conversation.group_id, len(given) - 1)]  # type: ignore[attr-defined]
        value = row[conversation.sample]  # type: ignore[attr-defined]
        return Score(reward=value, parts={"answer": value}, accuracy_strict=0.0, accuracy_lenient=value == 1.0)

    monkeypatch.setattr(ArithmeticEnv, "score", score)
    return given


@pytest.mark.parametrize(
    ("given", "more"),
    [((0.0, 0.0), []), ((0.5, 0.5), []), ((1.0, 1.0), []), ((0.0, 0.0), ["env.max_completion_tokens=3"])],
    ids=["all 0", "all alike", "all right", "all truncated"],
)
def test_steps_without_a_gradient_are_explained_twice(
    given: Sequence[float],
    more: list[str],
    tmp_path: Path,
    rewards: list[Sequence[float]],
    capsys: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    rewards.append(given)
    assert train_in(TRAIN_GRPO, tmp_path, [*SMALL, "steps=7", *more]) == 0
    shown = printed(capsys, "likely reason")
    says("train", shown)
    assert (tmp_path / "log.txt").read_text().count("likely reason") == shown.count("\n") + 1 == 2


def test_run_that_goes_on_remembers_what_it_explained(
    tmp_path: Path, rewards: list[Sequence[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards.append((0.0, 0.0))
    assert train_in(TRAIN_GRPO, tmp_path, [*SMALL, "steps=3"]) == 0
    assert train_in(TRAIN_GRPO, tmp_path, [*SMALL, "steps=6"], resume="latest") == 0
    assert re.findall(r"(\d) steps", printed(capsys, "likely reason")) == ["3", "5", "6"]


@pytest.mark.parametrize(
    ("given", "least"), [((0.5, 0.5), 0.1), ((0.0, 0.5), 0.9)], ids=["rewards never vary", "nothing is selected"]
)
def test_expert_iteration_explains_what_it_does_not_learn(
    given: Sequence[float],
    least: float,
    tmp_path: Path,
    rewards: list[Sequence[float]],
    capsys: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    """Its gradient may come from somewhere else than from differences of rewards."""
    rewards.append(given)
    words = [*SMALL, "topk_size=1", f"min_reward={least}", "steps=5"]
    assert train_in(TRAIN_EXPERT_ITERATION, tmp_path, words) == 0
    says("train", printed(capsys, "likely reason"))
