"""Settings become the players of a Ray cluster."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlpost import cluster
from rlpost.assemble_player import PlayerOrder, player_builder
from rlpost.collectors.players import Players
from rlpost.collectors.ray_worker import Copies, RayWorker
from rlpost.settings import RayClusterSettings, VLLMSettings

PASSED_ON = ("RLPOST_", "HF_", "VLLM_", "ATEN_", "ONEDNN_", "TOKENIZERS_", "NLTK_", "CUDA_HOME", "NCCL_")
HEAD_SECONDS = 20.0  # without an answer of the head, after which the cluster is taken for lost
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def ray_players(settings: RayClusterSettings, order: PlayerOrder, device: torch.device) -> tuple[Players, str]:
    """The players of a training in the workers of a cluster, and where they are in words; none is started yet.

    The model is trained on `device`, which a cluster that is begun here is not offered where there are others.

    Raises MissingExtraError without ray, PolicyError where the cluster does not answer.
    """
    ray = cluster.connect(settings.address, own_gpus=own_gpus(settings, device))
    shards = settings.tensor_parallel_size
    if isinstance(order.policy, VLLMSettings) and shards > 1:
        order = replace(order, policy=replace(order.policy, tensor_parallel_size=shards))
    gpus = settings.gpus_per_worker
    if gpus is None:
        gpus = float(shards) if cluster.has_gpus(ray) else 0.0
    options = {"num_cpus": settings.cpus_per_worker, "num_gpus": gpus}
    copies = Copies(ray)

    def build_from(folder: Path) -> Any:
        return player_builder(replace(order, folder=folder))

    def new_worker(seat: int) -> RayWorker:
        return RayWorker(
            ray,
            build_from,
            order.folder,
            name=f"worker {seat} of the cluster",
            options=options,
            environment=_environment(settings.cpus_per_worker),
            copies=copies,
            place_seconds=settings.place_seconds,
            may_wait=lambda: bool(players.ready),
            what_there_is=lambda: cluster.what_there_is(ray),
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


def _environment(cpus: float) -> dict[str, str]:
    """The variables of a worker's process: this one's that decide how it computes, and as many threads as CPUs."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    return passed | dict.fromkeys(THREADS, str(max(1, int(cpus))))


def _watch(players: Players, address: str) -> None:
    """Give the players up once the head of the cluster has not answered for `HEAD_SECONDS`.

    Ray itself would end this process after a minute, without a word.
    """
    host, port = address.rsplit(":", 1)
    heard = time.monotonic()
    while not players.is_closed:
        try:
            socket.create_connection((host, int(port)), HEAD_SECONDS / 3).close()
            heard = time.monotonic()
        except OSError as error:
            if (silent := time.monotonic() - heard) > HEAD_SECONDS:
                why = f"was lost with the head of the cluster, {address}, which has not answered for {silent:.0f} s"
                players.give_up(f"{why} ({error}): see that it runs, and go on with --resume")
                return
        time.sleep(HEAD_SECONDS / 10)
