"""Weight sync over a Ray cluster: one copy of the weights a host, which all workers of that host load.

What a collector of Ray actors does with it::

    sender = WeightSender(weight_sync_schemes)          # None: a RayWeightSyncScheme for "policy"
    sender.send({"policy": policy}, {0: worker, 3: worker})   # module, TensorDict or mapping; workers by number
    sender.newest                                       # version of the last weights that reached a worker

Nothing is sent, and no worker is called, before the first `send`. A worker is an `Actor` with a collector's
`cascade_execute`, such as `Actor(ray, LLMCollector.as_remote().remote(...), name)`. Its receivers are registered at its
first push. A model is "policy", or the path of a module from the collector.

`send` raises ValueError for a model without a scheme and TypeError for a source without weights, before anything is
sent, and `WorkersFailed` (a PolicyError with `reasons`, by the workers' numbers) if workers died, raised or did not
answer in time: the others, if any, have the new weights, and `newest` is their version. A label that a worker
may have taken up is never given to other weights. The caller decides about the failed workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlpost.data.conversation import PolicyVersionLabel, next_version
from rlpost.errors import PolicyError
from rlpost.policies.remote import PUSH_SECONDS
from rlpost.policies.vllm_engine import first_line
from rlpost.remote.cluster import Actor, Copies, ray_for
from rlpost.remote.exchange import fetched, host_id
from rlpost.weight_sync.base import (
    MODEL_ID,
    WeightReceiver,
    WeightSource,
    WeightSyncScheme,
    Worker,
    WorkersFailed,
    named_weights,
)
from rlpost.weight_sync.folder import weights_folder

LATE = "no answer in time"  # the worker may load the weights yet


class RayWeightSyncScheme(WeightSyncScheme):
    """A push writes one folder a host in shared memory, which all workers of that host load, and removes it afterwards.

    On this host it is written straight from the model; to every other host it goes as one object of Ray's store.
    With `adapter` it is the adapter alone, for workers whose engine applies one (vLLM with `adapter_rank`).
    """

    def __init__(self, *, adapter: bool = False) -> None:
        self.adapter = adapter

    def receiver(self) -> RayWeightReceiver:
        """See `WeightSyncScheme.receiver`."""
        return RayWeightReceiver(self.adapter)

    @contextmanager
    def offered(self, source: WeightSource, workers: Mapping[int, Worker]) -> Iterator[dict[int, Any]]:
        """See `WeightSyncScheme.offered`: the folder, or, on another host, its key and its files in Ray's store."""
        with weights_folder(source, adapter=self.adapter) as folder:
            here = host_id()
            is_here = all(worker.place == here for worker in workers.values())
            copy: Any = None if is_here else Copies(_ray()).of(folder)
            yield {n: folder if worker.place == here else copy for n, worker in workers.items()}


class RayWeightReceiver(WeightReceiver):
    """Loads the folder that was written on this host, or fetches it for all workers of this host."""

    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        self.adapter = adapter

    def place(self) -> str:
        """See `WeightReceiver.place`: the host."""
        return host_id()

    def bring(
        self, collector: Any, model_id: str, content: Path | tuple[str, Any], version: PolicyVersionLabel
    ) -> None:
        """See `WeightReceiver.bring`."""
        with ExitStack() as stack:
            if not isinstance(content, Path):
                key, files = content
                content = stack.enter_context(fetched(key, lambda: _ray().get(files, timeout=PUSH_SECONDS)))
            collector.take_up_model(model_id, content, version, adapter=self.adapter)


class WeightSender:
    """Sends weights to workers; the version rises once all have answered (see the top of this file)."""

    def __init__(
        self,
        schemes: Mapping[str, WeightSyncScheme] | None = None,
        *,
        version: PolicyVersionLabel = 0,
    ) -> None:
        self.schemes = dict(schemes) if schemes is not None else {MODEL_ID: RayWeightSyncScheme()}
        self.newest = version  # of the last weights that reached a worker
        self._label = version  # the last that a worker may have loaded
        self._known: dict[int, Worker] = {}  # the place is one for each model

    def send(self, weights: Mapping[str, WeightSource], workers: Mapping[int, Actor]) -> PolicyVersionLabel:
        """Push the weights of each model to all `workers`; returns the new version, which they have then."""
        for source in weights.values():
            named_weights(source)  # raises for a source without weights
        if not weights or not workers:
            return self.newest
        _ray()
        label = next_version(self._label)
        failed = self._register(workers)
        failed |= self._pushed(weights, {n: worker for n, worker in workers.items() if n not in failed}, label)
        took = sorted(workers.keys() - failed.keys())
        if took or LATE in failed.values():
            self._label = label
        if took:
            self.newest = label
        if failed:
            raise WorkersFailed(failed, took)
        return self.newest

    def close(self) -> None:
        """Release the schemes' resources; the workers stay as they are."""
        for scheme in self.schemes.values():
            scheme.close()

    def _pushed(
        self, weights: Mapping[str, WeightSource], workers: Mapping[int, Actor], version: PolicyVersionLabel
    ) -> dict[int, str]:
        """Push to workers that have receivers; the reason of each that failed, by its number."""
        with ExitStack() as stack:
            offers: dict[str, Mapping[int, Any]] = {}
            for model_id, source in weights.items() if workers else ():
                own = {n: Worker(workers[n], self._known[n].place[model_id]) for n in workers}
                offers[model_id] = stack.enter_context(self.schemes[model_id].offered(source, own))
            calls = {
                n: worker.submit("cascade_execute", "receive_offered", {m: offers[m][n] for m in offers}, version)
                for n, worker in workers.items()
            }
            lost: PolicyError | None = None
            try:
                for model_id in offers:
                    self.schemes[model_id].transmit(weights[model_id])
            except PolicyError as error:
                lost = error
            failed = self._answers(calls)[1]
            if lost is not None and not failed:
                raise lost
            return failed

    def _register(self, workers: Mapping[int, Actor]) -> dict[int, str]:
        """Register receivers with new workers and ask for their places; returns the reasons of failures, by worker."""
        new = {n: w for n, w in workers.items() if n not in self._known or self._known[n].identity is not w}
        receivers = {model_id: scheme.receiver() for model_id, scheme in self.schemes.items()}
        call = "cascade_execute"
        begun = {
            n: worker.submit(call, "register_scheme_receiver", receivers, synchronize_weights=False)
            for n, worker in new.items()
        }
        places, failed = self._answers({n: worker.submit(call, "receiving_places") for n, worker in new.items()})
        failed |= self._answers(begun)[1]
        self._known |= {n: Worker(new[n], own) for n, own in places.items() if n not in failed}
        return failed

    def _answers(self, calls: Mapping[int, Future[Any]]) -> tuple[dict[int, Any], dict[int, str]]:
        """The results of these calls, and the reasons of failures."""
        wait(calls.values(), PUSH_SECONDS)
        errors = {n: answer.exception() for n, answer in calls.items() if answer.done()}
        failed = {n: first_line(error) for n, error in errors.items() if error is not None}
        failed |= dict.fromkeys(calls.keys() - errors.keys(), LATE)
        return {n: answer.result() for n, answer in calls.items() if n not in failed}, failed


def _ray() -> Any:
    return ray_for("a RayWeightSyncScheme")
