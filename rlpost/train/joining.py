"""How the ranks of a training come together: started here, or by torchrun."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlpost.collectors.process import START_SECONDS, RemoteObject, WorkerProcess, listen
from rlpost.collectors.worker import Host
from rlpost.distributed import Place, device_of, forget_place, form_group
from rlpost.errors import ConfigError, RankError
from rlpost.estimate.machine import chosen_policy
from rlpost.model.trainable import locate_start
from rlpost.settings import ClusterSettings, Engine, Sharding, TransformersSettings, VLLMSettings
from rlpost.settings.commands import SampledSettings, TrainingSettings
from rlpost.train.rank import OtherRank
from rlpost.train.ranks import Ranks

ADDRESS, KEY = "rlpost/address", "rlpost/key"  # in the store: where rank 0 waits for the others, and their secret


def join_ranks(settings: TrainingSettings, checkpoint: Path | None, folder: Path) -> Ranks:
    """The ranks that train `settings` together, all in one process group, the others loading their model already.

    Raises ConfigError where they cannot be had, RankError where they do not come.
    """
    cluster = settings.cluster
    place = Place.from_environment(os.environ)
    if (asked := cluster.trainer_ranks) and place and asked != place.world:
        raise ConfigError(f"cluster.trainer_ranks={asked}, and {place.world} processes were started: leave it out")
    if place is None and (asked or 1) == 1:
        return Ranks()
    with contextlib.ExitStack() as opened:
        if place is None:
            place, store, others = _start(asked or 1, settings.plugin, folder, cluster)
        else:
            forget_place()
            store, others = _meet(place, settings.plugin, folder, cluster)
        ranks = opened.enter_context(Ranks(others))
        device = device_of(settings.model.device, place)
        with ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(lambda other: other.start(START_SECONDS), others))
        found = [other.submit("find_model", settings) for other in others]
        locate_start(settings)
        for future in found:
            future.result()
        formed = [other.submit("form_group", settings.model.device, cluster.rank_seconds) for other in others]
        form_group(place, store, device, cluster.rank_seconds)
        for future in formed:
            future.result()
        for other in others:
            other.submit("load", settings, checkpoint).add_done_callback(ranks.look)
        opened.pop_all()
    return ranks


def beside_ranks(settings: Any, ranks: int) -> Any:
    """`settings` with an engine in a process of its own where there are several ranks: vLLM takes a group for its own.

    Raises ConfigError for a policy that samples from a model that is divided among ranks.
    """
    if ranks == 1 or not settings.uses_policy:
        return settings
    policy = chosen_policy(settings.policy)
    elsewhere = isinstance(settings, SampledSettings) and settings.samples_elsewhere
    if isinstance(policy, TransformersSettings) and settings.cluster.sharding is Sharding.full and not elsewhere:
        raise ConfigError(
            "policy=transformers samples from the trainer's model, which cluster.sharding=full divides: take "
            "policy=vllm or collector=async"
        )
    if not isinstance(policy, VLLMSettings):
        return settings
    return replace(settings, policy=replace(policy, engine=Engine.own_process))


def follow() -> int:
    """Be one of the ranks that torchrun has started, but rank 0, until that ends; returns the exit code."""
    place = Place.from_environment(os.environ)
    assert place is not None
    store = place.open_store(START_SECONDS)
    forget_place()
    host, _, port = store.get(ADDRESS).decode().rpartition(":")
    connection = Client((host, int(port)), authkey=store.get(KEY))
    _keep_alive(connection)
    connection.send(place)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 decides what a signal ends
        signal.signal(number, signal.SIG_IGN)
    terminal = os.dup(2)
    served = Host(connection, orphaned=partial(_orphaned, place, terminal))
    served.serve()
    return served.object.conclusion[0]


def _start(
    world: int, plugins: list[str], folder: Path, cluster: ClusterSettings
) -> tuple[Place, dist.Store, Sequence[RemoteObject]]:
    """Processes of this machine that are to be ranks, not started yet, and where they will meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(0, world, 0, world, "127.0.0.1", store.port, store_is_there=True)
    others = []
    for rank in range(1, world):
        its = replace(place, rank=rank, local_rank=rank)
        others.append(
            WorkerProcess(
                partial(OtherRank, plugins, its, folder / f"rank-{rank}.log"),
                name=str(its),
                silent_seconds=cluster.rank_seconds,
                output=None,
            )
        )
    return place, store, others


class JoinedRank(RemoteObject):
    """A rank that a launcher has started, and that has come to this one by itself."""

    def __init__(self, build: Any, connection: Connection, **how: Any) -> None:
        super().__init__(build, **how)
        self._connection = connection

    @property
    def _is_open(self) -> bool:
        return True

    def _open(self, seconds: float) -> None:
        self._heard = time.monotonic()
        listen(self, self._connection)

    def _write(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # its loss is noticed where it is read from
            self._connection.send_bytes(message)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()  # at which it ends itself


def _meet(
    place: Place, plugins: list[str], folder: Path, cluster: ClusterSettings
) -> tuple[dist.Store, Sequence[RemoteObject]]:
    """The other processes that torchrun has started, once each of them has come."""
    store = place.open_store(cluster.rank_seconds)
    local = place.local_world == place.world
    secret = secrets.token_hex(32)
    waiting: set[int] = set(range(1, place.world))
    others: dict[int, RemoteObject] = {}
    with socket.create_server(("127.0.0.1" if local else "", 0)) as server:
        host = "127.0.0.1" if local else place.address
        store.set(KEY, secret)
        store.set(ADDRESS, f"{host}:{server.getsockname()[1]}")
        until = time.monotonic() + cluster.rank_seconds
        while waiting:
            server.settimeout(max(0.1, until - time.monotonic()))
            try:
                came, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(map(str, sorted(waiting)))
                raise RankError(
                    f"rank {missing} of {place.world} did not come within {cluster.rank_seconds:.0f} s: see that every "
                    "machine runs the same command with the same address of rank 0; cluster.rank_seconds sets the limit"
                ) from None
            connection = Connection(came.detach())
            deliver_challenge(connection, secret.encode())
            answer_challenge(connection, secret.encode())
            _keep_alive(connection)
            its: Place = connection.recv()
            waiting.remove(its.rank)
            others[its.rank] = JoinedRank(
                partial(OtherRank, plugins, its, folder / f"rank-{its.rank}.log"),
                connection,
                name=str(its),
                silent_seconds=cluster.rank_seconds,
            )
    return store, [others[rank] for rank in sorted(others)]


def _keep_alive(connection: Connection) -> None:
    """Notice within half a minute that the machine at the other end is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _orphaned(place: Place, terminal: int) -> None:
    """Rank 0 is gone without a word: say so where a user may see it, and end."""
    os.write(terminal, f"error: {place} ends, since rank 0 was lost: go on with --resume\n".encode())
    os._exit(RankError.exit_code)
