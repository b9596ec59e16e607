"""The players of asynchronous collection: in the trainer's process, and in the process that plays."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from rlpost.catalog import option_of
from rlpost.collectors.driver import GroupDriver
from rlpost.collectors.player import GroupPlayer
from rlpost.config.plugins import load_plugins
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.checks import check_template
from rlpost.errors import ConfigError
from rlpost.model.load import context_length
from rlpost.model.trainable import Trainable
from rlpost.model.weights import device_of
from rlpost.policies.base import Policy
from rlpost.policies.drawing import training_sampling
from rlpost.policies.remote import Players, RemotePolicy
from rlpost.remote import cluster
from rlpost.remote.child import USER_PATH, user_path
from rlpost.remote.process import WorkerProcess, reach
from rlpost.settings import AsyncCollectorSettings, Engine, PushMode, RayClusterSettings, VLLMSettings
from rlpost.settings.commands import SampledSettings


@dataclass
class PlayerOrder:
    """The parts that a player is built from, in its process, which knows no plugin yet."""

    plugins: list[str]
    make_env: Callable[[], DatasetChatEnv]
    make_policy: Callable[..., Policy]  # see `build_policy`, without the model of this process
    folder: Path  # of the weights that the policy begins with
    tokenizer: Any


def player_builder(order: PlayerOrder) -> Callable[[], GroupPlayer]:
    """The function that builds the player of `order` in another process."""
    return partial(build_player, order.plugins, cloudpickle.dumps(order))


def build_player(plugins: list[str], order: bytes) -> GroupPlayer:
    """The player that `order` describes, its policy started; in its own process, which knows no plugin yet."""
    load_plugins(plugins)
    wanted: PlayerOrder = cloudpickle.loads(order)
    env = wanted.make_env()
    env.start()
    check_template(env, wanted.tokenizer)
    policy = wanted.make_policy(folder=wanted.folder)
    policy.start()
    return GroupPlayer(env, policy)


def assemble_driver(
    settings: SampledSettings, order: PlayerOrder, env: DatasetChatEnv, trainable: Trainable, buffer: GroupBuffer
) -> GroupDriver:
    """The driver that draws prompts and fills `buffer`; the players' processes are not started yet.

    `order` says how a player is built; the engine of its policy is decided here.
    """
    own, machines = settings.collector, settings.cluster
    chosen = own if isinstance(own, AsyncCollectorSettings) else AsyncCollectorSettings(depth=0)
    ray = machines if isinstance(machines, RayClusterSettings) else None
    policy, weights_dtype = settings.policy, None
    if isinstance(policy, VLLMSettings):
        policy = replace(policy, engine=Engine.own_process)  # which takes each request as it comes
        weights_dtype = getattr(torch, policy.dtype.value, None)
        if ray is not None and ray.tensor_parallel_size > 1:
            policy = replace(policy, tensor_parallel_size=ray.tensor_parallel_size)
    order = replace(order, make_policy=partial(order.make_policy, policy, model=None))
    longest = settings.env.longest_conversation()
    if ray is not None:
        players, where = ray_players(ray, order, device_of(trainable.model))
        max_restarts = ray.max_restarts
    else:
        seats = [_environment(chosen, seat) for seat in range(chosen.players)]
        players = Players(partial(_local_worker, order, seats, Output()), chosen.players)
        where = "in its own process" if chosen.players == 1 else f"in {chosen.players} processes"
        max_restarts = chosen.max_restarts
    remote = RemotePolicy(
        players,
        order.tokenizer,
        sampling=training_sampling(settings.sampling, settings.env),
        seed=settings.seed,
        max_model_len=min(longest, context_length(trainable.folder) or longest),
        name=f"{option_of('policy', type(policy))} {where}",
        pushes_adapter=trainable.adapter_rank is not None,
        in_turn=settings.lag == 0,
        weights_dtype=weights_dtype,
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
    """The place of this process's output when the first worker starts; replacements write there too."""

    @cached_property
    def descriptor(self) -> int:
        """A descriptor of the open log, which stays valid when this process's output is redirected."""
        descriptor = os.dup(1)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


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
    """The environment variable that gives a process these GPUs of the ones that this process sees."""
    names = cluster.gpus_seen()
    if (missing := max(numbers)) >= len(names):
        raise ConfigError(f"collector.gpus={numbers}: there is no GPU {missing}, this process sees {len(names)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


PASSED_ON = ("RLPOST_", "HF_", "VLLM_", "ATEN_", "ONEDNN_", "TOKENIZERS_", "NLTK_", "CUDA_HOME", "NCCL_")


HEAD_SECONDS = 20.0  # without an answer of the head, after which the cluster is taken for lost


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def ray_players(settings: RayClusterSettings, order: PlayerOrder, device: torch.device) -> tuple[Players, str]:
    """The players of a training in the workers of a cluster, and where they are in words; none is started yet.

    The model is trained on `device`, which a cluster that is begun here is not offered where there are others.

    Raises MissingExtraError without ray, PolicyError where the cluster does not answer.
    """
    ray = cluster.connect(settings.address, own_gpus=own_gpus(settings, device))
    gpus = settings.gpus_per_worker
    if gpus is None:
        gpus = float(settings.tensor_parallel_size) if cluster.has_gpus(ray) else 0.0
    options = {"num_cpus": settings.cpus_per_worker, "num_gpus": gpus}
    copies = cluster.Copies(ray)

    def build_from(folder: Path) -> Any:
        return player_builder(replace(order, folder=folder))

    def new_worker(seat: int) -> Any:
        return cluster.RayWorker(
            ray,
            build_from,
            order.folder,
            name=f"worker {seat} of the cluster",
            options=options,
            environment=_cluster_environment(settings.cpus_per_worker),
            copies=copies,
            place_seconds=settings.place_seconds,
            may_wait=lambda: bool(players.ready),
        )

    players = Players(new_worker, settings.rollout_workers)
    address = ray.get_runtime_context().gcs_address
    threading.Thread(target=_watch, args=(players, address), name="rlpost-watch-head", daemon=True).start()
    count = settings.rollout_workers
    return players, f"in {count} Ray worker{'s' if count > 1 else ''}"


def own_gpus(settings: RayClusterSettings, device: torch.device) -> list[int]:
    """The numbers of the GPUs that this machine's ranks train on."""
    if device.type != "cuda":
        return []
    several = settings.trainer_ranks or 1
    return list(range(several)) if several > 1 else [device.index or 0]


def _cluster_environment(cpus: float) -> dict[str, str]:
    """The variables of a worker's process: this one's that decide how it computes, its path, and threads as CPUs."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    return passed | {USER_PATH: user_path()} | dict.fromkeys(THREADS, str(max(1, int(cpus))))


def _watch(players: Players, address: str) -> None:
    """Give the players up once the head of the cluster has not answered for `HEAD_SECONDS`.

    Ray itself would end this process after a minute, without a word.
    """
    host, port = address.rsplit(":", 1)
    answered_at = time.monotonic()
    while not players.is_closed:
        try:
            reach(host, int(port), HEAD_SECONDS / 3)
            answered_at = time.monotonic()
        except OSError as error:
            if (silent := time.monotonic() - answered_at) > HEAD_SECONDS:
                why = f"was lost with the head of the cluster, {address}, which has not answered for {silent:.0f} s"
                players.give_up(f"{why} ({error}): see that it runs, and go on with --resume")
                return
        time.sleep(HEAD_SECONDS / 10)
