"""The loop's advantages, dynamic sampling and overlong control, in rows and in whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Conversation
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import ConfigError, PolicyError
from rlpost.model.packing import Row, rows_of
from rlpost.objectives import MCAdvantage
from rlpost.objectives.advantage import mask_overlong
from rlpost.rewards.score import Score
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings import GRPOSettings
from rlpost.torchrl.batches import concat_rows
from rlpost.train.grpo import fill_advantages
from tests.says import Says
from tests.trainings import ends_alike, metrics, printed, train_in

Batch = Callable[..., TensorDict]
TINY = [
    *["model=tiny", "model.autocast=none", "prompts_per_step=2", "group_size=2", "env.max_completion_tokens=6"],
    *["eval.enabled=false", "optim.lr=1e-3", "checkpoint.every=0"],
]
IN_REWARD = ["loss.kl_in=reward", "loss.kl_coef=0.5", "loss.kl_estimator=k1"]


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


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("grpo", [0.5**0.5, -(0.5**0.5)] * 2), ("dr_grpo", [0.5, -0.5, 1.0, -1.0]), ("rloo", [1.0, -1.0, 2.0, -2.0])],
)
def test_advantage_within_a_group_is_as_mc_advantage_writes_it(
    step: tuple[TensorDict, list[Row]], estimator: str, expected: list[float]
) -> None:
    batch, rows = step
    assert all(math.isnan(row.advantages.sum()) for row in rows)  # what nobody gave trains nothing in silence
    written = MCAdvantage(2, estimator=estimator)(batch)
    assert written is not None
    assert filled(settings_of("loss.kl_coef=0.5", f"advantage.estimator={estimator}"), batch, rows) == {}
    assert [row.advantage for row in rows] == written["advantage"].tolist() == pytest.approx(expected)


def test_shuffled_rewards_depend_on_the_seed_and_stay_in_the_batch(step: tuple[TensorDict, list[Row]]) -> None:
    batch, rows = step
    settings = settings_of("advantage.estimator=reinforce_pp_baseline", "advantage.shuffle_rewards=true")
    swapped = set()
    for seed in range(8):
        filled(replace(settings, seed=seed), batch, rows)
        swapped.add(rows[0].mean_advantage < 0)
    assert swapped == {True, False}
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0, 4.0, 2.0]


def test_kl_in_the_reward_gives_each_token_its_own_advantage(step: tuple[TensorDict, list[Row]]) -> None:
    batch, rows = step
    for row, difference in zip(rows, KL, strict=True):
        row.ref_log_probs = torch.full((len(difference),), -2.0)
        row.old_log_probs = row.ref_log_probs + torch.tensor(difference)
    filled(settings_of(*IN_REWARD, "advantage.estimator=reinforce_pp"), batch, rows)
    returns = []  # of sampled ids: the reward less what this id and the later ones cost
    for reward, row, kl in zip([1.0, 0.0, 4.0, 2.0], rows, KL, strict=True):
        costs = [0.5 * d if s else 0.0 for d, s in zip(kl, row.sampled.tolist(), strict=True)]
        returns.append([reward - sum(costs[t:]) for t in range(len(costs))])
    sampled = [r for own, row in zip(returns, rows, strict=True) for r, s in zip(own, row.sampled, strict=True) if s]
    for own, row in zip(returns, rows, strict=True):
        expected = [(r - mean(sampled)) / stdev(sampled) if s else 0.0 for r, s in zip(own, row.sampled, strict=True)]
        assert isinstance(row.advantage, torch.Tensor)
        assert row.advantage.tolist() == pytest.approx(expected, abs=1e-6)
    assert rows[0].mean_advantage == pytest.approx(rows[0].advantages.mean().item())  # which is recorded


def test_completions_cut_at_their_limit_are_not_trained_on(step: tuple[TensorDict, list[Row]]) -> None:
    batch, rows = step
    assert [row.num_trained for row in mask_overlong(batch, rows)] == [2, 1, 0, 1]
    assert [row.num_trained for row in rows] == [2, 1, 2, 1]
    assert batch["masks", "all_assistant_mask"].unbind()[2].sum() == 2  # what is recorded stays true


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["overlong.penalty_tokens=7"], "env.max_completion_tokens=6"),
        ([*IN_REWARD, "advantage.estimator=reinforce_pp", "loss=gspo"], "loss=gspo"),
    ],
    ids=["overlong", "gspo"],
)
def test_impossible_settings_are_refused(words: list[str], key: str, says: Says) -> None:
    with says.refused("train", ConfigError, key):
        settings_of(*words)


# The loop


def run(folder: Path, *words: str, resume: str | None = None) -> list[dict[str, Any]]:
    assert train_in(TRAIN_GRPO, folder, [*TINY, *words], resume) == 0
    return metrics(folder)


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Conversation], float]], None]:
    """Puts a reward in the place of the environment's."""

    def put(reward: Callable[[Conversation], float]) -> None:
        monkeypatch.setattr(ArithmeticEnv, "score", lambda self, conversation: Score(reward(conversation)))

    return put


