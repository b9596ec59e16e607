"""ReplayBuffer: whole groups of rows of TensorDicts, each taken once; RayReplayBuffer has one in a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.ragged import ragged_rows
from rlpost.data.replay_buffer import Groups
from rlpost.errors import DataError, PolicyError
from rlpost.remote.cluster import Actor, joined
from rlpost.torchrl.batches import concat_rows, places_of_each, row_of, rows_in_line, select_rows
from rlpost.torchrl.frames import FrameBuffer

LOOK_SECONDS = 0.05  # between two looks for enough groups in an actor
CALLED_THERE = ("extend", "sample", "take_counts", "state_dict", "load_state_dict")  # of the buffer in an actor
Transform = Any  # called with a batch, returns one or None; may have `counts`, `state_dict` and `load_state_dict`


class ReplayBuffer(Groups[TensorDictBase]):
    """Groups of the rows that collectors write, first in first out; one thread may write while another takes.

    - `transforms` see every batch on its way in; one may return None to hold its rows back until
      more have come, as `MCAdvantage` does until a group is complete.
    - `group_size` holds a group back until it has that many rows; without it a group is what one batch
      brings of it.
    - `accept` says of each group, by its rows (G,), whether it may be trained on.
    - `oldest_first`, `draw_limit` and `max_waiting` are those of `rlpost.data.replay_buffer.Groups`.

    >>> import torch
    >>> from rlpost.data import ReplayBuffer
    >>> from tensordict import TensorDict
    >>> rows = {"group_id": torch.tensor([0, 0, 1]), "valid": torch.ones(3, dtype=torch.bool)}
    >>> buffer = ReplayBuffer(group_size=2)
    >>> buffer.extend(TensorDict(rows | {"next": {"reward": torch.rand(3, 1)}}, batch_size=[3]))
    >>> buffer.take(1)["group_id"].tolist()  # group 1 waits for its second completion
    [0, 0]
    """

    holds_groups = True  # which are taken once, while frames stay

    def __init__(
        self,
        *,
        transforms: Sequence[Transform] = (),
        group_key: str = "group_id",
        group_size: int | None = None,
        accept: Callable[[TensorDictBase], bool] | None = None,
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
        by_members = None if accept is None else lambda pieces: accept(concat_rows(pieces))
        super().__init__(group_size, by_members, oldest_first, draw_limit, max_waiting)
        self.transforms = list(transforms)
        self.group_key = group_key
        self.write_count = 0  # rows written since the buffer was built

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
        own = {number: select_rows(current, which) for number, which in places.items()}
        for number, rows in own.items():
            waiting = self._waiting.get(number, [])
            if waiting:
                _check_one_group(number, waiting[0], rows)
            size = self._size([*waiting, rows])
            if self.group_size is not None and size > self.group_size:
                raise ValueError(f"group {number} has {size} rows, more than the {self.group_size} a group can have")
        self._add({number: [rows] for number, rows in own.items()})

    def take_counts(self) -> dict[str, float]:
        """See `Groups.take_counts`; with the counts of the transforms."""
        with self._lock:
            counts = super().take_counts()
            for transform in self.transforms:
                if hasattr(transform, "counts"):
                    counts |= transform.counts()
            return counts

    def state_dict(self) -> dict[str, Any]:
        """See `Groups.state_dict`; with the rows that transforms hold back. Rows are TensorDicts (`torch.save`)."""
        with self._lock:
            held = [t.state_dict() if hasattr(t, "state_dict") else None for t in self.transforms]
            return super().state_dict() | {"transforms": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same transforms."""
        super().load_state_dict(state)
        for transform, saved in zip(self.transforms, state["transforms"], strict=True):
            if hasattr(transform, "load_state_dict"):
                transform.load_state_dict(saved)

    def _size(self, group: list[TensorDictBase]) -> int:
        return sum(piece.batch_size[0] for piece in group)

    def _oldest(self, group: list[TensorDictBase]) -> int:
        return min(int(piece["policy_version"].min()) for piece in group)

    def _rewards(self, group: list[TensorDictBase]) -> list[float]:
        """The reward of each valid row: the mean over its tokens where they have one each."""
        rewards: list[float] = []
        for piece in group:
            given = piece["next", "reward"]
            each = ragged_rows(given) if given.is_nested else given.flatten(1)
            means = [row.mean() for row, valid in zip(each, piece["valid"], strict=True) if valid]
            rewards += [mean.item() for mean in means if mean.isfinite()]
        return rewards

    def _batch(self, members: list[TensorDictBase]) -> TensorDict:
        return concat_rows(members)

    def _saved(self, group: list[TensorDictBase]) -> TensorDict:
        return concat_rows(group)

    def _restored(self, saved: Any) -> tuple[int, list[TensorDictBase]]:
        return int(saved[self.group_key][0]), [saved]


