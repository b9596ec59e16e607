"""MCAdvantage as the buffer's transform."""

from __future__ import annotations

import json

import pytest
import torch

from rlpost.data.batch import batch_from_conversations, select_rows
from rlpost.data.conversation import Completion, Conversation
from rlpost.objectives import MCAdvantage


def finished(group: int, sample: int, reward: float, valid: bool = True) -> Conversation:
    conversation = Conversation(task={}, messages=[{"role": "user", "content": "same question"}], group_id=group)
    conversation.sample = sample
    conversation.prompt_ids = [5, 6]
    conversation.add_completion(Completion([7] * (sample + 1), [-0.5] * (sample + 1), "x", "stop", 0))
    conversation.reward, conversation.valid, conversation.terminated = reward, valid, True
    return conversation


def test_interleaved_groups_are_told_apart_even_with_one_prompt() -> None:
    batch = batch_from_conversations([finished(0, 0, 1), finished(1, 0, 0), finished(0, 1, 0), finished(1, 1, 0)])
    out = MCAdvantage(2)(batch)
    assert out is not None
    assert out["group_id"].tolist() == [0, 0, 1, 1]
    assert out["advantage"].tolist() == pytest.approx([0.70711, -0.70711, 0, 0], abs=1e-4)
    assert [row.tolist() for row in out["tokens", "response"].unbind()] == [[7], [7, 7], [7], [7, 7]]


def test_an_incomplete_group_waits_for_its_rest() -> None:
    transform = MCAdvantage(3)
    assert transform(batch_from_conversations([finished(4, 0, 1.0), finished(4, 1, 0.0)])) is None
    assert transform.num_incomplete == 1
    out = transform(batch_from_conversations([finished(4, 2, 0.0)]))
    assert out is not None
    assert out["advantage"].tolist() == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)
    assert transform.num_incomplete == 0


def test_what_waits_survives_a_checkpoint() -> None:
    transform, resumed = MCAdvantage(2), MCAdvantage(2)
    assert transform(batch_from_conversations([finished(4, 0, 0.1)])) is None
    resumed.load_state_dict(json.loads(json.dumps(transform.state_dict())))
    rest = batch_from_conversations([finished(4, 1, 0.7)])
    expected, out = transform(rest), resumed(rest)
    assert expected is not None
    assert out is not None
    assert torch.equal(out["advantage"], expected["advantage"])
    assert torch.equal(out["next", "reward"], expected["next", "reward"])
    assert out["query"] == expected["query"]
    assert torch.equal(out["log_probs", "full"].values(), expected["log_probs", "full"].values())


def test_shuffled_rewards_keep_their_values_and_change_their_owners() -> None:
    rows = [finished(3, i, float(i)) for i in range(8)]
    plain = MCAdvantage(8)(batch_from_conversations(rows))
    shuffled = MCAdvantage(8, shuffle_rewards=True, seed=1)(batch_from_conversations(rows))
    again = MCAdvantage(8, shuffle_rewards=True, seed=1)(batch_from_conversations(rows))
    assert plain is not None
    assert shuffled is not None
    assert again is not None
    assert shuffled["advantage"].tolist() == again["advantage"].tolist()
    assert shuffled["advantage"].tolist() != plain["advantage"].tolist()
    assert torch.equal(shuffled["advantage"].sort().values, plain["advantage"].sort().values)
    assert torch.equal(shuffled["next", "reward"], plain["next", "reward"])  # what is reported stays true


def test_a_conversation_that_is_not_done_is_refused() -> None:
    row = finished(0, 0, 1.0)
    row.terminated = False
    with pytest.raises(RuntimeError, match="not done"):
        MCAdvantage(2)(batch_from_conversations([row]))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        MCAdvantage(1)


def test_a_group_that_grows_too_large_is_refused() -> None:
    batch = batch_from_conversations([finished(0, i, 0.0) for i in range(3)])
    with pytest.raises(ValueError, match="more than the 2 a group can have"):
        MCAdvantage(2)(select_rows(batch, [0, 1, 2]))
