"""RayCollector: collectors in the actors of a Ray cluster, as one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlpost.collectors.async_plan import NOT_OF_LANGUAGE, refuse
from rlpost.collectors.base import postprocessed
from rlpost.collectors.child_weights import ChildPolicy
from rlpost.collectors.frame_parts import Device
from rlpost.collectors.process import END_SECONDS
from rlpost.collectors.ray_batches import joined
from rlpost.collectors.ray_buffer import RayReplayBuffer
from rlpost.collectors.ray_crew import Crew, connected, pickled
from rlpost.collectors.ray_plan import Orders, given_options, length, random_frames, share
from rlpost.collectors.ray_pushes import Pushes
from rlpost.collectors.ray_rounds import Rounds
from rlpost.collectors.weights import WeightsCollector, Workers
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.data.frames import split_trajectories
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.policy_version import PolicyVersion
from rlpost.errors import CheckpointError
from rlpost.model.weights import SavedWeights
from rlpost.weight_sync.base import WeightSource, WeightUpdater, begin_versions
from rlpost.weight_sync.schemes import WeightSyncScheme

OWN_STATE = ("waiting", "delivered", "version")  # beside a worker's own


class RayCollector(WeightsCollector):
    """Iterates over the batches of collectors in Ray actors, or fills a replay buffer with them.

    `create_env_fn` makes the environment, or is one, in each actor; a list has one a collector, and else there are
    `num_collectors` (1). `policy_factory`, `collector_kwargs`, `remote_configs` and devices may be lists too. Each
    actor has a `collector_class`: left out, an LLMCollector for a language environment, `frames_per_batch` counting
    turns, and else a Collector, of `num_workers_per_collector` copies of the environment in step; an AsyncCollector may
    be named. `collector_kwargs` are theirs and go before the arguments here. Everything goes over by cloudpickle.

    With `sync` a batch is what all collectors give, one after the other, `frames_per_batch` in all, of which each has
    its part; otherwise it is what one of them gives, the first that is ready, and the others go on meanwhile. Iteration
    ends once `total_frames` are there or more (-1: never). `split_trajs` and `postproc` are applied to the whole batch,
    here. With `replay_buffer` batches go there and iteration gives None; `start` fills it from a thread of its own. A
    RayReplayBuffer is written to from the actors, where `postproc` is called then.

    Draws and trajectories of worker i are numbered from i * 10**12 on, so that no two workers have a group of one
    number; `set_seed` gives each worker the seed that the one before has returned, so that they differ in what they
    draw. `update_policy_weights_` sends through `weight_sync_schemes`, one copy a host, and raises the version once all
    have answered; nothing is sent before the first call. After each batch the workers it came from are updated with
    `update_after_each_batch`, and with `max_weight_update_interval` those that have given more than so many batches
    since their last update, from `policy`, or from what was last sent.

    `ray_init_config` is what `ray.init` takes where Ray does not run yet; without it a cluster that is there is used,
    else one is started here. `remote_configs` are what `ray.remote` takes for each actor; left out they are one CPU,
    2 GiB, and 0.2 GPUs where the cluster has any. Actors have `place_seconds` to find a place, each answer of theirs
    `wait_seconds`. What is raised in one is raised here with its traceback as a note, and a lost one is a PolicyError
    that names it. Raises TypeError or ValueError for arguments that cannot be, or have no effect, MissingExtraError
    without ray.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        trust_policy: bool | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        device: Device | Sequence[Device] | None = None,
        storing_device: Device | Sequence[Device] | None = None,
        env_device: Device | Sequence[Device] | None = None,
        policy_device: Device | Sequence[Device] | None = None,
        max_frames_per_traj: int | None = -1,
        init_random_frames: int | None = -1,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = False,
        exploration_type: InteractionType | str = InteractionType.RANDOM,
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
        weight_updater: Callable[[], WeightUpdater] | None = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        use_env_creator: bool = False,
        no_cuda_sync: bool | None = None,
        batches_ahead: int | None = 2,
        place_seconds: float = 300.0,
        wait_seconds: float = 600.0,
    ) -> None:
        if use_env_creator:
            raise TypeError("use_env_creator shares memory with other processes, and actors share none: leave it out")
        if no_cuda_sync:
            raise TypeError("no_cuda_sync has no effect: a batch is sent once it is whole. Leave it out")
        if policy is not None and policy_factory is not None:
            raise TypeError("RayCollector takes policy or policy_factory, not both")
        if split_trajs and replay_buffer is not None:
            raise TypeError("split_trajs pads trajectories, and a replay buffer stores frames: leave one of them out")
        if num_workers_per_collector < 1 or (num_collectors is not None and num_collectors < 1):
            raise ValueError("num_collectors and num_workers_per_collector are at least 1")
        self._orders = Orders(
            frames=1,
            exploration_type=exploration_type,
            collector_class=collector_class,
            collector_kwargs=collector_kwargs,
            remote_configs=remote_configs,
            devices={
                "device": device,
                "storing_device": storing_device,
                "env_device": env_device,
                "policy_device": policy_device,
            },
            options=given_options(
                trust_policy=trust_policy,
                max_frames_per_traj=max_frames_per_traj,
                reset_at_each_iter=reset_at_each_iter,
                weight_updater=weight_updater,
            ),
            joins=sync,
        )
        count = len(self._orders.of(create_env_fn, policy_factory, 0, num_collectors))
        self._orders.frames = share(frames_per_batch, count, sync)
        if (each := random_frames(init_random_frames, count if sync else 1)) is not None:
            self._orders.options = {**self._orders.options, "init_random_frames": each}
        orders = self._orders.of(create_env_fn, policy_factory, 0, num_collectors, copies=num_workers_per_collector)
        super().__init__(cast(EnvBase, None), replay_buffer, wait_seconds=wait_seconds)  # it has its envs elsewhere
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.sync, self.split_trajs, self.batches_ahead = sync, bool(split_trajs), batches_ahead
        is_written_there = isinstance(replay_buffer, RayReplayBuffer)
        self.postproc = None if is_written_there else postproc
        self.policy = there = ChildPolicy(policy)
        self._lock = threading.RLock()  # of all that follows
        self._holders = 0
        self._factory = policy_factory
        ray = connected(ray_init_config)
        self._crew = Crew(ray, wait_seconds=wait_seconds, place_seconds=place_seconds)
        interval = 0 if update_after_each_batch else max_weight_update_interval
        self._rounds = Rounds(self._crew, sync=sync, total_frames=total_frames, update_interval=interval)
        self._policy = None if policy is None else ray.put(pickled("policy", policy))
        self._delivery = ray.put(pickled("replay_buffer", (replay_buffer, postproc))) if is_written_there else None
        self._crew.add(orders, self._policy, self._delivery)
        if split_trajs and self.plays_conversations:
            self._crew.end(END_SECONDS)
            refuse(NOT_OF_LANGUAGE, {"split_trajs": True}, "a language environment")
        tracked = orders[0].plan.track_policy_version
        self.policy_version_tracker = PolicyVersion() if tracked is True else tracked or None
        if self.policy_version_tracker is not None:
            begin_versions(there, self.policy_version_tracker)
        first = next(iter(self._crew.members.values())).first_version
        there.version = there.version if first is None else first
        self._pushes = Pushes(self._crew, self._rounds, there, weight_sync_schemes)
        if isinstance(replay_buffer, ReplayBuffer):
            self._become_source_of(replay_buffer)
        if weight_recv_schemes is not None:
            self.register_scheme_receiver(weight_recv_schemes)

    @property
    def plays_conversations(self) -> bool:
        """See `CollectorBase.plays_conversations`."""
        return any(member.is_language for member in self._crew.members.values())

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, in the order of their numbers; what of them is to be called is `cascade_execute(path, ...)`."""
        return [member.actor for member in self._crew.members.values()]

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Add a collector for each of `create_env_fn`, of `num_envs` copies of it in step; also while iterating.

        What is left out is as for the others, and each collects as many frames as one of them. Weights that were sent
        before are sent to all again, as a new version. Raises as the constructor does.
        """
        self._check_open("add collectors to")
        orders = self._orders.of(
            create_env_fn,
            self._factory if policy is None else None,
            self._crew.next_number,
            length(create_env_fn) or 1,
            copies=num_envs,
            collector_kwargs=collector_kwargs,
            remote_configs=remote_configs,
        )
        sent = self._policy if policy is None else pickled("policy", policy)
        with self._lock:
            self._crew.add(orders, sent, self._delivery)
            self._pushes.send_again()

    # Batches

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`: until `total_frames` are there or more, where there is an end."""
        return self._rounds.wants_more

    @property
    def is_ahead(self) -> bool:
        """See `CollectorBase.is_ahead`: of a ReplayBuffer, by as many rows as `batches_ahead` batches."""
        if self.batches_ahead is None or not isinstance(self.replay_buffer, ReplayBuffer):
            return False
        return self.replay_buffer.num_rows >= self.batches_ahead * self.frames_per_batch

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`. Raises what a worker raised, and PolicyError for one that was lost."""
        with self._lock:
            self._crew.check()
            self._pushes.send_to_due()
            batches = [batch for _, batch in self._rounds.take()]
        if self._delivery is not None:
            return None
        batch = joined(batches, self.plays_conversations)
        batch = postprocessed(split_trajectories(batch) if self.split_trajs else batch, self.postproc)
        if self.replay_buffer is None:
            return batch
        self.replay_buffer.extend(batch)
        return None

    def rollout(self) -> TensorDictBase:
        """One batch of all collectors, collected now, whatever batches are delivered into."""
        self._check_foreground("take a rollout of")
        with self.pause(), self._lock:
            batches = self._crew.of_all("rollout")
        return joined([self._crew.moved(number, batch) for number, batch in batches.items()], self.plays_conversations)

    # Weights

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Workers | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Send weights to the workers, or to those of `worker_ids`: numbers, or the devices their policies are on.

        They come from a module, a TensorDict or a mapping, as the first argument, `weights`, `policy` or `state_dict`,
        for "policy" or the model `model_id`, or from `weights_dict`, by model, all of which a worker takes up between
        the same two batches; without any they are those of `policy`. The version rises once all have answered, after
        the batches under way there.

        Raises TypeError without weights; ValueError for two sets of them, or a worker or a model that is not there;
        and PolicyError for workers that they did not reach, which it names.
        """
        self._check_open("send weights with")
        sources = self._given_weights(policy_or_weights, weights, policy, model_id, weights_dict, state_dict)
        with self._lock:
            self._crew.check()
            self._pushes.send(sources, self._pushes.chosen(worker_ids))

    def _own_weights(self) -> torch.nn.Module:
        if (model := cast(ChildPolicy, self.policy).model) is None:
            raise TypeError("update_policy_weights_ was given no weights: pass a module, a TensorDict or state_dict=")
        return model

    def take_up(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """See `ReceivesWeights.take_up`: sent on to all workers, which count the version for themselves."""
        if adapter:
            raise TypeError("an adapter is sent by the scheme of one's own: RayWeightSyncScheme(adapter=True)")
        self.update_policy_weights_(SavedWeights(weights) if isinstance(weights, Path) else weights)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """`init_updater` of each worker's collector with these arguments."""
        self._check_open("use")
        self._crew.of_all("init_updater", *args, **kwargs)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no worker collects; the batches under way have come, and none begins.

        A worker goes on by itself where it hears nothing from this process for `LEASE_SECONDS` (30).
        """
        self._check_open("use")
        with super().pause(), ExitStack() as stack:
            with self._lock:
                self._crew.check()
                self._holders += 1
                self._rounds.is_held = True
                stack.callback(self._release)
            stack.enter_context(self._crew.held())
            yield

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            self._rounds.is_held = self._holders > 0

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """`reset` of each worker's collector with these arguments."""
        with self.pause():
            self._crew.of_all("reset", index, **kwargs)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the first worker, each other with what the one before has returned; returns the last one's.

        What was collected under another seed and not given yet is thrown away. With `static_seed` all have the same.
        """
        with self.pause(), self._lock:
            self._rounds.forget()
            for number in self._crew.members:
                asked = self._crew.submit(number, "cascade_execute", "set_seed", seed, static_seed)
                seed = self._crew.result(number, asked, "its seed")
        return seed

    def state_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The state of each worker's collector, and what it has collected that nobody has taken yet."""
        with self.pause(), self._lock:
            self._rounds.land_all()
            states = self._crew.of_all("state_dict")
            version = self.policy_version
            return [{**state, **self._rounds.state_of(n), "version": version} for n, state in states.items()]

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], strict: bool = True
    ) -> None:
        """Go on where `state_dict` was taken: a list has one state a worker, a single one is for all.

        Raises CheckpointError for a list of another length.
        """
        numbers = list(self._crew.members)
        states = [state_dict] * len(numbers) if isinstance(state_dict, Mapping) else list(state_dict)
        if len(states) != len(numbers):
            raise CheckpointError(
                f"{len(states)} states for {len(numbers)} collectors: load them with as many as they were taken of"
            )
        with self.pause(), self._lock:
            self._rounds.forget()
            for number, state in zip(numbers, states, strict=True):
                inner = {name: value for name, value in state.items() if name not in OWN_STATE}
                asked = self._crew.submit(number, "cascade_execute", "load_state_dict", inner, strict)
                self._crew.result(number, asked, "its state to be loaded")
                self._rounds.load_state_of(number, state)
            self._pushes.restore(states[0].get("version", self.policy.version))

    # The end

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """Close every worker's collector and end the actors; with `shutdown_ray` leave the cluster, or end it.

        They have `timeout` seconds (None: 20), and are killed then. A second call does nothing. Raises what went wrong
        in the background. `shutdown_ray` ends all actors that this process has started, buffers among them.
        """
        if self._is_shut_down:
            return
        try:
            super().shutdown(timeout, close_env=False)
        finally:
            self._pushes.close()
            self._crew.end(END_SECONDS if timeout is None else timeout)
            if shutdown_ray:
                self._crew.leave()

    async def async_shutdown(self, shutdown_ray: bool = False) -> None:  # type: ignore[override]
        """`shutdown`, for an event loop, which goes on meanwhile."""
        await asyncio.to_thread(self.shutdown, None, shutdown_ray)

    def is_initialized(self) -> bool:
        """Whether batches can be collected: until `shutdown`, or the loss of a worker."""
        return not self._is_shut_down and not self._crew.lost

    def _check_open(self, doing: str) -> None:
        if self._is_shut_down:
            raise RuntimeError(f"cannot {doing} a collector that was shut down: build another")
