"""A step of a run computed again: its loss is the recorded one, and other settings give what their formulas say."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.catalog import CHOICES, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, Command
from rlpost.config.compose import compose
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import ConfigError
from rlpost.objectives.policy_loss import VARIANTS
from rlpost.rewards.score import Score
from rlpost.runs.reader import read_run
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings import AdvantageSettings, OverlongSettings
from rlpost.settings.loss import ESTIMATORS, Aggregation
from rlpost.train.replay import Computed, Replay, check_step, replay
from tests.objectives import slow_reference as slow
from tests.objectives.test_advantage import slowly
from tests.trainings import metrics, train_in

COMMON = [
    *["model=tiny", "policy=transformers", "model.autocast=none", "env.max_completion_tokens=6", "optim.lr=1e-2"],
    *["eval.enabled=false", "report.enabled=false", "checkpoint.every=1", "checkpoint.keep_last=9"],
]
GROUPS = [*COMMON, "gate.enabled=false", "prompts_per_step=3", "group_size=4"]


@pytest.fixture(scope="module", autouse=True)
def reward_small_ids() -> Iterator[None]:
    """Random replies never hold the right number, so a reward stands in its place that differs among them."""

    def score(self: ArithmeticEnv, conversation: Any) -> Score:
        return Score(reward=sum(token < 120 for token in conversation.response_ids) / 6, parts={})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArithmeticEnv, "score", score)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a run of a training; each once."""
    runs: dict[tuple[str, ...], Path] = {}

    def make(command: Command[Any], *words: str) -> Path:
        key = (command.name, *words)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("run") / "r"
            common = GROUPS if command.settings.learns_from_own else COMMON
            assert train_in(command, runs[key], [*common, *words]) == 0
        return runs[key]

    return make


@pytest.fixture(scope="module")
def sums(made: Callable[..., Path]) -> Path:
    """A run of GRPO as it comes."""
    return made(TRAIN_GRPO, "steps=2")


@cache
def settings_of(command: Command[Any], run: Path) -> Any:
    return compose(command, (run / "overrides.txt").read_text().splitlines()).settings


def again(command: Command[Any], run: Path, step: int, **changes: Any) -> Replay:
    """The replay of a run's step; these parts of its settings are changed on the other side."""
    settings = settings_of(command, run)
    return replay(read_run(run), step, settings, replace(settings, **changes) if changes else None)


def other(command: Command[Any], run: Path, step: int, **changes: Any) -> Computed:
    """A run's step as those settings would have computed it."""
    computed = again(command, run, step, **changes).other
    assert computed is not None
    return computed


def assert_recorded(command: Command[Any], run: Path, step: int) -> Replay:
    replayed = again(command, run, step)
    [line] = [line for line in metrics(run) if line["step"] == step]
    figures = {name: value for name, value in replayed.was.figures.items() if name in line}
    assert {"grad_norm", *(name for name in line if name.startswith("loss/"))} <= figures.keys()
    for name, value in figures.items():
        assert value == pytest.approx(line[name], abs=1e-6, rel=1e-6), name
    assert replayed.agrees
    return replayed


def test_replayed_update_is_the_recorded_one_and_writes_nothing(sums: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sums.rglob("*")}
    for step in (1, 2):
        assert assert_recorded(TRAIN_GRPO, sums, step).log_probs_apart == pytest.approx(0, abs=1e-6)
    assert {path: path.stat().st_mtime_ns for path in sums.rglob("*")} == before


@pytest.mark.parametrize("loss", VARIANTS)
def test_every_other_loss_is_the_one_of_its_formula(loss: str, sums: Path) -> None:
    replayed = other(TRAIN_GRPO, sums, 2, loss=CHOICES["loss"][loss].cls(aggregation=Aggregation.sequence_mean))
    rows = read_rollouts(sums, 2)
    most = max(len(row["token_ids"]) for row in rows)

    def table(values: Callable[[Any], list[float]]) -> list[list[float]]:
        return [values(row) + [0.0] * (most - len(row["token_ids"])) for row in rows]

    old = table(lambda row: row["trainer_log_probs"])
    sampler = table(lambda row: row["log_probs"])
    advantage = [[row["advantage"]] * most for row in rows]
    mask = [[t < len(row["token_ids"]) for t in range(most)] for row in rows]
    batch = slow.Batch(old, advantage, mask, sampler, old)
    choice = slow.Choice(loss, "sequence_mean", VARIANTS[loss].coefficients)
    assert replayed.figures["loss/policy"] == pytest.approx(slow.loss(choice, old, old, batch), abs=1e-6)
    for place, slopes in enumerate(slow.gradient(choice, old, batch)):
        weights = replayed.weights.get(place, torch.zeros(0)).tolist()  # without an advantage it is not read
        assert weights == pytest.approx([-slope for slope in slopes[: len(weights)]], abs=1e-6)
        assert weights or not any(slopes)


