"""The Monte-Carlo advantage of GRPO, as the replay buffer's transform on write."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.plain import from_plain, to_plain
from rlpost.data.ragged import Key, joined
from rlpost.data.selection import HoldsGroups, Selection, Waiting
from rlpost.objectives.advantage import GROUP_ESTIMATORS, advantages, shuffled
from rlpost.torchrl.candidates import SELECTORS, Bounds, Selector, select, within
from rlpost.torchrl.trajectories import (
    REDUCTIONS,
    Trajectories,
    hashable,
    like_rewards,
    reward_entries,
    trajectories_by,
    values_of,
)

GroupKey = tuple[bool, Hashable]  # whether groups are numbered, and the number or the prompt


@dataclass(frozen=True, slots=True)
class _Written:
    """A group that is delivered."""

    steps: Selection  # (L,)
    number: torch.Tensor  # (1,)
    advantage: torch.Tensor  # (L, ...), or ragged (L, *)


class MCAdvantage(HoldsGroups):
    """Holds trajectories back until their group has `grpo_size`, then writes what each earned beyond the others.

    A batch is trajectories one after the other on one dimension, or a line of them for each
    environment. Where it has `group_key`, which numbers the draws of prompts, that tells groups
    apart, so that two draws of one prompt stay two groups. Where it has not, trajectories of an
    equal `prompt_key` (strings, tensors, a nested key) are a group, and each group written gets a
    number under `group_key`. Rows with a key `valid` that is False are outside every mean and get 0.

    With `trajectory_return=None` every reward of the group, one a step or one a token, is compared
    with all the others; with `"sum"`, `"max"` or `"mean"` each trajectory's return is compared with
    the other returns, and all its steps get the result. `estimator` says how: one of
    `rlpost.objectives.advantage.GROUP_ESTIMATORS`. `shuffle_rewards` permutes what is compared
    within the group first, reproducibly from `seed`: the control that must not learn.

    `keep_return_bounds=(low, high)` drops a group unless low < mean return < high. With
    `candidate_group_size` above `grpo_size`, up to so many trajectories are waited for, and from
    `candidate_selection_min_size` on (left out: `grpo_size`) `candidate_selector` (`first`,
    `uniform`, `balanced`, or a function like those in `rlpost.torchrl.candidates`) may find a
    group among them; those it leaves are dropped.

    At most `max_waiting` groups wait: the one that has longest had no new trajectory is given up,
    logged and counted. `num_complete` groups came together, of which `num_written` were delivered
    and `num_dropped` not, by bounds or selector; `num_evicted` were given up.

    >>> import torch
    >>> from rlpost.objectives import MCAdvantage
    >>> from tensordict import TensorDict
    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    >>> batch = TensorDict({"query": ["3 + 4"] * 4, "next": {"reward": rewards, "done": rewards >= 0}}, batch_size=[4])
    >>> MCAdvantage(grpo_size=4)(batch)["advantage"].round(decimals=2)
    tensor([ 0.8700, -0.8700, -0.8700,  0.8700])
    """

    def __init__(
        self,
        grpo_size: int,
        prompt_key: Key = "query",
        rewards_key: Key = ("next", "reward"),
        advantage_key: Key = "advantage",
        done_key: Key = ("next", "done"),
        verbose: bool = False,
        *,
        trajectory_return: str | None = None,
        keep_return_bounds: Bounds | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: str | Selector = "balanced",
        group_key: str = "group_id",
        estimator: str = "grpo",
        shuffle_rewards: bool = False,
        seed: int = 0,
        max_waiting: int = 4096,
    ) -> None:
        self.grpo_size = grpo_size
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.advantage_key = advantage_key
        self.done_key = done_key
        self.verbose = verbose
        self.trajectory_return = trajectory_return
        self.keep_return_bounds = keep_return_bounds
        self.candidate_group_size = grpo_size if candidate_group_size is None else candidate_group_size
        self.candidate_selection_min_size = (
            grpo_size if candidate_selection_min_size is None else candidate_selection_min_size
        )
        self.group_key = group_key
        self.estimator = estimator
        self.shuffle_rewards = shuffle_rewards
        self.seed = seed
        self._check()
        self.candidate_selector = _selector(candidate_selector)
        self.num_complete = self.num_written = self.num_dropped = 0
        self._waiting: Waiting[GroupKey, Trajectories] = Waiting(max_waiting, self.candidate_group_size, "trajectories")
        self._late: dict[GroupKey, int] = {}  # trajectories still to come of groups chosen before they were all there

    def _check(self) -> None:
        """Raise ValueError for arguments that contradict each other."""
        if self.grpo_size < 2:
            raise ValueError(f"grpo_size={self.grpo_size} leaves nothing to compare with: it must be at least 2")
        if self.trajectory_return not in (None, *REDUCTIONS):
            raise ValueError(f"trajectory_return={self.trajectory_return!r} must be None, {', '.join(REDUCTIONS)}")
        if self.estimator not in GROUP_ESTIMATORS:
            raise ValueError(
                f"estimator={self.estimator!r} is none of {', '.join(GROUP_ESTIMATORS)}: what reads the whole batch is "
                "taken when the batch is there, with rlpost.objectives.advantage.advantages"
            )
        if self.keep_return_bounds is not None:
            low, high = self.keep_return_bounds
            if self.trajectory_return is None:
                raise ValueError("keep_return_bounds bounds the mean return: say with trajectory_return what that is")
            if not low < high:
                raise ValueError(f"keep_return_bounds=({low}, {high}) keeps nothing: the first must be less")
        if not self.grpo_size <= self.candidate_selection_min_size <= self.candidate_group_size:
            raise ValueError(
                f"grpo_size={self.grpo_size} <= candidate_selection_min_size={self.candidate_selection_min_size} <= "
                f"candidate_group_size={self.candidate_group_size} does not hold"
            )
        if self.candidate_group_size > self.grpo_size and self.trajectory_return is None:
            raise ValueError("candidates are chosen by their return: say with trajectory_return what that is")

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The groups that `batch` completes, one after the other, with their advantage; None if there are none.

        Returns a plain TensorDict (L,) of all steps of the groups; the advantage has the shape of
        the rewards without a last dimension of 1. Raises RuntimeError for a trajectory that is not
        done, ValueError for a numbered group with more trajectories than belong to one, KeyError
        for a batch with neither `group_key` nor `prompt_key`.
        """
        written: list[_Written] = []
        for key, own in trajectories_by(batch, self.done_key, self._keys).items():
            if new := range(self._take_late(key, len(own)), len(own)):
                written += self._add(key, own.part(new))
        while len(self._late) > self._waiting.most:
            self._late.pop(next(iter(self._late)))
        self._waiting.evict()
        return self._joined(written) if written else None

    def clear(self) -> None:
        """Forget the trajectories that wait; the counts stay."""
        self._waiting.clear()
        self._late.clear()

    def counts(self) -> dict[str, float]:
        """What a training's metrics say of this transform; counted since the run began."""
        return {"groups/evicted": float(self.num_evicted)}

    def state_dict(self) -> dict[str, Any]:
        """The trajectories that wait and the counts, as JSON-compatible values."""
        return {
            "waiting": [[to_plain(group.steps.copied()), group.lengths] for group in self._waiting.values()],
            "late": [[value, count] for (_, value), count in self._late.items()],
            "counts": [self.num_complete, self.num_written, self.num_dropped, self.num_evicted],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._waiting.clear()
        for plain, lengths in state["waiting"]:
            steps = from_plain(plain)
            self._waiting.hold(self._keys(steps)[0], Trajectories(Selection.whole(steps), lengths))
        self._late = {(True, hashable(value)): count for value, count in state["late"]}
        self.num_complete, self.num_written, self.num_dropped, self._waiting.num_evicted = state["counts"]

    def _keys(self, steps: TensorDictBase) -> list[GroupKey]:
        """The group of each step."""
        numbered = self._is_numbered(steps)
        return [(numbered, value) for value in values_of(steps, self.group_key if numbered else self.prompt_key)]

    def _is_numbered(self, steps: TensorDictBase) -> bool:
        return self.group_key in steps.keys()  # noqa: SIM118  of a TensorDict, where `in` alone is not defined

    # One group

    def _add(self, key: GroupKey, new: Trajectories) -> Iterator[_Written]:
        """Add trajectories to their group; the groups that this completes."""
        numbered, value = key
        tried = len(self._waiting.get(key, ()))  # with so many, no group was to be made
        group = self._waiting.with_more(key, new)
        self._waiting.pop(key, None)
        if numbered and len(group) > self.candidate_group_size:
            raise ValueError(
                f"group {value} has {len(group)} rows, more than the {self.candidate_group_size} a group can have"
            )
        count = max(self.candidate_selection_min_size, tried + 1)
        while count <= len(group):
            chosen = self._choose(group, count)
            if chosen is None and count < self.candidate_group_size:
                count += 1
                continue
            yield from self._deliver(group, chosen, numbered)
            if numbered:
                self._expect_late(key, self.candidate_group_size - len(group))
            if numbered or count == len(group):
                return
            group = group.part(range(count, len(group)))
            count = self.candidate_selection_min_size
        self._waiting[key] = group

    def _choose(self, group: Trajectories, count: int) -> list[int] | None:
        """Which of the first `count` trajectories are delivered; None where they make no group."""
        everyone = list(range(count))
        if self.trajectory_return is None:
            return everyone
        returns = group.returns(self.trajectory_return, self.rewards_key)
        counts = group.valid() & returns.isfinite()
        chosen = (
            everyone if self.candidate_group_size == self.grpo_size else self._select(group, count, returns, counts)
        )
        if chosen is None:
            return None
        mean = returns[[i for i in chosen if counts[i]]].mean()
        return chosen if within(mean, self.keep_return_bounds) else None

    def _select(self, group: Trajectories, count: int, returns: torch.Tensor, counts: torch.Tensor) -> list[int] | None:
        """What the selector makes of the first `count` trajectories, as far as they count."""
        eligible = [i for i in range(count) if counts[i]]
        if len(eligible) < self.grpo_size:
            return None
        candidates = [group.part([i]).steps.copied() for i in eligible]
        chosen = select(self.candidate_selector, candidates, returns[eligible], self.grpo_size, self.keep_return_bounds)
        return None if chosen is None else [eligible[i] for i in chosen]

    def _deliver(self, group: Trajectories, chosen: list[int] | None, numbered: bool) -> Iterator[_Written]:
        """The chosen trajectories with their number and advantage; nothing for None. Counts either."""
        self.num_complete += 1
        if chosen is None:
            self.num_dropped += 1
            return
        group = group.part(chosen)
        own = group.steps.column(self.group_key) if numbered else torch.tensor([self.num_written])
        self.num_written += 1
        if self.verbose:
            mean = reward_entries(group.steps.column(self.rewards_key))[0].mean().item()
            print(f"group {self.num_written}: {len(group)} trajectories, mean reward {mean:.4g}", flush=True)
        number = own.reshape(-1)[:1]
        yield _Written(group.steps, number, self._advantage(group, number))

    def _joined(self, written: Sequence[_Written]) -> TensorDict:
        """All groups as one batch."""
        rows = Selection.joined([group.steps for group in written]).copied()
        if not self._is_numbered(rows):
            rows[self.group_key] = torch.cat([group.number.expand(len(group.steps)) for group in written])
        pads = not rows[self.rewards_key].is_nested
        rows[self.advantage_key] = joined([group.advantage for group in written], pads=pads)
        return rows

    def _advantage(self, group: Trajectories, number: torch.Tensor) -> torch.Tensor:
        rewards = group.steps.column(self.rewards_key)
        entries, step = reward_entries(rewards)  # (E,) each
        if self.trajectory_return is None:
            return like_rewards(self._compare(entries, group.valid_steps()[step], number), rewards)
        returns = group.returns(self.trajectory_return, self.rewards_key)
        return like_rewards(self._compare(returns, group.valid(), number)[group.owner()[step]], rewards)

    def _compare(self, values: torch.Tensor, valid: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """The advantage of each of `values` (N,) over the others, which are all of the group `number` (1,)."""
        groups = number.expand(values.numel())
        if self.shuffle_rewards:
            values = shuffled(values, groups, valid, self.seed)
        return advantages(self.estimator, values, groups, valid)

    # Groups whose trajectories come too late, or never

    def _expect_late(self, key: GroupKey, count: int) -> None:
        """Remember that `count` more trajectories will come of a group that is done with."""
        if count:
            self._late[key] = count

    def _take_late(self, key: GroupKey, count: int) -> int:
        """How many of `count` trajectories belong to a group that is done with."""
        expected = self._late.pop(key, 0)
        self._expect_late(key, max(expected - count, 0))
        return min(expected, count)


def _selector(given: str | Selector) -> Selector:
    """The function of a selector's name, or the function itself. Raises ValueError for anything else."""
    if callable(given):
        return given
    if given not in SELECTORS:
        raise ValueError(f"candidate_selector={given!r} is none of {', '.join(SELECTORS)}, and no function")
    return SELECTORS[given]
