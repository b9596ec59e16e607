"""The buffer between sampling and training: whole groups, each taken once."""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from rlpost.data.batch import (
    HoldsGroups,
    Selection,
    Waiting,
    check_one_group,
    from_plain,
    places_of_each,
    rows_in_line,
    to_plain,
)
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.ragged import ragged_rows
from rlpost.errors import ConfigError, PolicyError

Transform = Callable[[TensorDictBase], TensorDictBase | None]
Rule = Callable[[TensorDictBase], bool]  # the dense tensors of a group (G,) -> whether it may be trained on


@runtime_checkable
class Stateful(Protocol):
    """A transform that holds rows back, and so has something to save."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """A transform that has something to say in a step's metrics."""

    def counts(self) -> dict[str, float]: ...


class GroupSource(Protocol):
    """Fills a buffer on demand: a collector."""

    def collect(self) -> None:
        """Sample once more and write the result into the buffer."""
        ...

    @property
    def policy_version(self) -> PolicyVersionLabel | None:
        """The version that the policy samples with now."""
        ...

    @property
    def has_urgent_group(self) -> bool:
        """Whether a group is still being sampled that has to be in the next batch, or it will be too old for any."""
        ...

    def on_delivered(self, groups: Sequence[int]) -> None:
        """Called with the groups that have left the buffer to be trained on."""
        ...


@dataclass
class Drawn:
    """The groups that came into the buffer over some time, and the groups that a rule dropped.

    Rewards are those of valid rows: their sum and number over all groups, and how far they lie apart
    in the dropped groups.
    """

    groups: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0
    turned_down: int = 0
    lowest: float | None = None
    highest: float | None = None
    widest: float = 0.0  # the most that two rewards of one group lie apart

    def add(self, group: Selection) -> None:
        """Count a group that came in."""
        rewards = _valid_rewards(group)
        self.groups += 1
        self.reward_sum += sum(rewards)
        self.num_rewards += len(rewards)

    def turn_down(self, group: Selection) -> None:
        """Count a known group as dropped."""
        self.turned_down += 1
        if rewards := _valid_rewards(group):
            low, high = min(rewards), max(rewards)
            self.lowest = low if self.lowest is None else min(self.lowest, low)
            self.highest = high if self.highest is None else max(self.highest, high)
            self.widest = max(self.widest, high - low)

    @property
    def reward_mean(self) -> float:
        """Over every valid row that came in; NaN where none did."""
        return self.reward_sum / self.num_rewards if self.num_rewards else math.nan


def _valid_rewards(group: Selection) -> list[float]:
    """The reward of each valid row: the mean over its tokens where they have one each."""
    given, valid = group.column(("next", "reward")), group.column("valid").tolist()
    rewards = (
        [row.mean().item() for row in ragged_rows(given)] if given.is_nested else given.flatten(1).mean(-1).tolist()
    )
    return [reward for reward, counts in zip(rewards, valid, strict=True) if counts and math.isfinite(reward)]


