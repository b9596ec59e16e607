"""The best replies to each prompt, as the replay buffer's transform on write."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from statistics import fmean, median_low
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.batch import concat_rows, select_rows
from rlpost.data.plain import from_plain, to_plain

Key = str | tuple[str, ...]
TOLERANCE = 1e-6  # relative: further apart than rounding takes equal rewards


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
    so two draws of one prompt stay apart; without it the prompt, a string, alone decides.

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
    ) -> None:
        if topk_size < 1:
            raise ValueError(f"topk_size={topk_size} lets nothing through: it must be at least 1")
        if topk_size > total_dialog_turns:
            raise ValueError(
                f"topk_size={topk_size} is more than the total_dialog_turns={total_dialog_turns} that a prompt has: "
                "lower it"
            )
        self.total_dialog_turns = total_dialog_turns
        self.topk_size = topk_size
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.done_key = done_key
        self.min_reward = min_reward
        self.group_key = group_key
        self._incomplete: dict[tuple[int | None, str], list[TensorDictBase]] = {}  # a trajectory each

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The chosen trajectories of the prompts that `batch` (B,) completes, prompt by prompt; None if there are none.

        Raises RuntimeError if the batch ends before its last trajectory does, TypeError for a prompt
        that is no string.
        """
        prompts = self._prompts(batch)
        groups = batch[self.group_key].tolist() if self.group_key in batch else [None] * len(prompts)
        chosen: list[TensorDictBase] = []
        for rows in self._trajectories(batch):
            own = (groups[rows[0]], prompts[rows[0]])
            waiting = self._incomplete.setdefault(own, [])
            waiting.append(select_rows(batch, rows))
            if len(waiting) == self.total_dialog_turns:
                del self._incomplete[own]
                worth = [self._worth(trajectory) for trajectory in waiting]
                chosen += [waiting[i] for i in best(worth, self.topk_size, self.min_reward)]
        return concat_rows(chosen) if chosen else None

    @property
    def num_incomplete(self) -> int:
        """Prompts that still wait for trajectories."""
        return len(self._incomplete)

    def state_dict(self) -> dict[str, Any]:
        """The trajectories of prompts that are not complete, as JSON-compatible values."""
        return {
            "incomplete": [
                {"group": group, "prompt": prompt, "trajectories": [to_plain(rows) for rows in trajectories]}
                for (group, prompt), trajectories in self._incomplete.items()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._incomplete = {
            (waiting["group"], waiting["prompt"]): [from_plain(rows) for rows in waiting["trajectories"]]
            for waiting in state["incomplete"]
        }

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

    def _trajectories(self, batch: TensorDictBase) -> list[list[int]]:
        """The places of each trajectory's rows: up to and with the one that is done."""
        done = batch[self.done_key].flatten().tolist()
        if not done or not done[-1]:
            raise RuntimeError(
                "TopKRewardSelector was given a trajectory that is not done: collect whole ones, with "
                "yield_completed_trajectories=True"
            )
        ends = [i + 1 for i, is_last in enumerate(done) if is_last]
        return [list(range(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _worth(self, trajectory: TensorDictBase) -> float:
        """The mean over the rows that have a reward; NaN where none has, or one failed."""
        if "valid" in trajectory and not trajectory["valid"].all():
            return nan
        rewards: torch.Tensor = trajectory[self.rewards_key]
        finite = [reward for reward in rewards.double().flatten().tolist() if isfinite(reward)]
        return fmean(finite) if finite else nan


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
