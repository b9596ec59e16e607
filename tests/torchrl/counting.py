"""A small environment of TensorDicts, whose frames are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.envs import Bounded, TensorDictEnv


class Counting(TensorDictEnv):
    """Each of `size` places (None: a single one) counts its steps from its seed on; the reward is the action.

    An episode of place i ends after `lengths[i]` steps.
    """

    def __init__(self, size: int | None = 2, lengths: tuple[int, ...] = (3, 5), truncates: bool = True) -> None:
        self.batch_size = torch.Size([] if size is None else [size])
        self.action_spec = Bounded(torch.tensor([-1.0]), torch.tensor([1.0]))
        self.lengths = torch.tensor(lengths if size else lengths[0])
        self.truncates = truncates
        self.first = 0
        self.count = torch.zeros(self.batch_size)
        self.resets = 0
        self.closed = 0

    def begin(self, where: torch.Tensor) -> TensorDict:
        self.resets += int(where.sum())
        self.count = torch.where(where, float(self.first), self.count)
        return self.frame()

    def act(self, tensordict: TensorDictBase) -> TensorDict:
        self.count = self.count + 1
        ended = (self.count - self.first >= self.lengths).unsqueeze(-1)
        following = self.frame().set("reward", tensordict["action"].clone()).set("terminated", ended)
        return following.set("truncated", torch.zeros_like(ended)) if self.truncates else following

    def frame(self) -> TensorDict:
        return TensorDict({"observation": self.count.unsqueeze(-1).clone()}, batch_size=self.batch_size)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self.first = seed if static_seed else 10 * seed
        return seed

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = state["first"]

    def close(self) -> None:
        self.closed += 1
