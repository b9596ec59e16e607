"""The best replies to each prompt: picked from a batch of whole groups, or by a transform of the replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean, median_low
from typing import Any

from tensordict import TensorDict, TensorDictBase

from rlpost.data.plain import from_plain, to_plain
from rlpost.data.ragged import Key
from rlpost.data.selection import Selection, places_of_each

GroupKey = tuple[int | None, str]  # the group's number, where groups are numbered, and the prompt
TOLERANCE = 1e-6  # relative: further apart than rounding takes equal rewards


@dataclass(frozen=True, slots=True)
class _Trajectories:
    """Trajectories of one prompt, one after the other, and what each is worth."""

    rows: Selection  # (L,)
    lengths: list[int]  # rows of each; they sum to L
    worth: list[float]

    def pick(self, which: Sequence[int]) -> _Trajectories:
        """These trajectories, in this order."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        places = [place for i in which for place in range(starts[i], starts[i] + self.lengths[i])]
        return _Trajectories(self.rows.pick(places), [self.lengths[i] for i in which], [self.worth[i] for i in which])

    def joined(self, more: _Trajectories) -> _Trajectories:
        """These and then `more`."""
        rows = Selection.joined([self.rows, more.rows])
        return _Trajectories(rows, self.lengths + more.lengths, self.worth + more.worth)