def _check_one_group(number: int, waiting: TensorDictBase, new: TensorDictBase) -> None:
    """Raise DataError if the `new` rows have another prompt or source than the waiting ones."""
    for key in ("query", "source"):
        both = [rows.get(key, None) for rows in (waiting, new)]
        first, second = (None if values is None else row_of(values, 0) for values in both)
        if None not in (first, second) and first != second:
            raise DataError(
                f"group {number} would hold rows of two prompts ({key} {str(first)[:40]!r} and {str(second)[:40]!r}): "
                "two collectors number their draws alike, so give each a buffer of its own"
            )


class RayReplayBuffer:
    """A `ReplayBuffer` of groups, or with `storage` a `FrameBuffer`, in a Ray actor; it may be sent to other actors.

    It takes their arguments, and has their methods: whole groups are taken once (`take`, which waits for what
    collectors write), frames are drawn at random (`sample`).

    `remote_config` goes to `ray.remote` (default: no CPU of its own), `ray_init_config` to `ray.init` if Ray does not
    run yet. Every call waits `wait_seconds` at most. The actor ends with `close`, with the process that built it, or
    once nobody holds it. Raises MissingExtraError without ray, PolicyError if the actor finds no place, has died, or
    does not answer in time, and the errors of the buffer.
    """

    def __init__(
        self,
        *,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        ray = joined("RayReplayBuffer", ray_init_config)
        self.wait_seconds = wait_seconds
        self.holds_groups = "storage" not in options
        handle = ray.remote(**{"num_cpus": 0, **(remote_config or {})})(BufferActor).remote(options)
        self._actor = Actor(ray, handle, "the actor of the replay buffer, with what it held,")
        try:
            len(self)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """A method of the buffer, which the actor carries out."""
        if name not in CALLED_THERE:
            raise AttributeError(name)
        return partial(self._call, "call", name)

    def take(
        self, num_groups: int, max_policy_lag: int | None = None, *, policy_version: PolicyVersionLabel | None = None
    ) -> TensorDict:
        """See `ReplayBuffer.take`: waits until enough groups were written, `wait_seconds` at most.

        A group older than `max_policy_lag` pushes before `policy_version` is dropped and counted. Raises PolicyError if
        too few groups come.
        """
        until = time.monotonic() + self.wait_seconds
        while (batch := self._call("take", num_groups, max_policy_lag, policy_version)) is None:
            if time.monotonic() > until:
                raise PolicyError(
                    f"waited {self.wait_seconds:g} s for {num_groups} groups, and the replay buffer holds {len(self)} "
                    f"({self.write_count} rows were written): the collectors may have ended, or group_size or accept "
                    "may turn down what they write"
                )
            time.sleep(LOOK_SECONDS)
        return batch

    def __len__(self) -> int:
        return self._call("call", "__len__")

    @property
    def write_count(self) -> int:
        """Rows or frames written since the buffer was built."""
        return self._call("call", "write_count")

    @property
    def num_rows(self) -> int:
        """The rows of the whole groups."""
        return self._call("call", "num_rows")

    def close(self) -> None:
        """End the actor and what it holds; a second call does nothing."""
        self._actor.kill()

    shutdown = close

    def _call(self, method: str, *args: Any) -> Any:
        return self._actor.call(method, *args, seconds=self.wait_seconds)


class BufferActor:
    """The actor, which holds the buffer."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        cls: Any = FrameBuffer if "storage" in options else ReplayBuffer
        self.buffer = cls(**options)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the buffer, or read an attribute."""
        found = getattr(self.buffer, name)
        return found(*args) if callable(found) else found

    def take(self, num_groups: int, max_lag: int | None, version: PolicyVersionLabel | None) -> TensorDict | None:
        """`num_groups` that are recent enough; None if there are fewer."""
        self.buffer.drop_stale(version, max_lag)
        return self.buffer.take(num_groups) if len(self.buffer) >= num_groups else None
