"""Collectors in other processes, used as one: a local process for AsyncCollector, Ray actors for RayCollector.

A process gets `built_collector` with its arguments, and a `CollectorHost` calls it there. `WorkerPool` calls
those processes, `Batches` keeps one batch in flight at each, and `RemoteCollector` is what
both collectors have in common.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlpost.data.conversation import Completion, PolicyVersionLabel
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.policies.base import Policy, Request
from rlpost.remote.process import START_SECONDS
from rlpost.settings import SamplingSettings
from rlpost.torchrl.batches import from_plain, to_plain
from rlpost.torchrl.collector import Collector, made_env, only_kwargs
from rlpost.torchrl.collector_base import WeightsCollector, postprocessed
from rlpost.torchrl.frames import TRAJ_IDS
from rlpost.torchrl.llm_collector import LLMCollector
from rlpost.torchrl.replay_buffer import ReplayBuffer
from rlpost.weight_sync.base import begin_versions

WORKER_DRAWS = 10**12  # worker i numbers its draws and trajectories from i times this on
OWN_STATE = ("waiting", "delivered", "version")  # keys of the owner beside the worker's own state
GREEDY = (InteractionType.DETERMINISTIC, InteractionType.MODE)

# argument without effect on a language environment -> what to do instead
NOT_OF_LANGUAGE = {
    "device": "a language policy stays on the device where it is built; storing_device is for batches",
    "env_device": "conversations are not tensors: leave it out",
    "policy_device": "a language policy stays on the device where it is built: choose it there",
    "max_frames_per_traj": "a conversation's turns are bounded by its environment: give that max_steps",
    "init_random_frames": "random tokens are not a reply: leave it out",
    "split_trajs": "trajectories of conversations are never mixed: give yield_completed_trajectories=True",
    "set_truncated": "an unfinished conversation goes on in the next batch: leave it out",
    "trust_policy": "a policy of conversations is never wrapped: leave it out",
    "async_envs": "one language environment plays all its conversations together: raise its num_envs",
}
# argument without effect on frames -> what to do instead
NOT_OF_FRAMES = {
    "weight_updater": "the weights of a policy of frames are copied into it by their names: leave it out",
    "yield_completed_trajectories": "give split_trajs=True",
    "yield_only_last_steps": "give split_trajs=True",
    "flatten_data": "a FrameBuffer is written frame by frame whatever their shape: leave it out",
    "begin_ahead": "nothing of a later batch is played: leave it out",
    "verbose": "there are too many frames to print: leave it out",
}


# In the other process


def built_collector(
    *,
    create_env_fn: Callable[..., Any],
    policy: Any = None,
    policy_factory: Callable[[], Any] | None,
    frames_per_batch: int,
    collector_class: type[Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """The collector of an environment and a policy, which are built here too.

    `options` are further keyword arguments of the collector, and its `create_env_kwargs`. The default of
    `collector_class` is LLMCollector for a language environment, else Collector; one of several processes builds its
    environment there. Raises TypeError for an option without effect on the environment, and what building raises.
    """
    chosen: Any = collector_class
    options = dict(options)
    how: dict[str, Any] = {"policy_factory": policy_factory, "frames_per_batch": frames_per_batch}
    if inspect.isclass(chosen) and issubclass(chosen, RemoteCollector):
        return chosen(create_env_fn, policy, **how, **options)
    env = create_env_fn(**only_kwargs(options.pop("create_env_kwargs", None)))
    chosen = chosen or (LLMCollector if isinstance(env, EnvBase) else Collector)
    if not (inspect.isclass(chosen) and issubclass(chosen, LLMCollector)):
        return cast(Any, chosen)(made_env(env, None), policy, **how, **without(NOT_OF_FRAMES, options, "frames"))
    options = without(NOT_OF_LANGUAGE, options, "a language environment")
    exploration = options.pop("exploration_type", None)
    for name in ("reset_when_done", "storing_device"):
        options.pop(name, None)
    collector = chosen(
        env, policy=policy, policy_factory=policy_factory, dialog_turns_per_batch=frames_per_batch, **options
    )
    if (InteractionType.from_str(exploration) if isinstance(exploration, str) else exploration) in GREEDY:
        collector.policy.sampling = replace(collector.policy.sampling, temperature=0.0)
    collector.policy.start()
    return collector


def without(useless: Mapping[str, str], given: Mapping[str, Any], what_for: str) -> dict[str, Any]:
    """`given` without the `useless` ones. Raises TypeError if one of those asks for something, with its alternative."""
    for name, instead in useless.items():
        value = given.get(name)
        if value is not None and value is not False and not (isinstance(value, int) and value < 0):
            raise TypeError(f"{name} has no effect on {what_for}: {instead}")
    return {name: value for name, value in given.items() if name not in useless}


class CollectorHost:
    """Holds one collector in its process; calls are carried out in their order.

    Trajectories are numbered from `WORKER_DRAWS` times the worker's number on, apart from those of all others.
    """

    def __init__(self, number: int, num_threads: int) -> None:
        self.number = number
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # of processes that start here, engines included
        torch.set_num_threads(num_threads)
        self.collector: Any = None
        self._buffer: Any = None
        self._postproc: Callable[[TensorDictBase], TensorDictBase] | None = None

    def build(
        self, plan: bytes, policy: bytes | None = None, delivery: bytes | None = None
    ) -> tuple[int, bool, PolicyVersionLabel | None]:
        """Build the collector; returns its frames in a batch, whether they are turns, and the policy's version.

        `delivery`: the buffer to write batches to, and their postproc.
        """
        given = {} if policy is None else {"policy": cloudpickle.loads(policy)}
        if delivery is not None:
            self._buffer, self._postproc = cloudpickle.loads(delivery)
        self.collector = collector = cloudpickle.loads(plan)(**given)
        collector.number_as_worker(self.number)
        return collector.frames_per_batch, collector.plays_conversations, collector.get_policy_version()

    def next(self) -> TensorDictBase | int:
        """Collect one batch; returns its number of turns or frames if it goes into a buffer from here."""
        batch = self.collector.next()
        if self.number and (numbers := batch.get(TRAJ_IDS, None)) is not None:
            batch.set(TRAJ_IDS, numbers + self.number * WORKER_DRAWS)
        if self._buffer is None:
            return batch
        self._buffer.extend(postprocessed(batch, self._postproc))
        return batch.numel()

    def finish(self, close_env: bool = True) -> None:
        """Collect no more, and close the policy, and with `close_env` the environment."""
        if self.collector is None:
            return
        self.collector.shutdown(close_env=close_env)
        if isinstance(policy := getattr(self.collector, "policy", None), Policy):
            policy.close()

    close = finish  # when the owner is gone

    # The collector's own methods, for the owner and for a user's remote calls

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """See `CollectorBase.cascade_execute`."""
        return self.collector.cascade_execute(attr_path, *args, **kwargs)

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """See `CollectorBase.receive_weights`."""
        self.collector.receive_weights(policy_or_weights, weights=weights, policy=policy)

    def get_policy_version(self) -> PolicyVersionLabel | None:
        """See `WeightsCollector.get_policy_version`."""
        return self.collector.get_policy_version()


# In the owner's process


@dataclass
class Member:
    """A worker as its owner knows it."""

    remote: Any  # a `RemoteObject`, or an `Actor` of a cluster
    storing_device: torch.device | None = None  # of its batches, here
    policy_device: torch.device | None = None
    frames_per_batch: int = 0
    is_language: bool = False
    first_version: PolicyVersionLabel | None = None


class WorkerPool:
    """Collectors in other processes, by their numbers from 0. Each carries out its calls in their order."""

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self.members: dict[int, Member] = {}
        self.reported: set[int] = set()  # whose loss was raised

    def build(self, made: Mapping[int, Member], plans: Mapping[int, bytes], *parts: Any) -> None:
        """Build the collectors of these members; `parts` and errors are those of `CollectorHost.build`."""
        futures = {number: member.remote.submit("build", plans[number], *parts) for number, member in made.items()}
        self.members |= made
        for number, about in self.results(futures, "its collector to be built", START_SECONDS).items():
            member = made[number]
            member.frames_per_batch, member.is_language, member.first_version = about

    @property
    def lost(self) -> dict[int, PolicyError]:
        """Lost workers, each with the error that names how."""
        failures = {number: member.remote.failure for number, member in self.members.items()}
        return {number: failure for number, failure in failures.items() if failure is not None}

    def check(self) -> None:
        """Raise PolicyError for the first worker that was lost."""
        for number, failure in self.lost.items():
            self.reported.add(number)
            raise PolicyError(*failure.args)

    def results(
        self, futures: Mapping[int, Future[Any]], waited_for: str, seconds: float | None = None
    ) -> dict[int, Any]:
        """The answers by worker. Raises the first error as soon as it comes, PolicyError if one is late or lost."""
        within = self.wait_seconds if seconds is None else seconds
        done, late = wait_for(futures.values(), within, FIRST_EXCEPTION)
        for number, future in futures.items():
            if future in done and (error := future.exception()) is not None:
                self.reported |= {number} & self.lost.keys()
                raise error
        if late:
            raise self.late(waited_for, [number for number, future in futures.items() if future in late], within)
        return {number: future.result() for number, future in futures.items()}

    def late(self, waited_for: str, numbers: Sequence[int], seconds: float) -> PolicyError:
        """The error of workers that did not answer in time."""
        names = ", ".join(self.members[number].remote.name for number in numbers)
        return PolicyError(
            f"waited {seconds:.0f} s for {waited_for} of {names}: the policy or the environment may hang"
        )

    def call(self, method: str, *args: Any, numbers: Iterable[int] | None = None, **kwargs: Any) -> dict[int, Any]:
        """Call a method, named by its path, of the collectors of these workers (None: all); the results by worker."""
        self.check()
        chosen = {n: self.members[n].remote for n in (self.members if numbers is None else numbers)}
        futures = {n: remote.submit("cascade_execute", method, *args, **kwargs) for n, remote in chosen.items()}
        return self.results(futures, method)

    def finish(self, close_env: bool, seconds: float) -> dict[int, BaseException]:
        """Close the collectors of all living workers within `seconds`; returns errors, and losses not raised yet."""
        lost = self.lost
        errors: dict[int, BaseException] = {n: failure for n, failure in lost.items() if n not in self.reported}
        futures = {n: m.remote.submit("finish", close_env) for n, m in self.members.items() if n not in lost}
        _, late = wait_for(futures.values(), seconds)
        for number, future in futures.items():
            if future in late:
                errors[number] = self.late("finish", [number], seconds)
            elif (error := future.exception()) is not None:
                errors[number] = error
        return errors


class Batches:
    """Keeps at most one batch in flight at each worker, and at most `ahead` of each that are not delivered.

    With `joins` a batch of every worker is delivered at once, otherwise the first that is ready. With
    `update_interval` >= 0 a worker that has delivered more batches than that since its last update begins none
    before it is updated. Nothing begins before the first `take`, and after an error before the next one.
    """

    def __init__(
        self, workers: WorkerPool, *, total_frames: int, ahead: int, joins: bool = False, update_interval: int = -1
    ) -> None:
        self.workers = workers
        self.joins = joins
        self.total_frames = total_frames
        self.ahead = ahead
        self.update_interval = update_interval
        self._changed = threading.Condition()  # guards everything below
        self.delivered: Counter[int] = Counter()  # turns or frames, by worker
        self.since_update: Counter[int] = Counter()  # batches delivered since the last update, by worker
        self._in_flight: dict[int, Future[Any]] = {}
        self._waiting: deque[tuple[int, Any]] = deque()  # batches not delivered yet, with their workers
        self._delivered_last: list[int] = []  # workers of the batch that was delivered last
        self.error: BaseException | None = None  # of a batch, raised by the next call
        self._error_of = 0  # its worker
        self._has_begun = False
        self._takers = 0
        self._held_by: list[int] = []  # threads in a block of `held`

    @property
    def wants_more(self) -> bool:
        """Whether the total is not reached yet."""
        return self.total_frames < 0 or self.delivered.total() < self.total_frames

    def check(self) -> None:
        """Raise the error of a batch once, or the loss of a worker every time."""
        error, self.error = self.error, None
        if error is not None:
            self.workers.reported |= {self._error_of} & self.workers.lost.keys()
            raise error
        self.workers.check()

    def take(self) -> list[tuple[int, Any]]:
        """The next batch of every worker, or of the first that is ready, each with its worker's number.

        Raises as `check` does, PolicyError if no batch comes in time, and RuntimeError if none waits inside a block of
        `held`.
        """
        with self._changed:
            self.check()
            self._has_begun = True
            self._takers += 1
            try:
                self._ask()
                self._wait(self._can_deliver, "a batch")
            finally:
                self._takers -= 1
            batches = sorted(self._waiting, key=lambda each: each[0]) if self.joins else [self._waiting.popleft()]
            if self.joins:
                self._waiting.clear()
            for number, batch in batches:
                self.delivered[number] += _size(batch)
                self.since_update[number] += 1
            self._delivered_last = [number for number, _ in batches]
            self._ask()
        return [(number, self.moved(number, batch)) for number, batch in batches]

    def moved(self, number: int, batch: Any) -> Any:
        """A batch of worker `number`, moved to the worker's storing device."""
        device = self.workers.members[number].storing_device
        return batch if device is None or isinstance(batch, int) else batch.to(device)

    def _can_deliver(self) -> bool:
        ready = {number for number, _ in self._waiting}
        if ready.issuperset(self.workers.members) if self.joins else ready:
            return True
        if not self._in_flight and threading.get_ident() in self._held_by:
            raise RuntimeError("no batch is collected inside a block of pause(): take it before or after the block")
        return False

    def due(self) -> list[int]:
        """Workers that just delivered a batch and need new weights."""
        if self.update_interval < 0:
            return []
        return [number for number in self._delivered_last if self.since_update[number] > self.update_interval]

    def settled(self) -> None:
        """Let the workers that were due go on."""
        self._delivered_last = []

    def _ask(self) -> None:
        """Begin a batch at each worker with none in flight and room for one, as long as more are wanted."""
        if self._held_by or not self._has_begun:
            return
        members, due = self.workers.members, self.due()
        waiting = Counter(number for number, _ in self._waiting)
        most = max(self.ahead, 1 if self._takers else 0)
        for number in members:
            if number in self._in_flight or number in due or waiting[number] >= most:
                continue
            expected = self.delivered.total() + sum(_size(batch) for _, batch in self._waiting)
            expected += sum(members[n].frames_per_batch for n in self._in_flight)
            if self.joins or self.total_frames < 0 or expected < self.total_frames:
                future = members[number].remote.submit("next")
                self._in_flight[number] = future
                future.add_done_callback(lambda done, n=number: self._landed(n, done))

    def _landed(self, number: int, done: Future[Any]) -> None:
        """Keep a batch or an error that has arrived; runs in the receiving thread."""
        with self._changed:
            del self._in_flight[number]
            if (error := done.exception()) is None:
                self._waiting.append((number, done.result()))
            else:
                self._has_begun = False
                if self.error is None:
                    self.error, self._error_of = error, number
            self._ask()
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], waited_for: str) -> None:
        deadline = time.monotonic() + self.workers.wait_seconds
        while not until():
            self.check()
            if not self._changed.wait(deadline - time.monotonic()):
                raise self.workers.late(waited_for, list(self._in_flight), self.workers.wait_seconds)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which no worker collects; waits for the batches in flight first. Raises as `check` does."""
        self.check()
        thread = threading.get_ident()
        with self._changed:
            self._held_by.append(thread)
        try:
            with self._changed:
                self._wait(lambda: not self._in_flight, "the batch in flight")
            yield
        finally:
            with self._changed:
                self._held_by.remove(thread)
                self._ask()
                self._changed.notify_all()

    def forget(self) -> None:
        """Discard the batches that were not delivered; inside a block of `held`."""
        with self._changed:
            self._waiting.clear()
            self._has_begun = False
            self.settled()

    def state_of(self, number: int) -> dict[str, Any]:
        """The undelivered batches of worker `number`, and how much of it was delivered; inside a block of `held`."""
        plain = to_plain if self.workers.members[number].is_language else (lambda batch: batch)
        waiting = [plain(batch) for n, batch in self._waiting if n == number and not isinstance(batch, int)]
        return {"waiting": waiting, "delivered": self.delivered[number]}

    def load_state_of(self, number: int, state: Mapping[str, Any]) -> None:
        """Continue with worker `number` from `state_of`, or from its own collector's state, after `forget`."""
        read = from_plain if self.workers.members[number].is_language else (lambda batch: batch)
        kept = [read(batch) for batch in state.get("waiting", ())]
        own = state.get("frames", state.get("turns_delivered", 0)) - sum(map(_size, kept))
        self._waiting += [(number, batch) for batch in kept]
        self.delivered[number] = state.get("delivered", own)


