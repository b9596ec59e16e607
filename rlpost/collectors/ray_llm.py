"""RayLLMCollector: LLMCollectors in the actors of a Ray cluster, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from rlpost.collectors.llm import LLMCollector, turns_per_batch
from rlpost.collectors.ray_collector import RayCollector
from rlpost.collectors.ray_plan import given_options, length
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.policy_version import PolicyVersion
from rlpost.weight_sync.base import WeightUpdater
from rlpost.weight_sync.schemes import WeightSyncScheme


class RayLLMCollector(RayCollector):
    """Iterates over batches of dialog turns of `num_collectors` LLMCollectors, each in a Ray actor of its own.

    Its arguments are LLMCollector's, and `env` and `policy_factory` are called in the actors; a list has one for each.
    `dialog_turns_per_batch` are split over the collectors with `sync_iter`, where a batch is what all of them give;
    without, each gives so many, the first that is ready. `total_dialog_turns` is a lower bound. Each actor has
    `num_cpus` CPUs, which its engine's threads follow, and `num_gpus` GPUs (None: 0.2 where the cluster has any), or
    what `remote_configs` (or `remote_config`) says. Everything else is as RayCollector says.

    Raises TypeError or ValueError for arguments that cannot be, or have no effect.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]],
        *,
        policy: Any = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: Any = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: Callable[[], WeightUpdater] | None = None,
        queue: Any = None,
        track_policy_version: bool | PolicyVersion = False,
        begin_ahead: bool = True,
        verbose: bool = False,
        batches_ahead: int | None = 2,
        wait_seconds: float = 600.0,
        place_seconds: float = 300.0,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        sync_iter: bool = True,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        num_collectors: int | None = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise TypeError("RayLLMCollector takes exactly one of policy and policy_factory")
        if queue is not None:
            raise TypeError("queue has no effect: iterate over the collector, or give it a replay_buffer")
        if async_envs:
            raise TypeError(
                "async_envs=True has no effect on a language environment, whose conversations wait for one another in "
                "no pool: raise its num_envs"
            )
        if remote_config is not None and remote_configs is not None:
            raise TypeError("remote_config is another name of remote_configs: give one of them")
        given = remote_configs if remote_configs is not None else remote_config or {}
        own = {"num_cpus": num_cpus} | ({} if num_gpus is None else {"num_gpus": num_gpus})
        configs = [own | dict(each) for each in ([given] if isinstance(given, Mapping) else given)]
        count = num_collectors or length(env) or length(policy_factory) or 1
        options = given_options(
            yield_only_last_steps=yield_only_last_steps,
            yield_completed_trajectories=yield_completed_trajectories,
            flatten_data=flatten_data,
            verbose=verbose,
        )
        super().__init__(
            env,
            policy,
            policy_factory=policy_factory,
            frames_per_batch=turns_per_batch(dialog_turns_per_batch, count if sync_iter else 1),
            total_frames=total_dialog_turns,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            collector_class=LLMCollector,
            collector_kwargs={**options, "begin_ahead": begin_ahead, "track_policy_version": track_policy_version},
            sync=sync_iter,
            ray_init_config=ray_init_config,
            remote_configs=configs[0] if isinstance(given, Mapping) else configs,
            num_collectors=num_collectors,
            replay_buffer=replay_buffer,
            weight_updater=weight_updater,
            weight_sync_schemes=weight_sync_schemes,
            batches_ahead=batches_ahead,
            place_seconds=place_seconds,
            wait_seconds=wait_seconds,
        )

    @property
    def dialog_turns_per_batch(self) -> int:
        """How many turns a batch has, each collector's part rounded up to its environment's size."""
        parts = [member.frames_per_batch for member in self._crew.members.values()]
        return sum(parts) if self.sync else parts[0]

    def get_policy_model(self) -> list[Any]:
        """The actors that sample: each takes weights with `receive_weights`, from any process of the cluster."""
        return self.remote_collectors