class TopKRewardSelector:
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
    `max_waiting` prompts wait: the one that has longest had no new trajectory is given up, and
    counted in `num_evicted`.

    Raises ValueError for sizes that leave nothing to choose.
    """

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: Key = ("text", "prompt"),
        rewards_key: Key = ("next", "reward"),
        done_key: Key = ("next", "done"),
        *,
        min_reward: float | None = None,
        group_key: str = "group_id",
        max_waiting: int = 4096,
    ) -> None:
        if topk_size < 1:
            raise ValueError(f"topk_size={topk_size} lets nothing through: it must be at least 1")
        if topk_size > total_dialog_turns:
            raise ValueError(
                f"topk_size={topk_size} is more than the total_dialog_turns={total_dialog_turns} that a prompt has: "
                "lower it"
            )
        if max_waiting < 1:
            raise ValueError(f"max_waiting={max_waiting} lets no prompt wait: it must be at least 1")
        self.total_dialog_turns = total_dialog_turns
        self.topk_size = topk_size
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.done_key = done_key
        self.min_reward = min_reward
        self.group_key = group_key
        self.max_waiting = max_waiting
        self.num_evicted = 0
        self._waiting: dict[GroupKey, _Trajectories] = {}

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The chosen trajectories of the prompts that `batch` (B,) completes, prompt by prompt; None if there are none.

        Raises RuntimeError if the batch ends before its last trajectory does, TypeError for a prompt
        that is no string.
        """
        prompts = self._prompts(batch)
        groups = batch[self.group_key].tolist() if self.group_key in batch else [None] * len(prompts)
        places: dict[GroupKey, list[range]] = {}
        for span in self._spans(batch):
            places.setdefault((groups[span.start], prompts[span.start]), []).append(span)
        worth = _worth(batch, self.rewards_key)
        chosen: list[Selection] = []
        for key, spans in places.items():
            rows = Selection.of(batch, [row for span in spans for row in span])
            new = _Trajectories(rows, [len(span) for span in spans], [_mean(worth[s.start : s.stop]) for s in spans])
            chosen += self._add(key, new)
        while len(self._waiting) > self.max_waiting:
            del self._waiting[next(iter(self._waiting))]
            self.num_evicted += 1
        return Selection.joined(chosen).copied() if chosen else None

    @property
    def num_incomplete(self) -> int:
        """Prompts that still wait for trajectories."""
        return len(self._waiting)

    def counts(self) -> dict[str, float]:
        """What a training's metrics say of this transform; counted since the run began."""
        return {"groups/evicted": float(self.num_evicted)}

    def state_dict(self) -> dict[str, Any]:
        """The trajectories of prompts that are not complete, as JSON-compatible values."""
        waiting = [
            {
                "group": group,
                "prompt": prompt,
                "rows": to_plain(own.rows.copied()),
                "lengths": own.lengths,
                "worth": own.worth,
            }
            for (group, prompt), own in self._waiting.items()
        ]
        return {"waiting": waiting, "evicted": self.num_evicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._waiting = {
            (own["group"], own["prompt"]): _Trajectories(
                Selection.whole(from_plain(own["rows"])), own["lengths"], own["worth"]
            )
            for own in state["waiting"]
        }
        self.num_evicted = state["evicted"]

    def _add(self, key: GroupKey, new: _Trajectories) -> Iterator[Selection]:
        """What goes through of the prompts that `new` completes; the rest waits."""
        waited = self._waiting.pop(key, None)
        own = new if waited is None else waited.joined(new)
        for first in range(0, len(own.worth) - self.total_dialog_turns + 1, self.total_dialog_turns):
            picked = best(own.worth[first : first + self.total_dialog_turns], self.topk_size, self.min_reward)
            if picked:
                yield own.pick([first + i for i in picked]).rows
        complete = len(own.worth) - len(own.worth) % self.total_dialog_turns
        if complete < len(own.worth):
            self._waiting[key] = own.pick(range(complete, len(own.worth))) if complete else own

    def _prompts(self, batch: TensorDictBase) -> list[str]:
        column = batch[self.prompt_key]
        prompts = [column] if isinstance(column, str) else list(column)
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TypeError(
                    f"TopKRewardSelector tells prompts apart by their text, and {self.prompt_key} holds "
                    f"{type(prompt).__name__}: give the prompt_key of a string"
                )
        return prompts

    def _spans(self, batch: TensorDictBase) -> list[range]:
        """The places of each trajectory's rows: up to and with the one that is done."""
        done = batch[self.done_key].flatten().tolist()
        if not done or not done[-1]:
            raise RuntimeError(
                "TopKRewardSelector was given a trajectory that is not done: collect whole ones, with "
                "yield_completed_trajectories=True"
            )
        ends = [i + 1 for i, is_last in enumerate(done) if is_last]
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def best_of_groups(batch: TensorDictBase, count: int, minimum: float | None) -> list[int]:
    """The places of each group's `best` in a batch (B,) of whole groups, one row a completion, group by group."""
    worth = [_mean([reward]) for reward in _worth(batch, ("next", "reward"))]
    groups = places_of_each(batch["group_id"].tolist()).values()
    return [places[i] for places in groups for i in best([worth[place] for place in places], count, minimum)]


def _worth(batch: TensorDictBase, rewards_key: Key) -> list[float | None]:
    """The reward of each row: NaN where it has none (yet), None where it failed."""
    rewards = batch[rewards_key].double().flatten().tolist()
    valid = batch["valid"].flatten().tolist() if "valid" in batch else [True] * len(rewards)
    return [reward if counts else None for reward, counts in zip(rewards, valid, strict=True)]


def _mean(rewards: Sequence[float | None]) -> float:
    """Over the rows of a trajectory that have a reward; NaN where none has, or one failed."""
    finite = [reward for reward in rewards if reward is not None and isfinite(reward)]
    return fmean(finite) if finite and None not in rewards else nan


def best(worth: Sequence[float], count: int, minimum: float | None) -> list[int]:
    """The places of the `count` greatest candidates, greatest first; NaN is never one.

    Candidates are at least `minimum`, or where it is None strictly above the lower median of all
    that are no NaN, up to rounding.
    """
    known = [value for value in worth if value == value]
    if not known:
        return []
    bar = median_low(known) + TOLERANCE * max(1.0, *map(abs, known)) if minimum is None else minimum
    candidates = [i for i, value in enumerate(worth) if (value > bar if minimum is None else value >= bar)]
    return sorted(candidates, key=lambda i: -worth[i])[:count]
