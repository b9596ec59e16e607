"""Transforms of the replay buffer on write: MCAdvantage, GRPO's Monte-Carlo advantage, and TopKRewardSelector.

Both hold trajectories back until a group is complete. `first`, `uniform` and `balanced` choose the trajectories of a
group if more are sampled than it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from math import comb, isfinite, nan
from statistics import fmean
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rlpost.data.batch import best
from rlpost.data.ragged import Key, joined, ragged_rows
from rlpost.objectives.advantage import advantages, shuffled
from rlpost.torchrl.batches import L, concat_rows, from_plain, places_of_each, select_rows, to_plain

Bounds = tuple[float, float]
# (candidates, their returns (N,), group size, bounds of the mean return) -> who is chosen; None: nobody yet
Selector = Callable[[Sequence[TensorDictBase], torch.Tensor, int, Bounds | None], Sequence[int] | None]
GroupKey = tuple[bool, Hashable]  # whether groups are numbered, and the number or the prompt
Trajectories = list[TensorDictBase]  # N of them, the steps (L_i,) of each
PromptKey = tuple[int | None, str]  # the group's number, where groups are numbered, and the prompt
MOST_COMBINATIONS = 100_000  # `balanced` looks at all of these, and climbs where there are more
log = logging.getLogger("rlpost")
REDUCTIONS = {"sum": torch.sum, "max": torch.amax, "mean": torch.mean}


# Groups that wait for members


class HoldsGroups:
    """A transform that holds groups back until they are complete, at most `max_waiting` of them."""

    max_waiting: int
    num_evicted = 0  # groups that were discarded since too many waited
    _waiting: dict[Any, Trajectories]  # the one that has longest gained no trajectory first

    @property
    def num_incomplete(self) -> int:
        """Groups that still wait for members."""
        return len(self._waiting)

    def counts(self) -> dict[str, float]:
        """The metrics of this transform in a training; counted since the run began."""
        return {"groups/evicted": float(self.num_evicted)}

    def _evict(self, size: int) -> None:
        """Discard the groups of `size` that have waited longest for another trajectory; logs and counts them."""
        while len(self._waiting) > self.max_waiting:
            group = self._waiting.pop(next(iter(self._waiting)))
            self.num_evicted += 1
            log.warning(
                "gave up a group with %d of %d trajectories, since %d others wait (max_waiting); %d given up so far",
                len(group),
                size,
                self.max_waiting,
                self.num_evicted,
            )


# Advantages


@dataclass(eq=False)
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
    `candidate_group_size` above `grpo_size`, up to that many trajectories are collected, and from
    `candidate_selection_min_size` on (left out: `grpo_size`) `candidate_selector` (`first`,
    `uniform`, `balanced`, or a function like those in `rlpost.torchrl.buffer_transforms`) may find a
    group among them; those it leaves are dropped.

    At most `max_waiting` groups wait: the one that has longest had no new trajectory is given up,
    logged and counted. `num_complete` groups were completed, and `num_written` of them delivered
    and `num_dropped` not, by bounds or selector; `num_evicted` were given up.

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
    candidate_selector: str | Selector = "balanced"
    group_key: str = "group_id"
    estimator: str = "grpo"
    shuffle_rewards: bool = False
    seed: int = 0
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        self._most = self.candidate_group_size or self.grpo_size  # trajectories of a group
        self._least = self.candidate_selection_min_size or self.grpo_size
        given = self.candidate_selector
        self._selector = SELECTORS[given] if isinstance(given, str) else given
        self.num_complete = self.num_written = self.num_dropped = 0
        self._waiting: dict[GroupKey, Trajectories] = {}
        self._late: dict[GroupKey, int] = {}  # trajectories still to come of groups chosen before they were all there

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The groups that `batch` completes, one after the other, with their advantage; None if there are none.

        Returns a plain TensorDict (L,) of all steps of the groups; the advantage has the shape of
        the rewards without a last dimension of 1. Raises RuntimeError for a trajectory that is not
        done, ValueError for a numbered group with more trajectories than belong to one, KeyError
        for a batch with neither `group_key` nor `prompt_key`.
        """
        written: list[_Written] = []
        for key, own in _trajectories_by(batch, self.done_key, self._keys).items():
            if new := own[self._take_late(key, len(own)) :]:
                written += self._add(key, new)
        while len(self._late) > self.max_waiting:
            self._late.pop(next(iter(self._late)))
        self._evict(self._most)
        return self._joined(written) if written else None

    def clear(self) -> None:
        """Forget the trajectories that wait; the counts stay."""
        self._waiting.clear()
        self._late.clear()

    def state_dict(self) -> dict[str, Any]:
        """The trajectories that wait and the counts, as JSON-compatible values."""
        return {
            "waiting": [[to_plain(concat_rows(group)), lengths_of(group)] for group in self._waiting.values()],
            "late": [[value, count] for (_, value), count in self._late.items()],
            "counts": [self.num_complete, self.num_written, self.num_dropped, self.num_evicted],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._waiting.clear()
        for plain, lengths in state["waiting"]:
            steps = from_plain(plain)
            self._waiting[self._keys(steps)[0]] = [select_rows(steps, span) for span in spans_of(lengths)]
        self._late = {(True, _hashable(value)): count for value, count in state["late"]}
        self.num_complete, self.num_written, self.num_dropped, self.num_evicted = state["counts"]

    def _keys(self, steps: TensorDictBase) -> list[GroupKey]:
        """The group of each step."""
        numbered = self._is_numbered(steps)
        return [(numbered, value) for value in _values_of(steps, self.group_key if numbered else self.prompt_key)]

    def _is_numbered(self, steps: TensorDictBase) -> bool:
        return self.group_key in steps.keys()  # noqa: SIM118  of a TensorDict, where `in` alone is not defined

    # One group

    def _add(self, key: GroupKey, new: Trajectories) -> Iterator[_Written]:
        """Add trajectories to their group; the groups that this completes."""
        numbered, value = key
        tried = len(self._waiting.get(key, ()))  # no group could be made of that many
        group = self._waiting.pop(key, []) + new
        if numbered and len(group) > self._most:
            raise ValueError(f"group {value} has {len(group)} rows, more than the {self._most} a group can have")
        count = max(self._least, tried + 1)
        while count <= len(group):
            chosen = self._choose(group, count)
            if chosen is None and count < self._most:
                count += 1
                continue
            yield from self._deliver(group, chosen, numbered)
            if numbered:
                self._expect_late(key, self._most - len(group))
            if numbered or count == len(group):
                return
            group = group[count:]
            count = self._least
        self._waiting[key] = group

    def _choose(self, group: Trajectories, count: int) -> list[int] | None:
        """The indices of the delivered ones among the first `count` trajectories; None if they make no group."""
        everyone = list(range(count))
        if self.trajectory_return is None:
            return everyone
        returns = returns_of(group, self.trajectory_return, self.rewards_key)
        scored = valid_trajectories(group) & returns.isfinite()
        chosen = everyone if self._most == self.grpo_size else self._select(group, count, returns, scored)
        if chosen is None:
            return None
        mean = returns[[i for i in chosen if scored[i]]].mean()
        return chosen if _within(mean, self.keep_return_bounds) else None

    def _select(self, group: Trajectories, count: int, returns: torch.Tensor, scored: torch.Tensor) -> list[int] | None:
        """The selector's choice among the valid ones of the first `count` trajectories."""
        eligible = [i for i in range(count) if scored[i]]
        if len(eligible) < self.grpo_size:
            return None
        candidates = [group[i] for i in eligible]
        chosen = self._selector(candidates, returns[eligible], self.grpo_size, self.keep_return_bounds)
        return None if chosen is None else [eligible[i] for i in chosen]

    def _deliver(self, group: Trajectories, chosen: list[int] | None, numbered: bool) -> Iterator[_Written]:
        """The chosen trajectories with their number and advantage; nothing for None. Counts either."""
        self.num_complete += 1
        if chosen is None:
            self.num_dropped += 1
            return
        group = [group[i] for i in chosen]
        own = entry_of(group, self.group_key) if numbered else torch.tensor([self.num_written])
        self.num_written += 1
        if self.verbose:
            mean = _reward_entries(entry_of(group, self.rewards_key))[0].mean().item()
            print(f"group {self.num_written}: {len(group)} trajectories, mean reward {mean:.4g}", flush=True)
        number = own.reshape(-1)[:1]
        yield _Written(group, number, self._advantage(group, number))

    def _joined(self, written: Sequence[_Written]) -> TensorDict:
        """All groups as one batch."""
        rows = concat_rows([steps for one in written for steps in one.group])
        if not self._is_numbered(rows):
            rows[self.group_key] = torch.cat([one.number.expand(sum(lengths_of(one.group))) for one in written])
        pads = not rows[self.rewards_key].is_nested
        rows[self.advantage_key] = joined([group.advantage for group in written], pads=pads)
        return rows

    def _advantage(self, group: Trajectories, number: torch.Tensor) -> torch.Tensor:
        rewards = entry_of(group, self.rewards_key)
        entries, step = _reward_entries(rewards)  # (E,) each
        if self.trajectory_return is None:
            return _like_rewards(self._compare(entries, valid_steps(group)[step], number), rewards)
        returns = returns_of(group, self.trajectory_return, self.rewards_key)
        each = self._compare(returns, valid_trajectories(group), number)
        return _like_rewards(each[owner_of_steps(group)[step]], rewards)

    def _compare(self, values: torch.Tensor, valid: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """The advantage of each of `values` (N,) over the others, which are all of the group `number` (1,)."""
        groups = number.expand(values.numel())
        if self.shuffle_rewards:
            values = shuffled(values, groups, valid, self.seed)
        return advantages(self.estimator, values, groups, valid)

    # Groups whose trajectories come too late, or never

    def _expect_late(self, key: GroupKey, count: int) -> None:
        """Remember that `count` more trajectories of a finished group will come."""
        if count:
            self._late[key] = count

    def _take_late(self, key: GroupKey, count: int) -> int:
        """How many of `count` trajectories belong to a group that is done with."""
        expected = self._late.pop(key, 0)
        self._expect_late(key, max(expected - count, 0))
        return min(expected, count)


@dataclass(frozen=True, slots=True)
class _Written:
    """A group that is delivered."""

    group: Trajectories
    number: torch.Tensor  # (1,)
    advantage: torch.Tensor  # (L, ...), or ragged (L, *)


@dataclass(eq=False)
class TopKRewardSelector(HoldsGroups):
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
        self._waiting: dict[PromptKey, Trajectories] = {}

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The chosen trajectories of the prompts that `batch` (B,) completes, prompt by prompt; None if there are none.

        Raises RuntimeError if the batch ends before its last trajectory does.
        """
        chosen: list[TensorDictBase] = []
        for key, new in _trajectories_by(batch, self.done_key, self._keys).items():
            chosen += self._add(key, new)
        self._evict(self.total_dialog_turns)
        return concat_rows(chosen) if chosen else None

    def state_dict(self) -> dict[str, Any]:
        """The trajectories of prompts that are not complete, as JSON-compatible values."""
        waiting = [
            {"group": group, "prompt": prompt, "rows": to_plain(concat_rows(own)), "lengths": lengths_of(own)}
            for (group, prompt), own in self._waiting.items()
        ]
        return {"waiting": waiting, "evicted": self.num_evicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._waiting.clear()
        for own in state["waiting"]:
            rows = from_plain(own["rows"])
            self._waiting[own["group"], own["prompt"]] = [select_rows(rows, span) for span in spans_of(own["lengths"])]
        self.num_evicted = state["evicted"]

    def _add(self, key: PromptKey, new: Trajectories) -> Iterator[TensorDictBase]:
        """The trajectories of prompts that `new` completes; the rest waits."""
        own, size = self._waiting.pop(key, []) + new, self.total_dialog_turns
        complete = len(own) - len(own) % size
        for first in range(0, complete, size):
            group = own[first : first + size]
            worth = [_worth_of(steps, self.rewards_key) for steps in group]
            yield from (group[i] for i in best(worth, self.topk_size, self.min_reward))
        if complete < len(own):
            self._waiting[key] = own[complete:]

    def _keys(self, steps: TensorDictBase) -> list[PromptKey]:
        """The group of each row, and its prompt."""
        column = steps[self.prompt_key]
        prompts = [column] if isinstance(column, str) else list(column)
        groups = steps[self.group_key].tolist() if self.group_key in steps else [None] * len(prompts)
        return list(zip(groups, prompts, strict=True))


def _worth_of(steps: TensorDictBase, rewards_key: Key) -> float:
    """The mean reward over the steps of a trajectory that have one; NaN if none has, or one failed."""
    given = steps[rewards_key]
    each = ragged_rows(given) if given.is_nested else given.reshape(steps.batch_size[0], -1)
    rewards = [row.double().mean().item() for row in each]
    finite = [reward for reward in rewards if isfinite(reward)]
    has_failed = "valid" in steps.keys() and not steps["valid"].all()  # noqa: SIM118  of a TensorDict
    return nan if has_failed or not finite else fmean(finite)


# Selectors: which trajectories make a group, if more are sampled than it holds


def first(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """The trajectories that came first."""
    chosen = list(range(size))
    return chosen if _within(returns[chosen].mean(), bounds) else None


def uniform(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """Evenly spaced among the candidates in the order of their returns, the lowest and the highest included."""
    chosen = sorted(_evenly_spaced(returns, size))
    return chosen if _within(returns[chosen].mean(), bounds) else None


def balanced(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """The trajectories whose mean return is nearest the middle of the bounds, and among them the ones furthest apart.

    Without bounds the middle is that between the lowest and the highest return. Up to
    `MOST_COMBINATIONS` choices are all compared; of more, an evenly spaced one is improved by
    exchanging one trajectory at a time until nothing is gained.
    """
    low, high = bounds if bounds is not None else (returns.min().item(), returns.max().item())
    middle = (low + high) / 2
    if comb(returns.numel(), size) <= MOST_COMBINATIONS:
        choices = torch.combinations(torch.arange(returns.numel()), size)
        chosen = choices[_best(returns[choices], middle)].tolist()
    else:
        chosen = _climb(returns, _evenly_spaced(returns, size), middle)
    return sorted(chosen) if _within(returns[chosen].mean(), bounds) else None


SELECTORS: dict[str, Selector] = {"first": first, "uniform": uniform, "balanced": balanced}


def _within(mean: torch.Tensor, bounds: Bounds | None) -> torch.Tensor:
    """Whether a mean return lies strictly between `bounds`; elementwise."""
    return torch.ones_like(mean, dtype=torch.bool) if bounds is None else (mean > bounds[0]) & (mean < bounds[1])


def _evenly_spaced(returns: torch.Tensor, size: int) -> list[int]:
    order = returns.argsort(stable=True)
    return order[torch.linspace(0, returns.numel() - 1, size).round().long()].tolist()


def _best(choices: torch.Tensor, middle: float) -> int:
    """The row of `choices` (C, G) whose mean is nearest `middle`; of those as near, the one of largest variance."""
    distance = (choices.double().mean(-1) - middle).abs()
    as_near = distance <= distance.min() + 1e-9
    variance = choices.double().var(-1).where(as_near, -1.0)
    return int(variance.argmax())


def _climb(returns: torch.Tensor, chosen: list[int], middle: float) -> list[int]:
    while True:
        others = [i for i in range(returns.numel()) if i not in chosen]
        exchanges = [[*chosen[:place], other, *chosen[place + 1 :]] for place in range(len(chosen)) for other in others]
        best = _best(returns[torch.tensor([chosen, *exchanges])], middle)
        if best == 0:
            return chosen
        chosen = exchanges[best - 1]


# Trajectories in a batch, and their rewards


def entry_of(group: Trajectories, key: Key) -> torch.Tensor:
    """One entry of all steps, (L, ...), or ragged (L, *) where widths differ."""
    return joined([steps[key] for steps in group])


def lengths_of(group: Trajectories) -> list[int]:
    """Steps of each trajectory."""
    return [steps.batch_size[0] for steps in group]


def owner_of_steps(group: Trajectories) -> torch.Tensor:
    """The trajectory of each step, (L,)."""
    return torch.arange(len(group)).repeat_interleave(torch.tensor(lengths_of(group)))


def valid_steps(group: Trajectories) -> torch.Tensor:
    """(L,) bool: the steps that count; all of them without `valid`."""
    if any("valid" not in steps.keys() for steps in group):  # noqa: SIM118  of a TensorDict
        return torch.ones(sum(lengths_of(group)), dtype=torch.bool)
    return entry_of(group, "valid").reshape(-1)


def valid_trajectories(group: Trajectories) -> torch.Tensor:
    """(N,) bool: the trajectories whose steps all count."""
    wrong = torch.zeros(len(group)).index_add_(0, owner_of_steps(group), (~valid_steps(group)).float())
    return wrong == 0


def returns_of(group: Trajectories, reduction: str, rewards_key: Key) -> torch.Tensor:
    """The `reduction` (sum, max or mean) of each trajectory's rewards, (N,)."""
    entries, step = _reward_entries(entry_of(group, rewards_key))
    owner = owner_of_steps(group)[step]
    return torch.stack([REDUCTIONS[reduction](entries[owner == i]) for i in range(len(group))])


def _trajectories_by(
    batch: TensorDictBase, done_key: Key, keys: Callable[[TensorDictBase], Sequence[L]]
) -> dict[L, Trajectories]:
    """The trajectories of `batch` whose first steps have equal `keys`, which are one a step (L,); errors as below."""
    steps, spans = _split(batch, done_key)
    values = keys(steps)
    places = places_of_each(values[span.start] for span in spans)
    return {key: [select_rows(steps, spans[i]) for i in own] for key, own in places.items()}


def spans_of(lengths: Iterable[int]) -> list[range]:
    """The places of trajectories that lie one after the other."""
    ends = [0, *accumulate(lengths)]
    return [range(start, end) for start, end in pairwise(ends)]


def _split(batch: TensorDictBase, done_key: Key) -> tuple[TensorDictBase, list[range]]:
    """The steps of `batch` on one dimension (L,), and which of them each trajectory is.

    A batch of one dimension holds trajectories one after the other, each up to a step that is done;
    of several, each line along the last does. Lines of different lengths, or with entries of different widths,
    come stacked lazily.
    Raises RuntimeError where a line does not end with a step that is done.
    """
    lines = _lines(batch)
    spans: list[range] = []
    start = 0
    for line in lines:
        done = line[done_key].reshape(line.batch_size[0], -1).any(-1)
        if not done[-1]:
            raise RuntimeError(
                "a batch ends with a trajectory that is not done: collect whole ones, with "
                "yield_completed_trajectories=True"
            )
        for last in done.nonzero().flatten().tolist():
            spans.append(range(spans[-1].stop if spans else 0, start + last + 1))
        start += line.batch_size[0]
    return lines[0] if len(lines) == 1 else concat_rows(lines), spans


def _lines(batch: TensorDictBase) -> list[TensorDictBase]:
    if batch.ndim > 1:
        return [line for part in batch.unbind(0) for line in _lines(part)]
    is_lazy = isinstance(batch, LazyStackedTensorDict)
    return [concat_rows([step.unsqueeze(0) for step in batch.unbind(0)]) if is_lazy else batch]


def _values_of(steps: TensorDictBase, key: Key) -> list[Hashable]:
    """The entry of each step (L,) under `key` as something to group by: a string, a number or a tuple of them."""
    column: Any = steps.get(key)
    if isinstance(column, torch.Tensor):
        return [_hashable(row.tolist()) for row in column.unbind()]
    values = column if isinstance(column, list) else column.tolist()
    return [_hashable(value) for value in values]


def _hashable(value: Any) -> Hashable:
    """`value` with tuples for its lists."""
    return tuple(_hashable(each) for each in value) if isinstance(value, list | tuple) else value


def _reward_entries(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All rewards of L steps in a row (E,), and the step (E,) that each is of.

    `rewards` is (L, 1) with one a step, (L, T, 1) or (L, T) with one a token, or ragged (L, *).
    """
    if rewards.is_nested:
        ragged: Any = rewards
        sizes = ragged.offsets().diff()
        return ragged.values().flatten(), torch.arange(sizes.numel()).repeat_interleave(sizes)
    rows = rewards.reshape(rewards.shape[0], -1)
    return rows.flatten(), torch.arange(rows.shape[0]).repeat_interleave(rows.shape[1])


def _like_rewards(values: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """`values` (E,) in the shape of the rewards they were made from, without a last dimension of 1."""
    if rewards.is_nested:
        ragged: Any = rewards
        return torch.nested.nested_tensor_from_jagged(values, ragged.offsets())
    return values.reshape(rewards.shape[:-1] if rewards.ndim > 1 and rewards.shape[-1] == 1 else rewards.shape)
