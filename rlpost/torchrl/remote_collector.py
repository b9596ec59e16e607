"""AsyncCollector, RayCollector and RayLLMCollector: collectors in other processes, used as one.

Each process has a `CollectorWorker`. `rlpost.policies.remote.Players` starts the processes and pushes weights to them,
`Batches` keeps one batch in flight at each, and `RemoteCollector` is what both collectors have in common.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import InteractionType

from rlpost.data.conversation import Conversation, PolicyVersionLabel, next_version
from rlpost.envs.base import EnvBase, Transform
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.errors import PolicyError
from rlpost.policies.base import Policy
from rlpost.policies.remote import NewWorker, Players, RemotePolicy, Seat
from rlpost.remote import cluster
from rlpost.remote.process import END_SECONDS, WorkerProcess
from rlpost.settings import SamplingSettings
from rlpost.torchrl.batches import concat_rows
from rlpost.torchrl.collector import Collector, Device, made_env, one_device
from rlpost.torchrl.collector_base import MODEL_ID, WeightsCollector, WorkerIds, postprocessed
from rlpost.torchrl.frames import TRAJ_IDS, ParallelEnv, split_trajectories
from rlpost.torchrl.llm_collector import LLMCollector
from rlpost.weight_sync.base import WeightSource, begin_versions
from rlpost.weight_sync.folder import FolderUpdater, RayWeightSyncScheme

log = logging.getLogger("rlpost")
WORKER_DRAWS = 10**12  # worker i numbers its draws and trajectories from i times this on
OWN_STATE = ("waiting", "delivered", "version")  # keys of the owner beside the worker's own state
DEFAULTS = {"num_cpus": 1, "memory": 2 * 1024**3}  # of a worker
GPU_SHARE = 0.2  # of a GPU for each worker, if the cluster has any
DEVICES = ("device", "storing_device", "env_device", "policy_device")
GREEDY = (InteractionType.DETERMINISTIC, InteractionType.MODE)
Plan = tuple[bytes, Mapping[str, Any]]  # how a worker's collector is built, and what its actor asks for


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
    `collector_class` is LLMCollector for a language environment, else Collector. Raises TypeError for an option without
    effect, and what building raises.
    """
    chosen: Any = collector_class
    options = dict(options)
    how: dict[str, Any] = {"policy_factory": policy_factory, "frames_per_batch": frames_per_batch}
    env = made_env(create_env_fn, options.pop("create_env_kwargs", None))
    chosen = chosen or (LLMCollector if isinstance(env, EnvBase) else Collector)
    if not (inspect.isclass(chosen) and issubclass(chosen, LLMCollector)):
        return cast(Any, chosen)(env, policy, **how, **with_effect(options, chosen))
    exploration = options.pop("exploration_type", None)
    for name in ("reset_when_done", "storing_device"):
        options.pop(name, None)
    how["dialog_turns_per_batch"] = how.pop("frames_per_batch")
    collector = chosen(env, policy=policy, **how, **with_effect(options, chosen))
    if (InteractionType.from_str(exploration) if isinstance(exploration, str) else exploration) in GREEDY:
        collector.policy.sampling = replace(collector.policy.sampling, temperature=0.0)
    collector.policy.start()
    return collector


def with_effect(options: Mapping[str, Any], collector: Any) -> dict[str, Any]:
    """The `options` that `collector` takes. Raises TypeError for another one, unless it asks for nothing."""
    known = inspect.signature(collector).parameters
    for name, value in options.items():
        if name not in known and value not in (None, False) and not (isinstance(value, int) and value < 0):
            raise TypeError(
                f"{name} has no effect on the collector of this environment: leave it out, or set what it asks for "
                "where the environment and the policy are built"
            )
    return {name: value for name, value in options.items() if name in known}


