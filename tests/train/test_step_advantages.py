"""The loop's advantages, dynamic sampling and overlong control, in rows and in whole steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Conversation
from rlpost.errors import ConfigError, PolicyError
from rlpost.model.packing import Row, rows_of
from rlpost.objectives import MCAdvantage
from rlpost.objectives.advantage import mask_overlong
from rlpost.rewards.score import Score
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import RunRequest
from rlpost.torchrl.batches import concat_rows
from rlpost.train.grpo import fill_advantages, minibatches

Batch = Callable[..., TensorDict]

TINY = [
    "model=tiny",
    "model.autocast=none",
    "prompts_per_step=2",
    "group_size=2",
    "env.max_completion_tokens=6",
    "eval.enabled=false",
    "optim.lr=1e-3",
    "checkpoint.every=0",
]


def settings_of(*words: str) -> GRPOSettings:
    return compose(TRAIN_GRPO, [*TINY, "policy=transformers", *words]).settings


def filled(settings: GRPOSettings, batch: TensorDict, rows: list[Row]) -> dict[str, float]:
    return fill_advantages(batch, rows, settings.advantage, settings.loss, settings.seed)


@pytest.fixture
def step(batch: Batch) -> tuple[TensorDict, list[Row]]:
    """Two groups of two; the middle one of the third completion's three ids was not sampled, and it was cut."""
    rewards, lengths = [1.0, 0.0, 4.0, 2.0], [2, 1, 3, 1]
    masks = [[1, 1], [1], [1, 0, 1], [1]]
    pieces = [
        batch(size=1, first=i // 2, reward=r, response_ids=[7] * n, mask=m, finish_reason="length" if n > 2 else "stop")
        for i, (r, n, m) in enumerate(zip(rewards, lengths, masks, strict=True))
    ]
    rows = concat_rows(pieces)
    return rows, rows_of(rows)


KL = [[0.5, -0.25], [1.0], [0.25, 0.0, 0.5], [-1.0]]  # log π_old - log π_ref of each id


def with_log_probs(rows: list[Row]) -> list[Row]:
    for row, difference in zip(rows, KL, strict=True):
        row.ref_log_probs = torch.full((len(difference),), -2.0)
        row.old_log_probs = row.ref_log_probs + torch.tensor(difference)
    return rows


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("grpo", [0.5**0.5, -(0.5**0.5)] * 2), ("dr_grpo", [0.5, -0.5, 1.0, -1.0]), ("rloo", [1.0, -1.0, 2.0, -2.0])],
)
def test_what_its_group_alone_decides_is_as_mc_advantage_writes_it(
    step: tuple[TensorDict, list[Row]], estimator: str, expected: list[float]
) -> None:
    batch, rows = step
    assert all(math.isnan(row.advantages.sum()) for row in rows)  # what nobody gave trains nothing in silence
    written = MCAdvantage(2, estimator=estimator)(batch)
    assert written is not None
    assert filled(settings_of("loss.kl_coef=0.5", f"advantage.estimator={estimator}"), batch, rows) == {}
    assert [row.advantage for row in rows] == written["advantage"].tolist() == pytest.approx(expected)


def test_rewards_are_shuffled_as_mc_advantage_shuffles_them(step: tuple[TensorDict, list[Row]]) -> None:
    batch, rows = step
    words = ["advantage.estimator=reinforce_pp_baseline", "advantage.shuffle_rewards=true"]
    settings = settings_of(*words)
    swapped = set()
    for seed in range(8):
        filled(replace(settings, seed=seed), batch, rows)
        other = MCAdvantage(2, estimator="dr_grpo", shuffle_rewards=True, seed=seed)(batch)
        assert other is not None
        assert [math.copysign(1, row.mean_advantage) for row in rows] == other["advantage"].sign().tolist()
        swapped.add(rows[0].mean_advantage < 0)
    assert swapped == {True, False}
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0, 4.0, 2.0]


def test_with_the_kl_in_the_reward_reinforce_pp_gives_each_token_its_own_advantage(
    step: tuple[TensorDict, list[Row]],
) -> None:
    batch, rows = step[0], with_log_probs(step[1])
    words = ["loss.kl_in=reward", "loss.kl_coef=0.5", "loss.kl_estimator=k1", "advantage.estimator=reinforce_pp"]
    filled(settings_of(*words), batch, rows)
    returns = []  # of sampled ids: the reward less what this id and the later ones cost
    for reward, row, kl in zip([1.0, 0.0, 4.0, 2.0], rows, KL, strict=True):
        costs = [0.5 * d if s else 0.0 for d, s in zip(kl, row.sampled.tolist(), strict=True)]
        returns.append([reward - sum(costs[t:]) for t in range(len(costs))])
    sampled = [r for own, row in zip(returns, rows, strict=True) for r, s in zip(own, row.sampled, strict=True) if s]
    for own, row in zip(returns, rows, strict=True):
        expected = [(r - mean(sampled)) / stdev(sampled) if s else 0.0 for r, s in zip(own, row.sampled, strict=True)]
        assert isinstance(row.advantage, torch.Tensor)
        assert row.advantage.tolist() == pytest.approx(expected, abs=1e-6)
    of_first = rows[0].advantages.mean().item()
    assert rows[0].mean_advantage == pytest.approx(of_first)  # what is recorded is a completion's mean


