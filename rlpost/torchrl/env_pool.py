"""Several environments of TensorDicts at once, a thread each."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.errors import ConfigError, PolicyError
from rlpost.torchrl.frames import TensorDictEnv

T = TypeVar("T")


class _Worker:
    """A thread that does one thing after the other; it ends with this object, and keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.stop = weakref.finalize(self, self._work.put, None)
        threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, work))
        return future


def _serve(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (given := queue.get()) is not None:
        future, work = given
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
            future.set_exception(error)
        del given, future, work  # the queue's next may be long in coming


class ParallelEnv(TensorDictEnv):
    """`num_workers` environments as one of batch size (num_workers,), each stepped in a thread of this process.

    `create_env_fn` makes each, or is a list with a function for each; so are `create_env_kwargs`. What waits, for a
    simulator, a server or a tool, waits side by side; what computes in Python does not get faster. A step that
    has not ended after `wait_seconds` raises PolicyError; what an environment raises says which one it was.
    Raises ConfigError for environments that are batches themselves.
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
        if num_workers < 1 or not len(makers) == len(arguments) == num_workers:
            raise ConfigError(
                f"num_workers={num_workers} environments need so many functions and keyword arguments, or one for "
                f"all; here are {len(makers)} and {len(arguments)}"
            )
        self.envs: list[Any] = [make(**given) for make, given in zip(makers, arguments, strict=True)]
        for env in self.envs:
            if len(env.batch_size):
                raise ConfigError(f"an environment here has the batch size {tuple(env.batch_size)}: give single ones")
        self.batch_size = torch.Size([num_workers])
        self.action_spec = self.envs[0].action_spec
        self.observation_keys, self.action_keys = self.envs[0].observation_keys, self.envs[0].action_keys
        self.wait_seconds = wait_seconds
        self._threads = [_Worker(f"rlpost-env-{i}") for i in range(num_workers)]
        self._closed = False

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
            digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=4).digest()
            env.set_seed(seed if static_seed else int.from_bytes(digest, "big") >> 1)
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
        if self._closed:
            return
        self._closed = True
        try:
            self._all(lambda i: self.envs[i].close(), range(len(self.envs)))
        finally:
            for thread in self._threads:
                thread.stop()

    def _stacked(self, frames: Sequence[Any]) -> TensorDict:
        return torch.stack(list(frames)).contiguous()  # type: ignore[arg-type]

    def _all(self, work: Callable[[int], T], places: Sequence[int]) -> list[T]:
        """`work` of each place, side by side."""
        futures = [self._threads[i].submit(partial(work, i)) for i in places]
        _, late = wait(futures, self.wait_seconds)
        if late:
            raise self._too_late([i for i, future in zip(places, futures, strict=True) if future in late])
        return [_result(i, future) for i, future in zip(places, futures, strict=True)]

    def _too_late(self, places: Sequence[int]) -> PolicyError:
        return PolicyError(f"waited {self.wait_seconds:g} s for environment {places[0]} of the pool: it may hang")


class AsyncEnvPool(ParallelEnv):
    """Environments of which none waits for another: `AsyncEnvPool([make_env] * 4)`.

    It is a batch of environments as `ParallelEnv` is; a `Collector` takes each frame when it is there, and its
    environment goes on at once.
    """

    def __init__(
        self,
        env_makers: Sequence[Callable[..., Any]],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        wait_seconds: float = 600.0,
    ) -> None:
        super().__init__(len(env_makers), env_makers, create_env_kwargs=create_env_kwargs, wait_seconds=wait_seconds)
        self._under_way: dict[Future[Any], int] = {}  # the place of each
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()

    @property
    def num_under_way(self) -> int:
        """How much work was sent and not received yet."""
        return len(self._under_way)

    def send(self, place: int, work: Callable[[Any], Any]) -> None:
        """Begin `work`, called with the environment number `place`, in a thread."""
        future = self._threads[place].submit(partial(work, self.envs[place]))
        self._under_way[future] = place
        future.add_done_callback(self._ended.put)

    def receive(self) -> tuple[int, Any]:
        """The place and the result of the work that ended first of what was not received. Raises what it raised."""
        try:
            future = self._ended.get(timeout=self.wait_seconds)
        except Empty:
            raise self._too_late(sorted(self._under_way.values())) from None
        place = self._under_way.pop(future)
        return place, _result(place, future)


def _result(place: int, future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException as error:
        error.add_note(f"in environment {place} of the pool")
        raise
