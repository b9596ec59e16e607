"""Advantages against numbers worked out by hand, and against the formulas written out over lists."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import mean, stdev

import pytest
import torch
from tensordict import TensorDict

from rlpost.data.conversation import Conversation
from rlpost.model.packing import rows_of
from rlpost.objectives.advantage import (
    ESTIMATORS,
    advantages,
    equal_up_to_rounding,
    give_advantages,
    has_spread,
    length_penalty,
    penalise_length,
    penalise_overlong,
    shuffled,
    soft_overlong_penalty,
    token_advantages,
)
from rlpost.torchrl.batches import concat_rows

NAN = math.nan


def taken(
    estimator: str, rewards: list[float], groups: list[int] | None = None, valid: list[bool] | None = None
) -> list[float]:
    return advantages(
        estimator,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups or [0] * len(rewards)),
        torch.tensor(valid or [True] * len(rewards)),
    ).tolist()


WHITENED = [1.4929, -0.3604, -0.5663, -0.5663]  # mean 0.275, std 0.485627
LEFT_OUT = [1 - 0.1 / 3, 0.1 - 1 / 3, -1.1 / 3, -1.1 / 3]
OF_ONE_GROUP = {
    **dict.fromkeys(("grpo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "gdpo"), WHITENED),
    **dict.fromkeys(("rloo", "rloo_batch"), LEFT_OUT),
    "dr_grpo": [0.725, -0.175, -0.275, -0.275],
    "maxrl": [0.725 / 0.275, -0.175 / 0.275, -1.0, -1.0],
}
# group 0 is [1, 0], group 1 is [4, 2]; the batch's mean is 7/4, its variance (9 + 49 + 81 + 1) / 16 / 3 = 35 / 12;
# centred in their groups they are [.5, -.5, 1, -1], of variance 2.5 / 3
OF_TWO_GROUPS = {
    "grpo": [0.707107, -0.707107, 0.707107, -0.707107],
    "reinforce_pp": [r / math.sqrt(35 / 12) for r in (-0.75, -1.75, 2.25, 0.25)],
    "reinforce_pp_baseline": [r / math.sqrt(2.5 / 3) for r in (0.5, -0.5, 1, -1)],
    "lite_ppo": [r / math.sqrt(35 / 12) for r in (0.5, -0.5, 1, -1)],
}


def test_rewards_by_hand() -> None:
    assert set(OF_ONE_GROUP) == set(ESTIMATORS)
    for estimator, expected in OF_ONE_GROUP.items():
        assert taken(estimator, [1.0, 0.1, 0.0, 0.0]) == pytest.approx(expected, abs=1e-4), estimator
    for estimator, expected in OF_TWO_GROUPS.items():
        assert taken(estimator, [1.0, 0.0, 4.0, 2.0], [0, 0, 1, 1]) == pytest.approx(expected, abs=1e-5), estimator


def slowly(estimator: str, rewards: list[float], groups: list[int], i: int) -> float:
    """The papers' formulas for completion `i`."""
    own = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
    others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
    if estimator == "grpo":
        return (rewards[i] - mean(own)) / stdev(own)
    if estimator == "dr_grpo":
        return rewards[i] - mean(own)
    if estimator == "rloo":
        return rewards[i] - mean(others)
    if estimator == "reinforce_pp":
        return (rewards[i] - mean(rewards)) / stdev(rewards)
    if estimator == "maxrl":
        return (rewards[i] - mean(own)) / mean(own) if mean(own) > 0 else 0.0
    if estimator == "rloo_batch":
        return rewards[i] - mean([r for j, r in enumerate(rewards) if j != i])
    if estimator == "gdpo":
        scores = [slowly("grpo", rewards, groups, j) for j in range(len(rewards))]
        return (scores[i] - mean(scores)) / stdev(scores)
    if estimator == "lite_ppo":
        return (rewards[i] - mean(own)) / stdev(rewards)
    assert estimator == "reinforce_pp_baseline"
    centred = [slowly("dr_grpo", rewards, groups, j) for j in range(len(rewards))]
    return (centred[i] - mean(centred)) / stdev(centred)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_its_formula_whatever_the_order_of_the_rows(estimator: str) -> None:
    dice = random.Random(7)
    groups = [group for group in (5, 0, 9) for _ in range(4)]
    dice.shuffle(groups)
    rewards = [dice.uniform(-2, 3) for _ in groups]
    expected = [slowly(estimator, rewards, groups, i) for i in range(len(rewards))]
    assert taken(estimator, rewards, groups) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_a_batch_of_equal_rewards_gives_exactly_zero_rounding_noise_or_not(estimator: str, noise: float) -> None:
    rewards = [0.3, 0.1 + 0.2, 0.3 + noise, 0.3 - noise]
    assert taken(estimator, rewards, [0, 0, 1, 1]) == [0.0] * 4
    single = advantages(estimator, torch.tensor(rewards), torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool))
    assert single.tolist() == [0.0] * 4  # in float32, too


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl", "gdpo", "reinforce_pp_baseline", "lite_ppo"])
def test_an_equal_group_beside_another_gives_exactly_zero(estimator: str) -> None:
    values = taken(estimator, [0.1 + 0.2, 0.3, 1.0, 0.0], [0, 0, 1, 1])
    assert values[:2] == [0.0, 0.0]
    assert values[2] > 0 > values[3]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("failed", [(123.0, False), (NAN, False), (NAN, True), (math.inf, True)])
