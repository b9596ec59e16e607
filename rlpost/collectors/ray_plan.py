"""What a RayCollector sends to its actors: how each builds its collector, and what is refused of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import torch
from tensordict.nn import InteractionType

from rlpost.collectors.async_plan import CollectorPlan
from rlpost.collectors.async_process import AsyncCollector
from rlpost.collectors.frame_parts import Device
from rlpost.data.conversation import Conversation
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.base import Transform
from rlpost.weight_sync.base import WeightUpdater

WORKER_DRAWS = 10**12  # draws, and trajectories, are numbered from so many times the worker's number on
DEVICES = ("device", "storing_device", "env_device", "policy_device")
# what the driver decides for all workers -> what to do instead
OF_THE_DRIVER = {
    "frames_per_batch": "give it to the RayCollector, which splits it",
    "total_frames": "give it to the RayCollector, which counts",
    "dialog_turns_per_batch": "give frames_per_batch to the RayCollector, which splits it",
    "total_dialog_turns": "give total_frames to the RayCollector, which counts",
    "policy": "give it to the RayCollector",
    "policy_factory": "give it to the RayCollector, one or a list",
    "replay_buffer": "give it to the RayCollector",
    "postproc": "give it to the RayCollector, which calls it on the whole batch",
    "split_trajs": "give it to the RayCollector, which splits the whole batch",
    "queue": "iterate over the RayCollector, or give it a replay_buffer",
}
# options of an actor that a collector cannot live with -> why
NOT_OF_AN_ACTOR = {
    "max_restarts": "a restarted collector has lost its state, and samples with the weights of the beginning",
    "max_task_retries": "a batch that was collected twice has moved the environment on twice",
    "lifetime": "an actor that outlives its RayCollector is nobody's to end",
    "max_concurrency": "a collector does one thing at a time",
}


class NumberedApart(Transform):
    """Numbers the draws of one worker apart from all others': from `WORKER_DRAWS` times its number on."""

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """See `Transform.on_begin`."""
        for conversation in conversations:
            conversation.group_id += self.worker * WORKER_DRAWS


def worker_env(make: Any, worker: int, copies: int, **kwargs: Any) -> Any:
    """The environment of a worker, in its process: `make(**kwargs)`, or what `make` is, or `copies` of it in step."""
    is_one = hasattr(make, "reset") and hasattr(make, "step") and not isinstance(make, type)
    env = make if is_one else make(**kwargs)
    if isinstance(env, EnvBase):
        if copies > 1:
            raise TypeError(
                f"num_workers_per_collector={copies}: a language environment holds several conversations by itself; "
                "raise its num_envs"
            )
        return env.append_transform(NumberedApart(worker))
    if copies == 1:
        return env
    if is_one:
        raise TypeError(f"num_workers_per_collector={copies} needs a function that makes the environment, not one made")
    from rlpost.envs import ParallelEnv

    if hasattr(env, "close"):
        env.close()
    return ParallelEnv(copies, make, create_env_kwargs=kwargs)


class WorkerPlan(CollectorPlan):
    """A `CollectorPlan` whose collector may be an AsyncCollector; its batches come in the CPU's memory."""

    def built(self) -> Any:
        """The collector."""
        chosen = self.collector_class
        if not (inspect.isclass(chosen) and issubclass(chosen, AsyncCollector)):
            return super().built()
        return chosen(
            self.create_env_fn,
            self.policy,
            policy_factory=self.policy_factory,
            create_env_kwargs=self.create_env_kwargs,
            frames_per_batch=self.frames_per_batch,
            total_frames=self.total_frames,
            exploration_type=self.exploration_type,
            reset_when_done=self.reset_when_done,
            track_policy_version=self.track_policy_version,
            storing_device="cpu",
            **self.options,
        )


@dataclass
class Order:
    """One worker that is wanted: its collector, and the actor it lives in."""

    plan: WorkerPlan
    remote_config: Mapping[str, Any]
    storing_device: torch.device | None = None  # of its batches when they have come
    policy_device: torch.device | None = None


