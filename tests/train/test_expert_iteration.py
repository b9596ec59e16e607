"""Expert iteration on the tiny model: what is selected is what is learned, and a run can be broken off."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlpost.catalog import TRAIN_EXPERT_ITERATION
from rlpost.config.compose import compose
from rlpost.errors import ConfigError
from rlpost.train import sampling
from tests.asynchronous import write_rows
from tests.says import Says
from tests.trainings import ends_alike, metrics, printed, rollouts, train_in, weights

MORE = ["topk_size=2", "deterministic=true", "checkpoint.every=0", "sampling.temperature=1.0"]
NO_EVAL = "eval.enabled=false"
Run = Callable[..., int]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A training whose reward differs between the replies of a random model."""
    return [*write_rows(tmp_path_factory.mktemp("rows")), *MORE]


@pytest.fixture(scope="module")
def run(words: list[str]) -> Run:
    return lambda folder, *more, resume=None: train_in(TRAIN_EXPERT_ITERATION, folder, [*words, *more], resume)


def test_reward_rises(run: Run, tmp_path: Path) -> None:
    more = ["steps=15", "prompts_per_step=4", "group_size=8", "topk_size=4", NO_EVAL, "optim.lr=3e-3"]
    assert run(tmp_path, *more, "optim.schedule=constant") == 0
    reward = [line["reward/mean"] for line in metrics(tmp_path)]
    assert sum(reward[-5:]) / 5 > sum(reward[:3]) / 3 + 0.1


def test_step_trains_on_the_best_of_each_prompt(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", NO_EVAL) == 0
    [line] = metrics(tmp_path)
    rows = rollouts(tmp_path, 1)
    assert len(rows) == 8
    expected = []
    for group in (0, 1):
        own = [row for row in rows if row["group"] == group]
        bar = sorted(row["reward"] for row in own)[1]  # the lower median of four
        better = sorted((row for row in own if row["reward"] > bar + 1e-6), key=lambda row: -row["reward"])
        expected += better[:2]
    assert expected, "the seed gives a step with something to select"
    assert [row for row in rows if row["advantage"] == 1.0] == sorted(expected, key=rows.index)
    assert {row["advantage"] for row in rows} == {0.0, 1.0}
    assert line["selected/share"] == len(expected) / 8
    assert line["selected/reward_mean"] == pytest.approx(sum(row["reward"] for row in expected) / len(expected))
    assert line["selected/prompts"] == len({row["group"] for row in expected})
    assert line["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 8)
    assert line["tokens/trained"] == sum(sum(row["mask"]) for row in expected)
    assert line["tokens/generated"] == sum(sum(row["mask"]) for row in rows)
    assert line["selected/empty_steps"] == 0
    # the model is nearly uniform over its 259 tokens before it has learned anything
    assert line["loss/sft"] == pytest.approx(math.log(259), abs=0.2)
    session = [value for row in expected for value in row["log_probs"]]
    assert line["loss/sft"] == pytest.approx(-sum(session) / len(session), abs=1e-4)


def test_step_with_nothing_selected_changes_no_weight(
    run: Run, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    assert run(tmp_path, "steps=2", NO_EVAL, "min_reward=2.0") == 0  # no reply earns that
    lines = metrics(tmp_path)
    assert [line["selected/empty_steps"] for line in lines] == [1, 2]
    assert [line["selected/share"] for line in lines] == [0, 0]
    assert [line["policy/version"] for line in lines] == [0, 0]
    assert lines[1]["selected/reward_mean"] is None
    assert lines[1]["tokens/trained"] == 0
    assert lines[1]["tokens/generated"] > 0
    before, after = load_file(tiny_folder / "model.safetensors"), weights(tmp_path)
    assert all(after[name].equal(before[name]) for name in before)
    says("train", printed(capsys, "no completion was selected"))


def test_minimum_reward_keeps_prompts_without_spread(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", NO_EVAL, "min_reward=0.0", "topk_size=4") == 0
    assert metrics(tmp_path)[0]["selected/share"] == 1.0


def test_resumed_run_is_bitwise_the_unbroken_one(run: Run, tmp_path: Path) -> None:
    more = ["steps=5", "optim.schedule=cosine", "eval.every=2", "minibatch_size=1", "passes=2"]
    assert run(tmp_path / "whole", *more) == 0
    original, broken = sampling.batch_metrics, tmp_path / "broken"

    def interrupted(*args: Any) -> dict[str, float]:
        if len(metrics(broken)) == 2:  # in step 2, after the evaluation and step 1
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "batch_metrics", interrupted)
        assert run(broken, *more) == 130
    assert [line["step"] for line in metrics(broken)] == [0, 1, 2]
    assert run(broken, *more, resume="latest") == 0
    assert ends_alike(broken, tmp_path / "whole")


def test_resumed_run_keeps_its_selection(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", NO_EVAL) == 0
    with pytest.raises(ConfigError, match="topk_size=2"):
        run(tmp_path, "steps=2", NO_EVAL, "topk_size=1", resume="latest")


@pytest.mark.parametrize("more", ["loss=minor_sft", "loss.kl_coef=0.5"])
def test_loss_may_compare_with_the_starting_model(run: Run, tmp_path: Path, more: str) -> None:
    assert run(tmp_path, "steps=2", NO_EVAL, more) == 0
    first, second = metrics(tmp_path)
    assert first["kl/ref"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl/ref"] > 1e-6
    if more == "loss=minor_sft":  # -log sigmoid(0): the model is its own reference yet
        assert first["loss/sft"] == pytest.approx(math.log(2), abs=1e-5)
    else:
        assert second["loss/kl"] == pytest.approx(0.5 * second["kl/ref"], rel=1e-4)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["topk_size=5"], "topk_size=5"),
        (["group_size=1", "topk_size=1"], "group_size=1"),
        (["sampling.temperature=0"], "group_size"),
        (["env.split=test"], "env.split=test"),
        (["policy=vllm"], "deterministic=true"),
        (["loss=grpo"], "loss=grpo"),
    ],
    ids=["too many", "nothing to compare", "equal completions", "held out", "not bitwise", "another loss"],
)
def test_impossible_settings_are_refused_in_one_line(more: list[str], key: str, words: list[str], says: Says) -> None:
    with says.refused("train", ConfigError, key):
        compose(TRAIN_EXPERT_ITERATION, [*words, *more])