def advantages_of(estimator: str, rewards: list[float]) -> list[float]:
    """The advantages of groups of four, by the papers' formulas."""
    return [slowly(estimator, rewards, [j // 4 for j in range(len(rewards))], i) for i in range(len(rewards))]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_other_estimator_weighs_tokens_by_its_formula(estimator: str, sums: Path) -> None:
    rows = read_rollouts(sums, 2)
    expected = advantages_of(estimator, [row["reward"] for row in rows])
    replayed = again(TRAIN_GRPO, sums, 2, advantage=AdvantageSettings(estimator))
    assert replayed.other is not None
    tokens = sum(len(row["token_ids"]) for row in rows)
    for place, (row, advantage) in enumerate(zip(rows, expected, strict=True)):
        weights = replayed.other.weights.get(place, torch.zeros(len(row["token_ids"])))
        assert weights.tolist() == pytest.approx([advantage / tokens] * len(row["token_ids"]), abs=1e-6)
    if estimator == "grpo":
        assert (replayed.cosine, replayed.norm_ratio, replayed.moved) == (pytest.approx(1), pytest.approx(1), 0)


def test_penalties_masks_and_a_reference_are_replayed(made: Callable[..., Path]) -> None:
    words = ["loss=gspo_token", "loss.kl_coef=0.1", "loss.kl_in=reward", "advantage.estimator=reinforce_pp"]
    run = made(TRAIN_GRPO, "steps=2", *words, "overlong.penalty_tokens=3")
    assert_recorded(TRAIN_GRPO, run, 2)
    rows = read_rollouts(run, 2)
    bare = CHOICES["loss"]["grpo"].cls(entropy_target=9.0)  # of a run that adapts no coefficient
    changes = {"overlong": OverlongSettings(), "advantage": AdvantageSettings("rloo"), "loss": bare}
    free = other(TRAIN_GRPO, run, 2, **changes)
    expected = advantages_of("rloo", [row["reward"] - row["reward_parts"]["overlong"] for row in rows])
    tokens = sum(len(row["token_ids"]) for row in rows)
    assert {place: weights[0].item() for place, weights in free.weights.items()} == pytest.approx(
        {place: expected[place] / tokens for place in free.weights}, abs=1e-6
    )
    masked = other(TRAIN_GRPO, run, 2, overlong=OverlongSettings(mask=True, penalty_tokens=3))
    assert set(masked.weights) <= {place for place, row in enumerate(rows) if row["finish_reason"] == "stop"}


def test_adapted_bonus_and_moved_reference_are_those_of_the_step(made: Callable[..., Path]) -> None:
    words = ["loss.entropy_target=9", "loss.entropy_coef=0.01", "loss.kl_coef=0.5", "loss.ref_sync_every=1"]
    run = made(TRAIN_GRPO, "steps=3", *words)
    was = assert_recorded(TRAIN_GRPO, run, 3).was
    assert was.figures["entropy_coef"] == pytest.approx(0.02)
    loss = replace(settings_of(TRAIN_GRPO, run).loss, clip_high=0.5)  # a bound that does not act
    assert other(TRAIN_GRPO, run, 3, loss=loss).figures == pytest.approx(was.figures, abs=1e-6)


def test_of_several_updates_the_first_is_replayed(made: Callable[..., Path]) -> None:
    run = made(TRAIN_GRPO, "steps=1", "minibatch_size=4", "passes=2")
    replayed = again(TRAIN_GRPO, run, 1)
    assert (replayed.agrees, replayed.was.updates) == (None, 6)
    assert set(replayed.was.weights) <= {0, 1, 2, 3}  # a minibatch is a whole group
    assert replayed.log_probs_apart == pytest.approx(0, abs=1e-6)


def test_expert_iteration_is_replayed_with_what_it_selected(made: Callable[..., Path]) -> None:
    run = made(TRAIN_EXPERT_ITERATION, "steps=2", "topk_size=1")
    assert_recorded(TRAIN_EXPERT_ITERATION, run, 2)
    replayed = again(TRAIN_EXPERT_ITERATION, run, 2, topk_size=4, min_reward=0.0)
    assert replayed.other is not None
    assert (replayed.was.figures["completions"], replayed.other.figures["completions"]) == (1, 12)
    rows = read_rollouts(run, 2)
    tokens = sum(len(row["token_ids"]) for row in rows)
    weights = torch.cat(list(replayed.other.weights.values()))
    assert weights.tolist() == pytest.approx([1 / tokens] * tokens)
    assert set(replayed.was.weights) == {place for place, row in enumerate(rows) if row["advantage"] == 1}
    minor = other(TRAIN_EXPERT_ITERATION, run, 1, loss=CHOICES["loss"]["minor_sft"].cls())  # the reference is the model
    assert minor.figures["loss/sft"] == pytest.approx(math.log(2), abs=1e-6)


def test_step_without_its_weights_names_those_with_theirs(sums: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sums, tmp_path / "r", symlinks=True)
    assert check_step(read_run(run), None) == 2
    with pytest.raises(ConfigError, match=r"^step 9 .*: 1, 2$"):
        check_step(read_run(run), 9)
    (run / "checkpoints/step-000001/manifest.json").unlink()
    with pytest.raises(ConfigError, match=r": 1$"):
        check_step(read_run(run), 2)
