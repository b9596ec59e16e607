"""Settings become the parts of asynchronous collection: those of the trainer's process, and those of the player's."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

from rlpost.assemble_player import PlayerOrder, player_builder
from rlpost.catalog import CHOICES
from rlpost.cluster import gpus_seen
from rlpost.collectors.driver import GroupDriver
from rlpost.collectors.players import Players
from rlpost.collectors.process import WorkerProcess
from rlpost.collectors.remote_policy import RemotePolicy
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.build import longest_conversation
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.errors import ConfigError
from rlpost.estimate.machine import chosen_policy
from rlpost.model.load import context_length
from rlpost.model.shards import device_of
from rlpost.model.trainable import Trainable
from rlpost.policies.sampling import training_sampling
from rlpost.settings import (
    AsyncCollectorSettings,
    Engine,
    PolicySettings,
    PushMode,
    RayClusterSettings,
    VLLMSettings,
)
from rlpost.settings.commands import SampledSettings


def assemble_driver(
    settings: SampledSettings, env: DatasetChatEnv, tokenizer: Any, trainable: Trainable, buffer: ReplayBuffer
) -> GroupDriver:
    """What draws for a training and fills `buffer`; the processes that play are not started yet."""
    own = settings.collector
    chosen = own if isinstance(own, AsyncCollectorSettings) else AsyncCollectorSettings(depth=0)
    env.check_halves()
    policy = _own_engine(chosen_policy(settings.policy))
    order = PlayerOrder(settings, policy, trainable.folder, tokenizer, trainable.adapter_rank, trainable.adapter)
    longest = longest_conversation(settings.env)
    engine = next(name for name, row in CHOICES["policy"].items() if row.cls is type(policy))
    if isinstance(settings.cluster, RayClusterSettings):
        from rlpost.assemble_cluster import ray_players

        players, where = ray_players(settings.cluster, order, device_of(trainable.model))
        max_restarts = settings.cluster.max_restarts
    else:
        seats = [_environment(chosen, seat) for seat in range(chosen.players)]
        players = Players(partial(_local_worker, order, seats, Output()), chosen.players)
        where = "in its own process" if chosen.players == 1 else f"in {chosen.players} processes"
        max_restarts = chosen.max_restarts
    remote = RemotePolicy(
        players,
        tokenizer,
        sampling=training_sampling(settings),
        seed=settings.seed,
        max_model_len=min(longest, context_length(trainable.folder) or longest),
        name=f"{engine} {where}",
        pushes_adapter=trainable.adapter_rank is not None,
        in_turn=settings.lag == 0,
    )
    return GroupDriver(
        env,
        remote,
        buffer,
        model=trainable.model,
        prompts_per_step=settings.prompts_per_step,
        depth=min(1, settings.lag) if chosen.depth is None else chosen.depth,
        max_policy_lag=settings.lag,
        wait_for_groups=chosen.push is PushMode.wait,
        max_restarts=max_restarts,
        wait_seconds=chosen.wait_seconds,
    )


class Output:
    """Where this process's output goes when the first worker starts: that of those that follow one that died too."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """Of a file of its own, which stays as it is when this process's output goes elsewhere."""
        if self._descriptor is None:
            self._descriptor = os.dup(1)
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


def _local_worker(order: PlayerOrder, seats: list[dict[str, str]], output: Output, seat: int) -> WorkerProcess:
    """The process of a player on this machine, which is not started yet."""
    name = "the process that samples" if len(seats) == 1 else f"process {seat} that samples"
    return WorkerProcess(player_builder(order), name=name, environment=seats[seat], output=output.descriptor)


def _environment(chosen: AsyncCollectorSettings, seat: int) -> dict[str, str]:
    """The variables that leave the player of `seat` its share of the GPUs, or of the cores where there are several."""
    if chosen.gpus:
        each = len(chosen.gpus) // chosen.players
        return _gpus(chosen.gpus[seat * each : (seat + 1) * each])
    cores = max(1, len(os.sched_getaffinity(0)) // chosen.players) if hasattr(os, "sched_getaffinity") else 1
    return {} if chosen.players == 1 else {name: str(cores) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def _gpus(numbers: list[int]) -> dict[str, str]:
    """The variable that leaves a process these GPUs, of those that this one sees."""
    names = gpus_seen()
    if (missing := max(numbers)) >= len(names):
        raise ConfigError(f"collector.gpus={numbers}: there is no GPU {missing}, this process sees {len(names)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def _own_engine(policy: PolicySettings) -> PolicySettings:
    """The settings of a policy, vLLM's with the engine that takes each request as it comes."""
    return replace(policy, engine=Engine.own_process) if isinstance(policy, VLLMSettings) else policy
