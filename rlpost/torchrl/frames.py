"""Environments whose frames are tensors: what they have in common, and the spaces that actions lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack


class Spec(Protocol):
    """The space of one entry of one environment."""

    def rand(self, batch_size: Sequence[int] = ()) -> torch.Tensor:
        """Values drawn uniformly, of shape (*batch_size, *shape)."""
        ...


class Bounded:
    """Numbers from `low` to `high`, tensors of one shape; where a side has no bound, draws lie at most 1 beyond the
    other, and between -1 and 1 where neither has one.
    """

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high
        self.shape, self.dtype = low.shape, low.dtype

    def rand(self, batch_size: Sequence[int] = ()) -> torch.Tensor:
        """See `Spec.rand`; whole numbers include both bounds."""
        below, above = self.low.double(), self.high.double()
        low = torch.where(below.isinf(), torch.where(above.isinf(), -1.0, above - 1), below)
        high = torch.where(above.isinf(), torch.where(below.isinf(), 1.0, below + 1), above)
        drawn = torch.rand(*batch_size, *self.shape, dtype=torch.float64)
        if not self.dtype.is_floating_point:
            return (low + (drawn * (high - low + 1)).floor()).to(self.dtype)
        return (low + drawn * (high - low)).to(self.dtype)


class Categorical:
    """The numbers `start`, `start` + 1, ...: `n` of them, int64; of `shape` where one choice is several numbers."""

    def __init__(self, n: int, shape: Sequence[int] = (), start: int = 0) -> None:
        self.n, self.shape, self.start = n, torch.Size(shape), start

    def rand(self, batch_size: Sequence[int] = ()) -> torch.Tensor:
        """See `Spec.rand`."""
        return torch.randint(self.start, self.start + self.n, (*batch_size, *self.shape))


class TensorDictEnv(ABC):
    """Frames (*batch_size): `reset` gives the first of an episode, and `step` what follows an action.

    A subclass gives `begin` and `act`, and sets `action_spec` and `observation_keys`. The state is the
    environment's own. Frames have `done`, `terminated` and `truncated` (*batch_size, 1), and lie on
    `device` where there is one.
    """

    batch_size: torch.Size = torch.Size([])
    device: torch.device | None = None
    action_spec: Spec
    observation_keys: Sequence[str] = ("observation",)
    action_keys: Sequence[str] = ("action",)

    @abstractmethod
    def begin(self, where: torch.Tensor) -> TensorDict:
        """The observations (*batch_size) of new episodes in the places where the mask `where` (*batch_size) says so.

        What it holds in other places is not read.
        """

    @abstractmethod
    def act(self, tensordict: TensorDictBase) -> TensorDict:
        """The observations after `action`, with `reward`, `terminated` and, where there is such a thing, `truncated`.

        Rewards and flags are (*batch_size, 1).
        """

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """The first frames of new episodes; given `_reset`, a mask, only where it says so: elsewhere `tensordict`."""
        mask = None if tensordict is None else tensordict.get("_reset", None)
        everywhere = torch.ones(self.batch_size, dtype=torch.bool)
        where = everywhere if mask is None else mask.reshape(self.batch_size).cpu()
        begun = self.begin(where)
        for name in ("done", "terminated", "truncated"):
            begun.set(name, torch.zeros(*self.batch_size, 1, dtype=torch.bool))
        begun = self._placed(begun)
        if tensordict is None or where.all():
            return begun
        return begun.where(where.to(begun.device), tensordict.select(*begun.keys()))

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take `action` out of `tensordict` and write `next`: the frames that follow, and `reward`."""
        following = self.act(tensordict)
        if "truncated" not in following:
            following.set("truncated", torch.zeros_like(following["terminated"]))
        following.set("done", following["terminated"] | following["truncated"])
        return tensordict.set("next", self._placed(following))

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`step`, and the frames to act on next: those that follow, or the first of new episodes."""
        stepped = self.step(tensordict)
        following = stepped["next"].exclude("reward")
        done = following["done"]
        return stepped, self.reset(following.set("_reset", done)) if done.any() else following

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        break_when_any_done: bool = True,
    ) -> TensorDictBase:
        """At most `max_steps` frames of `policy` after a reset, (*batch_size, T); see `EnvBase.rollout`."""
        steps: list[TensorDictBase] = []
        current = self.reset()
        for _ in range(max_steps):
            stepped, current = self.step_and_maybe_reset(current.update(policy(current)))
            steps.append(stepped)
            if break_when_any_done and stepped["next", "done"].any():
                break
        return lazy_stack(steps, dim=-1).contiguous()

    def to(self, device: torch.device | str | int) -> Self:
        """Give frames on `device` from now on."""
        self.device = torch.device(device)
        return self

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the episodes that begin from now on; returns the last seed that was used."""
        return seed

    def state_dict(self) -> dict[str, Any]:
        """Where the next episode goes on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  nothing to do without a state
        """Begin the next episode as where `state` was taken."""

    def close(self) -> None:  # noqa: B027
        """Give back what the environment holds; a second call does nothing."""

    def _placed(self, tensordict: TensorDict) -> TensorDict:
        return tensordict if self.device is None else tensordict.to(self.device)