def test_completions_cut_at_their_limit_are_not_trained_on(step: tuple[TensorDict, list[Row]]) -> None:
    batch, rows = step
    assert [row.num_trained for row in mask_overlong(batch, rows)] == [2, 1, 0, 1]
    assert [row.num_trained for row in rows] == [2, 1, 2, 1]
    assert batch["masks", "all_assistant_mask"].unbind()[2].sum() == 2  # what is recorded stays true


def test_a_minibatch_holds_whole_groups_and_another_size_is_refused() -> None:
    words = ["prompts_per_step=4", "passes=2"]
    numbers: Any = list(range(8))  # stand for rows; two a group
    settings = settings_of(*words, "minibatch_size=4")
    assert [list(m) for m in minibatches(numbers, settings.minibatch_size, settings.passes)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ] * 2
    with pytest.raises(ConfigError, match="minibatch_size=3 does not fit: it must be a multiple of group_size=2"):
        settings_of(*words, "minibatch_size=3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dynamic.draw_limit=0"], "dynamic.draw_limit=0 is out of range: it must be at least 1"),
        (["overlong.penalty_tokens=-1"], "overlong.penalty_tokens=-1 is out of range: it must be at least 0"),
        (["overlong.penalty_tokens=7"], "it must be at most env.max_completion_tokens=6"),
        (["advantage.estimator=rlo"], "rloo"),
        (
            ["advantage.estimator=reinforce_pp", "loss.kl_in=reward", "loss.kl_coef=0.1", "loss=gspo"],
            "loss=gspo weighs whole completions: take loss=gspo_token",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(*words)


# The loop


def run(folder: Path, *words: str, resume: str | None = None) -> list[dict[str, Any]]:
    composed = compose(TRAIN_GRPO, [*TINY, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    assert TRAIN_GRPO.train(composed.settings, request) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def completions(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"rollouts/step-{step:06d}.parquet").to_pylist()


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Conversation], float]], None]:
    """Puts a reward in the place of the environment's."""
    from rlpost.envs.arithmetic import ArithmeticEnv

    def put(reward: Callable[[Conversation], float]) -> None:
        monkeypatch.setattr(ArithmeticEnv, "score", lambda self, conversation: Score(reward(conversation)))

    return put


def every_other_group(conversation: Conversation) -> float:
    """1 for groups 0, 2, 4 ...; in the others 0 and 1."""
    return 1.0 if conversation.group_id % 2 == 0 else float(conversation.sample)


def test_dynamic_sampling_trains_on_groups_that_differ_and_tells_of_the_others(tmp_path: Path, score: Any) -> None:
    score(every_other_group)
    [first, second] = run(tmp_path, "policy=transformers", "steps=2", "dynamic.enabled=true")
    for line in (first, second):
        assert (line["groups/drawn"], line["groups/dropped"], line["groups/zero_std"]) == (4.0, 2.0, 0.0)
        assert (line["reward/mean"], line["reward/mean_drawn"]) == (0.5, 0.75)
    assert [row["group"] for row in completions(tmp_path, 1)] == [1, 1, 3, 3]
    assert [row["group"] for row in completions(tmp_path, 2)] == [5, 5, 7, 7]


def test_without_it_the_same_groups_are_trained_on_as_they_come(tmp_path: Path, score: Any) -> None:
    score(every_other_group)
    [line] = run(tmp_path, "policy=transformers", "steps=1")
    assert (line["groups/drawn"], line["groups/dropped"], line["groups/zero_std"]) == (2.0, 0.0, 0.5)
    assert line["reward/mean"] == line["reward/mean_drawn"] == 0.75


def test_groups_left_over_by_dynamic_sampling_survive_a_checkpoint(
    tmp_path: Path, score: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    score(lambda c: 1.0 if c.group_id % 3 == 0 else float(c.sample))  # two of three groups differ
    words = ["policy=transformers", "dynamic.enabled=true", "max_policy_lag=3", "deterministic=true"]
    whole = run(tmp_path / "whole", *words, "steps=4")
    assert "lag     completions may be 3 versions older than the policy; pi_old / mu cor" in capsys.readouterr().out
    run(tmp_path / "broken", *words, "steps=1")
    broken = run(tmp_path / "broken", *words, "steps=4", resume="latest")

    def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]

    assert untimed(broken) == untimed(whole)
    groups = [row["group"] for step in range(1, 5) for row in completions(tmp_path / "broken", step)[::2]]
    assert groups == [1, 2, 4, 5, 7, 8, 10, 11]  # each once, none of those dropped