@pytest.mark.parametrize(
    ("dynamic", "groups", "drawn"),
    [("true", [[1, 3], [5, 7]], (4, 2, 0, 0.5)), ("false", [[0, 1], [2, 3]], (2, 0, 0.5, 0.75))],
)
def test_dynamic_sampling_trains_on_groups_that_differ(
    dynamic: str, groups: list[list[int]], drawn: tuple[float, ...], tmp_path: Path, score: Any
) -> None:
    score(lambda c: 1.0 if c.group_id % 2 == 0 else float(c.sample))  # every second group differs
    lines = run(tmp_path, "policy=transformers", "steps=2", f"dynamic.enabled={dynamic}")
    names = ("groups/drawn", "groups/dropped", "groups/zero_std", "reward/mean")
    assert [tuple(line[name] for name in names) for line in lines] == [drawn] * 2
    assert [line["reward/mean_drawn"] for line in lines] == [0.75] * 2
    assert [[row["group"] for row in read_rollouts(tmp_path, step)[::2]] for step in (1, 2)] == groups


def test_groups_left_by_dynamic_sampling_survive_a_checkpoint(
    tmp_path: Path, score: Any, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    score(lambda c: 1.0 if c.group_id % 3 == 0 else float(c.sample))  # two of three groups differ
    words = ["policy=transformers", "dynamic.enabled=true", "max_policy_lag=3", "deterministic=true"]
    run(tmp_path / "whole", *words, "steps=4")
    says("train", printed(capsys, "lag "))
    run(tmp_path / "broken", *words, "steps=1")
    run(tmp_path / "broken", *words, "steps=4", resume="latest")
    assert ends_alike(tmp_path / "broken", tmp_path / "whole")
    groups = [row["group"] for step in range(1, 5) for row in read_rollouts(tmp_path / "broken", step)[::2]]
    assert groups == [1, 2, 4, 5, 7, 8, 10, 11]  # each once, none of those dropped


REPLIES = "policy.replies=['12','7','a reply that is too long']"


def test_overlong_completions_are_penalised_and_left_out(tmp_path: Path, score: Any) -> None:
    score(lambda c: 1.0 if c.response_text == "12" else 0.0)
    words = ["policy=scripted", REPLIES, "steps=1", "prompts_per_step=6", "group_size=4"]
    [line] = run(tmp_path, *words, "overlong.mask=true", "overlong.penalty_tokens=4")
    rows = read_rollouts(tmp_path, 1)
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


@pytest.mark.parametrize(
    "words", [["policy=transformers"], ["policy=scripted", REPLIES]], ids=["nothing differs", "lengths alone"]
)
def test_dynamic_sampling_gives_up_where_no_group_differs(words: list[str], tmp_path: Path, score: Any) -> None:
    """Penalties for length are no difference in the task's reward."""
    score(lambda c: 0.3)
    more = ["steps=1", "prompts_per_step=6", "overlong.penalty_tokens=4", "dynamic.enabled=true"]
    with pytest.raises(PolicyError, match=r"^3 .* 0 of 6 .* 18 of 18 "):
        run(tmp_path, *words, *more, "dynamic.draw_limit=3")


def test_step_of_overlong_completions_alone_trains_on_nothing(
    tmp_path: Path, score: Any, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    score(lambda c: float(c.sample))
    words = ["policy=scripted", "policy.replies=['a reply that is too long']", "steps=1", "overlong.mask=true"]
    [line] = run(tmp_path, *words)
    assert (line["completion/masked_overlong"], line["tokens/trained"], line["grad_norm"]) == (4.0, 0.0, 0.0)
    assert line["sampler/logprob_gap"] > 1.0  # measured all the same: a script is sure of what the model is not
    says("train", printed(capsys, "overlong.mask=true"))


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp"])
def test_kl_in_the_reward_leaves_the_shown_reward(tmp_path: Path, score: Any, estimator: str) -> None:
    score(lambda c: sum(token < 120 for token in c.response_ids) / 6)
    words = [*IN_REWARD, "optim.lr=1e-2", f"advantage.estimator={estimator}"]
    first, second = run(tmp_path, "policy=transformers", "steps=2", *words)
    assert first["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-6)  # the reference is the starting model
    assert abs(second["reward/kl_penalty"]) > 1e-4
    assert "loss/kl" not in second
    rows = read_rollouts(tmp_path, 2)
    assert second["reward/mean"] == pytest.approx(mean(row["reward"] for row in rows))
    assert all(row["reward"] == pytest.approx(sum(t < 120 for t in row["token_ids"]) / 6) for row in rows)
