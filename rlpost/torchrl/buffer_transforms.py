"""Transforms of the replay buffer on write: MCAdvantage, GRPO's Monte-Carlo advantage, and TopKRewardSelector.

Both hold trajectories back until a group is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from math import isfinite, nan
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.batch import best
from rlpost.data.ragged import Key, column, ragged_rows
from rlpost.data.replay_buffer import HoldsGroups
from rlpost.objectives.advantage import advantages
from rlpost.torchrl.batches import concat_rows, places_of_each, select_rows
from rlpost.torchrl.sequences import in_one_dimension

Bounds = tuple[float, float]
# (candidates, their returns (N,), group size, bounds of the mean return) -> who is chosen; None: nobody yet
Selector = Callable[[Sequence[TensorDictBase], torch.Tensor, int, Bounds | None], Sequence[int] | None]
GroupKey = tuple[bool, str]  # whether groups are numbered, and the number or the prompt as text
Trajectories = list[TensorDictBase]  # the steps (L_i,) of each
REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "mean": torch.mean}


# Groups that wait for members


class GroupTransform(HoldsGroups, ABC):
    """A transform that holds trajectories back until their group is complete.

    A subclass is a dataclass with the fields below; it sets `group_size`, the trajectories of a complete group.
    """

    prompt_key: Key
    rewards_key: Key
    done_key: Key
    group_key: str

    def __post_init__(self) -> None:
        self._waiting: dict[GroupKey, Trajectories] = {}

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The trajectories of the groups that `batch` completes, group by group; None if there are none.

        Returns a plain TensorDict (L,) of their steps. Raises RuntimeError for a trajectory that is not done, and
        KeyError for a batch with neither `group_key` nor `prompt_key`.
        """
        trajectories = trajectories_of(batch, self.done_key)
        written: Trajectories = []
        for key, places in places_of_each(map(self._key_of, trajectories)).items():
            written += self._add(key, [trajectories[place] for place in places])
        self._evict()
        return concat_rows(written) if written else None

    @abstractmethod
    def _add(self, key: GroupKey, new: Trajectories) -> Iterable[TensorDictBase]:
        """Add trajectories to their group, and take those out that are to be written."""

    def counts(self) -> dict[str, float]:
        """The metrics of this transform in a training; counted since the run began."""
        return {"groups/evicted": float(self.num_evicted)}

    def state_dict(self) -> dict[str, Any]:
        """The trajectories that wait, as TensorDicts, and the counts."""
        waiting = [[steps.copy() for steps in group] for group in self._waiting.values()]
        return {"waiting": waiting, "evicted": self.num_evicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        groups = [[steps.copy() for steps in group] for group in state["waiting"]]
        self._waiting = {self._key_of(group[0]): group for group in groups}
        self.num_evicted = state["evicted"]

    def _key_of(self, steps: TensorDictBase) -> GroupKey:
        """The group of a trajectory: that of its first step."""
        numbered = self.group_key in steps.keys()  # noqa: SIM118  of a TensorDict, where `in` alone is not defined
        value = column(steps, self.group_key if numbered else self.prompt_key)[0]
        return numbered, str(value.tolist() if isinstance(value, torch.Tensor) else value)


# Advantages


@dataclass(eq=False)
class MCAdvantage(GroupTransform):
    """Holds trajectories back until their group has `grpo_size`, then writes what each earned beyond the others.

    A batch is trajectories one after the other on one dimension, or a line of them for each
    environment. Where it has `group_key`, which numbers the draws of prompts, that tells groups
    apart, so that two draws of one prompt stay two groups. Where it has not, trajectories of an
    equal `prompt_key` (strings, tensors, a nested key) are a group, and each group written gets a
    number under `group_key`. Rows with a key `valid` that is False are outside every mean and get 0.

    With `trajectory_return=None` every reward of the group, one a step or one a token, is compared
    with all the others; with `"sum"`, `"max"` or `"mean"` each trajectory's return is compared with
    the other returns, and all its steps get the result. `estimator` says how: one of
    `rlpost.objectives.advantage.GROUP_ESTIMATORS`.

    `keep_return_bounds=(low, high)` drops a group unless low < mean return < high. With
    `candidate_group_size` above `grpo_size`, up to that many trajectories are collected, and from
    `candidate_selection_min_size` on (left out: `grpo_size`) `candidate_selector` may find a group
    among them; those it leaves are dropped. The default takes returns from the lowest to the highest.

    At most `max_waiting` groups wait: the one that has longest had no new trajectory is given up,
    logged and counted. `num_complete` groups were completed, and `num_written` of them delivered
    and `num_dropped` not, by bounds or selector; `num_evicted` were given up. The advantage has the shape of the
    rewards without a last dimension of 1. Raises ValueError for a numbered group with more trajectories than belong
    to one.

    >>> import torch
    >>> from rlpost.objectives import MCAdvantage
    >>> from tensordict import TensorDict
    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    >>> batch = TensorDict({"query": ["3 + 4"] * 4, "next": {"reward": rewards, "done": rewards >= 0}}, batch_size=[4])
    >>> MCAdvantage(grpo_size=4)(batch)["advantage"].round(decimals=2)
    tensor([ 0.8700, -0.8700, -0.8700,  0.8700])
    """

    grpo_size: int
    prompt_key: Key = "query"
    rewards_key: Key = ("next", "reward")
    advantage_key: Key = "advantage"
    done_key: Key = ("next", "done")
    verbose: bool = False
    _: KW_ONLY
    trajectory_return: str | None = None
    keep_return_bounds: Bounds | None = None
    candidate_group_size: int | None = None
    candidate_selection_min_size: int | None = None
    candidate_selector: Selector | None = None  # None: `evenly_spaced`
    group_key: str = "group_id"
    estimator: str = "grpo"
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group_size = self.candidate_group_size or self.grpo_size
        self._least = self.candidate_selection_min_size or self.grpo_size
        self._selector = self.candidate_selector or evenly_spaced
        self.num_complete = self.num_written = self.num_dropped = 0
        # numbered groups that were chosen before all their trajectories were there: the rest is dropped
        self._early: dict[GroupKey, None] = {}

    def clear(self) -> None:
        """Forget the trajectories that wait; the counts stay."""
        self._waiting.clear()
        self._early.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `GroupTransform.state_dict`."""
        counts = [self.num_complete, self.num_written, self.num_dropped]
        return super().state_dict() | {"early": [number for _, number in self._early], "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupTransform.load_state_dict`."""
        super().load_state_dict(state)
        self._early = {(True, number): None for number in state["early"]}
        self.num_complete, self.num_written, self.num_dropped = state["counts"]

    def _add(self, key: GroupKey, new: Trajectories) -> Iterator[TensorDictBase]:
        if key in self._early:
            return
        numbered, value = key
        group = self._waiting.pop(key, [])
        if numbered and len(group) + len(new) > self.group_size:
            size = len(group) + len(new)
            raise ValueError(f"group {value} has {size} rows, more than the {self.group_size} a group can have")
        for steps in new:
            group.append(steps)
            if len(group) < self._least:
                continue
            chosen = self._choose(group)
            if chosen is None and len(group) < self.group_size:
                continue
            yield from self._deliver(chosen)
            if numbered and len(group) < self.group_size:
                self._early[key] = None
                if len(self._early) > self.max_waiting:
                    self._early.pop(next(iter(self._early)))
                return
            group = []
        if group:
            self._waiting[key] = group

    def _choose(self, group: Trajectories) -> Trajectories | None:
        """The trajectories to deliver; None if they make no group."""
        if self.trajectory_return is None:
            return group
        returns, valid = self._returns([_entries(steps, self.rewards_key) for steps in group])
        chosen = torch.arange(len(group))
        if self.group_size > self.grpo_size:
            eligible = valid.nonzero().flatten()
            if eligible.numel() < self.grpo_size:
                return None
            candidates = [group[i] for i in eligible]
            picked = self._selector(candidates, returns[eligible], self.grpo_size, self.keep_return_bounds)
            if picked is None:
                return None
            chosen = eligible[list(picked)]
        if self.keep_return_bounds is not None:
            low, high = self.keep_return_bounds
            if not low < returns[chosen][valid[chosen]].mean() < high:
                return None
        return [group[i] for i in chosen]

    def _deliver(self, group: Trajectories | None) -> Trajectories:
        """The trajectories of a complete group with their number and advantage; none for None. Counts either."""
        self.num_complete += 1
        if group is None:
            self.num_dropped += 1
            return []
        for steps in group:
            if self.group_key not in steps.keys():  # noqa: SIM118  of a TensorDict
                steps[self.group_key] = torch.full(steps.batch_size, self.num_written)
        self.num_written += 1
        entries = [_entries(steps, self.rewards_key) for steps in group]
        values, valid = (torch.cat(parts) for parts in zip(*entries, strict=True))
        sizes = [rewards.numel() for rewards, _ in entries]
        if self.verbose:
            mean = values.mean().item()
            print(f"group {self.num_written}: {len(group)} trajectories, mean reward {mean:.4g}", flush=True)
        if self.trajectory_return is not None:
            values, valid = self._returns(entries)
            sizes = [1] * len(group)
        groups = group[0][self.group_key].reshape(-1)[:1].expand(values.numel())
        computed = advantages(self.estimator, values, groups, valid)
        for steps, own in zip(group, computed.split(sizes), strict=True):
            steps[self.advantage_key] = _like_rewards(own, steps[self.rewards_key])
        return group

    def _returns(self, entries: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The return of each trajectory (N,), and whether it counts, (N,) bool."""
        assert self.trajectory_return is not None
        returns = torch.stack([REDUCTIONS[self.trajectory_return](rewards) for rewards, _ in entries])
        return returns, torch.stack([valid.all() for _, valid in entries]) & returns.isfinite()


@dataclass(eq=False)
class TopKRewardSelector(GroupTransform):
    """Holds trajectories back until each prompt has its number, then lets the best of them through.

    A prompt is complete with `total_dialog_turns` trajectories, each of one row or of the rows of
    its turns, the last of them done; what a trajectory is worth is the mean reward of its rows.
    Of these, the ones strictly above the prompt's lower median are candidates, so where all are
    worth the same there is none; with `min_reward` the candidates are instead the ones worth at
    least that, whatever the others are. The `topk_size` best candidates go through, best first and
    in the order they came where they are equal; fewer where there are fewer. A trajectory whose
    rewards failed (`valid` False, or none that is finite) counts as one of its prompt's and is never
    a candidate.

    Rows of a batch that has `group_key` belong together by their group as well as by their prompt,
    so two draws of one prompt stay apart; without it the prompt, a string, alone decides. At most
    `max_waiting` prompts wait: the one that has longest had no new trajectory is given up, logged
    and counted in `num_evicted`.
    """

    total_dialog_turns: int
    topk_size: int
    prompt_key: Key = ("text", "prompt")
    rewards_key: Key = ("next", "reward")
    done_key: Key = ("next", "done")
    _: KW_ONLY
    min_reward: float | None = None
    group_key: str = "group_id"
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group_size = self.total_dialog_turns

    def _add(self, key: GroupKey, new: Trajectories) -> Iterator[TensorDictBase]:
        group = self._waiting.pop(key, []) + new
        while len(group) >= self.group_size:
            complete, group = group[: self.group_size], group[self.group_size :]
            worth = [_worth_of(steps, self.rewards_key) for steps in complete]
            yield from (complete[i] for i in best(worth, self.topk_size, self.min_reward))
        if group:
            self._waiting[key] = group


def _worth_of(steps: TensorDictBase, rewards_key: Key) -> float:
    """The mean reward over the steps of a trajectory that have one; NaN if none has, or one failed."""
    given = steps[rewards_key]
    each = ragged_rows(given) if given.is_nested else given.reshape(steps.batch_size[0], -1)
    rewards = [row.double().mean().item() for row in each]
    finite = [reward for reward in rewards if isfinite(reward)]
    has_failed = "valid" in steps.keys() and not steps["valid"].all()  # noqa: SIM118  of a TensorDict
    return nan if has_failed or not finite else fmean(finite)


def evenly_spaced(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int]:
    """A `Selector`: evenly spaced in the order of the returns, the lowest and the highest included."""
    order = returns.argsort(stable=True)
    return sorted(order[torch.linspace(0, returns.numel() - 1, size).round().long()].tolist())


# Trajectories in a batch, and their rewards


def trajectories_of(batch: TensorDictBase, done_key: Key) -> Trajectories:
    """The trajectories of `batch`, (L_i,) each.

    A batch of one dimension holds trajectories one after the other, each up to a step that is done;
    of several, each line along the last does. Lines of different lengths, or with entries of different widths,
    come stacked lazily.
    Raises RuntimeError where a line does not end with a step that is done.
    """
    if batch.ndim > 1:
        return [steps for part in batch.unbind(0) for steps in trajectories_of(part, done_key)]
    batch = in_one_dimension(batch)
    done = batch[done_key].reshape(batch.batch_size[0], -1).any(-1)
    if not done[-1]:
        raise RuntimeError(
            "a batch ends with a trajectory that is not done: collect whole ones, with "
            "yield_completed_trajectories=True"
        )
    ends = [last + 1 for last in done.nonzero().flatten().tolist()]
    return [select_rows(batch, range(start, end)) for start, end in pairwise([0, *ends])]


def _entries(steps: TensorDictBase, rewards_key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """All rewards of a trajectory in a row, (E,), and whether each is of a step that counts, (E,) bool.

    Rewards are (L, 1) with one a step, (L, T, 1) or (L, T) with one a token, or ragged (L, *).
    """
    given: Any = steps[rewards_key]
    valid = torch.ones(steps.batch_size, dtype=torch.bool)
    if "valid" in steps.keys():  # noqa: SIM118  of a TensorDict
        valid = steps["valid"].reshape(-1)
    if given.is_nested:
        return given.values().flatten(), valid.repeat_interleave(given.offsets().diff())
    rewards = given.flatten()
    return rewards, valid.repeat_interleave(rewards.numel() // valid.numel())


def _like_rewards(values: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """`values`, (E,) or one for all, in the shape of the rewards, without a last dimension of 1."""
    if rewards.is_nested:
        ragged: Any = rewards
        return torch.nested.nested_tensor_from_jagged(values.expand(ragged.values().numel()), ragged.offsets())
    shape = rewards.shape[:-1] if rewards.ndim > 1 and rewards.shape[-1] == 1 else rewards.shape
    return values.expand(rewards.numel()).reshape(shape)
