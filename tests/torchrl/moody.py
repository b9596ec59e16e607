"""An environment of frames and its policy, as a collector's process imports them: without what else a test needs."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from counting import Counting
from tensordict import TensorDict, TensorDictBase


class Scaled(torch.nn.Module):
    """Acts with a multiple of what it sees, and says with how many threads, in a TensorDict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        threads = torch.tensor([torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])])
        written = {
            "threads": threads.expand(*tensordict.batch_size, 2),
            "action": tensordict["observation"] * self.scale,
        }
        return TensorDict(written, tensordict.batch_size)


def seen(batch: Any) -> list[Any]:
    """The observations of a batch of frames."""
    return batch["observation"].squeeze(-1).tolist()


def next_of(collector: Any) -> TensorDictBase:
    """The next batch, which has to be there."""
    batch = collector.next()
    assert batch is not None
    return batch


def half(tensordict: TensorDictBase) -> TensorDictBase:
    """Acts with half of what it sees."""
    return tensordict.set("action", tensordict["observation"] / 2)


class Moody(Counting):
    """Raises where its first number is 660, and takes its time where that is 990."""

    def pid(self) -> int:
        return os.getpid()

    def act(self, tensordict: TensorDictBase) -> Any:
        if self.first == 660:
            raise OSError("the simulator went away")
        if self.first == 990:
            time.sleep(1)
        return super().act(tensordict)