def test_a_failed_reward_is_outside_every_mean_and_gets_zero(estimator: str, failed: tuple[float, bool]) -> None:
    reward, valid = failed
    values = taken(estimator, [1.0, 0.0, reward, 4.0, 2.0], [0, 0, 0, 1, 1], [True, True, valid, True, True])
    without = taken(estimator, [1.0, 0.0, 4.0, 2.0], [0, 0, 1, 1])
    assert values == [*without[:2], 0.0, *without[2:]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_valid_sample_has_nothing_to_be_compared_with(estimator: str) -> None:
    assert taken(estimator, [5.0, 1.0, NAN], valid=[True, False, True]) == [0.0] * 3
    assert taken(estimator, [5.0]) == [0.0]
    assert taken(estimator, [1.0, NAN], valid=[False, True]) == [0.0, 0.0]


def test_parts_of_a_reward_are_compared_each_on_its_own_scale() -> None:
    """Parts right [1, 0 | 0, 0] and length [10, 30 | 0, 20]; the last completion has no part right."""
    parts = torch.tensor([[1.0, 10.0], [0.0, 30.0], [0.0, 0.0], [NAN, 20.0]], dtype=torch.float64)
    weights = torch.tensor([2.0, -1.0], dtype=torch.float64)
    half = math.sqrt(0.5)  # the score of the better of two; right tells nothing of the second group
    sums = [2 * half + half, -2 * half - half, half, -half]
    std = stdev(sums)
    values = advantages("gdpo", parts, torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), weights)
    assert values.tolist() == pytest.approx([each / std for each in sums], abs=1e-12)


def test_a_figure_outside_the_reward_is_not_learned_from(batch: Callable[..., TensorDict]) -> None:
    """A completion with one unverified answer and one without; the reward is twice `right`."""

    def given(right: float, unverified: float) -> TensorDict:
        parts = {"right": right, "unverified": unverified}
        return batch(size=1, reward=2 * right, reward_parts=parts, part_weights={"right": 2.0, "unverified": 0.0})

    both = concat_rows([given(0.0, 1.0), given(1.0, 0.0)])
    both["group_id"] = torch.zeros(2, dtype=torch.int64)
    rows = rows_of(both)
    give_advantages(both, rows, "gdpo")
    assert [row.advantage for row in rows] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    penalise_length(both, 0.5)
    assert both["next", "part_weights", "length_penalty"].flatten().tolist() == [0.5, 0.5]


