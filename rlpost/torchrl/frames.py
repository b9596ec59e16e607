"""Environments whose frames are tensors, and a buffer that draws frames at random.

`GymEnv` is one of gymnasium's environments, `ParallelEnv` is several in threads; both are `TensorDictEnv`s, whose
actions lie in a `Spec`.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, pad_sequence

from rlpost.errors import ConfigError, PolicyError
from rlpost.imports import require
from rlpost.remote.process import carry_out

T = TypeVar("T")
TRAJ_IDS = ("collector", "traj_ids")


class TensorDictEnv(ABC):
    """Frames (*batch_size): `reset` gives the first of an episode, and `step` what follows an action.

    A subclass gives `begin` and `act`, and sets `action_spec` and `observation_keys`. The state is the
    environment's own. Frames have `done`, `terminated` and `truncated` (*batch_size, 1), and lie on
    `device` if it is set.
    """

    batch_size: torch.Size = torch.Size([])
    device: torch.device | None = None
    action_spec: Bounded | Categorical
    observation_keys: Sequence[str] = ("observation",)
    action_keys: Sequence[str] = ("action",)

    @abstractmethod
    def begin(self, where: torch.Tensor) -> TensorDict:
        """The observations (*batch_size) of new episodes in the places where the mask `where` (*batch_size) is True.

        Those in other places are not read.
        """

    @abstractmethod
    def act(self, tensordict: TensorDictBase) -> TensorDict:
        """The observations after `action`, with `reward`, `terminated` and, optionally, `truncated`.

        Rewards and flags are (*batch_size, 1).
        """

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """The first frames of new episodes: everywhere, or where a mask `_reset` is True, elsewhere `tensordict`."""
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
        """`step`, and the frames to act on next: the following ones, or the first of new episodes."""
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
        tensordict: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """At most `max_steps` frames of `policy` after `reset(tensordict)`, (*batch_size, T); see `EnvBase.rollout`."""
        steps: list[TensorDictBase] = []
        current = self.reset(tensordict)
        for _ in range(max_steps):
            stepped, current = self.step_and_maybe_reset(current.update(policy(current)))
            steps.append(stepped)
            if break_when_any_done and stepped["next", "done"].any():
                break
        return dense(lazy_stack(steps, dim=-1))

    def to(self, device: torch.device | str | int) -> Self:
        """Give frames on `device` from now on."""
        self.device = torch.device(device)
        return self

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the episodes that begin from now on; returns the last seed that was used."""
        return seed

    def state_dict(self) -> dict[str, Any]:
        """The state that the next episode begins from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  nothing to do without a state
        """Begin the next episode from `state`."""

    def close(self) -> None:  # noqa: B027
        """Release the environment's resources; a second call does nothing."""

    def _placed(self, tensordict: TensorDict) -> TensorDict:
        return tensordict if self.device is None else tensordict.to(self.device)


# Spaces of actions and observations


class Bounded:
    """Numbers from `low` to `high`, tensors of one shape."""

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high
        self.shape, self.dtype = low.shape, low.dtype

    def rand(self, batch_size: Sequence[int] = ()) -> torch.Tensor:
        """Values drawn uniformly, (*batch_size, *shape); whole numbers include both bounds."""
        low, high = self.low.double(), self.high.double()
        drawn = torch.rand(*batch_size, *self.shape, dtype=torch.float64)
        if not self.dtype.is_floating_point:
            return (low + (drawn * (high - low + 1)).floor()).to(self.dtype)
        return (low + drawn * (high - low)).to(self.dtype)


class Categorical:
    """The numbers `start`, `start` + 1, ...: `n` of them, int64."""

    def __init__(self, n: int, *, start: int = 0) -> None:
        self.n, self.start = n, start

    def rand(self, batch_size: Sequence[int] = ()) -> torch.Tensor:
        """Numbers drawn uniformly, (*batch_size)."""
        return torch.randint(self.start, self.start + self.n, tuple(batch_size))


Spec = Bounded | Categorical  # the space of one entry of one environment


