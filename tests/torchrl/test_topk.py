"""The best replies to each prompt, and nothing before a prompt has all of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from math import nan

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from rlpost.data import ReplayBuffer, TopKRewardSelector
from rlpost.data.batch import batch_from_conversations, best, best_of_groups
from rlpost.data.conversation import Conversation
from rlpost.data.ragged import strings
from rlpost.torchrl.batches import concat_rows, select_rows

Make = Callable[..., Conversation]


@pytest.fixture
def group(conversation: Make) -> Callable[..., TensorDict]:
    """Makes one prompt's replies, one a reward."""

    def make(number: int, rewards: list[float], **fields: object) -> TensorDict:
        made = [conversation(number, sample, reward=reward, **fields) for sample, reward in enumerate(rewards)]
        return batch_from_conversations(made)

    return make


def rewards_of(batch: TensorDictBase | None) -> list[float]:
    assert batch is not None
    return batch["next", "reward"].flatten().tolist()


def test_fifty_rows_in_groups_of_five_leave_twenty_in_descending_order(group: Callable[..., TensorDict]) -> None:
    # of five different rewards two are above the median, fewer than the three asked for
    buffer = ReplayBuffer(transforms=[TopKRewardSelector(total_dialog_turns=5, topk_size=3)])
    for number in range(10):
        buffer.extend(group(number, [number + step / 8 for step in (2, 4, 0, 3, 1)], query=f"prompt {number}"))
    assert len(buffer) == 10
    taken = buffer.take(10)
    assert rewards_of(taken) == [number + step / 8 for number in range(10) for step in (4, 3)]
    assert taken["sample"].tolist() == [1, 3] * 10


def test_interleaved_groups_of_one_prompt_are_told_apart(group: Callable[..., TensorDict]) -> None:
    both = concat_rows([group(0, [0.0, 1.0]), group(1, [3.0, 2.0])])
    assert rewards_of(TopKRewardSelector(2, 2)(select_rows(both, [0, 2, 3, 1]))) == [1.0, 3.0]


def test_several_turns_are_worth_their_mean_and_stay_whole() -> None:
    # a: (0 + 1) / 2 = 0.5; b: one turn of 0.75; c: 0.25, its first turn having no reward yet
    batch = TensorDict(
        {
            "text": {"prompt": strings(["p"] * 5)},
            "turn": torch.arange(5),
            "next": {
                "reward": torch.tensor([[0.0], [1.0], [0.75], [nan], [0.25]]),
                "done": torch.tensor([[False], [True], [True], [False], [True]]),
            },
        },
        batch_size=[5],
    )
    chosen = TopKRewardSelector(3, 3, min_reward=0.5)(batch)
    assert chosen is not None
    assert chosen["turn"].tolist() == [2, 0, 1]


def test_trajectories_of_different_widths_are_chosen_whole() -> None:
    def row(ids: list[int], reward: float, done: bool) -> TensorDict:
        made = TensorDict({"q": "p", "ids": torch.tensor(ids), "next": {"done": torch.tensor([done])}})
        made["next", "reward"] = torch.full((len(ids), 1), reward)
        return made

    selector = TopKRewardSelector(3, 2, prompt_key="q", min_reward=1.0)
    assert selector(lazy_stack([row([1], 0.0, False), row([1, 2], 1.0, True)])) is None  # worth 0.5
    assert selector(lazy_stack([row([3, 4, 5], 1.0, False), row([3], 2.0, True)])) is None  # 1.5
    chosen = selector(lazy_stack([row([6, 7], 4.0, True)]))  # 4
    assert chosen is not None
    assert [ids.tolist() for ids in chosen["ids"].unbind()] == [[6, 7], [3, 4, 5], [3]]


@pytest.mark.parametrize(
    ("worth", "count", "minimum", "chosen"),
    [
        ([1.0, 1.0, 1.0], 2, None, []),  # all equal
        ([0.1 + 0.2, 0.3, 0.3], 2, None, []),  # but for rounding
        ([0.0, 0.0, 1.0, 1.0], 4, None, [2, 3]),  # the lower median of an even number is 0
        ([0.0, 1.0, 1.0, 1.0], 4, None, []),  # and here 1
        ([0.0, 1.0, 1.0, 1.0], 2, 1.0, [1, 2]),  # equal ones in the order they came
        ([1.0, 1.0], 2, 1.0, [0, 1]),  # a minimum keeps a group whose replies are all as good
        ([0.0, 0.9], 2, 1.0, []),
        ([nan, 0.0, 1.0], 3, None, [2]),  # the median of 0 and 1
        ([nan, nan], 1, None, []),
        ([nan, -5.0], 1, -9.0, [1]),
    ],
)
def test_the_best_are_above_the_lower_median_or_the_minimum(
    worth: list[float], count: int, minimum: float | None, chosen: list[int]
) -> None:
    assert best(worth, count, minimum) == chosen


def test_a_failed_reward_completes_its_group_and_is_not_chosen(conversation: Make) -> None:
    made = [conversation(0, 0, reward=9.0, valid=False), conversation(0, 1, reward=None), conversation(0, 2)]
    chosen = TopKRewardSelector(3, 3, min_reward=0.0)(batch_from_conversations(made))
    assert chosen is not None
    assert chosen["sample"].tolist() == [2]


def test_what_waits_is_saved_and_taken_up_again(group: Callable[..., TensorDict]) -> None:
    rows = group(0, [1.0, 0.0, 2.0])
    saved = TopKRewardSelector(3, 2)
    assert saved(select_rows(rows, [0, 1])) is None
    resumed = TopKRewardSelector(3, 2)
    resumed.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
    assert rewards_of(resumed(select_rows(rows, [2]))) == [2.0]
    assert resumed.num_incomplete == 0


def test_a_prompt_that_stays_incomplete_is_given_up(group: Callable[..., TensorDict]) -> None:
    selector = TopKRewardSelector(2, 1, max_waiting=2)
    for number in range(3):
        selector(group(number, [1.0]))
    assert (selector.num_incomplete, selector.num_evicted) == (2, 1)
    assert selector.counts() == {"groups/evicted": 1.0}
    assert selector(group(0, [0.0])) is None  # the first of group 0 is forgotten
    assert rewards_of(selector(group(2, [0.0]))) == [1.0]


def test_the_best_of_each_group_of_a_batch(conversation: Make) -> None:
    rewards = {(0, 0): 0.2, (0, 1): 0.9, (0, 2): 0.9, (1, 0): 0.5, (1, 1): 0.1, (1, 2): None, (1, 3): 0.7}
    made = [conversation(g, s, reward=r, valid=r is not None) for (g, s), r in rewards.items()]
    rows = batch_from_conversations([made[i] for i in (3, 0, 1, 4, 5, 2, 6)])  # the groups' rows are not together
    # group 1 came first; above its lower median 0.5 lies 0.7 alone. Both of group 0's are equal to its median, 0.9
    assert best_of_groups(rows, 2, None) == [6]
    assert best_of_groups(rows, 2, 0.5) == [6, 0, 2, 5]
    assert best_of_groups(rows, 1, 0.0) == [6, 2]
    assert best_of_groups(rows, 1, 2.0) == []
