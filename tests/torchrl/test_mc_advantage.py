"""MCAdvantage as the buffer's transform."""

from __future__ import annotations

import logging
import math
import pickle
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
from rlpost.torchrl.batches import concat_rows


def finished(group: int, sample: int, reward: float, valid: bool = True) -> Conversation:
    conversation = Conversation(task={}, messages=[{"role": "user", "content": "same question"}], group_id=group)
    conversation.sample = sample
    conversation.prompt_ids = [5, 6]
    conversation.add_completion(Completion([7] * (sample + 1), [-0.5] * (sample + 1), "x", "stop", 0))
    conversation.reward, conversation.valid, conversation.terminated = reward, valid, True
    return conversation


def numbered(*rows: tuple[Any, ...]) -> TensorDict:
    """Conversations that know their group: (group, sample, reward) each, and whether it is valid."""
    return batch_from_conversations([finished(*row) for row in rows])


def steps(prompt: Any, rewards: Sequence[float], key: str | tuple[str, ...] = "query") -> TensorDict:
    """One trajectory without a number, grouped by its prompt: a step a reward, the last one done."""
    size = len(rewards)
    done = torch.zeros(size, 1, dtype=torch.bool)
    done[-1] = True
    made = TensorDict({"next": {"reward": torch.tensor(rewards).unsqueeze(-1), "done": done}}, batch_size=[size])
    value = strings([prompt] * size) if isinstance(prompt, str) else torch.tensor([prompt] * size)
    return made.set(key, value)


def written(transform: MCAdvantage, *batches: TensorDictBase) -> TensorDictBase:
    """What comes out when the batches are written as one."""
    out = transform(batches[0] if len(batches) == 1 else concat_rows(list(batches)))
    assert out is not None
    return out


def advantages(batch: TensorDictBase) -> Any:
    """Those of a batch, rounded."""
    found = batch["advantage"]
    rows = list(found.unbind()) if found.is_nested else [found]
    rounded = [row.double().round(decimals=4).tolist() for row in rows]
    return rounded if found.is_nested else rounded[0]


def rewards(batch: TensorDictBase) -> list[float]:
    return batch["next", "reward"].flatten().tolist()


def after_a_checkpoint(transform: MCAdvantage, resumed: MCAdvantage) -> MCAdvantage:
    resumed.load_state_dict(pickle.loads(pickle.dumps(transform.state_dict())))
    return resumed


# Groups of conversations, which have numbers


def test_interleaved_groups_are_told_apart_even_with_one_prompt() -> None:
    out = written(MCAdvantage(2), numbered((0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 0)))
    assert out["group_id"].tolist() == [0, 0, 1, 1]
    assert advantages(out) == [0.7071, -0.7071, 0, 0]
    assert [row.tolist() for row in out["tokens", "response"].unbind()] == [[7], [7, 7], [7], [7, 7]]


def test_an_incomplete_group_waits_for_its_rest() -> None:
    transform = MCAdvantage(3)
    assert transform(numbered((4, 0, 1.0), (4, 1, 0.0))) is None
    assert transform.num_incomplete == 1
    assert advantages(written(transform, numbered((4, 2, 0.0)))) == [1.1547, -0.5774, -0.5774]
    assert transform.num_incomplete == 0


def test_what_waits_survives_a_checkpoint() -> None:
    transform = MCAdvantage(2)
    assert transform(numbered((4, 0, 0.1))) is None
    resumed = after_a_checkpoint(transform, MCAdvantage(2))
    rest = numbered((4, 1, 0.7))
    expected, out = written(transform, rest), written(resumed, rest)
    for key in ("advantage", ("next", "reward")):
        assert torch.equal(out[key], expected[key])
    assert out["query"] == expected["query"]
    assert torch.equal(out["log_probs", "full"].values(), expected["log_probs", "full"].values())


def test_a_group_is_the_same_however_its_rows_arrive() -> None:
    def by_row(batch: TensorDictBase | None) -> dict[tuple[int, int], float]:
        if batch is None:
            return {}
        columns = [batch[name].tolist() for name in ("group_id", "sample", "advantage")]
        return {(group, sample): advantage for group, sample, advantage in zip(*columns, strict=True)}

    dice = random.Random(3)
    rows = [(group, i, dice.random(), dice.random() > 0.2) for group in range(3) for i in range(4)]
    expected = by_row(MCAdvantage(4)(numbered(*rows)))
    assert len(expected) == 12
    for _ in range(5):
        dice.shuffle(rows)
        cuts = sorted(dice.sample(range(1, len(rows)), 3))
        transform, seen = MCAdvantage(4), {}
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            seen |= by_row(transform(numbered(*rows[start:stop])))
        assert seen == pytest.approx(expected, abs=1e-6)
        assert transform.num_incomplete == 0