# Several environments at once, a thread each


class ParallelEnv(TensorDictEnv):
    """`num_workers` environments as one of batch size (num_workers,), each stepped in a thread of this process.

    `create_env_fn` makes each, or is a list with a function for each; so are `create_env_kwargs`. Waits for a
    simulator, a server or a tool overlap; computing in Python does not get faster. A step that has not ended after
    `wait_seconds` raises PolicyError; an error of an environment names it in a note.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        wait_seconds: float = 600.0,
    ) -> None:
        makers = [create_env_fn] * num_workers if callable(create_env_fn) else list(create_env_fn)
        shared = create_env_kwargs is None or isinstance(create_env_kwargs, Mapping)
        arguments: list[Any] = [create_env_kwargs or {}] * num_workers if shared else list(create_env_kwargs or ())
        self.envs: list[Any] = [make(**given) for make, given in zip(makers, arguments, strict=True)]
        self.batch_size = torch.Size([num_workers])
        self.action_spec = self.envs[0].action_spec
        self.observation_keys, self.action_keys = self.envs[0].observation_keys, self.envs[0].action_keys
        self.wait_seconds = wait_seconds
        self._threads = [_Worker(f"rlpost-env-{i}") for i in range(num_workers)]

    def begin(self, where: torch.Tensor) -> TensorDict:
        """See `TensorDictEnv.begin`."""
        places = where.nonzero().flatten().tolist()
        begun = dict(zip(places, self._all(lambda i: self.envs[i].reset(), places), strict=True))
        blank = torch.zeros_like(begun[places[0]])
        return self._stacked([begun.get(i, blank) for i in range(len(self.envs))])

    def act(self, tensordict: TensorDictBase) -> TensorDict:
        """See `TensorDictEnv.act`."""
        rows = [row.copy() for row in tensordict.unbind(0)]
        return self._stacked(self._all(lambda i: self.envs[i].step(rows[i])["next"], range(len(rows))))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed each environment with a hash of `seed` and its place, or all with `seed` itself if `static_seed`.

        Returns the last of as many seeds as there are environments, `seed` being the first: two pools that were
        given different ones have no environment alike.
        """
        for place, env in enumerate(self.envs):
            env.set_seed(seed if static_seed else _derived(seed, place))
        return seed if static_seed else seed + len(self.envs) - 1

    def state_dict(self) -> dict[str, Any]:
        """See `TensorDictEnv.state_dict`: of each environment."""
        return {"envs": [env.state_dict() for env in self.envs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TensorDictEnv.load_state_dict`."""
        for env, own in zip(self.envs, state["envs"], strict=True):
            env.load_state_dict(own)

    def close(self) -> None:
        """Close the environments, each once the step it is at has ended; a second call does nothing."""
        places = [i for i, thread in enumerate(self._threads) if thread.stop.alive]
        try:
            self._all(lambda i: self.envs[i].close(), places)
        finally:
            for thread in self._threads:
                thread.stop()

    def _stacked(self, frames: Sequence[Any]) -> TensorDict:
        return torch.stack(list(frames)).contiguous()  # type: ignore[arg-type]

    def _all(self, work: Callable[[int], T], places: Sequence[int]) -> list[T]:
        """`work` of each place, side by side."""
        futures = {i: self._threads[i].submit(partial(work, i)) for i in places}
        _, late = wait(futures.values(), self.wait_seconds)
        results = []
        for place, future in futures.items():
            if future in late:
                raise PolicyError(f"waited {self.wait_seconds:g} s for environment {place} of the pool: it may hang")
            try:
                results.append(future.result())
            except BaseException as error:
                error.add_note(f"in environment {place} of the pool")
                raise
        return results


def _derived(seed: int, number: int) -> int:
    """A seed that depends on both."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest(), "big") >> 1


class _Worker:
    """A daemon thread that carries out its work in order; it ends with this object."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.stop = weakref.finalize(self, self._work.put, None)
        threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((work, future))
        return future


def _serve(queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (given := queue.get()) is not None:
        carry_out(*given)
        del given  # the queue's next may be long in coming


# gymnasium's environments


class GymEnv(TensorDictEnv):
    """One environment of gymnasium's: `GymEnv("Pendulum-v1")`, made with `arguments`, or an object of that kind.

    Observations are the entry `observation`, those of a dictionary an entry each;
    frames are (), flags and rewards (1,). Once it is seeded an episode is a function of the seed and its
    number, so that a saved environment begins the same ones again; before, each is gymnasium's.
    Raises MissingExtraError without gymnasium, ConfigError for actions of another space than Box and Discrete.
    """

    def __init__(self, game: Any, *, device: torch.device | str | None = None, **arguments: Any) -> None:
        require("gymnasium", "gymnasium", "GymEnv")
        import gymnasium

        self._game: Any = gymnasium.make(game, **arguments) if isinstance(game, str) else game
        self.device = None if device is None else torch.device(device)
        self.action_spec = spec_of(self._game.action_space)
        space = self._game.observation_space
        self._by_name = isinstance(space, gymnasium.spaces.Dict)
        self.observation_keys = tuple(space.spaces) if self._by_name else ("observation",)
        self._seed: int | None = None
        self._episodes = 0  # begun since it was seeded

    def begin(self, where: torch.Tensor) -> TensorDict:
        """See `TensorDictEnv.begin`."""
        observation, _ = self._game.reset(seed=self._episode_seed())
        self._episodes += 1
        return self._frame(observation)

    def act(self, tensordict: TensorDictBase) -> TensorDict:
        """See `TensorDictEnv.act`."""
        action = tensordict.get("action").detach().cpu().numpy()
        played = action.item() if isinstance(self.action_spec, Categorical) and action.ndim == 0 else action
        observation, reward, terminated, truncated, _ = self._game.step(played)
        frame = self._frame(observation)
        frame.set("reward", torch.tensor([float(reward)]))
        frame.set("terminated", torch.tensor([bool(terminated)]))
        return frame.set("truncated", torch.tensor([bool(truncated)]))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See `TensorDictEnv.set_seed`; the first episode is what gymnasium begins with `seed`."""
        self._seed, self._episodes = seed, 0
        return seed

    def state_dict(self) -> dict[str, Any]:
        """The seed, and the number of episodes that began with it."""
        return {"seed": self._seed, "episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TensorDictEnv.load_state_dict`; the present episode is abandoned."""
        self._seed, self._episodes = state["seed"], state["episodes"]

    def close(self) -> None:
        """Close the game."""
        self._game.close()

    def _episode_seed(self) -> int | None:
        if self._seed is None or self._episodes == 0:
            return self._seed
        return _derived(self._seed, self._episodes)

    def _frame(self, observation: Any) -> TensorDict:
        named = observation if self._by_name else {"observation": observation}
        return TensorDict({name: torch.as_tensor(value).clone() for name, value in named.items()}, batch_size=[])


def spec_of(space: Any) -> Spec:
    """The `Spec` of a space of gymnasium. Raises ConfigError for one of another kind."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return Bounded(torch.as_tensor(space.low), torch.as_tensor(space.high))
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), start=int(space.start))
    raise ConfigError(
        f"GymEnv takes actions of the spaces Box and Discrete, not of {space}: flatten it with a wrapper of gymnasium's"
    )


