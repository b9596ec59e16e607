"""A training that learns nothing says so, once while it runs and at its end, with the likely reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.rewards.score import Score
from rlpost.settings.commands import RunRequest

SMALL = ["model=tiny", "policy=scripted", "prompts_per_step=1", "group_size=2", "eval.enabled=false"]
SMALL += ["checkpoint.every=0"]


def run(folder: Path, *words: str, resume: str | None = None) -> None:
    composed = compose(TRAIN_GRPO, [*SMALL, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    assert TRAIN_GRPO.train(composed.settings, request) == 0


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


def lines(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


@pytest.mark.parametrize(
    ("given", "more", "reason"),
    [
        ((0.0, 0.0), [], "every reward is 0: the task is too hard, or the reward does not find the answer"),
        ((0.5, 0.5), [], "every reward is 0.5, which tells no completion from another"),
        ((1.0, 1.0), [], "every completion is right; the task is too easy for this model"),
        ((0.0, 0.0), ["env.max_completion_tokens=3"], "is cut at env.max_completion_tokens=3; raise it"),
    ],
)
def test_steps_without_a_gradient_are_told_once_and_at_the_end(
    given: Sequence[float],
    more: list[str],
    reason: str,
    tmp_path: Path,
    rewards: list[Sequence[float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewards.append(given)
    run(tmp_path, "steps=7", *more)
    told = lines(capsys.readouterr().out, "nothing was learned in ", reason)
    assert [line.partition(":")[0] for line in told] == [
        "nothing was learned in the first 5 steps",
        "nothing was learned in the 7 steps of this run",
    ]
    assert len(lines((tmp_path / "log.txt").read_text(), "WARNING nothing was learned in ", reason)) == 2


def test_a_run_that_goes_on_remembers_what_it_was_told(
    tmp_path: Path, rewards: list[Sequence[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards.append((0.0, 0.0))
    run(tmp_path, "steps=3")
    run(tmp_path, "steps=6", resume="latest")
    told = lines(capsys.readouterr().out, "nothing was learned in ")
    assert [line.partition(":")[0].removeprefix("nothing was learned in ") for line in told] == [
        "the 3 steps of this run",
        "the first 5 steps",
        "the 6 steps of this run",
    ]


def test_a_reward_that_never_varies_is_told_where_something_else_gives_a_gradient(
    tmp_path: Path, rewards: list[Sequence[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards.append((0.5, 0.5))
    composed = compose(TRAIN_EXPERT_ITERATION, [*SMALL, "topk_size=1", "min_reward=0.1", "steps=5"])
    request = RunRequest(tmp_path, None, composed.overrides, ["rlpost", "train"], composed.yaml)
    assert TRAIN_EXPERT_ITERATION.train(composed.settings, request) == 0
    told = lines(capsys.readouterr().out, "every completion in ", "earned the same reward", "every reward is 0.5")
    assert len(told) == 2


def test_expert_iteration_that_selects_nothing_is_told(
    tmp_path: Path, rewards: list[Sequence[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards.append((0.0, 0.5))
    composed = compose(TRAIN_EXPERT_ITERATION, [*SMALL, "topk_size=1", "min_reward=0.9", "steps=5"])
    request = RunRequest(tmp_path, None, composed.overrides, ["rlpost", "train"], composed.yaml)
    assert TRAIN_EXPERT_ITERATION.train(composed.settings, request) == 0
    assert len(lines(capsys.readouterr().out, "nothing was learned in ", "no completion was worth at least 0.9")) == 2