def _size(batch: Any) -> int:
    """Turns or frames of a batch, which is their number where the worker has written it to its buffer."""
    return batch if isinstance(batch, int) else batch.numel()


class ChildPolicy(Policy):
    """Stands for the policy of collectors in other processes: its version, and the `model` whose weights it gets."""

    shares_weights = False

    def __init__(self, given: Any) -> None:
        super().__init__(sampling=SamplingSettings())
        model = given if isinstance(given, torch.nn.Module) else getattr(given, "model", None)
        self.model = model if isinstance(model, torch.nn.Module) else None

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Raises PolicyError: it samples in its collector's process alone."""
        raise PolicyError("this policy samples in its collector's process: build another to sample with here")


class RemoteCollector(WeightsCollector):
    """A collector whose environments and policies are in the processes of `_workers`."""

    batches_ahead: int | None
    frames_per_batch: int

    def __init__(self, policy: Any, replay_buffer: Any, *, wait_seconds: float, **how: Any) -> None:
        super().__init__(cast(EnvBase, None), replay_buffer, wait_seconds=wait_seconds)  # it has its envs elsewhere
        self.policy = ChildPolicy(policy)
        self._workers = WorkerPool(wait_seconds)
        self._batches = Batches(self._workers, **how)

    def _begin(self, tracked: bool | PolicyVersion) -> None:
        """Begin with the version of the workers' policies, once they are built."""
        self.policy_version_tracker = PolicyVersion() if tracked is True else tracked or None
        if self.policy_version_tracker is not None:
            begin_versions(self.policy, self.policy_version_tracker)
        first = next(iter(self._workers.members.values())).first_version
        self.policy.version = self.policy.version if first is None else first
        if isinstance(self.replay_buffer, ReplayBuffer):
            self._claim(self.replay_buffer)

    @property
    def plays_conversations(self) -> bool:
        """See `CollectorBase.plays_conversations`."""
        return any(member.is_language for member in self._workers.members.values())

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`."""
        return self._batches.wants_more

    @property
    def is_ahead(self) -> bool:
        """See `CollectorBase.is_ahead`: `batches_ahead` batches of rows wait in a ReplayBuffer."""
        if self.batches_ahead is None or not isinstance(self.replay_buffer, ReplayBuffer):
            return False
        return self.replay_buffer.num_rows >= self.batches_ahead * self.frames_per_batch

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `CollectorBase.pause`; batches that have come already are delivered."""
        self._check_open("use")
        with super().pause(), self._batches.held():
            yield

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`init_updater` of each collector with these arguments."""
        self._check_open("use")
        self._workers.call("init_updater", *args, **kwargs)

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """`reset` of each collector with these arguments. Batches that wait are still delivered."""
        with self.pause():
            self._workers.call("reset", index, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the first collector, each other with the seed that the one before returned; returns the last one's.

        Batches of another seed that were not delivered yet are discarded. With `static_seed` all have the same.
        """
        with self.pause():
            self._batches.forget()
            for number in self._workers.members:
                seed = self._workers.call("set_seed", seed, static_seed, numbers=[number])[number]
        return seed

    def _states(self) -> list[dict[str, Any]]:
        """The state of each collector, with its batches that were not delivered yet."""
        with self.pause():
            states = self._workers.call("state_dict")
            version = self.policy_version
            return [{**state, **self._batches.state_of(n), "version": version} for n, state in states.items()]

    def _load_states(self, states: Sequence[Mapping[str, Any]], strict: bool) -> None:
        """Continue from a state for each collector."""
        members = self._workers.members
        with self.pause():
            self._batches.forget()
            for number, state in zip(members, states, strict=True):
                inner = {name: value for name, value in state.items() if name not in OWN_STATE}
                self._workers.call("load_state_dict", inner, strict, numbers=[number])
                self._batches.load_state_of(number, state)
            there = self._workers.call("get_policy_version")[next(iter(members))]
            self.policy.version = states[0].get("version", self.policy.version if there is None else there)

    def is_initialized(self) -> bool:
        """Whether batches can be collected: until `shutdown`, or the loss of a worker."""
        return not self._is_shut_down and not self._workers.lost


def pickled(where: str, whole: Any, parts: Mapping[str, Any]) -> bytes:
    """`whole` as bytes. Raises TypeError with the name of the first of its `parts` that cannot be pickled."""
    try:
        return cloudpickle.dumps(whole)
    except Exception as error:
        single = {name: part for name, part in parts.items() if name != "options"}  # each option is among the parts
        name = next((name for name, part in single.items() if not _can_be_pickled(part)), "options")
        raise TypeError(
            f"{name} cannot be sent to {where} ({error}): build what it needs in create_env_fn or in policy_factory, "
            "which are called there"
        ) from error


def _can_be_pickled(part: Any) -> bool:
    try:
        cloudpickle.dumps(part)
    except Exception:  # noqa: BLE001  whatever a stranger's class raises
        return False
    return True
