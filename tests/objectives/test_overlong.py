"""The soft overlong penalty and the rule of dynamic sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from rlpost.data.conversation import Conversation
from rlpost.objectives.advantage import (
    has_spread,
    length_penalty,
    penalise_length,
    penalise_overlong,
    soft_overlong_penalty,
)
from rlpost.torchrl.batches import concat_rows

Batch = Callable[..., TensorDict]


def test_the_penalty_falls_on_a_straight_line_over_the_last_tokens() -> None:
    lengths = torch.tensor([0, 6, 7, 8, 10, 11])
    assert soft_overlong_penalty(lengths, 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_penalty_is_part_of_the_reward_and_of_nothing_else(batch: Batch) -> None:
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


def test_the_length_penalty_is_a_part_of_the_reward(batch: Batch) -> None:
    rows = concat_rows([batch(size=1, response_ids=[7] * n, reward=1.0, reward_parts={"right": 1.0}) for n in (4, 8)])
    penalise_length(rows, 0.5)
    assert rows["next", "reward"].flatten().tolist() == [0.75, 0.5]
    assert rows["next", "reward_parts", "length_penalty"].flatten().tolist() == [-0.25, -0.5]


def test_only_sampled_tokens_count_as_length(batch: Batch) -> None:
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