def test_failed_rewards_get_no_advantage_and_leave_a_group_whole() -> None:
    out = written(MCAdvantage(3), numbered((0, 0, 1.0), (0, 1, math.nan, False), (0, 2, 0.0)))
    assert advantages(out) == [0.7071, 0, -0.7071]


# Trajectories of several steps, without numbers: grouped by their prompt


@pytest.mark.parametrize(
    ("reduction", "returns"), [("sum", [3.0, 1.0, 5.0]), ("max", [2.0, 1.0, 5.0]), ("mean", [1.5, 0.5, 5.0])]
)
def test_a_return_is_compared_and_reaches_every_step(reduction: str, returns: list[float]) -> None:
    transform = MCAdvantage(3, trajectory_return=reduction)
    out = written(transform, steps("a", [1.0, 2.0]), steps("a", [0.0, 1.0]), steps("a", [5.0]))
    mean = sum(returns) / 3
    std = math.sqrt(sum((r - mean) ** 2 for r in returns) / 2)
    first, second, third = ((r - mean) / std for r in returns)
    assert out["advantage"].tolist() == pytest.approx([first, first, second, second, third])


def test_the_prompt_tells_groups_apart_and_each_gets_a_number() -> None:
    transform = MCAdvantage(2, trajectory_return="sum")
    assert transform(concat_rows([steps("a", [1.0]), steps("b", [0.0])])) is None
    out = written(transform, steps("b", [4.0]), steps("a", [0.0]))
    assert list(out["query"]) == ["b", "b", "a", "a"]
    assert advantages(out) == [-0.7071, 0.7071, 0.7071, -0.7071]
    assert out["group_id"].tolist() == [0, 0, 1, 1]
    buffer = ReplayBuffer(transforms=[MCAdvantage(2)])
    with pytest.raises(KeyError):  # what the buffer takes has rows that say whether they are valid
        buffer.extend(concat_rows([steps("a", [1.0]), steps("a", [0.0])]))


@pytest.mark.parametrize("key", ["observation", ("tokens", "prompt")])
@pytest.mark.parametrize(("one", "other"), [(1, 2), ([1, 2], [1, 3])])
def test_prompts_may_be_tensors_under_a_nested_key(key: str | tuple[str, str], one: Any, other: Any) -> None:
    transform = MCAdvantage(2, prompt_key=key)
    out = written(transform, steps(one, [1.0], key), steps(other, [7.0], key), steps(one, [0.0], key))
    assert out[key].tolist() == [one, one]
    assert advantages(out) == [0.7071, -0.7071]
    assert transform.num_incomplete == 1


def test_more_trajectories_of_a_prompt_are_its_next_group() -> None:
    transform = MCAdvantage(2)
    out = written(transform, *[steps("a", [float(i)]) for i in range(5)])
    assert (out["group_id"].tolist(), rewards(out)) == ([0, 0, 1, 1], [0.0, 1.0, 2.0, 3.0])
    out = written(transform, steps("a", [9.0]))
    assert (out["group_id"].tolist(), rewards(out)) == ([2, 2], [4.0, 9.0])


def test_a_batch_of_lines_is_taken_apart_at_what_is_done() -> None:
    lines: Any = torch.stack([concat_rows([steps("a", [1.0]), steps("b", [0.0, 0.0])]), steps("a", [0.0, 0.0, 3.0])])
    transform = MCAdvantage(2, trajectory_return="sum")
    out = written(transform, lines)
    assert rewards(out) == [1.0, 0.0, 0.0, 3.0]
    assert advantages(out) == [-0.7071, 0.7071, 0.7071, 0.7071]
    assert transform.num_incomplete == 1  # b


def test_lines_of_different_lengths_stacked_lazily_come_out_as_a_plain_tensordict() -> None:
    transform = MCAdvantage(4, trajectory_return="sum")
    assert transform(LazyStackedTensorDict(steps("a", [1.0, 1.0]), steps("a", [0.0]))) is None
    out = written(transform, steps("a", [2.0]), steps("a", [0.0]))
    assert type(out) is TensorDict
    assert rewards(out) == [1.0, 1.0, 0.0, 2.0, 0.0]
    assert advantages(out) == [0.866, 0.866, -0.866, 0.866, -0.866]