def test_maxrl_weighs_a_prompt_by_how_seldom_it_is_solved() -> None:
    """One of four right: +3; three of four: +1/3. A group whose mean is below 0 gives nothing."""
    assert taken("maxrl", [1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert taken("maxrl", [1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert taken("maxrl", [-1.0, 0.0]) == [0.0, 0.0]


def test_a_single_sample_counts_where_the_batch_is_compared() -> None:
    values = taken("reinforce_pp", [1.0, 3.0], [0, 1])  # two groups of one
    assert values == pytest.approx([-0.707107, 0.707107], abs=1e-6)
    assert taken("lite_ppo", [1.0, 3.0], [0, 1]) == [0.0, 0.0]


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="gae"):
        taken("gae", [1.0, 0.0])


def test_equality_up_to_rounding_is_relative_to_large_values_alone() -> None:
    assert equal_up_to_rounding(torch.tensor([1e6, 1e6 + 0.5]))
    assert not equal_up_to_rounding(torch.tensor([1.0, 1.00001]))
    assert not equal_up_to_rounding(torch.tensor([0.0, 1e-5]))
    assert equal_up_to_rounding(torch.tensor([3.0]))


def test_a_token_is_worth_the_reward_less_its_penalties_to_come() -> None:
    penalties = torch.tensor([[0.5, 1.0, 9.0], [0.0, 0.25, 0.25], [7.0, 7.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    values = token_advantages(
        torch.tensor([2.0, 1.0, NAN], dtype=torch.float64), penalties, mask, torch.tensor([True, True, False])
    )
    # returns: 2 - 1.5 and 2 - 1; 1 - 0.5 and 1 - 0.25: mean 0.6875, deviations -.1875, .3125, -.1875, .0625
    std = math.sqrt((2 * 0.1875**2 + 0.3125**2 + 0.0625**2) / 3)
    expected = [[-0.1875 / std, 0.3125 / std, 0.0], [0.0, -0.1875 / std, 0.0625 / std], [0.0] * 3]
    assert values.tolist() == [pytest.approx(row) for row in expected]


def test_token_advantages_without_a_difference_are_exactly_zero() -> None:
    ones = torch.ones(2, 2, dtype=torch.bool)
    assert token_advantages(torch.tensor([0.3, 0.1 + 0.2]), torch.zeros(2, 2), ones, ones[0]).tolist() == [[0, 0]] * 2


def test_shuffling_moves_valid_rewards_within_their_group() -> None:
    rewards, groups = torch.arange(16.0), torch.tensor([0, 1] * 8)
    valid = torch.ones(16, dtype=torch.bool).index_fill(0, torch.tensor([3, 4]), False)
    moved = shuffled(rewards, groups, valid, seed=5)
    assert moved.tolist() == shuffled(rewards, groups, valid, seed=5).tolist()
    assert moved.tolist() != rewards.tolist()
    assert moved.tolist() != shuffled(rewards, groups, valid, seed=6).tolist()
    assert moved[[3, 4]].tolist() == [3.0, 4.0]
    assert sorted(moved[groups == 0].tolist()) == rewards[groups == 0].tolist()
    alone = shuffled(rewards[groups == 1], groups[groups == 1], valid[groups == 1], seed=5)
    assert alone.tolist() == moved[groups == 1].tolist()  # whatever else is in the batch


# Penalties on lengths, and the rule of dynamic sampling


def test_the_penalty_falls_on_a_straight_line_over_the_last_tokens() -> None:
    lengths = torch.tensor([0, 6, 7, 8, 10, 11])
    assert soft_overlong_penalty(lengths, 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_penalty_is_part_of_the_reward_and_of_nothing_else(batch: Callable[..., TensorDict]) -> None:
    rows = concat_rows(
        [
            batch(size=1, response_ids=[7] * 6, reward=1.0, accuracy_strict=1.0, reward_parts={"right": 1.0}),
            batch(size=1, response_ids=[7] * 8, reward=0.0, accuracy_strict=0.0),
            batch(size=1, response_ids=[7] * 9, reward=None, valid=False),
        ]
    )
    penalise_overlong(rows, 8, 4)
    assert rows["next", "reward"][:2].tolist() == [[0.5], [-1.0]]
    assert math.isnan(rows["next", "reward"][2].item())  # a reward that failed stays without a value
    assert rows["next", "reward_parts", "overlong"].tolist() == [[-0.5], [-1.0], [-1.0]]
    assert rows["next", "reward_parts", "right"][0].item() == 1.0
    assert rows["next", "accuracy_strict"][:2].tolist() == [[1.0], [0.0]]


def test_the_length_penalty_is_a_share_of_the_groups_mean_reward() -> None:
    """Groups [1, 0] of 4 and 8 tokens and [3, failed] of 5 and 10: means 0.5 and 3, longest that count 8 and 5."""
    rewards, lengths = torch.tensor([1.0, 0.0, 3.0, math.nan]), torch.tensor([4, 8, 5, 10])
    penalty = length_penalty(rewards, lengths, torch.tensor([0, 0, 1, 1]), 0.1)
    assert penalty[:3].tolist() == pytest.approx([-0.025, -0.05, -0.3])
    none = length_penalty(-rewards, lengths, torch.tensor([0, 0, 1, 1]), 0.1)
    assert none[:3].abs().tolist() == [0.0, 0.0, 0.0]  # a longer one of bad completions gains nothing by it


def test_the_length_penalty_is_a_part_of_the_reward(batch: Callable[..., TensorDict]) -> None:
    rows = concat_rows([batch(size=1, response_ids=[7] * n, reward=1.0, reward_parts={"right": 1.0}) for n in (4, 8)])
    penalise_length(rows, 0.5)
    assert rows["next", "reward"].flatten().tolist() == [0.75, 0.5]
    assert rows["next", "reward_parts", "length_penalty"].flatten().tolist() == [-0.25, -0.5]


def test_only_sampled_tokens_count_as_length(batch: Callable[..., TensorDict]) -> None:
    rows = batch(size=1, response_ids=[7] * 8, mask=[1, 1, 0, 0, 0, 0, 1, 1], reward=1.0)
    penalise_overlong(rows, 8, 4)
    assert rows["next", "reward"].item() == 1.0  # four are the environment's


@pytest.mark.parametrize(
    ("rewards", "valid", "accepted"),
    [
        ([1.0, 0.0], [True, True], True),
        ([1.0, 1.0], [True, True], False),
        ([0.1 + 0.2, 0.3], [True, True], False),
        ([0.3, 0.31], [True, True], True),  # not only 0 and 1
        ([1.0, 0.0], [True, False], False),  # nothing valid to compare with
        ([1.0, None, 1.0], [True, False, True], False),
        ([1.0, None, 0.0], [True, False, True], True),
        ([None, None], [False, False], False),
    ],
)
def test_a_group_is_accepted_when_its_valid_rewards_differ(
    conversation: Callable[..., Conversation], rewards: list[float | None], valid: list[bool], accepted: bool
) -> None:
    group = [conversation(reward=r, valid=v) for r, v in zip(rewards, valid, strict=True)]
    assert has_spread(group) is accepted
