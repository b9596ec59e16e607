"""ReplayBuffer: whole groups of rows of TensorDicts, each taken once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from rlpost.data.ragged import ragged_rows
from rlpost.data.replay_buffer import Groups
from rlpost.errors import DataError
from rlpost.torchrl.batches import concat_rows, from_plain, places_of_each, row_of, rows_in_line, select_rows, to_plain

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
        """See `Groups.state_dict`; with the rows that transforms hold back."""
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

    def _plain(self, group: list[TensorDictBase]) -> dict[str, Any]:
        return to_plain(concat_rows(group))

    def _restored(self, plain: Any) -> tuple[int, list[TensorDictBase]]:
        rows = from_plain(plain)
        return int(rows[self.group_key][0]), [rows]


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