class CollectorWorker:
    """One collector in its process; calls are carried out in their order.

    Trajectories are numbered from `WORKER_DRAWS` times the worker's number on, apart from those of all others.
    """

    def __init__(self, number: int, num_threads: int, plan: bytes) -> None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # of processes that start here, engines included
        torch.set_num_threads(num_threads)
        self.number = number
        self.collector = cloudpickle.loads(plan)()
        self.collector.worker_idx = number

    def about(self) -> tuple[int, bool]:
        """How many frames are in a batch, and whether they are turns of conversations."""
        return self.collector.frames_per_batch, self.collector.plays_conversations

    def next(self) -> TensorDictBase:
        """Collect one batch."""
        batch = self.collector.next()
        if self.number and (numbers := batch.get(TRAJ_IDS, None)) is not None:
            batch.set(TRAJ_IDS, numbers + self.number * WORKER_DRAWS)
        return batch

    def push(self, folder: Path, version: PolicyVersionLabel, *, wait: bool, adapter: bool) -> None:
        """Load the weights in `folder`: `Players` call this. No batch is in flight then, so there is no `wait`."""
        self.collector.take_up(folder, version, adapter=adapter)

    def set_version(self, version: PolicyVersionLabel) -> None:
        """See `CollectorBase.set_version`: `Players` call this."""
        self.collector.set_version(version)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """See `CollectorBase.cascade_execute`."""
        return self.collector.cascade_execute(path, *args, **kwargs)

    def finish(self, close_env: bool) -> None:
        """Collect no more, and close the policy, and with `close_env` the environment."""
        self.collector.shutdown(close_env=close_env)
        if isinstance(policy := getattr(self.collector, "policy", None), Policy):
            policy.close()

    def close(self) -> None:
        """End with everything that was built here: the process calls this when it is closed."""
        self.finish(close_env=True)


def worker_env(make: Any, worker: int, copies: int, **kwargs: Any) -> Any:
    """The environment of a worker: `make(**kwargs)`, or `make` itself, or `copies` of it in step."""
    env = made_env(make, kwargs)
    if isinstance(env, EnvBase):
        return env.append_transform(NumberedApart(worker))
    if copies == 1:
        return env
    if hasattr(env, "close"):
        env.close()
    return ParallelEnv(copies, make, create_env_kwargs=kwargs)


