"""Environments on problems made on the spot, without end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from rlpost.data.order import held_out_of
from rlpost.envs.chat import DatasetChatEnv, Task
from rlpost.errors import DataError
from rlpost.settings.env import MadeSettings

HELD_OUT_PROBLEMS = 0.2  # share of the problems held out for test
EPOCH = 10_000  # problems that count as one pass without a limit
PROVED_AT_MOST = 1000  # problems that `rlpost env test` tries
TRIES = 2000  # problems tried to find one of this split
STRIDE = 1 << 40  # more than there are positions


class EndlessEnv(DatasetChatEnv):
    """A `DatasetChatEnv` on problems made on the spot; a subclass makes them in `open_rows`."""

    def __init__(self, *, held_out: float = HELD_OUT_PROBLEMS, **chat: Any) -> None:
        MadeSettings(held_out=held_out)  # checks the range
        super().__init__((), held_out=held_out, **chat)

    def prompts_shared_with(self, other: DatasetChatEnv) -> int:
        """See `DatasetChatEnv.prompts_shared_with`; none unless `held_out` is 0, and then as many as both may draw."""
        if self.held_out > 0:
            return 0
        alike = [part.num_tasks for part in other.parts if type(part) is type(self)]
        return min(self.num_tasks, max(alike, default=0))

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`; the first 1,000 problems at most."""
        self.start()
        for position in range(min(self._rows.count(), PROVED_AT_MOST)):
            yield f"{self.split} problem {position + 1}", self._rows.at(position)


class EndlessProblems(ABC):
    """The problems of the split of `env`: position p is a function of (seed, p), so any is reached at once.

    A problem is held out by a hash of its `identity`, whatever the seed; with `held_out=0` every
    problem is on both sides. A problem may come again, the more often the fewer there are. With a
    `limit` the first `limit` positions come over and over.
    """

    def __init__(self, env: Any, seed: int) -> None:
        self.env = env  # whose settings decide what is made
        self.seed = seed
        self.split: str = env.split
        self.limit: int | None = env.limit
        self.held_out: float = env.held_out

    @abstractmethod
    def make(self, number: int) -> Task | None:
        """The problem `number` of this seed, of either split; None where that number gives none."""

    @abstractmethod
    def identity(self, task: Task) -> str:
        """The identity of a problem: two with the same one are in the same split."""

    @abstractmethod
    def describe(self) -> str:
        """The settings that decide what `make` makes, in words."""

    def at(self, position: int) -> Task:
        """The problem at `position`. Raises DataError where 2,000 tries find none of this split."""
        place = position if self.limit is None else position % self.limit
        for attempt in range(TRIES):
            task = self.make(attempt * STRIDE + place)
            if task is not None and self._has(task):
                return task
        raise DataError(
            f"{TRIES} tries made no problem of the {self.split} split ({self.describe()}): these settings leave too "
            f"few; change them or env.held_out={self.held_out:g}"
        )

    def iter_from(self, position: int) -> Iterator[Task]:
        """The problems from `position` on, without end."""
        return (self.at(p) for p in count(position))

    def count(self) -> int:
        """How many problems count as one pass: `limit`, or 10,000, none repeated on purpose in the next pass."""
        return EPOCH if self.limit is None else self.limit

    def fingerprint(self, served: int) -> str:
        """Everything besides the seed that a saved position depends on, in words: the same wherever it is."""
        return f"{self.split} problems: {self.describe()}, {self.held_out:g} held out, limit {self.limit}"

    def _has(self, task: Task) -> bool:
        return self.held_out == 0 or held_out_of([self.identity(task)], self.held_out) == [self.split == "test"]
