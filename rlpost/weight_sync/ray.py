"""Weight sync over a Ray cluster: one copy of the weights a host, which all workers of that host load.

What a collector of Ray actors does with it::

    sender = WeightSender(weight_sync_schemes)          # None: default_schemes()
    sender.send({"policy": policy}, {0: actor, 3: actor})   # module, TensorDict or mapping; workers by number
    sender.version                                      # of what the workers have; rises once, after all answered
    sender.send({"policy": policy}, {4: actor}, version=sender.version)   # a worker that joins: no new version
    sender.close()

Nothing is sent, and no worker is asked anything, before the first `send`: that is the lazy start. A worker is an
actor with a collector's `register_scheme_receiver`, `receive_offered` and `cascade_execute` (every `CollectorBase` has
them, so `LLMCollector.as_remote` is one); an actor class of another kind passes these three on. Its receivers are
registered at its first push.

`send` raises ValueError for a model without a scheme and TypeError for a source without weights, before anything is
sent, and `WorkersFailed` (a PolicyError with `reasons`, by the workers' numbers) where workers died, raised or did not
answer in time: the others have the new weights, and `version` has risen for them unless there is none. A label
that a worker may have taken up is never given to other weights. What to do with the failed ones is the caller's.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlpost.data.conversation import PolicyVersionLabel, next_version
from rlpost.errors import PolicyError
from rlpost.extras import require
from rlpost.model.lora import is_adapted, save_adapter
from rlpost.policies.vllm_process import exchange_folder, first_line, save_one_by_one
from rlpost.weight_sync.base import WeightSource, named_weights
from rlpost.weight_sync.schemes import MODEL_ID, TakesWeights, WeightReceiver, WeightSyncScheme, WorkersFailed

PUSH_SECONDS = 900.0  # longest wait for all workers to load a push, the batches under way there included
LATE = "no answer in time"  # of a worker that may take the weights up yet
K = TypeVar("K")


class Place(NamedTuple):
    """Where a worker is: what has one shared memory, and Ray's node."""

    host: str
    node: str


def host_id() -> str:
    """The same in all processes that see the same shared memory, and in no other."""
    with exchange_folder() as folder:
        device = os.stat(folder).st_dev
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else platform.node()}/{device}"


def this_place() -> Place:
    """The place of the calling worker, or of the driver."""
    return Place(host_id(), _ray().get_runtime_context().get_node_id())


class HostFolders:
    """A copy of a folder on every other host: an actor there writes it, and removes it afterwards."""

    def __init__(self, seconds: float = PUSH_SECONDS) -> None:
        self.seconds = seconds
        self._keepers: dict[str, Any] = {}  # actors by host

    @contextmanager
    def spread(self, folder: Path, places: Iterable[Place]) -> Iterator[dict[str, Path]]:
        """A block in which each host of `places` has the files of `folder`: where, by host. They cross a wire once.

        Raises PolicyError, which names the host, where a copy could not be written.
        """
        here = host_id()
        nodes = {place.host: place.node for place in places if place.host != here}
        if not nodes:
            yield {here: folder}
            return
        ray = _ray()
        content = ray.put({file.name: np.fromfile(file, np.uint8) for file in sorted(folder.iterdir())})
        keepers = {host: self._keeper(host, node) for host, node in nodes.items()}
        try:
            asked = {host: keeper.write.remote(content) for host, keeper in keepers.items()}
            there, failed = answers(asked, self.seconds)
            if failed:
                for host in failed:
                    self._keepers.pop(host)
                told = "; ".join(f"node {nodes[host]}: {reason}" for host, reason in failed.items())
                raise PolicyError(
                    f"the weights could not be written on {len(failed)} hosts ({told}); no worker has them"
                )
            yield {here: folder, **there}
        finally:
            answers({host: keeper.drop.remote() for host, keeper in keepers.items()}, self.seconds)

    def _keeper(self, host: str, node: str) -> Any:
        if host not in self._keepers:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            at = NodeAffinitySchedulingStrategy(node, soft=False)
            self._keepers[host] = _ray().remote(num_cpus=0, scheduling_strategy=at)(FolderKeeper).remote()
        return self._keepers[host]

    def close(self) -> None:
        """End the actors."""
        while self._keepers:
            _ray().kill(self._keepers.popitem()[1])


class FolderKeeper:
    """Writes files into shared memory and removes them: what runs on another host."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def write(self, files: Mapping[str, np.ndarray]) -> Path:
        """The folder with these files, the whole of it written."""
        folder = self._open.enter_context(exchange_folder())
        for name, content in files.items():
            content.tofile(folder / name)
        return folder

    def drop(self) -> None:
        """Remove what was written."""
        self._open.close()


class RayWeightSyncScheme(WeightSyncScheme):
    """A push writes one folder a host in shared memory, which all workers of that host load, and removes it afterwards.

    On this host it is written straight from the model; to every other host it goes as one object of Ray's store.
    With `adapter` it is the adapter alone, for workers whose engine applies one (vLLM with `adapter_rank`).
    """

    def __init__(self, *, adapter: bool = False, seconds: float = PUSH_SECONDS) -> None:
        self.adapter = adapter
        self._hosts = HostFolders(seconds)

    def receiver(self) -> RayWeightReceiver:
        """See `WeightSyncScheme.receiver`."""
        return RayWeightReceiver(self.adapter)

    @contextmanager
    def offered(self, source: WeightSource, places: Mapping[int, Place]) -> Iterator[dict[int, Path]]:
        """See `WeightSyncScheme.offered`: the folder on each worker's host."""
        with exchange_folder() as folder:
            if self.adapter:
                if not is_adapted(source):
                    raise PolicyError(f"adapter=True sends an adapter, and this {type(source).__name__} has none")
                save_adapter(source, folder)
            else:
                save_one_by_one(named_weights(source).items(), folder)
            with self._hosts.spread(folder, places.values()) as folders:
                yield {number: folders[place.host] for number, place in places.items()}

    def close(self) -> None:
        """See `WeightSyncScheme.close`."""
        self._hosts.close()