def test_steps_of_different_widths_stacked_lazily_become_ragged() -> None:
    def line(ids: list[list[int]], given: list[float]) -> LazyStackedTensorDict:
        rows = steps("a", given).unbind(0)
        return LazyStackedTensorDict(*[row.set(("tokens", "full"), torch.tensor(ids[i])) for i, row in enumerate(rows)])

    lines = [line([[1, 2], [1, 2, 3]], [0.0, 1.0]), line([[4]], [2.0])]
    transform = MCAdvantage(2)
    assert transform(lines[0]) is None
    for out in (transform(lines[1]), MCAdvantage(2)(LazyStackedTensorDict(*lines))):
        assert type(out) is TensorDict
        assert [row.tolist() for row in out["tokens", "full"].unbind()] == [[1, 2], [1, 2, 3], [4]]
        assert advantages(out) == [-1.0, 0.0, 1.0]  # mean 1, std 1


def test_padded_batches_of_different_widths_are_padded_to_the_widest() -> None:
    def padded(ids: list[int], width: int) -> TensorDict:
        """One trajectory of one step, padded behind its ids, with a reward of 1 for each of them."""
        row, there = steps("a", [0.0]), torch.arange(width) < len(ids)
        row["tokens"] = {"full": torch.tensor([[*ids, *[9] * (width - len(ids))]])}
        row["masks"] = {"all_attention_mask": there.unsqueeze(0)}
        row["next", "reward"] = there.float().reshape(1, width, 1)
        return row

    transform = MCAdvantage(2, estimator="dr_grpo", trajectory_return="sum")
    assert transform(padded([5], 2)) is None
    out = written(transform, padded([6, 7, 8], 3))
    assert out["tokens", "full"].tolist() == [[5, 9, 0], [6, 7, 8]]
    assert out["masks", "all_attention_mask"].tolist() == [[True, False, False], [True] * 3]
    assert rewards(out) == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert advantages(out) == [[-1.0, -1.0, 0.0], [1.0, 1.0, 1.0]]  # returns 1 and 3


def test_rewards_of_tokens_give_advantages_of_tokens() -> None:
    dense = concat_rows([steps("a", [0.0]), steps("a", [0.0])])
    uneven = dense.clone()
    dense["next", "reward"] = torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]])  # (L, T, 1)
    uneven["next", "reward"] = ragged([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0])])
    for rows, summed, expected in [
        (dense, None, [[-1.0, 0.0], [1.0, 0.0]]),
        (uneven, None, [[-1.0, 0.0, 1.0], [0.0]]),
        (uneven, "sum", [[2.0, 2.0, 2.0], [-2.0]]),
    ]:
        assert advantages(written(MCAdvantage(2, estimator="dr_grpo", trajectory_return=summed), rows)) == expected


def test_what_does_not_end_is_refused() -> None:
    open_ended = steps("a", [0.0, 0.0])
    open_ended["next", "done"][:] = False
    going_on = finished(0, 0, 1.0)
    going_on.terminated = False
    for rows in (concat_rows([steps("a", [1.0]), open_ended]), batch_from_conversations([going_on])):
        with pytest.raises(RuntimeError, match="not done"):
            MCAdvantage(2)(rows)


# Bounds, candidates, groups that never complete


def fed(transform: MCAdvantage, *given: float, prompt: str = "a") -> list[float] | None:
    """The rewards that come out when trajectories of one step are written one by one: of the last write."""
    out = None
    for reward in given:
        out = transform(steps(prompt, [reward]))
    return None if out is None else rewards(out)


def counted(transform: MCAdvantage) -> tuple[int, int, int]:
    return (transform.num_complete, transform.num_dropped, transform.num_incomplete)


def test_groups_out_of_bounds_are_dropped_and_counted() -> None:
    transform = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.0, 1.0))
    assert fed(transform, 0.0, 0.0) is None
    assert fed(transform, 1.0, 1.0) is None  # a mean on the bound is out
    assert fed(transform, 1.0, 0.0) == [1.0, 0.0]
    assert (transform.num_written, *counted(transform)) == (1, 3, 2, 0)