@dataclass
class Orders:
    """What all workers of one RayCollector have in common; `of` makes what differs."""

    frames: int  # of a batch of each
    exploration_type: InteractionType | str
    collector_class: type[Any] | None
    collector_kwargs: Any
    remote_configs: Any
    devices: Mapping[str, Any]
    joins: bool  # whether the workers' batches are put together
    options: Mapping[str, Any] = field(default_factory=dict)  # of the collectors

    def of(
        self,
        create_env_fn: Any,
        factory: Any,
        first: int = 0,
        count: int | None = None,
        *,
        copies: int = 1,
        collector_kwargs: Any = None,
        remote_configs: Any = None,
    ) -> list[Order]:
        """Workers from number `first` on, as many as the lists are long, or `count`; `factory` makes their policies.

        Raises ValueError for lists of different lengths and TypeError for what has no effect.
        """
        makers: list[Any] = list(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else [create_env_fn]
        if not makers:
            raise ValueError("create_env_fn is an empty list: give one environment for each collector")
        count = count or max(len(makers), length(factory) or 1)
        makers = each_of("create_env_fn", makers if len(makers) > 1 else makers[0], count)
        factories = each_of("policy_factory", factory, count)
        given_kwargs = self.collector_kwargs if collector_kwargs is None else collector_kwargs
        kwargs = each_of("collector_kwargs", given_kwargs, count)
        configs = each_of("remote_configs", self.remote_configs if remote_configs is None else remote_configs, count)
        devices = {name: each_of(name, given, count) for name, given in self.devices.items()}
        orders = []
        for i in range(count):
            own = {name: given[i] for name, given in devices.items()}
            maker = partial(worker_env, checked_maker(makers[i]), first + i, copies)
            orders.append(self._order(maker, factories[i], dict(kwargs[i] or {}), dict(configs[i] or {}), own))
        if len({order.storing_device for order in orders}) > 1 and self.joins:
            raise ValueError("storing_device differs from collector to collector, and sync=True joins their batches")
        return orders

    def _order(
        self, maker: Any, factory: Any, own: dict[str, Any], config: dict[str, Any], devices: dict[str, Any]
    ) -> Order:
        for name in own:
            if name in OF_THE_DRIVER:
                raise TypeError(f"collector_kwargs has {name}, which is not one worker's: {OF_THE_DRIVER[name]}")
        for name, value in config.items():
            if name in NOT_OF_AN_ACTOR and value:
                raise TypeError(f"remote_configs has {name}={value!r}: {NOT_OF_AN_ACTOR[name]}; leave it out")
        devices |= {name: own.pop(name) for name in DEVICES if name in own}
        storing = devices["storing_device"] if devices["storing_device"] is not None else devices["device"]
        policy = devices["policy_device"] if devices["policy_device"] is not None else devices["device"]
        options = {**self.options, **{n: v for n, v in devices.items() if v is not None and n != "storing_device"}}
        exploration = own.pop("exploration_type", self.exploration_type)
        plan = WorkerPlan(
            create_env_fn=maker,
            create_env_kwargs=own.pop("create_env_kwargs", None) or {},
            policy=None,
            policy_factory=factory,
            frames_per_batch=self.frames,
            total_frames=-1,
            exploration_type=InteractionType.from_str(exploration) if isinstance(exploration, str) else exploration,
            reset_when_done=own.pop("reset_when_done", True),
            track_policy_version=own.pop("track_policy_version", False),
            stores=True,
            collector_class=self.collector_class,
            options=options | own,
        )
        if isinstance(plan.options.get("weight_updater"), WeightUpdater):
            raise TypeError("a weight_updater lives where its policy does: pass its constructor, which is called there")
        return Order(plan, config, _device(storing), _device(policy))


def each_of(name: str, given: Any, count: int) -> list[Any]:
    """One of `given` for each of `count` workers. Raises ValueError for a list of another length."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name} lists {len(given)}, and there are {count} collectors: give one for each, or one")
    return list(given)


def checked_maker(make: Any) -> Callable[..., Any] | Any:
    """`make`. Raises TypeError for what is no environment and makes none."""
    if not callable(make) and not (hasattr(make, "reset") and hasattr(make, "step")):
        raise TypeError(f"create_env_fn is a function that makes an environment, or one, not {type(make).__name__}")
    return make


def share(frames_per_batch: int, workers: int, sync: bool) -> int:
    """How many frames each worker's batch has. Raises ValueError for none, and where they cannot be split evenly."""
    if frames_per_batch < 1:
        raise ValueError(f"frames_per_batch={frames_per_batch} makes no batch: it must be at least 1")
    if not sync:
        return frames_per_batch
    if frames_per_batch % workers:
        raise ValueError(
            f"frames_per_batch={frames_per_batch} cannot be split over {workers} collectors: give a multiple, or "
            "sync=False, where each collects all of them"
        )
    return frames_per_batch // workers


def given_options(**options: Any) -> dict[str, Any]:
    """Those that say something: not None, False or, as a number, negative."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and not (isinstance(value, int) and value < 0)
    }


def random_frames(asked: int | None, workers: int) -> int | None:
    """Each worker's part of `init_random_frames`, rounded up."""
    return None if asked is None or asked <= 0 else ceil(asked / workers)


def length(given: Any) -> int | None:
    """Of a list; None for anything else."""
    return len(given) if isinstance(given, (list, tuple)) else None


def _device(given: Device | None) -> torch.device | None:
    return None if given is None else torch.device(given)