class RayWeightReceiver(WeightReceiver):
    """Loads the folder that was written on this host."""

    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        self.adapter = adapter

    def place(self) -> Place:
        """See `this_place`."""
        return this_place()

    def bring(self, collector: TakesWeights, model_id: str, content: Path, version: PolicyVersionLabel) -> None:
        """See `WeightReceiver.bring`."""
        collector.take_up(content, version, adapter=self.adapter)


def default_schemes() -> dict[str, WeightSyncScheme]:
    """What a collector of Ray actors sends with unless it is told otherwise."""
    return {MODEL_ID: RayWeightSyncScheme()}


class WeightSender:
    """Sends weights to workers, all of which answer before their version rises: see the top of this file."""

    def __init__(
        self,
        schemes: Mapping[str, WeightSyncScheme] | None = None,
        *,
        version: PolicyVersionLabel = 0,
        seconds: float = PUSH_SECONDS,
    ) -> None:
        self.schemes = default_schemes() if schemes is None else dict(schemes)
        self._version = version
        self.seconds = seconds
        self._label = version  # the last that a worker may have taken up
        self._places: dict[int, tuple[Any, Place]] = {}  # of workers with receivers: their actor's id, and its place

    @property
    def version(self) -> PolicyVersionLabel:
        """What was last brought to a worker."""
        return self._version

    def send(
        self,
        weights: Mapping[str, WeightSource],
        workers: Mapping[int, Any],
        *,
        version: PolicyVersionLabel | None = None,
    ) -> PolicyVersionLabel:
        """Bring the weights of each model to all `workers`, and return the version that they have then.

        `version`: they are that one's already, as for a worker that joins; left out, they are a new one's.
        """
        if strange := sorted(weights.keys() - self.schemes.keys()):
            raise ValueError(f"no weight_sync_scheme sends {strange[0]!r}: there are {', '.join(sorted(self.schemes))}")
        if empty := sorted(name for name, source in weights.items() if not named_weights(source)):
            raise TypeError(f"the {type(weights[empty[0]]).__name__} given for {empty[0]!r} has no weights")
        if not weights or not workers:
            return self._version
        label = next_version(self._label) if version is None else version
        places, failed = self._registered(workers)
        failed |= self._received(weights, {number: workers[number] for number in places}, places, label)
        took = sorted(workers.keys() - failed.keys())
        if took or LATE in failed.values():
            self._label = label
        if took:
            self._version = label
        if failed:
            raise WorkersFailed(failed, took)
        return self._version

    def close(self) -> None:
        """Give back what pushes have needed; the workers are left as they are."""
        for scheme in self.schemes.values():
            scheme.close()

    def _received(
        self,
        weights: Mapping[str, WeightSource],
        workers: Mapping[int, Any],
        places: Mapping[int, Place],
        version: PolicyVersionLabel,
    ) -> dict[int, str]:
        """Push to workers that have receivers; why not, by the number of each that has failed."""
        if not workers:
            return {}
        with ExitStack() as stack:
            offers = {
                model_id: stack.enter_context(self.schemes[model_id].offered(source, places))
                for model_id, source in weights.items()
            }
            asked = {
                number: worker.receive_offered.remote(
                    {model_id: offers[model_id][number] for model_id in offers}, version
                )
                for number, worker in workers.items()
            }
            for model_id, source in weights.items():
                self.schemes[model_id].transmit(source)
            return answers(asked, self.seconds)[1]

    def _registered(self, workers: Mapping[int, Any]) -> tuple[dict[int, Place], dict[int, str]]:
        """The workers' places, those that are new given receivers; and why not, of each that could not be."""
        identities = {number: worker._actor_id for number, worker in workers.items()}
        new = {n: workers[n] for n, own in identities.items() if self._places.get(n, (None,))[0] != own}
        receivers = {model_id: scheme.receiver() for model_id, scheme in self.schemes.items()}
        path = f"receiver_schemes[{next(iter(receivers))!r}].place"
        begun = {n: w.register_scheme_receiver.remote(receivers, synchronize_weights=False) for n, w in new.items()}
        failed = answers(begun, self.seconds)[1]
        asked = {n: w.cascade_execute.remote(path) for n, w in new.items() if n not in failed}
        found, silent = answers(asked, self.seconds)
        self._places |= {number: (identities[number], place) for number, place in found.items()}
        failed |= silent
        return {number: self._places[number][1] for number in workers if number not in failed}, failed


def answers(asked: Mapping[K, Any], seconds: float) -> tuple[dict[K, Any], dict[K, str]]:
    """What came of these calls within `seconds` in all, and why nothing came of the others."""
    if not asked:
        return {}, {}
    ray = _ray()
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    got: dict[K, Any] = {}
    failed: dict[K, str] = {}
    for key, ref in asked.items():
        if ref not in ready:
            failed[key] = LATE
            continue
        try:
            got[key] = ray.get(ref, timeout=seconds)
        except Exception as error:  # noqa: BLE001  whatever the worker raised, or how it ended: told by the caller
            failed[key] = first_line(getattr(error, "cause", None) or error)
    return got, failed


def _ray() -> Any:
    require("ray", "ray", "a RayWeightSyncScheme")
    import ray  # pyright: ignore[reportMissingImports]

    return ray