def test_forgetting_what_waits_keeps_the_counts() -> None:
    transform = MCAdvantage(2)
    assert fed(transform, 1.0, 0.0, 5.0) is None
    transform.clear()
    assert (transform.num_incomplete, transform.num_written) == (0, 1)
    assert fed(transform, 2.0, 3.0) == [2.0, 3.0]


def candidates(**options: Any) -> MCAdvantage:
    bounds: dict[str, Any] = {"trajectory_return": "sum", "keep_return_bounds": (0.1, 0.9)}
    return MCAdvantage(2, **{**bounds, "candidate_group_size": 4, **options})


def test_a_group_is_written_as_soon_as_one_can_be_made() -> None:
    transform = candidates()
    assert fed(transform, 0.0, 1.0) == [0.0, 1.0]
    assert (transform.num_written, transform.num_incomplete) == (1, 0)
    waiting = candidates(candidate_selection_min_size=3)
    assert fed(waiting, 0.0, 1.0) is None
    assert fed(waiting, 1.0) == [0.0, 1.0]


def test_a_later_candidate_rescues_a_group() -> None:
    transform = candidates()
    assert fed(transform, 1.0, 1.0, 1.0) is None
    assert fed(transform, 0.0) == [1.0, 0.0]
    assert counted(transform) == (1, 0, 0)


def test_candidates_that_make_no_group_are_dropped_together() -> None:
    transform = candidates()
    assert fed(transform, 1.0, 1.0, 1.0, 1.0) is None
    assert counted(transform) == (1, 1, 0)
    assert fed(transform, 0.0, 1.0) == [0.0, 1.0]


def test_candidates_that_failed_are_not_chosen() -> None:
    rows = concat_rows([steps("a", [reward]) for reward in (math.nan, 0.0, 1.0)])
    rows.set("valid", torch.tensor([False, True, True]))
    assert rewards(written(candidates(candidate_group_size=3), rows)) == [0.0, 1.0]


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number a row", "a column of numbers"])
def test_the_rest_of_a_group_that_was_chosen_early_is_dropped(shape: tuple[int, ...]) -> None:
    def rows(*given: tuple[int, int, float]) -> TensorDict:
        batch = numbered(*given)
        return batch.set("group_id", batch["group_id"].reshape(-1, *shape))

    transform = candidates(candidate_group_size=3)
    out = written(transform, rows((0, 0, 0.0), (0, 1, 1.0), (1, 0, 0.0)))
    assert out["sample"].tolist() == [0, 1]
    resumed = after_a_checkpoint(transform, candidates(candidate_group_size=3))
    assert resumed(rows((0, 2, 1.0))) is None
    assert resumed.num_incomplete == 1  # group 1 alone
    out = written(resumed, rows((1, 1, 1.0)))
    assert (out["group_id"].flatten().tolist(), resumed.num_written) == ([1, 1], 2)


def test_a_selector_of_ones_own_sees_the_trajectories() -> None:
    def longest(rows: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Any) -> list[int]:
        return sorted(range(len(rows)), key=lambda i: -rows[i].batch_size[0])[:size]

    transform = candidates(candidate_selection_min_size=3, candidate_group_size=3, candidate_selector=longest)
    out = written(transform, steps("a", [0.0]), steps("a", [0.0, 0.0, 1.0]), steps("a", [0.0, 0.5]))
    assert rewards(out) == [0.0, 0.0, 1.0, 0.0, 0.5]
    assert advantages(out) == [0.7071] * 3 + [-0.7071] * 2


def test_groups_that_never_complete_are_given_up_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    transform = MCAdvantage(2, max_waiting=2)
    with caplog.at_level(logging.WARNING, logger="rlpost"):
        for prompt in "abc":
            assert fed(transform, 1.0, prompt=prompt) is None
    assert transform.counts() == {"groups/evicted": transform.num_evicted} == {"groups/evicted": 1}
    assert "1 of 2" in caplog.text
    assert fed(transform, 0.0, prompt="b") == [1.0, 0.0]  # only the oldest went
    assert fed(transform, 0.0, prompt="a") is None


def test_candidates_are_chosen_from_the_lowest_to_the_highest_return() -> None:
    transform = MCAdvantage(3, trajectory_return="sum", candidate_group_size=5, candidate_selection_min_size=5)
    assert fed(transform, 0.9, 0.0, 0.5, 0.1, 1.0) == [0.0, 0.5, 1.0]
