"""The Monte-Carlo advantage of GRPO, as the replay buffer's transform on write."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.batch import concat_rows, select_rows
from rlpost.data.plain import from_plain, to_plain
from rlpost.objectives.advantage import advantages


class MCAdvantage:
    """Holds rows back until their group is complete, then gives each its group-relative advantage.

    `grpo_size` is G. Rows of one group share `group_key`, which numbers the draw and not the prompt,
    so two draws of one prompt stay apart. `shuffle_rewards` permutes the rewards within each group
    first, reproducibly from `seed`: the control that must not learn.
    """

    def __init__(
        self,
        grpo_size: int,
        *,
        group_key: str = "group_id",
        rewards_key: tuple[str, ...] = ("next", "reward"),
        advantage_key: str = "advantage",
        estimator: str = "grpo",
        shuffle_rewards: bool = False,
        seed: int = 0,
    ) -> None:
        if grpo_size < 2:
            raise ValueError(f"grpo_size={grpo_size} leaves nothing to compare with: it must be at least 2")
        self.grpo_size = grpo_size
        self.group_key = group_key
        self.rewards_key = rewards_key
        self.advantage_key = advantage_key
        self.estimator = estimator
        self.shuffle_rewards = shuffle_rewards
        self.seed = seed
        self._incomplete: dict[int, TensorDictBase] = {}

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """Rows of the groups that `batch` completes, with their advantage (B,); None if it completes none.

        Raises RuntimeError for a row that is not done, ValueError for a group of more than G rows.
        """
        if not batch["next", "done"].all():
            raise RuntimeError("MCAdvantage was given a conversation that is not done: collect whole trajectories")
        complete = []
        ids = batch[self.group_key].tolist()
        for group in dict.fromkeys(ids):
            rows: TensorDictBase = select_rows(batch, [i for i, g in enumerate(ids) if g == group])
            if group in self._incomplete:
                rows = concat_rows([self._incomplete.pop(group), rows])
            if rows.batch_size[0] > self.grpo_size:
                raise ValueError(f"group {group} has {rows.batch_size[0]} rows, more than grpo_size={self.grpo_size}")
            if rows.batch_size[0] < self.grpo_size:
                self._incomplete[group] = rows
                continue
            rows[self.advantage_key] = self._advantage(rows, group)
            complete.append(rows)
        return concat_rows(complete) if complete else None

    @property
    def num_incomplete(self) -> int:
        """Groups that still wait for rows."""
        return len(self._incomplete)

    def state_dict(self) -> dict[str, Any]:
        """The rows of incomplete groups, as JSON-compatible values."""
        return {"incomplete": [to_plain(rows) for rows in self._incomplete.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        batches = [from_plain(rows) for rows in state["incomplete"]]
        self._incomplete = {int(batch[self.group_key][0]): batch for batch in batches}

    def _advantage(self, rows: TensorDictBase, group: int) -> torch.Tensor:
        rewards = rows[self.rewards_key].squeeze(-1)
        valid = rows["valid"]
        if self.shuffle_rewards:
            rewards = rewards.clone()
            rewards[valid] = rewards[valid][self._permutation(int(valid.sum()), group)]
        return advantages(self.estimator, rewards, rows[self.group_key], valid)

    def _permutation(self, size: int, group: int) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self.seed}/shuffle/{group}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.randperm(size, generator=generator)