# A buffer of frames, and changes to a batch of them


class FrameBuffer:
    """Frames that are drawn at random, again and again; the oldest make room for new ones.

    One thread may write while another draws. `batch_size` is the default of `sample`, `seed` that of its draws.

    >>> import torch
    >>> from rlpost.data import FrameBuffer, LazyTensorStorage
    >>> from tensordict import TensorDict
    >>> buffer = FrameBuffer(storage=LazyTensorStorage(3))
    >>> buffer.extend(TensorDict({"observation": torch.arange(5)}, batch_size=[5]))
    >>> buffer.write_count, len(buffer)
    (5, 3)
    >>> set(buffer.sample(50)["observation"].tolist())
    {2, 3, 4}
    """

    def __init__(self, *, storage: LazyTensorStorage, batch_size: int | None = None, seed: int = 0) -> None:
        self.storage = storage
        self.batch_size = batch_size
        self.write_count = 0  # frames written since the buffer was built
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return min(self.write_count, self.storage.max_size)

    def extend(self, batch: TensorDictBase) -> None:
        """Write every frame of `batch`, of any batch size."""
        frames = batch.contiguous().reshape(-1)
        count = frames.batch_size[0]
        if not count:
            return
        with self._lock:
            newest = torch.arange(max(0, count - self.storage.max_size), count)
            self.storage.write((self.write_count + newest) % self.storage.max_size, frames[newest[0] :])
            self.write_count += count

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """`batch_size` frames (N,), each any of those there with the same chance."""
        size: Any = self.batch_size if batch_size is None else batch_size
        with self._lock:
            return self.storage.read(torch.randint(len(self), (size,), generator=self._generator))

    def state_dict(self) -> dict[str, Any]:
        """The frames, their count and the state of the random generator, as tensors."""
        with self._lock:
            kept = None if self.storage.frames is None else self.storage.read(torch.arange(len(self)))
            return {"frames": kept, "write_count": self.write_count, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, by a buffer with as much room."""
        kept, count = state["frames"], state["write_count"]
        with self._lock:
            if kept is not None:
                self.storage.write(torch.arange(kept.batch_size[0]), kept)
            self.write_count = count
            self._generator.set_state(state["generator"])


class LazyTensorStorage:
    """Room for `max_size` frames on `device`, allocated when the first come, with their entries."""

    def __init__(self, max_size: int, *, device: torch.device | str = "cpu") -> None:
        self.max_size = max_size
        self.device = torch.device(device)
        self.frames: Any = None  # a TensorDict (max_size,)

    def write(self, places: torch.Tensor, frames: TensorDictBase) -> None:
        """Write `frames` (N,) to `places` (N,)."""
        if self.frames is None:
            self.frames = frames.to(self.device).apply(
                lambda value: value.new_zeros(self.max_size, *value.shape[1:]), batch_size=[self.max_size]
            )
        self.frames[places.to(self.device)] = frames.to(self.device)

    def read(self, places: torch.Tensor) -> TensorDictBase:
        """Copies of the frames at `places` (N,)."""
        return self.frames[places.to(self.device)]


class MultiStep:
    """A postproc that makes each reward the discounted sum of `n_steps` rewards, Σ_k γ^k r_{t+k}, or of those up to
    the end of its trajectory or batch, and `next` what follows the last of them.

    Adds `steps_to_next_obs` (..., T, 1), how many were summed, `gamma`, γ to that power, by which the value of
    `next` is to be discounted, and `("next", "original_reward")`. Sutton and Barto, section 7.1.
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
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


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """The trajectories of `batch` (*batch_size, T), one a row, in the order of their numbers.

    (N, T), shorter ones padded with zeros behind; `("collector", "mask")` (N, T) is False on the padding.
    """
    flat = batch.reshape(-1)
    ids = flat[TRAJ_IDS]
    rows = [flat[ids == number] for number in ids.unique()]
    padded = pad_sequence(rows)
    lengths = torch.tensor([row.batch_size[0] for row in rows], device=ids.device).unsqueeze(1)
    return padded.set(("collector", "mask"), torch.arange(padded.batch_size[1], device=ids.device) < lengths)


def mark_truncated(batch: TensorDictBase) -> None:
    """Mark the last frame of each row as truncated, in place."""
    following = batch["next"]
    last = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    last[..., -1] = True
    for name in ("truncated", "done"):
        following.set(name, following[name] | last.unsqueeze(-1))


def dense(stacked: TensorDictBase) -> TensorDictBase:
    """`stacked`, as plain tensors if all frames have the same shapes."""
    ragged = any(isinstance(value, torch.Tensor) and value.is_nested for value in stacked.unbind(-1)[0].values(True))
    return stacked if ragged else stacked.contiguous()
