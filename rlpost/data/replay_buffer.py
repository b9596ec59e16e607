"""The buffer between sampling and training: whole groups, each taken once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from rlpost.data.batch import concat_rows, select_rows
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.plain import from_plain, to_plain
from rlpost.errors import ConfigError, PolicyError

Transform = Callable[[TensorDictBase], TensorDictBase | None]


@runtime_checkable
class Stateful(Protocol):
    """A transform that holds rows back, and so has something to save."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GroupSource(Protocol):
    """What fills a buffer on demand: a collector."""

    def collect(self) -> None:
        """Sample once more and write the result into the buffer."""
        ...

    @property
    def policy_version(self) -> PolicyVersionLabel | None:
        """The version that the policy samples with now."""
        ...


class ReplayBuffer:
    """Groups of finished conversations, first in first out.

    `transforms` see every batch on its way in; one may return None to hold its rows back until more
    have come (`MCAdvantage` does, until a group is complete). `draw_limit` bounds how often in a row
    `take` asks the source for more before it gives up.
    """

    def __init__(
        self, *, transforms: Sequence[Transform] = (), group_key: str = "group_id", draw_limit: int = 32
    ) -> None:
        self.transforms = list(transforms)
        self.group_key = group_key
        self.draw_limit = draw_limit
        self.source: GroupSource | None = None
        self.num_dropped_by_age = 0  # groups
        self._groups: list[TensorDictBase] = []

    def __len__(self) -> int:
        return len(self._groups)

    def extend(self, batch: TensorDictBase) -> None:
        """Write a batch (B,) whose rows carry `group_key`."""
        current: TensorDictBase | None = batch
        for transform in self.transforms:
            current = transform(current)
            if current is None:
                return
        ids = current[self.group_key].tolist()
        for group in dict.fromkeys(ids):
            self._groups.append(select_rows(current, [i for i, g in enumerate(ids) if g == group]))

    def take(self, num_groups: int, max_policy_lag: int | None = None) -> TensorDict:
        """The oldest `num_groups` groups as one batch; they leave the buffer.

        Asks the source for more where too few are there. A group sampled more than `max_policy_lag`
        weight pushes before the present policy is dropped and counted. Raises PolicyError when
        `draw_limit` rounds did not bring enough.
        """
        rounds = 0
        self._drop_older_than(max_policy_lag)
        while len(self._groups) < num_groups:
            if self.source is None:
                raise PolicyError(
                    f"the replay buffer holds {len(self._groups)} of the {num_groups} groups asked for and has no "
                    "collector to ask for more: pass it to LLMCollector(replay_buffer=...)"
                )
            if rounds == self.draw_limit:
                raise PolicyError(
                    f"{rounds} rounds of sampling brought {len(self._groups)} of {num_groups} groups "
                    f"({self.num_dropped_by_age} dropped by age so far): group_size may exceed what the environment "
                    "repeats"
                )
            self.source.collect()
            rounds += 1
            self._drop_older_than(max_policy_lag)
        taken, self._groups = self._groups[:num_groups], self._groups[num_groups:]
        return concat_rows(taken)

    def state_dict(self) -> dict[str, Any]:
        """The groups that wait and the rows that transforms hold back, as JSON-compatible values."""
        return {
            "groups": [to_plain(group) for group in self._groups],
            "num_dropped_by_age": self.num_dropped_by_age,
            "transforms": [t.state_dict() if isinstance(t, Stateful) else None for t in self.transforms],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same transforms."""
        self._groups = [from_plain(group) for group in state["groups"]]
        self.num_dropped_by_age = state["num_dropped_by_age"]
        for transform, saved in zip(self.transforms, state["transforms"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)

    def _drop_older_than(self, max_policy_lag: int | None) -> None:
        version = self.source.policy_version if self.source is not None else None
        if max_policy_lag is None or version is None:
            return
        if not isinstance(version, int):
            raise ConfigError("max_policy_lag needs integer policy versions: uuids have no order")
        fresh = [g for g in self._groups if version - int(g["policy_version"].min()) <= max_policy_lag]
        self.num_dropped_by_age += len(self._groups) - len(fresh)
        self._groups = fresh