class ReplayBuffer(HoldsGroups):
    """Groups of finished conversations, first in first out; one thread may write while another takes.

    - `transforms` see every batch on its way in; one may return None to hold its rows back until
      more have come, as `MCAdvantage` does until a group is complete.
    - `group_size` holds a group back until it has that many rows; without it a group is what one batch
      brings of it.
    - `accept` says of each group, by its dense tensors (G,), whether it may be trained on; one that it turns
      down leaves at once, and is counted.
    - `oldest_first` gives groups in the order of the oldest policy version in them, rather than in that of
      their arrival: a group that took long to sample is trained on before later ones.
    - `draw_limit` bounds the requests of `take` to the source: that many times the wanted groups, in that many
      rounds at least, and that many rounds in a row without a whole group. Then it gives up.
    - `max_waiting` bounds how many groups wait for rows: beyond it the one that has waited longest
      since its last row is given up, logged and counted in `num_evicted`.

    >>> import torch
    >>> from rlpost.data import ReplayBuffer
    >>> from tensordict import TensorDict
    >>> rows = {"group_id": torch.tensor([0, 0, 1]), "valid": torch.ones(3, dtype=torch.bool)}
    >>> buffer = ReplayBuffer(group_size=2)
    >>> buffer.extend(TensorDict(rows | {"next": {"reward": torch.rand(3, 1)}}, batch_size=[3]))
    >>> buffer.take(1)["group_id"].tolist()  # group 1 waits for its second completion
    [0, 0]
    """

    def __init__(
        self,
        *,
        transforms: Sequence[Transform] = (),
        group_key: str = "group_id",
        group_size: int | None = None,
        accept: Rule | None = None,
        oldest_first: bool = False,
        draw_limit: int = 32,
        max_waiting: int = 4096,
        **others: Any,
    ) -> None:
        if others:
            raise TypeError(
                f"ReplayBuffer takes no {next(iter(others))}: it holds whole groups of conversations. Frames go into "
                "rlpost.data.FrameBuffer(storage=LazyTensorStorage(...), batch_size=...)"
            )
        self.transforms = list(transforms)
        self.group_key = group_key
        self.group_size = group_size
        self.accept = accept
        self.oldest_first = oldest_first
        self.draw_limit = draw_limit
        self.source: GroupSource | None = None
        self.on_group: Callable[[TensorDictBase], None] | None = None  # called with each whole group before judging it
        self.num_dropped_by_age = 0  # groups
        self.drawn = Drawn()  # since `take_counts` was last called
        self.write_count = 0  # rows written since the buffer was built
        self._num_judged = 0  # groups that were whole, since the buffer was built
        self._groups: list[Selection] = []
        self._waiting: Waiting[int, Selection] = Waiting(max_waiting, group_size, "completions")  # by number
        self._lock = threading.RLock()  # of everything but `source`, which may write from its own thread

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def group_numbers(self) -> list[int]:
        """The numbers of the whole groups, in the order in which they will be taken."""
        with self._lock:
            return [self._number(group) for group in self._groups]

    @property
    def num_rows(self) -> int:
        """The rows of the whole groups."""
        with self._lock:
            return sum(map(len, self._groups))

    def remove(self, number: int) -> None:
        """Discard a whole group, for whoever samples it again."""
        with self._lock:
            kept = [group for group in self._groups if self._number(group) != number]
            self._groups = kept

    def extend(self, batch: TensorDictBase) -> None:
        """Write a batch (B,), or (B, T) row after row, whose rows carry `group_key`.

        Raises ValueError for a group with more than `group_size` rows, and DataError if rows of two prompts would be
        one group.
        """
        with self._lock:
            self._write(rows_in_line(batch))
            self.write_count += batch.numel()

    def _write(self, batch: TensorDictBase) -> None:
        current: TensorDictBase | None = batch
        for transform in self.transforms:
            current = transform(current)
            if current is None:
                return
        places = places_of_each(current[self.group_key].tolist())
        for number, own in places.items():
            if number in self._waiting:
                check_one_group(number, self._waiting[number], Selection.of(current, own))
        groups = {number: self._waiting.with_more(number, Selection.of(current, own)) for number, own in places.items()}
        for number, group in groups.items():
            if self.group_size is not None and len(group) > self.group_size:
                raise ValueError(
                    f"group {number} has {len(group)} rows, more than the {self.group_size} a group can have"
                )
        for number, group in groups.items():
            if self.group_size is None or len(group) == self.group_size:
                self._waiting.pop(number, None)
                self._judge(group)
            else:
                self._waiting.hold(number, group)
        self._waiting.evict()

    def _judge(self, group: Selection) -> None:
        """A group is whole: keep it, or turn it down."""
        self._num_judged += 1
        self.drawn.add(group)
        if self.on_group is not None:
            self.on_group(group.measures())
        if self.accept is not None and not self.accept(group.measures()):
            self.drawn.turn_down(group)
            return
        if self.oldest_first:
            insort(self._groups, group, key=lambda group: int(group.column("policy_version").min()))
        else:
            self._groups.append(group)

    def _number(self, group: Selection) -> int:
        return int(group.column(self.group_key)[0])

    def take(self, num_groups: int, max_policy_lag: int | None = None) -> TensorDict:
        """The oldest `num_groups` groups as one batch; they leave the buffer.

        Asks the source for more where too few are there. A group sampled more than `max_policy_lag`
        weight pushes before the present policy is dropped and counted, never taken. Groups beyond
        `num_groups` stay for the next time. Raises PolicyError when what `draw_limit` allows did not bring enough.
        """
        rounds, fruitless, before = 0, 0, self._num_judged
        self._drop(max_policy_lag)
        while len(self._groups) < num_groups or (self.source is not None and self.source.has_urgent_group):
            if self.source is None:
                raise PolicyError(
                    f"the replay buffer holds {len(self._groups)} of the {num_groups} groups asked for and has no "
                    "collector to ask for more: pass it to LLMCollector(replay_buffer=...)"
                )
            enough = self._num_judged - before >= self.draw_limit * num_groups
            if rounds >= self.draw_limit and (enough or fruitless >= self.draw_limit):
                raise PolicyError(
                    f"{rounds} rounds of sampling brought {len(self._groups)} of {num_groups} groups "
                    f"({self.num_dropped_by_age} dropped by age so far): {self._advice()}"
                )
            judged = self._num_judged
            self.source.collect()
            rounds += 1
            fruitless = 0 if self._num_judged > judged else fruitless + 1
            self._drop(max_policy_lag)
        with self._lock:
            groups, self._groups = self._groups[:num_groups], self._groups[num_groups:]
        if self.source is not None:
            self.source.on_delivered([self._number(group) for group in groups])
        return Selection.joined(groups).copied()

    def take_counts(self) -> dict[str, float]:
        """Statistics of the groups since the last call, under the names of metrics.jsonl.

        `groups/drawn`, `groups/dropped` (by a rule) and `reward/mean_drawn`, the mean reward before
        any group was dropped, if any had one. Counted since the run began: `buffer/dropped_by_age`, with a `group_size`
        `groups/evicted`, and what the transforms count.
        """
        with self._lock:
            drawn, self.drawn = self.drawn, Drawn()
            counts = {
                "groups/drawn": float(drawn.groups),
                "groups/dropped": float(drawn.turned_down),
                "buffer/dropped_by_age": float(self.num_dropped_by_age),
            }
            if drawn.num_rewards:
                counts["reward/mean_drawn"] = drawn.reward_mean
            if self.group_size is not None:
                counts["groups/evicted"] = float(self.num_evicted)
            for transform in self.transforms:
                if isinstance(transform, Counting):
                    counts |= transform.counts()
            return counts

    def state_dict(self) -> dict[str, Any]:
        """Complete groups, incomplete groups, and rows that transforms hold back, JSON-compatible."""
        with self._lock:
            return {
                "groups": [to_plain(group.copied()) for group in self._groups],
                "waiting": [to_plain(group.copied()) for group in self._waiting.values()],
                "num_dropped_by_age": self.num_dropped_by_age,
                "num_evicted": self.num_evicted,
                "drawn": asdict(self.drawn),
                "transforms": [t.state_dict() if isinstance(t, Stateful) else None for t in self.transforms],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same transforms."""
        self._groups = [Selection.whole(from_plain(group)) for group in state["groups"]]
        self._waiting.clear()
        for group in (Selection.whole(from_plain(plain)) for plain in state["waiting"]):
            self._waiting.hold(int(group.column(self.group_key)[0]), group)
        self.num_dropped_by_age = state["num_dropped_by_age"]
        self._waiting.num_evicted = state["num_evicted"]
        self.drawn = Drawn(**state["drawn"])
        for transform, saved in zip(self.transforms, state["transforms"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)

    def _drop(self, max_policy_lag: int | None) -> None:
        """Drop and count stale groups."""
        with self._lock:
            version = None if self.source is None else self.source.policy_version
            if max_policy_lag is not None and version is not None:
                if not isinstance(version, int):
                    raise ConfigError("max_policy_lag needs integer policy versions: uuids have no order")
                oldest = version - max_policy_lag
                fresh = [group for group in self._groups if int(group.column("policy_version").min()) >= oldest]
                self.num_dropped_by_age += len(self._groups) - len(fresh)
                self._groups = fresh

    def _advice(self) -> str:
        """Why too few groups may have come, and what to do about it."""
        drawn = self.drawn
        if not drawn.turned_down:
            return "group_size may exceed what the environment repeats"
        spread = (
            "none had a valid reward"
            if drawn.lowest is None
            else f"rewards from {drawn.lowest:g} to {drawn.highest:g}, at most {drawn.widest:g} apart within a group"
        )
        return (
            f"{drawn.turned_down} of {drawn.groups} groups were dropped ({spread}); give prompts that the model "
            "answers well now and then, a larger group_size, or a higher dynamic.draw_limit"
        )
