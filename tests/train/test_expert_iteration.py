"""Expert iteration on the tiny model: what is selected is what is learned, and a run can be broken off."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost.catalog import TRAIN_EXPERT_ITERATION
from rlpost.config.compose import compose
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import ConfigError
from rlpost.rewards.score import Score
from rlpost.train import sampling
from rlpost.train.expert_iteration import assemble as assemble_expert_iteration
from tests.trainings import metrics, train_in, untimed

TINY = [
    "model=tiny",
    "policy=transformers",
    "model.autocast=none",
    "prompts_per_step=2",
    "group_size=4",
    "topk_size=2",
    "env.max_completion_tokens=6",
    "env.eval_limit=8",
    "optim.lr=1e-3",
    "checkpoint.every=0",
    "deterministic=true",
    "sampling.temperature=1.0",
]
NO_EVAL = "eval.enabled=false"


@pytest.fixture(autouse=True)
def reward_small_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random replies never hold the right number, so that a reward stands in its place that differs among them."""

    def score(self: ArithmeticEnv, conversation: Any) -> Score:
        small = sum(token < 120 for token in conversation.response_ids) / 6
        return Score(reward=small, parts={"small": small}, accuracy_strict=0.0, accuracy_lenient=float(small > 0.5))

    monkeypatch.setattr(ArithmeticEnv, "score", score)


def run(folder: Path, *words: str, resume: str | None = None) -> int:
    return train_in(TRAIN_EXPERT_ITERATION, folder, [*TINY, *words], resume)


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"rollouts/step-{step:06d}.parquet").to_pylist()


def weights(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints/latest/model", dtype=torch.float32)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def starting_weights() -> torch.Tensor:
    parts = assemble_expert_iteration(compose(TRAIN_EXPERT_ITERATION, TINY).settings)
    return torch.cat([p.detach().flatten() for p in parts.model.parameters()])


def test_the_reward_rises(tmp_path: Path) -> None:
    words = [
        "steps=15",
        "prompts_per_step=4",
        "group_size=8",
        "topk_size=4",
        NO_EVAL,
        "optim.lr=3e-3",
        "optim.schedule=constant",
    ]
    assert run(tmp_path, *words) == 0
    reward = [line["reward/mean"] for line in metrics(tmp_path)]
    assert sum(reward[-5:]) / 5 > sum(reward[:3]) / 3 + 0.2


def test_a_step_trains_on_each_prompts_best_and_records_which_they_were(tmp_path: Path) -> None:
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


def test_a_step_with_nothing_selected_learns_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "steps=2", NO_EVAL, "min_reward=2.0") == 0  # no reply earns that
    lines = metrics(tmp_path)
    assert [line["selected/empty_steps"] for line in lines] == [1, 2]
    assert [line["selected/share"] for line in lines] == [0, 0]
    assert [line["policy/version"] for line in lines] == [0, 0]
    assert lines[1]["selected/reward_mean"] is None
    assert lines[1]["tokens/trained"] == 0
    assert lines[1]["tokens/generated"] > 0
    assert torch.equal(weights(tmp_path), starting_weights())
    said = capsys.readouterr().out
    cause = "no completion was selected, so nothing was learned from the step\n"
    assert [line for line in said.splitlines(True) if cause in line] == [f"step 1: {cause}", f"in 2 steps: {cause}"]


def test_a_minimum_keeps_prompts_whose_replies_are_all_as_good(tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", NO_EVAL, "min_reward=0.0", "topk_size=4") == 0
    assert metrics(tmp_path)[0]["selected/share"] == 1.0


def test_a_resumed_run_is_bitwise_the_unbroken_one(tmp_path: Path) -> None:
    words = ["steps=5", "optim.schedule=cosine", "eval.every=2", "minibatch_size=1", "passes=2"]
    assert run(tmp_path / "whole", *words) == 0
    original, broken = sampling.batch_metrics, tmp_path / "broken"

    def interrupted(*args: Any) -> dict[str, float]:
        if len(metrics(broken)) == 2:  # in step 2, after the evaluation and step 1
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "batch_metrics", interrupted)
        assert run(broken, *words) == 130
    assert [line["step"] for line in metrics(broken)] == [0, 1, 2]
    assert run(broken, *words, resume="latest") == 0
    assert untimed(broken) == untimed(tmp_path / "whole")
    assert torch.equal(weights(broken), weights(tmp_path / "whole"))


def test_what_a_run_began_with_stays(tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", NO_EVAL) == 0
    with pytest.raises(ConfigError, match="the run began with topk_size=2, not 1"):
        run(tmp_path, "steps=2", NO_EVAL, "topk_size=1", resume="latest")


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        (["loss=minor_sft"], math.log(2)),  # -log sigmoid(0): the model is its own reference yet
        (["loss.kl_coef=0.5"], None),
    ],
)
def test_a_loss_may_compare_with_the_starting_model(tmp_path: Path, words: list[str], loss: float | None) -> None:
    assert run(tmp_path, "steps=2", NO_EVAL, *words) == 0
    first, second = metrics(tmp_path)
    assert first["kl/ref"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl/ref"] > 1e-6
    if loss is not None:
        assert first["loss/sft"] == pytest.approx(loss, abs=1e-5)
    else:
        assert second["loss/kl"] == pytest.approx(0.5 * second["kl/ref"], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["topk_size=5"], "topk_size=5 is more than the group_size=4 completions of a prompt"),
        (["group_size=1", "topk_size=1"], "group_size=1 leaves nothing to compare a completion with"),
        (["sampling.temperature=0"], "gives every prompt group_size equal completions"),
        (["env.split=test"], "env.split=test would train on what is held out"),
        (["policy=vllm"], "deterministic=true promises bitwise equal runs"),
        (["loss=grpo"], "loss=grpo is for rlpost train grpo"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose(TRAIN_EXPERT_ITERATION, [*TINY, *words])
    assert "\n" not in str(caught.value)