def test_dynamic_sampling_gives_up_where_no_group_differs(tmp_path: Path, score: Any) -> None:
    score(lambda c: 0.0)
    words = ["policy=transformers", "steps=1", "dynamic.enabled=true", "dynamic.draw_limit=3"]
    with pytest.raises(PolicyError, match=r"3 rounds of sampling brought 0 of 2 groups .* 6 of 6 groups were dropped"):
        run(tmp_path, *words)


REPLIES = "policy.replies=['12','7','a reply that is too long']"


def test_overlong_completions_are_penalised_and_left_out_of_the_loss(tmp_path: Path, score: Any) -> None:
    score(lambda c: 1.0 if c.response_text == "12" else 0.0)
    words = ["policy=scripted", REPLIES, "steps=1", "prompts_per_step=6", "group_size=4"]
    [line] = run(tmp_path, *words, "overlong.mask=true", "overlong.penalty_tokens=4")
    rows = completions(tmp_path, 1)
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert 0 < len(cut) < len(rows)
    assert line["completion/masked_overlong"] == len(cut)
    for row in rows:
        part = -max(0, len(row["token_ids"]) - 2) / 4  # 0 up to 6 - 4 tokens, -1 at 6
        assert dict(row["reward_parts"]) == {"overlong": part}
        assert row["reward"] == (1.0 if row["completion"] == "12" else 0.0) + part
        group = [r["reward"] for r in rows if r["group"] == row["group"]]  # the reward of a masked one counts
        expected = (row["reward"] - mean(group)) / stdev(group) if len(set(group)) > 1 else 0.0
        assert row["advantage"] == pytest.approx(expected, abs=1e-5)
    assert line["reward/mean_drawn"] == pytest.approx(mean(row["completion"] == "12" for row in rows))  # the task's own
    assert line["reward/overlong"] == pytest.approx(mean(dict(r["reward_parts"])["overlong"] for r in rows))
    trained = [len(r["token_ids"]) for r in rows if r["finish_reason"] != "length" and r["advantage"] != 0]
    assert line["tokens/trained"] == sum(trained)


def test_lengths_alone_do_not_make_a_group_worth_training_on(tmp_path: Path, score: Any) -> None:
    score(lambda c: 0.3)
    words = ["policy=scripted", REPLIES, "steps=1", "prompts_per_step=6", "group_size=4", "overlong.penalty_tokens=4"]
    with pytest.raises(PolicyError, match=r"brought 0 of 6 groups .* 12 of 12 groups were dropped"):
        run(tmp_path, *words, "dynamic.enabled=true", "dynamic.draw_limit=2")


def test_a_step_of_nothing_but_overlong_completions_trains_on_nothing_and_says_so(
    tmp_path: Path, score: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    score(lambda c: float(c.sample))
    words = ["policy=scripted", "policy.replies=['a reply that is too long']", "steps=1", "overlong.mask=true"]
    [line] = run(tmp_path, *words)
    assert (line["completion/masked_overlong"], line["tokens/trained"], line["grad_norm"]) == (4.0, 0.0, 0.0)
    assert line["sampler/logprob_gap"] > 1.0  # measured all the same: a script is sure of what the model is not
    said = capsys.readouterr().out
    assert "step 1: nothing was trained on: all completions were truncated, and overlong.mask=true leaves " in said
    assert "(at env.max_completion_tokens=6; raise the limit)\n" in said


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp"])
def test_with_the_kl_in_the_reward_the_loop_shows_the_tasks_reward(tmp_path: Path, score: Any, estimator: str) -> None:
    score(lambda c: sum(token < 120 for token in c.response_ids) / 6)
    words = ["loss.kl_in=reward", "loss.kl_coef=0.5", "loss.kl_estimator=k1", "optim.lr=1e-2"]
    first, second = run(tmp_path, "policy=transformers", "steps=2", f"advantage.estimator={estimator}", *words)
    assert first["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-6)  # the reference is the starting model
    assert abs(second["reward/kl_penalty"]) > 1e-4
    assert "loss/kl" not in second
    rows = completions(tmp_path, 2)
    assert second["reward/mean"] == pytest.approx(mean(row["reward"] for row in rows))
    assert all(row["reward"] == pytest.approx(sum(t < 120 for t in row["token_ids"]) / 6) for row in rows)
