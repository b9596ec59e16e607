"""RayCollector and RayLLMCollector: collectors in the actors of a Ray cluster, used as one.

An `Order` describes a worker's collector and actor; how the actors are called, and whose batch is delivered when, is in
`rlpost.torchrl.remote_collector`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.data.conversation import Conversation, PolicyVersionLabel
from rlpost.envs.base import EnvBase, Transform
from rlpost.model.weights import SavedWeights
from rlpost.remote import cluster
from rlpost.remote.process import END_SECONDS
from rlpost.torchrl.batches import concat_rows
from rlpost.torchrl.collector import Collector, made_env, one_device
from rlpost.torchrl.collector_base import WorkerIds, postprocessed
from rlpost.torchrl.frames import split_trajectories
from rlpost.torchrl.llm_collector import LLMCollector
from rlpost.torchrl.ray_buffer import RayReplayBuffer
from rlpost.torchrl.remote_collector import (
    NOT_OF_LANGUAGE,
    WORKER_DRAWS,
    CollectorHost,
    Member,
    RemoteCollector,
    built_collector,
    pickled,
    without,
)
from rlpost.weight_sync.base import MODEL_ID, WeightSource, WeightSyncScheme, WorkersFailed
from rlpost.weight_sync.ray import WeightSender

log = logging.getLogger("rlpost")
ACTOR = "a collector's actor"  # in the message of what cannot be sent
DEFAULTS = {"num_cpus": 1, "memory": 2 * 1024**3}  # of an actor
GPU_SHARE = 0.2  # of a GPU for each actor, if the cluster has any
OPTIONS = inspect.signature(Collector).parameters.keys() | inspect.signature(LLMCollector).parameters.keys()
DEVICES = ("device", "storing_device", "env_device", "policy_device")
# option of an actor that breaks a collector -> why
NOT_OF_AN_ACTOR = {
    "max_restarts": "a restarted collector has lost its state, and samples with the weights of the beginning",
    "max_task_retries": "a batch that was collected twice has moved the environment on twice",
    "lifetime": "nobody would end an actor that outlives its RayCollector",
    "max_concurrency": "a collector does one thing at a time",
}


class RayCollector(RemoteCollector):
    """Iterates over the batches of collectors in Ray actors, or fills a replay buffer with them.

    `create_env_fn` makes the environment, or is one, in each actor; a list has one for each collector, and otherwise
    there are `num_collectors` (default: 1). `policy_factory`, `collector_kwargs`, `remote_configs` and devices may be
    lists too. Each actor has a `collector_class`; the default is LLMCollector for a language environment, where
    `frames_per_batch` counts turns, and else Collector, with `num_workers_per_collector` copies of the environment in
    step; it may be AsyncCollector. `options` are its arguments, such as `trust_policy`, `device`, `storing_device`,
    `env_device`, `policy_device`, `max_frames_per_traj`, `reset_at_each_iter`, `exploration_type` and
    `weight_updater`; `collector_kwargs` are too, and override them. All are sent by cloudpickle.

    With `sync` a batch joins a part of every collector, `frames_per_batch` in all; otherwise it is the first batch
    that is ready, of one collector, and the others go on meanwhile. Iteration ends once at least `total_frames` are
    delivered (-1: never). `split_trajs` and `postproc` are applied to the whole batch, here. With `replay_buffer`
    batches go there and iteration yields None; `start` fills it from a thread of its own. The actors write to a
    RayReplayBuffer themselves, and call `postproc` before.

    Worker i numbers draws and trajectories from i * 10**12 on, so that no two workers have a group of one number;
    `set_seed` gives each worker the seed that the one before has returned, so that their draws differ.
    `update_policy_weights_` sends through `weight_sync_schemes`, one copy a host, and raises the version once all
    have answered; nothing is sent before the first call. With `update_after_each_batch` a batch's workers are updated
    after it, with `max_weight_update_interval` those that have delivered more than this many batches since their last
    update; they get the weights of `policy`, or those that were sent last.

    `ray_init_config` goes to `ray.init` if Ray does not run yet; without it a running cluster is used, or else one
    is started here. `remote_configs` go to `ray.remote` for each actor; the default is one CPU, 2 GiB, and 0.2 GPUs if
    the cluster has any. Actors have `place_seconds` to find a place, and each answer `wait_seconds`. An error in an
    actor is raised here with its traceback as a note; a lost one is a PolicyError that names it. Raises TypeError
    for arguments that have no effect, ValueError for frames that cannot be split, MissingExtraError without ray.
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
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        batches_ahead: int | None = 2,
        place_seconds: float = 300.0,
        wait_seconds: float = 600.0,
        **options: Any,
    ) -> None:
        for name in options.keys() - OPTIONS:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
        count = num_collectors or max(_length(create_env_fn) or 1, _length(policy_factory) or 1)
        if init_random_frames and init_random_frames > 0:
            options["init_random_frames"] = ceil(init_random_frames / (count if sync else 1))
        self._orders = partial(
            orders_of,
            build=partial(
                built_collector, frames_per_batch=share(frames_per_batch, count, sync), collector_class=collector_class
            ),
            options=options,
        )
        orders = self._orders(
            create_env_fn, policy_factory, collector_kwargs, remote_configs, count, copies=num_workers_per_collector
        )
        super().__init__(
            policy,
            replay_buffer,
            wait_seconds=wait_seconds,
            total_frames=total_frames,
            ahead=0 if sync else 1,
            joins=sync,
            update_interval=0 if update_after_each_batch else max_weight_update_interval,
        )
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.sync, self.split_trajs, self.batches_ahead = sync, bool(split_trajs), batches_ahead
        is_written_there = isinstance(replay_buffer, RayReplayBuffer)
        self.postproc = None if is_written_there else postproc
        self._sending = threading.RLock()  # of weights
        self._defaults = policy_factory, collector_kwargs, remote_configs  # of collectors that are added
        self._ray = ray = cluster.joined("RayCollector", ray_init_config)
        self._place_seconds = place_seconds
        self._sent_policy = None if policy is None else ray.put(pickled(ACTOR, policy, {"policy": policy}))
        delivery = (replay_buffer, postproc)
        self._delivery = ray.put(pickled(ACTOR, delivery, {"replay_buffer": delivery})) if is_written_there else None
        self._add(orders, self._sent_policy)
        if split_trajs and self.plays_conversations:
            self._end(END_SECONDS)
            without(NOT_OF_LANGUAGE, {"split_trajs": True}, "a language environment")
        self._begin(orders[0][0].keywords["options"].get("track_policy_version", False))
        self._schemes = weight_sync_schemes
        self._sender = WeightSender(weight_sync_schemes, version=self.policy.version)
        self._last: Mapping[str, WeightSource] = {}  # the weights that were sent last, by model
        if weight_recv_schemes is not None:
            self.register_scheme_receiver(weight_recv_schemes)

    def _add(self, orders: Sequence[Order], policy: Any) -> None:
        """Start a worker for each order, of this `policy` if it is not None.

        Raises PolicyError if they find no place in time, TypeError for a part that cannot be sent, and what building
        raises; all of them are ended then.
        """
        plans = [pickled(ACTOR, plan, plan.keywords | plan.keywords["options"]) for plan, _, _ in orders]
        first = max(self._workers.members, default=-1) + 1
        defaults = {**DEFAULTS, "num_gpus": GPU_SHARE if cluster.has_gpus(self._ray) else 0}
        made: dict[int, Member] = {}
        try:
            for number, (_, own_config, member) in enumerate(orders, first):
                config = {**defaults, **own_config, "max_restarts": 0}
                threads = max(1, int(config.get("num_cpus") or 1))
                handle = self._ray.remote(**config)(CollectorHost).remote(number, threads)
                member.remote = cluster.Actor(self._ray, handle, f"worker {number} of the RayCollector")
                made[number] = member
            request = defaults | dict(orders[0][1])
            cluster.place(self._ray, [member.remote for member in made.values()], request, self._place_seconds)
            self._workers.build(made, dict(enumerate(plans, first)), policy, self._delivery)
        except BaseException:
            for number, member in made.items():
                member.remote.kill()
                self._workers.members.pop(number, None)
            raise

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, in the order of their numbers; call their collectors with `cascade_execute(path, ...)`."""
        return [member.remote.handle for member in self._workers.members.values()]

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
        factory, kwargs, configs = self._defaults
        orders = self._orders(
            create_env_fn,
            factory if policy is None else None,
            kwargs if collector_kwargs is None else collector_kwargs,
            configs if remote_configs is None else remote_configs,
            _length(create_env_fn) or 1,
            first=max(self._workers.members) + 1,
            copies=num_envs,
        )
        sent = self._sent_policy if policy is None else pickled(ACTOR, policy, {"policy": policy})
        with self._sending:
            self._add(orders, sent)
            if self._last:
                self._send(self._last, self._workers.members)

    # Batches

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`. Raises a worker's error, and PolicyError for a lost worker."""
        if self._delivery is None:
            return super().collect_round()
        self._next_batches()
        return None

    def _collected(self) -> TensorDictBase:
        batch = _joined(self._next_batches(), self.plays_conversations)
        return postprocessed(split_trajectories(batch) if self.split_trajs else batch, self.postproc)

    def _next_batches(self) -> list[Any]:
        """The next batch of every worker, or of the first that is ready."""
        self._batches.check()
        self._send_to_due()
        return [batch for _, batch in self._batches.take()]

    def rollout(self) -> TensorDictBase:
        """One batch of all collectors, collected now and returned, even with a buffer."""
        self._check_foreground("take a rollout of")
        with self.pause():
            batches = self._workers.call("rollout")
        return _joined([self._batches.moved(n, batch) for n, batch in batches.items()], self.plays_conversations)

    # Weights

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: WorkerIds | None = None,
        model_id: str | None = None,
        **given: Any,
    ) -> None:
        """Send weights to the workers, or to those of `worker_ids`: numbers, or the devices their policies are on.

        They come from a module, a TensorDict or a mapping, as the first argument, `weights`, `policy` or `state_dict`,
        for "policy" or the model `model_id`, or from `weights_dict`, by model, which a worker loads all between the
        same two batches; by default they are those of `policy`. The version rises once all have answered, after
        their batches in flight.

        Raises TypeError without weights; ValueError for two sets of them, or a worker or a model that does not exist;
        and PolicyError that names the workers that they did not reach.
        """
        self._check_open("send weights with")
        sources = self._given_weights(model_id, policy_or_weights=policy_or_weights, **given)
        self._workers.check()
        self._send(sources, self._chosen(worker_ids))

    def _send(self, sources: Mapping[str, WeightSource], numbers: Iterable[int]) -> None:
        """Send to these workers and wait for all. Raises as `WeightSender.send`; those reached have the version."""
        with self._sending:
            actors = {number: self._workers.members[number].remote for number in numbers}
            failed: Mapping[int, str] = {}
            try:
                self._sender.send(sources, actors)
            except WorkersFailed as error:
                failed = error.reasons
                raise
            finally:
                if self._sender.newest != self.policy.version:
                    self.policy.become(self._sender.newest)
                    self._last = dict(sources)
                    for number in actors.keys() - failed.keys():
                        self._batches.since_update[number] = 0

    def _send_to_due(self) -> None:
        """Update the workers that are due before they go on, if there are weights to send."""
        model = getattr(self.policy, "model", None)
        sources = self._last or ({} if model is None else {MODEL_ID: model})
        if sources and (due := self._batches.due()):
            self._send(sources, due)
        self._batches.settled()

    def _chosen(self, worker_ids: WorkerIds | None) -> list[int]:
        """The numbers of these workers."""
        wanted = [worker_ids] if isinstance(worker_ids, int | torch.device) else worker_ids
        members = self._workers.members.items()
        return [n for n, member in members if wanted is None or n in wanted or member.policy_device in wanted]

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `CollectorBase.take_up`: sends them to all workers as the next version."""
        self.update_policy_weights_(SavedWeights(weights) if isinstance(weights, Path) else weights)

    # State

    def state_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The state of each worker's collector, with its batches that were not delivered yet."""
        return self._states()

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], strict: bool = True
    ) -> None:
        """Continue from `state_dict`: a list has one state for each worker, a single one is for all.

        Raises ValueError for a list of another length.
        """
        count = len(self._workers.members)
        self._load_states([state_dict] * count if isinstance(state_dict, Mapping) else list(state_dict), strict)
        self._sender.close()
        self._sender = WeightSender(self._schemes, version=self.policy.version)

    # The end

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """Close every worker's collector and end the actors; with `shutdown_ray` leave the cluster, or end it.

        They have `timeout` seconds (None: 20) before they are killed. A second call does nothing. Raises the
        background's error. `shutdown_ray` ends all actors that this process has started, buffers included.
        """
        if self._is_shut_down:
            return
        try:
            super().shutdown(timeout, close_env=False)
        finally:
            self._sender.close()
            self._end(END_SECONDS if timeout is None else timeout)
            if shutdown_ray:
                self._ray.shutdown()

    def _end(self, seconds: float) -> None:
        """Close every worker's collector within `seconds`, and end them all; errors are logged."""
        with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError):  # the cluster may be gone already
            for number, error in self._workers.finish(True, seconds).items():
                log.warning("worker %d was shut down after an error: %s", number, error)
        for member in self._workers.members.values():
            member.remote.kill()

    async def async_shutdown(self, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """`shutdown`, without blocking the event loop."""
        await asyncio.to_thread(self.shutdown, None, shutdown_ray)


class RayLLMCollector(RayCollector):
    """Iterates over batches of dialog turns of `num_collectors` LLMCollectors, each in a Ray actor of its own.

    `env` and `policy_factory` are called in the actors, and a list has one for each. With `sync_iter` a batch has
    `dialog_turns_per_batch`, a part of each collector; without, it is the first that is ready, of that many turns of
    one collector. `total_dialog_turns` is a lower bound. Each actor has `num_cpus` CPUs, and its engine as many
    threads, and `num_gpus` GPUs (None: 0.2 if the cluster has any), unless `remote_configs` (or `remote_config`) says
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
        async_envs: bool | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        sync_iter: bool = True,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        num_collectors: int | None = None,
        **options: Any,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise TypeError("RayLLMCollector takes exactly one of policy and policy_factory")
        without(NOT_OF_LANGUAGE, {"async_envs": async_envs}, "a language environment")
        given = remote_configs if remote_configs is not None else remote_config or {}
        own = {"num_cpus": num_cpus} | ({} if num_gpus is None else {"num_gpus": num_gpus})
        count = num_collectors or _length(env) or _length(policy_factory) or 1
        super().__init__(
            env,
            policy,
            policy_factory=policy_factory,
            frames_per_batch=dialog_turns_per_batch or (count if sync_iter else 1),
            total_frames=total_dialog_turns,
            collector_class=LLMCollector,
            sync=sync_iter,
            remote_configs=own | dict(given) if isinstance(given, Mapping) else [own | dict(each) for each in given],
            num_collectors=num_collectors,
            **options,
        )

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns in a batch, each collector's part rounded up to its environment's size."""
        parts = [member.frames_per_batch for member in self._workers.members.values()]
        return sum(parts) if self.sync else parts[0]

    def get_policy_model(self) -> list[Any]:
        """The actors that sample: each takes weights with `receive_weights`, from any process of the cluster."""
        return self.remote_collectors


# What each actor is asked to build


Order = tuple[partial[Any], Mapping[str, Any], Member]  # builds a worker's collector; its actor's options; the worker


def orders_of(
    create_env_fn: Any,
    policy_factory: Any,
    collector_kwargs: Any,
    remote_configs: Any,
    count: int,
    *,
    build: partial[Any],
    options: Mapping[str, Any],
    first: int = 0,
    copies: int = 1,
) -> list[Order]:
    """Orders of `count` workers from number `first` on; of the lists, devices too, each has its own entry.

    `build` builds a worker's collector; its batches are sent from the CPU. Raises TypeError for options without effect.
    """
    if _length(create_env_fn) == 1:
        [create_env_fn] = create_env_fn
    orders = []
    for i in range(count):

        def own(given: Any, i: int = i) -> Any:
            return given if _length(given) is None else given[i]

        config = dict(own(remote_configs) or {})
        for name, value in config.items():
            if name in NOT_OF_AN_ACTOR and value:
                raise TypeError(f"remote_configs has {name}={value!r}: {NOT_OF_AN_ACTOR[name]}; leave it out")
        given = {**options, **{name: own(options.get(name)) for name in DEVICES}, **(own(collector_kwargs) or {})}
        storing, policy = (
            one_device(given["device"] if given[name] is None else given[name])
            for name in ("storing_device", "policy_device")
        )
        maker = partial(worker_env, own(create_env_fn), first + i, copies)
        given["storing_device"] = "cpu"
        plan = partial(build, create_env_fn=maker, policy_factory=own(policy_factory), options=given)
        orders.append((plan, config, Member(None, storing, policy)))
    return orders


def worker_env(make: Any, worker: int, copies: int, **kwargs: Any) -> Any:
    """The environment of a worker: `make(**kwargs)`, or `make` itself, or `copies` of it in step."""
    env = made_env(make, kwargs)
    if isinstance(env, EnvBase):
        return env.append_transform(NumberedApart(worker))
    if copies == 1:
        return env
    from rlpost.envs import ParallelEnv

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


def share(frames_per_batch: int, workers: int, sync: bool) -> int:
    """Frames in each worker's batch. Raises ValueError if they cannot be split evenly."""
    if not sync:
        return frames_per_batch
    if frames_per_batch % workers:
        raise ValueError(
            f"frames_per_batch={frames_per_batch} cannot be split over {workers} collectors: give a multiple, or "
            "sync=False, where each collects all of them"
        )
    return frames_per_batch // workers


def _length(given: Any) -> int | None:
    """The length of a list; None for anything else."""
    return len(given) if isinstance(given, (list, tuple)) else None


def _joined(batches: Sequence[TensorDictBase], are_conversations: bool) -> TensorDictBase:
    """`batches` one after the other along their first dimension.

    Conversations are ragged, (B,) or (B, T); frames (*batch_size, T) are dense.
    """
    if len(batches) == 1:
        return batches[0]
    if not are_conversations:
        return torch.cat(list(batches), dim=0)  # pyright: ignore[reportArgumentType, reportReturnType]
    if batches[0].ndim == 1:
        return concat_rows(batches)
    steps = zip(*(batch.unbind(1) for batch in batches), strict=True)
    return LazyStackedTensorDict.lazy_stack([concat_rows(each) for each in steps], -1)
