"""MCAdvantage as the buffer's transform."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rlpost.data import ReplayBuffer
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.ragged import ragged, strings
from rlpost.objectives import MCAdvantage
from rlpost.torchrl.batches import concat_rows, select_rows


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


def test_a_group_that_grows_too_large_is_refused() -> None:
    batch = batch_from_conversations([finished(0, i, 0.0) for i in range(3)])
    with pytest.raises(ValueError, match="more than the 2 a group can have"):
        MCAdvantage(2)(select_rows(batch, [0, 1, 2]))


# Groups


def test_a_group_is_the_same_however_its_rows_arrive() -> None:
    dice = random.Random(3)
    rows = [finished(group, i, dice.random(), valid=dice.random() > 0.2) for group in range(3) for i in range(4)]
    whole = MCAdvantage(4)(batch_from_conversations(rows))
    assert whole is not None
    expected = {(g, s): a for g, s, a in zip(*columns(whole, "group_id", "sample", "advantage"), strict=True)}
    for _ in range(5):
        dice.shuffle(rows)
        cuts = sorted(dice.sample(range(1, len(rows)), 3))
        transform, seen = MCAdvantage(4), {}
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            out = transform(batch_from_conversations(rows[start:stop]))
            if out is not None:
                triples = zip(*columns(out, "group_id", "sample", "advantage"), strict=True)
                seen |= {(g, s): a for g, s, a in triples}
        assert seen == pytest.approx(expected, abs=1e-6)
        assert transform.num_incomplete == 0


def columns(batch: TensorDictBase, *names: str) -> list[list[Any]]:
    return [batch[name].tolist() for name in names]


def test_failed_rewards_get_no_advantage_and_leave_their_group_whole() -> None:
    rows = [finished(0, 0, 1.0), finished(0, 1, math.nan, valid=False), finished(0, 2, 0.0)]
    out = MCAdvantage(3)(batch_from_conversations(rows))
    assert out is not None
    assert out["advantage"].tolist() == pytest.approx([0.70711, 0, -0.70711], abs=1e-4)


def test_the_weighted_sum_of_several_rewards_is_what_is_compared() -> None:
    rows = []
    for sample, (right, tidy) in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        row = finished(0, sample, 3.0 * right + 0.5 * tidy)
        row.reward_parts = {"right": right, "tidy": tidy}
        rows.append(row)
    out = MCAdvantage(2, estimator="dr_grpo")(batch_from_conversations(rows))
    assert out is not None
    assert out["advantage"].tolist() == [1.25, -1.25]
    assert out["next", "reward_parts", "right"].flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("estimator", "expected"), [("dr_grpo", [0.5, -0.5]), ("rloo", [1.0, -1.0])])
def test_other_estimators_of_a_group(estimator: str, expected: list[float]) -> None:
    out = MCAdvantage(2, estimator=estimator)(batch_from_conversations([finished(0, 0, 1), finished(0, 1, 0)]))
    assert out is not None
    assert out["advantage"].tolist() == expected


# Trajectories of several steps, without numbers: grouped by their prompt


def steps(prompt: Any, rewards: Sequence[float], key: str | tuple[str, ...] = "query") -> TensorDict:
    """One trajectory: a step a reward, the last one done."""
    size = len(rewards)
    done = torch.zeros(size, 1, dtype=torch.bool)
    done[-1] = True
    made = TensorDict({"next": {"reward": torch.tensor(rewards).unsqueeze(-1), "done": done}}, batch_size=[size])
    value = strings([prompt] * size) if isinstance(prompt, str) else torch.tensor([prompt] * size)
    return made.set(key, value)


def test_by_default_all_steps_of_a_group_are_compared_with_each_other() -> None:
    out = MCAdvantage(2)(concat_rows([steps("a", [0.0, 1.0]), steps("a", [2.0])]))
    assert out is not None
    assert out["advantage"].tolist() == [-1.0, 0.0, 1.0]  # mean 1, std 1


@pytest.mark.parametrize(
    ("reduction", "returns"), [("sum", [3.0, 1.0, 5.0]), ("max", [2.0, 1.0, 5.0]), ("mean", [1.5, 0.5, 5.0])]
)
def test_a_return_is_compared_and_reaches_every_step(reduction: str, returns: list[float]) -> None:
    batch = concat_rows([steps("a", [1.0, 2.0]), steps("a", [0.0, 1.0]), steps("a", [5.0])])
    out = MCAdvantage(3, trajectory_return=reduction)(batch)
    assert out is not None
    mean = sum(returns) / 3
    std = math.sqrt(sum((r - mean) ** 2 for r in returns) / 2)
    first, second, third = ((r - mean) / std for r in returns)
    assert out["advantage"].tolist() == pytest.approx([first, first, second, second, third])


def test_the_prompt_tells_groups_apart_and_each_gets_a_number() -> None:
    transform = MCAdvantage(2, trajectory_return="sum")
    assert transform(concat_rows([steps("a", [1.0]), steps("b", [0.0])])) is None
    out = transform(concat_rows([steps("b", [4.0]), steps("a", [0.0])]))
    assert out is not None
    assert list(out["query"]) == ["b", "b", "a", "a"]
    assert out["advantage"].tolist() == pytest.approx([-0.70711, 0.70711, 0.70711, -0.70711], abs=1e-4)
    assert out["group_id"].tolist() == [0, 0, 1, 1]
    buffer = ReplayBuffer(transforms=[MCAdvantage(2)])
    with pytest.raises(KeyError):  # what the buffer takes has rows that say whether they are valid
        buffer.extend(concat_rows([steps("a", [1.0]), steps("a", [0.0])]))


@pytest.mark.parametrize("key", ["observation", ("tokens", "prompt")])
@pytest.mark.parametrize(("one", "other"), [(1, 2), ([1, 2], [1, 3])])
def test_prompts_may_be_tensors_under_a_nested_key(key: str | tuple[str, str], one: Any, other: Any) -> None:
    transform = MCAdvantage(2, prompt_key=key)
    out = transform(concat_rows([steps(one, [1.0], key), steps(other, [7.0], key), steps(one, [0.0], key)]))
    assert out is not None
    assert out[key].tolist() == [one, one]
    assert out["advantage"].tolist() == pytest.approx([0.70711, -0.70711], abs=1e-4)
    assert transform.num_incomplete == 1


def test_more_trajectories_of_a_prompt_are_its_next_group() -> None:
    transform = MCAdvantage(2)
    out = transform(concat_rows([steps("a", [float(i)]) for i in range(5)]))
    assert out is not None
    assert out["group_id"].tolist() == [0, 0, 1, 1]
    assert out["next", "reward"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    out = transform(steps("a", [9.0]))
    assert out is not None
    assert out["next", "reward"].flatten().tolist() == [4.0, 9.0]
    assert out["group_id"].tolist() == [2, 2]


def test_a_batch_of_lines_is_taken_apart_at_what_is_done() -> None:
    lines: Any = torch.stack([concat_rows([steps("a", [1.0]), steps("b", [0.0, 0.0])]), steps("a", [0.0, 0.0, 3.0])])
    transform = MCAdvantage(2, trajectory_return="sum")
    out = transform(lines)
    assert out is not None
    assert out["next", "reward"].flatten().tolist() == [1.0, 0.0, 0.0, 3.0]
    assert out["advantage"].tolist() == pytest.approx([-0.70711, 0.70711, 0.70711, 0.70711], abs=1e-4)
    assert transform.num_incomplete == 1  # b


def test_lines_of_different_lengths_stacked_lazily_come_out_as_a_plain_tensordict() -> None:
    lines = LazyStackedTensorDict(steps("a", [1.0, 1.0]), steps("a", [0.0]))
    transform = MCAdvantage(4, trajectory_return="sum")
    assert transform(lines) is None
    out = transform(concat_rows([steps("a", [2.0]), steps("a", [0.0])]))
    assert type(out) is TensorDict
    assert out["next", "reward"].flatten().tolist() == [1.0, 1.0, 0.0, 2.0, 0.0]
    assert out["advantage"].tolist() == pytest.approx([0.866025, 0.866025, -0.866025, 0.866025, -0.866025])


def lazy_line(ids: Sequence[Sequence[int]], rewards: Sequence[float], per_token: bool = False) -> Any:
    """One trajectory whose steps have ids of different lengths, stacked lazily."""
    made = steps("a", rewards)
    for i, row in enumerate(rows := list(made.unbind(0))):
        row["tokens"] = {"full": torch.tensor(ids[i])}
        if per_token:
            row["next", "reward"] = torch.full((len(ids[i]), 1), rewards[i])
    return LazyStackedTensorDict(*rows)


def test_steps_of_different_widths_stacked_lazily_become_ragged() -> None:
    lines = [lazy_line([[1, 2], [1, 2, 3]], [0.0, 1.0]), lazy_line([[4]], [2.0])]
    transform = MCAdvantage(2)
    assert transform(lines[0]) is None
    for out in (transform(lines[1]), MCAdvantage(2)(LazyStackedTensorDict(*lines))):
        assert type(out) is TensorDict
        assert [row.tolist() for row in out["tokens", "full"].unbind()] == [[1, 2], [1, 2, 3], [4]]
        assert out["advantage"].tolist() == [-1.0, 0.0, 1.0]  # mean 1, std 1


def padded_row(ids: Sequence[int], width: int, reward: float) -> TensorDict:
    """One trajectory of one step, padded behind its ids, with a reward for each place of them."""
    row = steps("a", [0.0])
    there = torch.arange(width) < len(ids)
    row["tokens"] = {"full": torch.tensor([[*ids, *[9] * (width - len(ids))]])}
    row["masks"] = {"all_attention_mask": there.unsqueeze(0)}
    row["next", "reward"] = (reward * there).reshape(1, width, 1)
    return row


def test_padded_batches_of_different_widths_are_padded_to_the_widest() -> None:
    transform = MCAdvantage(2, estimator="dr_grpo", trajectory_return="sum")
    assert transform(padded_row([5], 2, 1.0)) is None
    out = transform(padded_row([6, 7, 8], 3, 1.0))
    assert out is not None
    assert out["tokens", "full"].tolist() == [[5, 9, 0], [6, 7, 8]]
    assert out["masks", "all_attention_mask"].tolist() == [[True, False, False], [True] * 3]
    assert out["next", "reward"].squeeze(-1).tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert out["advantage"].tolist() == [[-1.0, -1.0, 0.0], [1.0, 1.0, 1.0]]  # returns 1 and 3


def test_rewards_of_tokens_give_advantages_of_tokens() -> None:
    rows = concat_rows([steps("a", [0.0]), steps("a", [0.0])])
    dense, uneven = rows.clone(), rows.clone()
    dense["next", "reward"] = torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]])  # (L, T, 1)
    out = MCAdvantage(2, estimator="dr_grpo")(dense)
    assert out is not None
    assert out["advantage"].tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    uneven["next", "reward"] = ragged([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0])])
    out = MCAdvantage(2, estimator="dr_grpo")(uneven)
    assert out is not None
    assert [row.tolist() for row in out["advantage"].unbind()] == [[-1.0, 0.0, 1.0], [0.0]]
    out = MCAdvantage(2, estimator="dr_grpo", trajectory_return="sum")(uneven)
    assert out is not None
    assert [row.tolist() for row in out["advantage"].unbind()] == [[2.0, 2.0, 2.0], [-2.0]]


def test_a_line_that_does_not_end_is_refused() -> None:
    open_ended = steps("a", [0.0, 0.0])
    open_ended["next", "done"][:] = False
    with pytest.raises(RuntimeError, match="not done"):
        MCAdvantage(2)(concat_rows([steps("a", [1.0]), open_ended]))


def test_verbose_tells_of_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    MCAdvantage(2, verbose=True)(concat_rows([steps("a", [1.0]), steps("a", [0.0])]))
    assert capsys.readouterr().out == "group 1: 2 trajectories, mean reward 0.5\n"


# Bounds, candidates, groups that never complete


def fed(transform: MCAdvantage, *rewards: float, prompt: str = "a") -> list[float] | None:
    """The rewards that come out when trajectories of one step are written one by one: of the last write."""
    out = None
    for reward in rewards:
        out = transform(steps(prompt, [reward]))
    return None if out is None else out["next", "reward"].flatten().tolist()


def test_groups_out_of_bounds_are_dropped_and_counted() -> None:
    transform = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.0, 1.0))
    assert fed(transform, 0.0, 0.0) is None
    assert fed(transform, 1.0, 1.0) is None  # a mean on the bound is out
    assert fed(transform, 1.0, 0.0) == [1.0, 0.0]
    assert (transform.num_complete, transform.num_written, transform.num_dropped) == (3, 1, 2)
    assert transform.num_incomplete == 0


def test_forgetting_what_waits_keeps_the_counts() -> None:
    transform = MCAdvantage(2)
    assert fed(transform, 1.0, 0.0, 5.0) is None
    transform.clear()
    assert (transform.num_incomplete, transform.num_written) == (0, 1)
    assert fed(transform, 2.0, 3.0) == [2.0, 3.0]


def candidates(**options: Any) -> MCAdvantage:
    given: dict[str, Any] = {
        "trajectory_return": "sum",
        "keep_return_bounds": (0.1, 0.9),
        "candidate_group_size": 4,
    } | options
    return MCAdvantage(2, **given)


def test_a_group_is_written_as_soon_as_one_can_be_made() -> None:
    transform = candidates()
    assert fed(transform, 0.0, 1.0) == [0.0, 1.0]
    assert (transform.num_written, transform.num_incomplete) == (1, 0)


def test_a_later_candidate_rescues_a_group() -> None:
    transform = candidates()
    assert fed(transform, 1.0, 1.0, 1.0) is None
    assert fed(transform, 0.0) == [1.0, 0.0]
    assert (transform.num_complete, transform.num_dropped, transform.num_incomplete) == (1, 0, 0)


def test_candidates_that_make_no_group_are_dropped_together() -> None:
    transform = candidates()
    assert fed(transform, 1.0, 1.0, 1.0, 1.0) is None
    assert (transform.num_complete, transform.num_dropped, transform.num_incomplete) == (1, 1, 0)
    assert fed(transform, 0.0, 1.0) == [0.0, 1.0]


def test_a_smallest_number_of_candidates_is_waited_for() -> None:
    transform = candidates(candidate_selection_min_size=3)
    assert fed(transform, 0.0, 1.0) is None
    assert fed(transform, 1.0) == [0.0, 1.0]


def test_candidates_that_failed_are_not_chosen() -> None:
    transform = candidates(candidate_group_size=3)
    rows = concat_rows([steps("a", [reward]) for reward in (math.nan, 0.0, 1.0)])
    out = transform(rows.set("valid", torch.tensor([False, True, True])))
    assert out is not None
    assert out["next", "reward"].flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number a row", "a column of numbers"])
def test_what_is_left_of_a_numbered_group_that_was_chosen_early_is_dropped(shape: tuple[int, ...]) -> None:
    def rows(*given: tuple[int, int, float]) -> TensorDict:
        batch = batch_from_conversations([finished(*each) for each in given])
        return batch.set("group_id", batch["group_id"].reshape(-1, *shape))

    transform = candidates(candidate_group_size=3)
    out = transform(rows((0, 0, 0.0), (0, 1, 1.0), (1, 0, 0.0)))
    assert out is not None
    assert out["sample"].tolist() == [0, 1]
    resumed = candidates(candidate_group_size=3)
    resumed.load_state_dict(json.loads(json.dumps(transform.state_dict())))
    assert resumed(rows((0, 2, 1.0))) is None
    assert resumed.num_incomplete == 1  # group 1 alone
    out = resumed(rows((1, 1, 1.0)))
    assert out is not None
    assert (out["group_id"].flatten().tolist(), resumed.num_written) == ([1, 1], 2)


def test_a_selector_of_ones_own_sees_the_trajectories() -> None:
    def longest(rows: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Any) -> list[int]:
        return sorted(range(len(rows)), key=lambda i: -rows[i].batch_size[0])[:size]

    transform = candidates(candidate_selection_min_size=3, candidate_group_size=3, candidate_selector=longest)
    out = transform(concat_rows([steps("a", [0.0]), steps("a", [0.0, 0.0, 1.0]), steps("a", [0.0, 0.5])]))
    assert out is not None
    assert out["next", "reward"].flatten().tolist() == [0.0, 0.0, 1.0, 0.0, 0.5]
    assert out["advantage"].tolist() == pytest.approx([0.70711] * 3 + [-0.70711] * 2, abs=1e-4)


def test_groups_that_never_complete_are_given_up_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    transform = MCAdvantage(2, max_waiting=2)
    with caplog.at_level(logging.WARNING, logger="rlpost"):
        for prompt in "abc":
            assert fed(transform, 1.0, prompt=prompt) is None
    assert transform.num_evicted == 1
    assert transform.counts() == {"groups/evicted": 1.0}
    assert "gave up a group with 1 of 2 trajectories" in caplog.text
    assert fed(transform, 0.0, prompt="b") == [1.0, 0.0]  # only the oldest went
    assert fed(transform, 0.0, prompt="a") is None
