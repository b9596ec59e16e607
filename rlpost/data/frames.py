"""Frames without groups: a buffer that draws them at random, and what is made of a batch of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, pad_sequence

from rlpost.errors import CheckpointError, DataError

TRAJ_IDS = ("collector", "traj_ids")


class LazyTensorStorage:
    """Room for `max_size` frames, made on `device` when the first come, which say what entries there are."""

    def __init__(self, max_size: int, *, device: torch.device | str = "cpu") -> None:
        if max_size < 1:
            raise ValueError(f"max_size={max_size} leaves no room: it must be at least 1")
        self.max_size = max_size
        self.device = torch.device(device)
        self.frames: TensorDict | None = None  # (max_size,)

    def write(self, places: torch.Tensor, frames: TensorDictBase) -> None:
        """Keep `frames` (N,) at `places` (N,). Raises DataError where entries differ from those of the first frames."""
        if self.frames is None:
            self.frames = self._room(frames)
        kinds = [(_key(key), value.dtype, value.shape[1:]) for key, value in _leaves(frames)]
        room = [(_key(key), value.dtype, value.shape[1:]) for key, value in _leaves(self.frames)]
        if wrong := sorted({*map(str, kinds)} ^ {*map(str, room)}):
            raise DataError(f"these frames are not like the first of this buffer: they differ in {wrong[0]}")
        self.frames[places.to(self.device)] = frames.to(self.device)

    def read(self, places: torch.Tensor) -> TensorDictBase:
        """Copies of the frames at `places` (N,)."""
        assert self.frames is not None  # the buffer reads what it has written
        return self.frames[places.to(self.device)]

    def _room(self, frames: TensorDictBase) -> TensorDict:
        for key, value in _leaves(frames):
            if not isinstance(value, torch.Tensor) or value.is_nested:
                raise DataError(
                    f"a frame's {_key(key)} is no tensor of one shape: texts and ragged entries of conversations go "
                    "into rlpost.data.ReplayBuffer"
                )
        made: Any = frames.to(self.device).apply(
            lambda value: value.new_zeros(self.max_size, *value.shape[1:]), batch_size=[self.max_size]
        )
        return made


class FrameBuffer:
    """Frames that are drawn at random, again and again; the oldest make room for new ones.

    One thread may write while another draws. `batch_size` is how many `sample` draws where it is not told,
    `seed` that of its drawing.

    >>> import torch
    >>> from rlpost.data import FrameBuffer, LazyTensorStorage
    >>> from tensordict import TensorDict
    >>> buffer = FrameBuffer(storage=LazyTensorStorage(3))
    >>> buffer.extend(TensorDict({"observation": torch.arange(5)}, batch_size=[5]))
    >>> buffer.write_count, len(buffer), buffer.capacity
    (5, 3, 3)
    >>> set(buffer.sample(50)["observation"].tolist())
    {2, 3, 4}
    """

    def __init__(
        self, *, storage: LazyTensorStorage, batch_size: int | None = None, seed: int = 0, shared: bool = False
    ) -> None:
        if shared:
            raise TypeError(
                "shared=True: this buffer is one process's, any thread of which may write to it; a collector in "
                "another process sends its frames here. Leave it out"
            )
        self.storage = storage
        self.batch_size = batch_size
        self.write_count = 0  # frames written since the buffer was built
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """How many frames there is room for."""
        return self.storage.max_size

    def __len__(self) -> int:
        return min(self.write_count, self.capacity)

    def extend(self, batch: TensorDictBase) -> None:
        """Write every frame of `batch`, of any batch size.

        Raises DataError for frames unlike those before, or with entries that are no tensors of one shape.
        """
        frames = batch.contiguous().reshape(-1)
        count = frames.batch_size[0]
        if not count:
            return
        with self._lock:
            newest = torch.arange(max(0, count - self.capacity), count)
            self.storage.write((self.write_count + newest) % self.capacity, frames[newest[0] :])
            self.write_count += count

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """`batch_size` frames (N,), each any of those there with the same chance.

        Raises TypeError where no size is known, DataError from an empty buffer.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise TypeError("sample needs a batch_size: give it here, or to the buffer")
        with self._lock:
            if not self.write_count:
                raise DataError("nothing can be drawn from an empty buffer: collect into it first")
            return self.storage.read(torch.randint(len(self), (size,), generator=self._generator))

    def state_dict(self) -> dict[str, Any]:
        """The frames, their count and where drawing goes on, as tensors."""
        with self._lock:
            kept = None if self.storage.frames is None else self.storage.read(torch.arange(len(self)))
            return {"frames": kept, "write_count": self.write_count, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises CheckpointError for a buffer of another capacity."""
        kept, count = state["frames"], state["write_count"]
        if kept is not None and kept.batch_size[0] != min(count, self.capacity):
            raise CheckpointError(
                f"the saved buffer held {kept.batch_size[0]} of {count} frames, and this one has room for "
                f"{self.capacity}: give it the capacity it had"
            )
        with self._lock:
            if kept is not None:
                self.storage.write(torch.arange(kept.batch_size[0]), kept)
            self.write_count = count
            self._generator.set_state(state["generator"])


def dense(stacked: TensorDictBase) -> TensorDictBase:
    """`stacked`, as plain tensors where all frames have the same shapes."""
    ragged = any(isinstance(value, torch.Tensor) and value.is_nested for value in stacked.unbind(-1)[0].values(True))
    return stacked if ragged else stacked.contiguous()


def mark_truncated(batch: TensorDictBase) -> None:
    """Mark the last frame of each row, in place. Raises ValueError where the environment does not tell truncation."""
    following = batch["next"]
    if "truncated" not in following.keys():  # noqa: SIM118
        raise ValueError("set_truncated=True needs the environment's 'truncated', and its frames have none")
    last = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    last[..., -1] = True
    for name in ("truncated", "done"):
        following.set(name, following[name] | last.unsqueeze(-1))


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """The trajectories of `batch` (*batch_size, T), one a row, in the order of their numbers.

    (N, T), shorter ones padded with zeros behind; `("collector", "mask")` (N, T) says what is no pad. Raises
    DataError without `("collector", "traj_ids")`.
    """
    flat = batch.reshape(-1)
    if TRAJ_IDS not in flat.keys(include_nested=True):
        raise DataError(f"frames without {TRAJ_IDS} cannot be told apart into trajectories: take a collector's batch")
    ids = flat[TRAJ_IDS]
    rows = [flat[ids == number] for number in ids.unique()]
    padded = pad_sequence(rows)
    lengths = torch.tensor([row.batch_size[0] for row in rows], device=ids.device).unsqueeze(1)
    return padded.set(("collector", "mask"), torch.arange(padded.batch_size[1], device=ids.device) < lengths)


class MultiStep:
    """A postproc that makes each reward the discounted sum of `n_steps` rewards, Σ_k γ^k r_{t+k}, or of those up to
    the end of its trajectory or batch, and `next` what follows the last of them.

    Adds `steps_to_next_obs` (..., T, 1), how many were summed, `gamma`, γ to that power, by which the value of
    `next` is to be discounted, and `("next", "original_reward")`. Sutton and Barto, section 7.1.
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
        if n_steps < 1 or not 0 < gamma <= 1:
            raise ValueError(
                f"MultiStep(gamma={gamma}, n_steps={n_steps}): gamma lies in (0, 1], n_steps is at least 1"
            )
        self.gamma = gamma
        self.n_steps = n_steps

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """`batch` (..., T) with sums for its rewards (..., T, 1)."""
        following = batch["next"]
        reward, done = following["reward"], following["done"]
        length = batch.batch_size[-1]
        total, steps = torch.zeros_like(reward), torch.zeros_like(reward, dtype=torch.int64)
        goes_on = torch.ones_like(done)
        for k in range(min(self.n_steps, length)):
            there = goes_on[..., : length - k, :]  # whether step t + k belongs to t's trajectory
            total[..., : length - k, :] += self.gamma**k * reward[..., k:, :] * there
            steps[..., : length - k, :] += there
            goes_on[..., : length - k, :] = there & ~done[..., k:, :]
        last = torch.arange(length, device=reward.device).unsqueeze(-1) + steps - 1  # (..., T, 1)
        rows = following.reshape(-1, length)
        index = last.reshape(-1, length)
        picked: Any = torch.stack([row[own] for row, own in zip(rows, index, strict=True)]).reshape(batch.batch_size)
        picked.set("original_reward", reward)
        made = batch.copy().set("next", picked.set("reward", total))
        return made.set("steps_to_next_obs", steps).set("gamma", self.gamma ** steps.to(reward.dtype))


def _leaves(frames: TensorDictBase) -> Any:
    return frames.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf)


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, (torch.Tensor, NonTensorStack)) or not issubclass(kind, TensorDictBase)


def _key(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ".".join(key)