class NumberedApart(Transform):
    """Numbers the draws of a worker from `WORKER_DRAWS` times its number on, apart from all others."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """See `Transform.on_begin`."""
        for conversation in conversations:
            conversation.group_id += self.worker * WORKER_DRAWS


# In the owner's process


class RemoteCollector(WeightsCollector):
    """A collector whose environments and policies are in the processes that `new_worker` makes, one a number from 0.

    Each worker collects one batch, and the next one as soon as that is delivered. With `joins` a batch of every worker
    is delivered at once, and the next ones begin when they are asked for; otherwise it is the first that is ready. With
    `update_interval` >= 0 a worker that has delivered more batches than that since its last update begins none before
    it is updated. Nothing begins before the first batch is asked for. `tracked` is the constructor's
    `track_policy_version`.
    """

    policy: Any  # a RemotePolicy
    weight_updater: Any  # a FolderUpdater
    split_trajs = False

    def __init__(
        self,
        new_worker: NewWorker,
        policy: Any,
        replay_buffer: Any,
        *,
        wait_seconds: float,
        frames_per_batch: int,
        total_frames: int,
        batches_ahead: int | None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        tracked: bool | PolicyVersion,
        joins: bool,
        update_interval: int,
        adapter: bool = False,
    ) -> None:
        super().__init__(cast(EnvBase, None), replay_buffer, wait_seconds=wait_seconds)  # it has its envs elsewhere
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.batches_ahead = batches_ahead
        self.postproc = postproc
        self._joins = joins
        self._update_interval = update_interval
        self._players = players = Players(new_worker, 0)
        self._storing_devices: dict[int, torch.device | None] = {}  # of each worker's batches, here
        self._policy_devices: dict[int, torch.device | None] = {}
        self._frames: dict[int, int] = {}  # in a batch of each worker
        self._delivered: Counter[int] = Counter()  # turns or frames, by worker
        self._since_update: Counter[int] = Counter()  # batches delivered since the last update, by worker
        self._due: list[int] = []  # workers to update before they begin another batch
        self._begun: dict[int, Future[TensorDictBase]] = {}  # by worker, until it is delivered
        self._paused = 0  # blocks of `pause`
        self._lock = threading.RLock()  # of all these
        self._sending = threading.RLock()  # of weights
        self._sent: WeightSource | None = None  # the weights that were sent last
        self.policy = RemotePolicy(players, None, sampling=SamplingSettings(), pushes_adapter=adapter)
        self.policy.version = getattr(policy, "version", 0)
        self.policy.model = policy if isinstance(policy, torch.nn.Module) else getattr(policy, "model", None)
        self.weight_updater = FolderUpdater(self.policy)
        self.policy_version_tracker = PolicyVersion() if tracked is True else tracked or None
        if self.policy_version_tracker is not None:
            begin_versions(self.policy, self.policy_version_tracker)
        self._newest = players.first_version = self.policy.version  # the last that a worker may have

    def _start(self, count: int) -> None:
        """Start `count` more workers. If one cannot be built none is kept: raises what building raises."""
        for seat in self._players.add(count):
            about = seat.process.call("about", seconds=self.wait_seconds)
            self._frames[seat.number], self.plays_conversations = about

    def _call(self, method: str, *args: Any, seats: Sequence[Seat] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method, named by its path, of the collectors in `seats` (None: all) side by side; their results."""
        self._check_alive()
        chosen = self._players.seats if seats is None else seats

        def call(seat: Seat) -> Any:
            return seat.process.call("call", method, *args, seconds=self.wait_seconds, **kwargs)

        with ThreadPoolExecutor(len(chosen), "rlpost-call") as pool:
            return list(pool.map(call, chosen))

    @property
    def _loss(self) -> PolicyError | None:
        """The error that names the first worker that was lost."""
        return next((loss for seat in self._players.seats if (loss := seat.process.failure) is not None), None)

    def _check_alive(self) -> None:
        if (loss := self._loss) is not None:
            raise loss

    # Batches

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`."""
        return self.total_frames < 0 or self._delivered.total() < self.total_frames

    def _collected(self) -> TensorDictBase:
        """The next batch of every worker, or of the first that is ready; workers that are due get weights before.

        Raises the error of a batch, the loss of a worker, PolicyError if no batch comes in time, and RuntimeError if
        none has come inside a block of `pause`.
        """
        source = self.policy.model if self._sent is None else self._sent
        if self._due and source is not None:
            self._send(source, [self._players.seats[number] for number in self._due])
        self._due.clear()
        with self._lock:
            batch = self._joined(self._ready_batches())
        return postprocessed(split_trajectories(batch) if self.split_trajs else batch, self.postproc)

    def _ready_batches(self) -> dict[int, TensorDictBase]:
        self._check_alive()
        self._begin()
        if len(self._begun) < (len(self._frames) if self._joins else 1):
            raise RuntimeError("no batch is collected inside a block of pause(): take it before or after the block")
        self._wait("a batch", FIRST_EXCEPTION if self._joins else FIRST_COMPLETED)
        ready = [number for number, batch in self._begun.items() if batch.done()]
        batches = {n: self._begun.pop(n).result() for n in (sorted(ready) if self._joins else ready[:1])}
        for number, batch in batches.items():
            self._delivered[number] += batch.numel()
            self._since_update[number] += 1
            if 0 <= self._update_interval < self._since_update[number]:
                self._due.append(number)
        if not self._joins:
            self._begin()
        return batches

    def _begin(self) -> None:
        """Begin a batch at each worker that has none and is not due, as long as more are wanted."""
        for number in () if self._paused else self._frames.keys() - self._begun.keys() - set(self._due):
            expected = self._delivered.total() + sum(self._frames[n] for n in self._begun)
            if self._joins or self.total_frames < 0 or expected < self.total_frames:
                self._begun[number] = self._players.seats[number].process.submit("next")

    def _wait(self, waited_for: str, until: str) -> None:
        """Wait for the batches that were begun, all or one. Raises the error of a batch, once, or PolicyError."""
        done, late = wait(self._begun.values(), self.wait_seconds, until)
        for number, batch in list(self._begun.items()):
            if batch in done and (error := batch.exception()) is not None:
                del self._begun[number]
                raise error
        if late and (until != FIRST_COMPLETED or not done):
            names = ", ".join(self._players.seats[n].process.name for n, batch in self._begun.items() if batch in late)
            raise PolicyError(
                f"waited {self.wait_seconds:.0f} s for {waited_for} of {names}: the policy or the environment may hang"
            )

    def rollout(self) -> TensorDictBase:
        """One batch of all workers, collected now and returned, even with a buffer; others are delivered later."""
        with self.pause():
            return self._joined(dict(enumerate(self._call("rollout"))))

    def _joined(self, by_worker: Mapping[int, TensorDictBase]) -> TensorDictBase:
        """The batches of workers, each on its storing device, one after the other along their first dimension.

        Conversations are ragged, (B,) or (B, T); frames (*batch_size, T) are dense.
        """
        devices = self._storing_devices
        batches: list[Any] = [b if devices[n] is None else b.to(devices[n]) for n, b in by_worker.items()]
        if len(batches) == 1:
            return batches[0]
        if not self.plays_conversations:
            return torch.cat(batches, dim=0)  # pyright: ignore[reportReturnType]
        if batches[0].ndim == 1:
            return concat_rows(batches)
        steps = zip(*(batch.unbind(1) for batch in batches), strict=True)
        return LazyStackedTensorDict.lazy_stack([concat_rows(each) for each in steps], -1)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See `CollectorBase.pause`; waits for the batches in flight, which are delivered later."""
        self._check_open("use")
        with super().pause(), self._lock:
            self._check_alive()
            self._wait("the batch in flight", ALL_COMPLETED)
            self._paused += 1
            try:
                yield
            finally:
                self._paused -= 1

    # Weights

    def _push(self, source: WeightSource, worker_ids: WorkerIds | None) -> None:
        """See `update_policy_weights_`: the version rises once all workers have answered, after their batches.

        Raises what a worker raises, whose name is in a note; the others have the new weights then, and the version
        rises.
        """
        self._check_open("send weights with")
        wanted = [worker_ids] if isinstance(worker_ids, int | torch.device) else worker_ids
        seats = self._players.seats
        self._send(
            source,
            [s for s in seats if wanted is None or s.number in wanted or self._policy_devices[s.number] in wanted],
        )

    def _send(self, source: WeightSource, seats: list[Seat]) -> None:
        """Send the weights of `source` to `seats`, and wait for all. Raises as `_push` does."""
        self._check_alive()
        with self._sending:
            version = next_version(self._newest)
            try:
                self.weight_updater.send(self.policy, source, version, seats)
            except PolicyError:
                self._newest = version  # a worker that is late may load them yet
                raise
            finally:
                reached = [seat.number for seat in seats if seat.version == version]
                if reached:
                    self._newest, self._sent = version, source
                    self.policy.become(version)
                    self._since_update.update(dict.fromkeys(reached, 0))
        self._check_alive()  # a worker may have been lost meanwhile

    def take_up(self, folder: Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`: every worker loads the same folder."""
        self._players.push(folder, version, seats=self._players.seats, wait=True, adapter=adapter)
        self._newest = version
        self.policy.become(version)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`init_updater` of each collector with these arguments."""
        self._check_open("use")
        self._call("init_updater", *args, **kwargs)

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """`reset` of each collector with these arguments. Batches that wait are still delivered."""
        with self.pause():
            self._call("reset", index, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the first collector, each other with the seed that the one before returned; returns the last one's.

        Batches of another seed that were not delivered yet are discarded. With `static_seed` all have the same.
        """
        with self.pause():
            self._begun.clear()
            for seat in self._players.seats:
                [seed] = self._call("set_seed", seed, static_seed, seats=[seat])
        return seed

    def state_dict(self) -> Any:
        """The state of each worker's collector, with its batch that was not delivered yet, in a list."""
        with self.pause():
            states = self._call("state_dict")
            for number, state in enumerate(states):
                waiting = self._begun.get(number)
                state["waiting"] = None if waiting is None else waiting.result()
                state["delivered"] = self._delivered[number]
                state["version"] = self.policy_version
            return states

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Continue from `state_dict`: a list has one state for each worker, a single one is for all.

        Batches that wait are discarded. Raises ValueError for a list of another length.
        """
        single = isinstance(state_dict, Mapping)
        states = [state_dict] * len(self._players.seats) if single else state_dict
        with self.pause():
            self._begun.clear()
            for seat, state in zip(self._players.seats, states, strict=True):
                inner = {name: value for name, value in state.items() if name not in OWN_STATE}
                self._call("load_state_dict", inner, strict, seats=[seat])
                self._delivered[seat.number] = state["delivered"]
                if (waiting := state["waiting"]) is not None:
                    self._begun[seat.number] = came = Future()
                    came.set_result(waiting)
            self._newest = states[0]["version"]
            self.set_version(self._newest)

    # The end

    def is_initialized(self) -> bool:
        """Whether batches can be collected: until `shutdown`, or the loss of a worker."""
        return not self._is_shut_down and self._loss is None

    def _stop(self, timeout: float | None, close_env: bool) -> None:
        """Close the collectors, with `close_env` their environments too, and end the processes with all they started.

        They have `timeout` seconds (None: 20) before they are killed, which is an error. Raises the error of a batch
        that was not raised yet.
        """
        seconds = END_SECONDS if timeout is None else timeout
        if (loss := self._loss) is not None:
            log.warning("%s", loss)
        alive = [seat.process for seat in self._players.seats if seat.process.failure is None]
        try:
            super()._stop(timeout, close_env=False)
            with ThreadPoolExecutor(max(1, len(alive)), "rlpost-call") as pool:
                list(pool.map(lambda worker: worker.call("finish", close_env, seconds=seconds), alive))
            for batch in self._begun.values():
                batch.result(seconds)
        finally:
            self._players.close(seconds)

    def __del__(self) -> None:
        if hasattr(self, "_players"):  # a constructor may have failed before
            for seat in self._players.seats:
                seat.process.kill("was held by nobody any more")
        super().__del__()


def pickled(parts: Mapping[str, Any], whole: Any) -> bytes:
    """`whole` as bytes. Raises TypeError with the name of the first of its `parts` that cannot be sent elsewhere."""
    try:
        return cloudpickle.dumps(whole)
    except Exception:
        for name, part in parts.items():
            try:
                cloudpickle.dumps(part)
            except Exception as error:
                raise TypeError(
                    f"{name} cannot be sent to another process ({error}): build what it needs in create_env_fn or in "
                    "policy_factory, which are called there"
                ) from error
        raise


def _length(given: Any) -> int:
    """The length of a list; 1 for anything else."""
    return len(given) if isinstance(given, (list, tuple)) else 1


def _own(given: Any, number: int) -> Any:
    """The entry of worker `number`: of a list its own, or the only one; anything else is for all."""
    if not isinstance(given, (list, tuple)):
        return given
    return given[0] if len(given) == 1 else given[number]


# The collectors


class AsyncCollector(RemoteCollector):
    """Iterates over the batches of one collector in a process of its own, or fills a replay buffer with them.

    `create_env_fn(**create_env_kwargs)` and `policy_factory()` are called there; a `policy` is sent as a copy. The
    default of `collector_class` is LLMCollector for a language environment, where `frames_per_batch` counts turns of
    conversations, and else Collector. `options` are further arguments of that class, such as `env_device`,
    `policy_device`, `create_env_kwargs`, `max_frames_per_traj`, `init_random_frames`, `reset_at_each_iter`,
    `split_trajs`, `exploration_type`, `reset_when_done` and `set_truncated`. All is sent by cloudpickle, so it may be a
    lambda.

    Collecting begins when the first batch is asked for; the next one is collected while that is used. With
    `replay_buffer` each is written to it when it is taken, and iteration yields None; `start` fills it in the
    background: a ReplayBuffer of groups until `batches_ahead` batches of rows wait there to be taken, one of frames all
    the time. `postproc` is called here. Iteration ends after `total_frames`, a multiple of `frames_per_batch` (-1:
    never).

    `update_policy_weights_` waits for the batch in flight, and the next one is collected with the new weights. With
    `update_at_each_batch` weights are sent after each batch too: the ones sent last, or else the weights of `policy`.
    They are sent as a folder in memory, with the version that this process counts.
    `weight_updater`, a constructor, loads them there, if a language policy does not do that itself. `num_threads` is
    torch's number of threads here, until `shutdown`, and `num_sub_threads` there.

    An error there is raised here by the next call, with the traceback as a note; a death of the process is a
    PolicyError that says how it ended. Both wake whoever waits. `shutdown`, the end of a `with` block and of the
    collector end the process and all it has started. Raises TypeError for arguments that have no effect, and what
    building the environment and the policy raises.

    >>> import torch
    >>> from rlpost.collectors import AsyncCollector
    >>> from rlpost.envs import GymEnv
    >>> env_maker = lambda: GymEnv("Pendulum-v1")  # doctest: +SKIP
    >>> collector = AsyncCollector(env_maker, torch.nn.Linear(3, 1), frames_per_batch=200)  # doctest: +SKIP
    >>> collector.next().batch_size  # doctest: +SKIP
    torch.Size([200])
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Device | Sequence[Device] | None = None,
        storing_device: Device | Sequence[Device] | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        update_at_each_batch: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        track_policy_version: bool | PolicyVersion = False,
        replay_buffer: Any = None,
        collector_class: type[Any] | None = None,
        batches_ahead: int = 2,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        options |= {"device": device, "track_policy_version": track_policy_version is not False}
        storing = one_device(device if storing_device is None else storing_device)
        if storing is not None:
            options["storing_device"] = "cpu"  # there
        parts = {"create_env_fn": create_env_fn, "policy": policy, "policy_factory": policy_factory}
        how = {"frames_per_batch": frames_per_batch, "collector_class": collector_class, "options": options}
        plan = pickled(parts | options, partial(built_collector, **parts, **how))

        def new_worker(number: int) -> WorkerProcess:
            return WorkerProcess(
                partial(CollectorWorker, number, num_sub_threads, plan), name="the collector's process"
            )

        super().__init__(
            new_worker,
            policy,
            replay_buffer,
            wait_seconds=wait_seconds,
            frames_per_batch=frames_per_batch,
            batches_ahead=batches_ahead,
            postproc=postproc,
            tracked=track_policy_version,
            total_frames=-1 if total_frames is None else total_frames,
            joins=False,
            update_interval=0 if update_at_each_batch else -1,
        )
        self._storing_devices[0] = self._policy_devices[0] = storing
        self._start(1)
        self.frames_per_batch = self._frames[0]
        self._threads_before = torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.num_threads = num_threads

    def state_dict(self) -> dict[str, Any]:
        """The collector's state, with its policy's and its environment's, and the batch that was not taken yet."""
        return super().state_dict()[0]

    def _stop(self, timeout: float | None, close_env: bool) -> None:
        if self.num_threads is not None:
            torch.set_num_threads(self._threads_before)
        super()._stop(timeout, close_env)


class RayCollector(RemoteCollector):
    """Iterates over the batches of collectors in the processes of a Ray cluster, or fills a replay buffer with them.

    `create_env_fn` makes the environment, or is one, in each process; a list has one for each collector, and otherwise
    there are `num_collectors` (default: 1). `policy_factory`, `collector_kwargs`, `remote_configs` and devices may be
    lists too. Each process has a `collector_class`; the default is LLMCollector for a language environment, where
    `frames_per_batch` counts turns, and else Collector, with `num_workers_per_collector` copies of the environment in
    step. `options` are its arguments, such as `trust_policy`, `device`, `storing_device`,
    `env_device`, `policy_device`, `max_frames_per_traj`, `reset_at_each_iter`, `exploration_type` and
    `weight_updater`; `collector_kwargs` are too, and override them. All are sent by cloudpickle.

    With `sync` a batch joins a part of every collector, `frames_per_batch` in all; otherwise it is the first batch
    that is ready, of one collector, and the others go on meanwhile. Iteration ends once at least `total_frames` are
    delivered (-1: never). `split_trajs` and `postproc` are applied to the whole batch, here. With `replay_buffer`
    batches go there and iteration yields None; `start` fills it from a thread of its own.

    Worker i numbers draws and trajectories from i * 10**12 on, so that no two workers have a group of one number;
    `set_seed` gives each worker the seed that the one before has returned, so that their draws differ.
    `update_policy_weights_` sends the weights as one copy a machine, or with a `weight_sync_schemes` of
    `{"policy": RayWeightSyncScheme(adapter=True)}` the adapter alone, and raises the version once all have answered;
    nothing is sent before the first call. With `update_after_each_batch` a worker is updated before it begins another
    batch; with `max_weight_update_interval` it is updated once it has delivered more batches than that since its
    last update. It gets the weights that were sent last, or else the weights of `policy`.

    `ray_init_config` goes to `ray.init` if Ray does not run yet; without it a running cluster is used, or else one
    is started here. `remote_configs` go to `ray.remote` for each actor; the default is one CPU, 2 GiB, and 0.2 GPUs if
    the cluster has any. Each worker has `place_seconds` to find a place, and each answer `wait_seconds`. An error in a
    worker is raised here with its traceback and its name as notes; a lost one is a PolicyError that names it. Raises
    TypeError for arguments that have no effect, ValueError for frames that cannot be split, MissingExtraError without
    ray.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = False,
        collector_class: type[Any] | None = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        replay_buffer: Any = None,
        weight_sync_schemes: Mapping[str, RayWeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, RayWeightSyncScheme] | None = None,
        track_policy_version: bool | PolicyVersion = False,
        batches_ahead: int | None = 2,
        place_seconds: float = 300.0,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        count = num_collectors or max(_length(create_env_fn), _length(policy_factory))
        shares = count if sync else 1
        if frames_per_batch % shares:
            raise ValueError(
                f"frames_per_batch={frames_per_batch} cannot be split over {count} collectors: give a multiple, or "
                "sync=False, where each collects all of them"
            )
        if init_random_frames and init_random_frames > 0:
            options["init_random_frames"] = ceil(init_random_frames / shares)
        self._build = partial(
            built_collector, frames_per_batch=frames_per_batch // shares, collector_class=collector_class
        )
        tracked = (_own(collector_kwargs, 0) or {}).get("track_policy_version", track_policy_version)
        self._options = options
        self._given: dict[str, Any] = {
            "policy": policy,
            "policy_factory": policy_factory,
            "collector_kwargs": collector_kwargs,
            "remote_configs": remote_configs,
        }
        self._ray = ray = cluster.joined("RayCollector", ray_init_config)
        self._plans: dict[int, Plan] = {}
        plans, copies = self._plans, cluster.Copies(ray)

        def new_worker(number: int) -> cluster.RayWorker:
            plan, config = plans[number]
            num_threads = max(1, int(config["num_cpus"]))
            return cluster.RayWorker(
                ray,
                lambda folder: partial(CollectorWorker, number, num_threads, plan),
                None,
                name=f"worker {number} of the RayCollector",
                options=config,
                environment={},
                copies=copies,
                place_seconds=place_seconds,
            )

        scheme = (weight_sync_schemes or {MODEL_ID: RayWeightSyncScheme()})[MODEL_ID]
        super().__init__(
            new_worker,
            policy,
            replay_buffer,
            wait_seconds=wait_seconds,
            frames_per_batch=frames_per_batch,
            batches_ahead=batches_ahead,
            postproc=postproc,
            tracked=tracked,
            adapter=scheme.adapter,
            total_frames=total_frames,
            joins=sync,
            update_interval=0 if update_after_each_batch else max_weight_update_interval,
        )
        self.split_trajs = bool(split_trajs)
        self._add(create_env_fn, count, copies=num_workers_per_collector, **self._given)
        if split_trajs and self.plays_conversations:
            self.shutdown()
            raise TypeError("split_trajs has no effect on conversations: give yield_completed_trajectories=True")
        if weight_recv_schemes is not None:
            self.register_scheme_receiver(weight_recv_schemes)

    def _add(
        self,
        create_env_fn: Any,
        count: int,
        *,
        copies: int,
        policy: Any,
        policy_factory: Any,
        collector_kwargs: Any,
        remote_configs: Any,
    ) -> None:
        """Start `count` workers, each with its own entry of the arguments that are lists, devices too.

        Raises PolicyError if one finds no place in time, TypeError for a part that cannot be sent, and what building
        raises; all of them are ended then.
        """
        defaults = {**DEFAULTS, "num_gpus": GPU_SHARE if cluster.has_gpus(self._ray) else 0}
        first = len(self._players.seats)
        for i in range(count):
            options = {**self._options, **{name: _own(self._options.get(name), i) for name in DEVICES}}
            options |= _own(collector_kwargs, i) or {}
            places = [options["device"] if options[name] is None else options[name] for name in DEVICES[1:]]
            self._storing_devices[first + i], _, self._policy_devices[first + i] = map(one_device, places)
            options["storing_device"] = "cpu"  # there, from where batches are sent
            options["track_policy_version"] = self.policy_version_tracker is not None
            config = defaults | (_own(remote_configs, i) or {})
            if config.pop("max_restarts", 0):
                raise TypeError("remote_configs has max_restarts: a restarted collector has lost its state")
            env = partial(worker_env, _own(create_env_fn, i), first + i, copies)
            parts = {"create_env_fn": env, "policy": policy, "policy_factory": _own(policy_factory, i)}
            self._plans[first + i] = pickled(parts | options, partial(self._build, **parts, options=options)), config
        self._start(count)

    @property
    def remote_collectors(self) -> list[Any]:
        """The workers, in the order of their numbers: `worker.call("call", path, ...)` is `cascade_execute` there."""
        return [seat.process for seat in self._players.seats]

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Add a collector for each of `create_env_fn`, of `num_envs` copies of it in step; also while iterating.

        Defaults are those of the others, and each collects as many frames as one of them. Weights that were sent
        before are sent to all again, as a new version. Raises as the constructor does.
        """
        self._check_open("add collectors to")
        given = {"collector_kwargs": collector_kwargs, "remote_configs": remote_configs}
        given = self._given | {name: value for name, value in given.items() if value is not None}
        if policy is not None:
            given |= {"policy": policy, "policy_factory": None}
        with self._sending:
            self._add(create_env_fn, _length(create_env_fn), copies=num_envs, **given)
            if self._sent is not None:
                self._send(self._sent, self._players.seats)

    # State and end

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """Close every worker's collector and end the workers; with `shutdown_ray` leave the cluster, or end it.

        They have `timeout` seconds (None: 20) before they are killed. A second call does nothing. Raises an error that
        was not raised yet. `shutdown_ray` ends all actors that this process has started, buffers included.
        """
        try:
            super().shutdown(timeout)
        finally:
            if shutdown_ray:
                self._ray.shutdown()

    async def async_shutdown(self, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """`shutdown`, without blocking the event loop."""
        await asyncio.to_thread(self.shutdown, None, shutdown_ray)


class RayLLMCollector(RayCollector):
    """Iterates over batches of dialog turns of `num_collectors` LLMCollectors, each in a process of a Ray cluster.

    `env` and `policy_factory` are called there, and a list has one for each. With `sync_iter` a batch has
    `dialog_turns_per_batch`, a part of each collector; without, it is the first that is ready, of that many turns of
    one collector. `total_dialog_turns` is a lower bound. Each has `num_cpus` CPUs, and its engine as many
    threads, and `num_gpus` GPUs (None: 0.2 if the cluster has any), unless `remote_config`, one or a list, says
    otherwise. `options` are LLMCollector's further arguments (`yield_only_last_steps`,
    `yield_completed_trajectories`, `reset_at_each_iter`, `flatten_data`, `track_policy_version`, `begin_ahead`,
    `verbose`, ...), and RayCollector's (`postproc`, `replay_buffer`, `weight_updater`, `batches_ahead`,
    `wait_seconds`, `place_seconds`, `ray_init_config`, `weight_sync_schemes`, ...). All else is as in RayCollector.

    Raises TypeError for both or neither of `policy` and `policy_factory`, and as RayCollector does.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]],
        *,
        policy: Any = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        remote_config: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        sync_iter: bool = True,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        num_collectors: int | None = None,
        **options: Any,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise TypeError("RayLLMCollector takes exactly one of policy and policy_factory")
        own = {"num_cpus": num_cpus} | ({} if num_gpus is None else {"num_gpus": num_gpus})
        given = [remote_config or {}] if isinstance(remote_config, Mapping | None) else remote_config
        count = num_collectors or max(_length(env), _length(policy_factory))
        super().__init__(
            env,
            policy,
            policy_factory=policy_factory,
            frames_per_batch=dialog_turns_per_batch or (count if sync_iter else 1),
            total_frames=total_dialog_turns,
            collector_class=LLMCollector,
            sync=sync_iter,
            remote_configs=[own | dict(each) for each in given],
            num_collectors=count,
            **options,
        )

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns in a batch, each collector's part rounded up to its environment's size."""
        parts = list(self._frames.values())
        return sum(parts) if self._joins else parts[0]

    def get_policy_model(self) -> list[Any]:
        """The workers that sample: see `remote_collectors`."""
        return self.remote_collectors
