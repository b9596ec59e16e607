"""Several ranks that train together, as the loop on rank 0 sees them.

Rank 0 runs the loop and has the folder, the screen, the random draws and the evaluations. The others hold the model,
or their part of it, and follow rank 0's calls: each reads whole groups of a minibatch, and their gradients are summed.
`join_ranks` starts the others on this machine, or meets the ones that torchrun has started.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlpost import distributed
from rlpost.config.plugins import load_plugins
from rlpost.errors import ConfigError, PolicyError, RankError, RlpostError
from rlpost.model import weights
from rlpost.model.device import compute_deterministically
from rlpost.model.logprobs import verdict_of
from rlpost.model.lora import whole_adapter
from rlpost.model.packing import Row, shares_of
from rlpost.model.trainable import Trainable, forward_precision, load_trainable, locate_models
from rlpost.model.weights import ADAPTER, announce_with, is_sharded
from rlpost.remote.process import START_SECONDS, Host, JoinedProcess, RemoteObject, WorkerProcess, connected, listening
from rlpost.runs.checkpoint import restore_moments
from rlpost.settings import ClusterSettings, ModelSettings
from rlpost.settings.commands import TrainingSettings
from rlpost.train.process_group import Place, device_of, forget_place, form_group, leave_group
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.update import Microbatches, Objective, Update
from rlpost.weight_sync.base import named_weights

log = logging.getLogger("rlpost")
NAMING_SECONDS = 5.0  # after a failed collective operation, until the lost rank is known
LAST_RESORT_SECONDS = 15.0  # for this process to end in order once another rank is lost
LOAD_SECONDS = 900.0  # for another rank to load its model, once this one has
END_SECONDS = 10.0  # for another rank to end in order
ADDRESS, KEY = "rlpost/address", "rlpost/key"  # keys of the store: where rank 0 waits, and the others' secret


class SeveralRanks(Ranks):
    """Rank 0, in this process, and the others.

    Raises RankError, in whatever the main thread does, once another rank is lost.
    """

    def __init__(self, others: Sequence[RemoteObject]) -> None:
        super().__init__()
        self.others = others
        self._alarm = Alarm()
        self._threads = torch.get_num_threads()  # before the ranks share the cores
        for other in others:
            other.on_death = self._lost_one

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Tell the others that the training has ended, and how."""
        self._alarm.close()
        failed = isinstance(error, Exception)
        code = getattr(error, "exit_code", 1) if failed else 0
        for other in self.others:
            other.on_death = lambda: None
            with contextlib.suppress(PolicyError):  # one that was never started, or has ended
                other.submit("conclude", code, str(error) if failed else "")
        for other in self.others:
            other.close(END_SECONDS)
        leave_group()
        torch.set_num_threads(self._threads)

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return 1 + len(self.others)

    def begin(self, own: Rank, tokens_per_microbatch: int | None) -> None:
        """Begin the training with `own`, this rank's model; waits until the others have loaded theirs."""
        self.own = own
        with self._naming():
            futures = [other.submit("begin", own.objective, tokens_per_microbatch) for other in self.others]
            self._answers(futures, "loading the model", LOAD_SECONDS)
        if is_sharded(own.model):
            announce_with(own.model, partial(self._tell, "gather"))

    def update(self, minibatch: Sequence[Row], number: int) -> Update[Any]:
        """Take optimizer step `number` (from 0), each rank on its share of `minibatch`."""
        shares = self._shares(minibatch)
        with self._naming():
            futures = self._ask(
                "update", [(share, number, self.total_updates) for share in self._rows(minibatch, shares)]
            )
            mine = self.own.update([minibatch[place] for place in shares[0]], number, self.total_updates)
            theirs: list[Update[Any]] = [as_tensors(each) for each in self._answers(futures, "an update")]
        outputs = [as_tensors(as_arrays(output)) for output in mine.outputs]  # on the CPU, as those of the others
        outputs += [output for each in theirs for output in each.outputs]
        read = self._in_order(shares, [mine.log_probs, *(each.log_probs for each in theirs)]) if mine.stepped else []
        return Update(outputs, mine.grad_norm, mine.stepped, read)

    def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """See `Ranks.on_all`."""
        with self._naming():
            futures = self._tell(method, *arguments)
            own = getattr(self.own, method)(*arguments)
            return [own, *self._answers(futures, f"the answer to {method}")]

    # Calls to the others

    def _read(self, method: str, rows: Sequence[Row], temperature: float, *more: Any) -> list[torch.Tensor]:
        shares = self._shares(rows)
        with self._naming():
            futures = self._ask(method, [(share, temperature) for share in self._rows(rows, shares)])
            read = [getattr(self.own, method)([rows[place] for place in shares[0]], temperature, *more)]
            read += [as_tensors(each) for each in self._answers(futures, "log-probs")]
        return self._in_order(shares, read)

    @staticmethod
    def _in_order(shares: list[list[int]], values: Sequence[Sequence[Any]]) -> list[Any]:
        """The values of each rank's share of the rows, in the order of the rows."""
        found: dict[int, Any] = {}
        for share, own in zip(shares, values, strict=True):
            found.update(zip(share, own, strict=True))
        return [found[place] for place in range(len(found))]

    def _shares(self, rows: Sequence[Row]) -> list[list[int]]:
        return shares_of(rows, self.count, share_prompts=verdict_of(self.own.model).reads_packed)

    def _rows(self, rows: Sequence[Row], shares: list[list[int]]) -> list[Any]:
        """The rows of each of the others' shares, as arrays."""
        return [as_arrays([rows[place] for place in share]) for share in shares[1:]]

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """Call `method` on each of the others, with its own arguments; their results."""
        futures = []
        for other, each in zip(self.others, arguments, strict=True):
            future = other.submit("work", method, *each)
            future.add_done_callback(self.look)
            futures.append(future)
        return futures

    def _tell(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return self._ask(method, [arguments] * len(self.others))

    def _answers(self, futures: Sequence[Future[Any]], what: str, seconds: float | None = None) -> list[Any]:
        """Wait for the others' results. Raises RankError if one takes too long; `what` names the work in the error."""
        seconds = distributed.DEADLINE_SECONDS if seconds is None else seconds
        answers = []
        for rank, future in enumerate(futures, start=1):
            try:
                answers.append(future.result(seconds))
            except TimeoutError:
                raise RankError(
                    f"waited {seconds:.0f} s for {what} of rank {rank}, which hangs or is much slower than rank 0; "
                    f"cluster.rank_seconds sets the limit, and rank-{rank}.log of the run says what it did"
                ) from None
        return answers

    # Their end

    def look(self, future: Future[Any]) -> None:
        """Ring the alarm if another rank's call, whose `future` is done, has failed."""
        error = future.exception()
        if error is None or isinstance(error, FloatingPointError):
            return
        if isinstance(error, RlpostError):
            self._alarm.ring(error)
        else:
            log.error("another rank failed: %r\n%s", error, "\n".join(getattr(error, "__notes__", ())))
            self._alarm.ring(RankError(f"another rank failed, and the run's log.txt says where: {error!r}"))

    def _lost_one(self) -> None:
        lost = next((other.failure for other in self.others if other.failure is not None), None)
        self._alarm.ring(RankError(f"{lost}; the training ends with it: go on with --resume"))

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """If the body fails because another rank is lost, raise the error that names that rank."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RlpostError) and not isinstance(error, RankError):
                raise
            if (reason := self._alarm.wait(NAMING_SECONDS)) is not None and reason is not error:
                raise reason from error
            raise


# How ranks come together: started here, or by torchrun


def join_ranks(settings: TrainingSettings, checkpoint: Path | None, folder: Path) -> SeveralRanks:
    """The ranks that train `settings`, in one process group; the others have begun to load their model.

    Raises ConfigError if the settings and the launcher disagree, RankError if a rank does not come in time.
    """
    cluster = settings.cluster
    place = Place.from_environment(os.environ)
    if (wanted := cluster.trainer_ranks) and place and wanted != place.world:
        raise ConfigError(f"cluster.trainer_ranks={wanted}, and {place.world} processes were started: leave it out")
    with contextlib.ExitStack() as opened:
        if place is None:
            place, store, others = _start(wanted or 1, settings.plugin, folder, cluster)
        else:
            forget_place()
            store, others = _meet(place, settings.plugin, folder, cluster)
        ranks = opened.enter_context(SeveralRanks(others))
        device = device_of(settings.model.device, place)
        with ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(lambda other: other.start(START_SECONDS), others))
        models = settings.model, settings.lora.path, settings.reference_path
        found = [other.submit("find_models", *models) for other in others]
        locate_models(*models)
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


def follow() -> int:
    """Serve as a rank above 0 that torchrun has started, until the training ends; returns the exit code."""
    place = Place.from_environment(os.environ)
    assert place is not None
    store = place.open_store(START_SECONDS)
    forget_place()
    host, _, port = store.get(ADDRESS).decode().rpartition(":")
    connection = connected(host, int(port), store.get(KEY).decode())
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
    """The place, the store and the processes, not started yet, of `world` ranks on this machine."""
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


def _meet(
    place: Place, plugins: list[str], folder: Path, cluster: ClusterSettings
) -> tuple[dist.Store, Sequence[RemoteObject]]:
    """Wait until every other process that torchrun has started has connected; the store and those processes."""
    store = place.open_store(cluster.rank_seconds)
    local = place.local_world == place.world
    secret = secrets.token_hex(32)
    waiting: set[int] = set(range(1, place.world))
    others: dict[int, RemoteObject] = {}
    with listening("127.0.0.1" if local else "", cluster.rank_port or 0, secret) as (port, accepted):
        host = "127.0.0.1" if local else place.address
        store.set(KEY, secret)
        store.set(ADDRESS, f"{host}:{port}")
        until = time.monotonic() + cluster.rank_seconds
        while waiting:
            try:
                connection = accepted(until)
            except TimeoutError:
                missing = ", ".join(map(str, sorted(waiting)))
                raise RankError(
                    f"rank {missing} of {place.world} did not join within {cluster.rank_seconds:.0f} s: see that every "
                    "machine runs the same command with the same address of rank 0; cluster.rank_seconds sets the limit"
                ) from None
            its: Place = connection.recv()
            waiting.remove(its.rank)
            others[its.rank] = JoinedProcess(
                partial(OtherRank, plugins, its, folder / f"rank-{its.rank}.log"),
                connection,
                name=str(its),
                silent_seconds=cluster.rank_seconds,
            )
    return store, [others[rank] for rank in sorted(others)]


def _orphaned(place: Place, terminal: int) -> None:
    """Print that rank 0 was lost on the terminal, and end."""
    os.write(terminal, f"error: {place} ends, since rank 0 was lost: go on with --resume\n".encode())
    os._exit(RankError.exit_code)


# The other ranks, and the way to them


class Follower(Rank):
    """A rank above 0, with the work that rank 0 does elsewhere."""

    def gather(self, name: str) -> None:
        """Take part in gathering a weight, or the adapter, that rank 0 reads."""
        if name == ADAPTER:
            whole_adapter(self.model)
        else:
            self._gathered[name]  # which gathers it

    @cached_property
    def _gathered(self) -> Mapping[str, torch.Tensor]:
        return named_weights(self.model)


class OtherRank:
    """A rank that is not rank 0, in a process of its own; its methods are called from rank 0's."""

    def __init__(self, plugins: list[str], place: Place, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as sink:  # rank 0 has the terminal
            for number in (1, 2):
                os.dup2(sink.fileno(), number)
        load_plugins(plugins)
        self.place = place
        self.conclusion: tuple[int, str] = 0, ""  # the training's exit code, and the reason for its end
        self._settings: TrainingSettings
        self._trainable: Trainable
        self._rank: Follower | None = None

    def find_models(self, model: ModelSettings, adapter: str | None, reference: str | None) -> None:
        """See `locate_models`."""
        locate_models(model, adapter, reference)

    def form_group(self, device: str, seconds: float) -> None:
        """Join the process group."""
        store = self.place.open_store(seconds)
        form_group(self.place, store, device_of(device, self.place), seconds)

    def load(self, settings: TrainingSettings, checkpoint: Path | None) -> None:
        """Load the model and its optimizer, from the start or from `checkpoint`."""
        torch.manual_seed(settings.seed)
        compute_deterministically(settings.deterministic)
        self._trainable = load_trainable(settings, checkpoint)
        if checkpoint is not None:
            restore_moments(self._trainable.model, self._trainable.optimizer, checkpoint)
        self._settings = settings

    def begin(self, objective: Objective[Any], tokens_per_microbatch: int | None) -> None:
        """Get ready to work, with the `objective` and the budget of one forward and backward."""
        settings, loaded = self._settings, self._trainable
        self._rank = Follower(
            loaded.model,
            loaded.optimizer,
            objective,
            settings.optim,
            loaded.reference,
            Microbatches(
                tokens_per_microbatch,
                weights.device_of(loaded.model),
                forward_precision(settings.cluster, settings.model),
                note=lambda text: print(text, flush=True),
                in_step=is_sharded(loaded.model),
            ),
        )

    def work(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank. On an error this rank leaves the group, so that no rank waits for it in vain."""
        assert self._rank is not None
        try:
            return as_arrays(getattr(self._rank, method)(*as_tensors(arguments)))
        except FloatingPointError:  # all ranks raise it at once, and rank 0 handles it
            raise
        except BaseException:
            leave_group()
            raise

    def conclude(self, exit_code: int, reason: str) -> None:
        """Note how the training ended, and leave the group."""
        self.conclusion = exit_code, reason
        if reason:
            print(f"{self.place} ends: {reason}", flush=True)
        leave_group()


class Alarm:
    """Raises another thread's error in the main thread, wherever that is."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._rung = threading.Event()
        self._closed = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            signal.signal(signal.SIGUSR1, self._raise)  # for good: a signal may be in flight when this is closed

    def ring(self, error: BaseException) -> None:
        """Raise `error` in the main thread; end this process if that does not end it in time."""
        if self._closed or self._rung.is_set():
            return
        self._error = error
        self._rung.set()
        log.error("%s", error)
        if self._in_main_thread:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            threading.Thread(target=self._last_resort, daemon=True).start()

    def wait(self, seconds: float) -> BaseException | None:
        """The error, or None if none comes within `seconds`."""
        self._rung.wait(seconds)
        return self._error

    def close(self) -> None:
        """Raise nothing any more."""
        self._closed = True

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None and not self._closed:
            raise self._error

    def _last_resort(self) -> None:
        """End this process if the main thread is stuck in a library that waits for the lost rank."""
        until = time.monotonic() + LAST_RESORT_SECONDS
        while time.monotonic() < until:
            if self._closed:
                return
            time.sleep(0.2)
        os.write(2, f"error: {self._error}\n".encode())
        os._exit(getattr(self._error, "exit_code", 1))


def as_arrays(value: Any) -> Any:
    """`value` with arrays instead of the tensors in its dataclasses, dicts, lists and tuples, fit for a pipe.

    An array is pickled alone, while a tensor that is a view takes the whole tensor under it along.
    """
    return _mapped(value, torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())


def as_tensors(value: Any) -> Any:
    """The argument of `as_arrays` from its result, with tensors on the CPU."""
    return _mapped(value, np.ndarray, torch.from_numpy)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, kind, change) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, _mapped(getattr(value, field.name), kind, change))
        return changed
    return value
