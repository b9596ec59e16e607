"""The policy of players in other processes: RemotePolicy samples with them, and Players starts and replaces them.

A player is an object of another process that samples, such as `rlpost.collectors.player.GroupPlayer`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpost.data.conversation import Completion, PolicyVersionLabel
from rlpost.errors import PolicyError
from rlpost.model.weight_sums import EngineSums
from rlpost.policies.base import Policy, Request
from rlpost.remote.process import END_SECONDS, START_SECONDS, NotReady, RemoteObject
from rlpost.settings import SamplingSettings

PUSH_SECONDS = 900.0  # longest wait for a push to be loaded, and for the groups in flight if it waits for them
LOOK_SECONDS = 1.0
NewWorker = Callable[[int], RemoteObject]  # makes the process of a seat, which is not started yet


class RemotePolicy(Policy):
    """The policy of `players`, each a `GroupPlayer` in a process of its own.

    All of them answer `generate`, beside the groups they play. `on_event` is called with the seat of a player and its
    event; `sync_players`, called before sampling, pushes the present weights to players that lack them. `name` names
    the engine there; `in_turn` means that nothing is played between a batch and the next push. Weights are sent in
    `weights_dtype`, that of the engine; None: in their own.
    """

    model: Any = None  # of collectors: the module whose weights are sent by default
    shares_weights = False
    pushes = "weight_sync.folder:FolderUpdater"

    def __init__(
        self,
        players: Players,
        tokenizer: Any,
        *,
        sampling: SamplingSettings,
        seed: int = 0,
        max_model_len: int | None = None,
        name: str = "RemotePolicy",
        pushes_adapter: bool = False,
        in_turn: bool = False,
        weights_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed)
        self.players = players
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.name = name
        self.pushes_adapter = pushes_adapter
        self.in_turn = in_turn
        self.weights_dtype = weights_dtype
        self.on_event: Callable[[Seat, str, Any], None] = lambda seat, kind, content: None
        self.sync_players: Callable[[], None] = lambda: None
        self._tokens: dict[int, int] = {}  # that each seat's player has sampled
        self._ended: dict[int, int] = {}  # completions of this call of `generate`
        self._started = False
        players.on_event = self._take

    def start(self) -> None:
        """See `Policy.start`; raises what building the environment or the policy there raises."""
        if not self._started:
            self._started = True
            self.players.start()

    def close(self) -> None:
        """See `Policy.close`."""
        self.players.close()

    def rest(self) -> None:
        """See `Policy.rest`, of every player, where they play in turn with training."""
        playing = [worker for seat in self.players.ready if (worker := seat.playing) is not None]
        for worker, resting in [(worker, worker.submit("rest")) for worker in playing] if self.in_turn else ():
            with _unless_dead(worker):
                resting.result()

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """See `Policy.weight_sums`, by player; one that dies meanwhile is left out."""
        playing = [(seat, worker) for seat in self.current if (worker := seat.playing) is not None]
        by_player: dict[int, EngineSums] = {}
        for seat, worker, future in [(*each, each[1].submit("weight_sums", names)) for each in playing]:
            with _unless_dead(worker):
                by_player.update((seat.number, sums) for sums in future.result().values())
        return by_player

    @property
    def current(self) -> list[Seat]:
        """The seats whose players sample with the weights of `version`."""
        return [seat for seat in self.players.ready if seat.version == self.version]

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`. The requests of a player that dies meanwhile go to the others and to its successor."""
        made: dict[int, Completion] = {}
        self._ended = {}
        while left := [place for place in range(len(requests)) if place not in made]:
            self.players.wait()
            self.sync_players()
            seats = self.current
            calls = []
            for number, seat in enumerate(seats):
                if (worker := seat.playing) is not None and (places := left[number :: len(seats)]):
                    future = worker.submit("generate", [requests[place] for place in places], sampling)
                    calls.append((worker, places, future))
            for worker, places, future in calls:
                with _unless_dead(worker):
                    made.update(zip(places, future.result(), strict=True))
        return [made[place] for place in range(len(requests))]

    def _take(self, seat: Seat, kind: str, content: Any) -> None:
        if kind == "ended":
            self._ended[seat.number], tokens = content
            self.count_tokens(seat, tokens)
            if self.on_ended is not None:
                self.on_ended(sum(self._ended.values()))
        else:
            self.on_event(seat, kind, content)

    def count_tokens(self, seat: Seat, tokens: int) -> None:
        """The player of `seat` has sampled this many since it began."""
        self._tokens[seat.number] = tokens
        self.tokens_sampled = sum(self._tokens.values())


@contextmanager
def _unless_dead(worker: RemoteObject) -> Iterator[None]:
    """A block that waits for `worker`'s answer; it ends without one if the worker has died, since that is replaced."""
    try:
        yield
    except PolicyError:
        if worker.failure is None:
            raise


# The players


class Players:
    """`count` players that `new_worker` makes; each is started, and replaced when it dies, in a thread of its own.

    `on_event` is called with a seat and an event of its player, `on_death` with the seat of a player that died, and
    `on_ready` when one more can play. `may_restart` is called with the reason of each death and returns whether to
    start another process. All are called by threads of this class. A player begins with the weights it was built
    with, those of `first_version`; later weights are pushed to it before it plays.
    """

    def __init__(self, new_worker: NewWorker, count: int = 1) -> None:
        self.new_worker = new_worker
        self.seats = [Seat(number) for number in range(count)]
        self.first_version: PolicyVersionLabel = 0
        self.on_event: Callable[[Seat, str, Any], None] = lambda seat, kind, content: None
        self.on_death: Callable[[Seat], None] = lambda seat: None
        self.on_ready: Callable[[], None] = lambda: None
        self.may_restart: Callable[[PolicyError], bool] = lambda failure: False
        self._changed = threading.Condition()
        self._over: BaseException | None = None  # why nobody plays any more and none is started
        self._last: BaseException | None = None  # why the last player that ended, or could not begin, did so
        self.is_closed = False

    @property
    def ready(self) -> list[Seat]:
        """The seats whose players play."""
        return [seat for seat in self.seats if seat.playing is not None]

    @property
    def failure(self) -> BaseException | None:
        """The error, if every player has failed for good; otherwise None."""
        with self._changed:
            gone = not (self.ready or any(seat.is_starting for seat in self.seats))
            return self._over or (self._last if gone else None)

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start every player, and return when the first can play; the others follow.

        Raises what building it raised, or PolicyError.
        """
        for seat in self.seats:
            self._begin(seat, seconds)
        self.wait()

    def add(self, count: int, seconds: float = START_SECONDS) -> list[Seat]:
        """Start `count` more players, wait for all of them, and return their seats.

        None of them is kept if one cannot be started; raises what building it raised, or PolicyError.
        """
        added = [Seat(len(self.seats) + number) for number in range(count)]
        self.seats += added
        for seat in added:
            self._begin(seat, seconds)
        with self._changed:
            while any(seat.is_starting for seat in added):
                self._changed.wait(LOOK_SECONDS)
        if (error := next((seat.error for seat in added if seat.error is not None), None)) is not None:
            self.seats = [seat for seat in self.seats if seat not in added]
            _close([seat.worker for seat in added if seat.worker is not None])
            raise error
        return added

    def wait(self) -> list[Seat]:
        """Wait for a player that plays; returns the seats of all that do. Raises `failure` if there will be none."""
        with self._changed:
            while (failure := self.failure) is None:
                if ready := self.ready:
                    return ready
                if self.is_closed:
                    raise PolicyError("the processes that sample are closed")
                self._changed.wait(LOOK_SECONDS)
        raise failure

    def close(self, seconds: float = END_SECONDS) -> None:
        """Close every player within `seconds` and end its process, even one that is still starting."""
        with self._changed:
            self.is_closed = True
            workers = [seat.worker for seat in self.seats if seat.worker is not None]
            self._changed.notify_all()
        _close(workers, seconds)

    def give_up(self, why: str) -> None:
        """End all players, which can no longer be reached, and replace none; whoever waits for them gets `why`."""
        self._over = PolicyError(f"every process that samples {why}")
        for seat in self.seats:
            if seat.worker is not None:
                seat.worker.lose(why)
        self.on_ready()
        with self._changed:
            self._changed.notify_all()

    def set_version(self, version: PolicyVersionLabel) -> None:
        """The players were built with the weights of `version`: a run is resumed."""
        self.first_version = version
        for seat in self.seats:
            if (worker := seat.playing) is not None:
                worker.call("set_version", version)
                seat.version = version

    def push(self, folder: Path, version: PolicyVersionLabel, *, seats: list[Seat], wait: bool, adapter: bool) -> None:
        """Load the weights in `folder` into the players in `seats`; returns when they all sample with them.

        A player that dies meanwhile is skipped: its successor gets them later. Raises PolicyError if one refuses.
        """
        if not seats:
            return

        def load(seat: Seat) -> None:
            if (worker := seat.playing) is None:
                return
            try:
                with _unless_dead(worker):
                    worker.call("push", worker.bring(folder), version, wait=wait, adapter=adapter, seconds=PUSH_SECONDS)
                    seat.version = version
            finally:
                worker.release_copy(folder)

        with ThreadPoolExecutor(len(seats), "rlpost-push") as threads:
            for loaded in [threads.submit(load, seat) for seat in seats]:
                loaded.result()

    @property
    def _is_final(self) -> bool:
        """Whether players that die are no longer replaced."""
        return self.is_closed or self._over is not None

    def _begin(self, seat: Seat, seconds: float) -> None:
        seat.is_starting = True
        threading.Thread(target=self._started, args=(seat, seconds), name="rlpost-start-player", daemon=True).start()

    def _started(self, seat: Seat, seconds: float) -> None:
        """Start the player of a seat; one that dies while it starts is replaced as long as `may_restart` allows."""
        while True:
            worker = self.new_worker(seat.number)
            worker.on_event = lambda kind, content: self.on_event(seat, kind, content)
            worker.on_death = lambda: self._died(seat, worker)  # noqa: B023  of this round
            with self._changed:
                seat.worker, seat.version = worker, None
            try:
                if not self.is_closed:
                    worker.start(seconds)
                    worker.call("set_version", self.first_version, seconds=seconds)
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                failure = worker.failure  # before it is closed, which is one too
                worker.close()
                died = failure is not None and error.args == failure.args and not isinstance(error, NotReady)
                if died and isinstance(error, PolicyError) and not self._is_final and self.may_restart(error):
                    continue
                self._settle(seat, None, error)
                return
            self._settle(seat, self.first_version, None)
            if worker.failure is not None:  # it died in between
                self._died(seat, worker)
            self.on_ready()
            return

    def _settle(self, seat: Seat, version: PolicyVersionLabel | None, error: BaseException | None) -> None:
        with self._changed:
            seat.version, seat.is_starting, seat.error = version, False, error
            self._last = error or self._last
            closed = self.is_closed
            self._changed.notify_all()
        if closed and seat.worker is not None:
            seat.worker.close()

    def _died(self, seat: Seat, worker: RemoteObject) -> None:
        """A player that had begun to play has died: start another in its seat if `may_restart` allows."""
        with self._changed:
            if self.is_closed or seat.worker is not worker or seat.is_starting or seat.version is None:
                return  # `_started` sees to it
            seat.version = None
            self._last = failure = worker.failure or PolicyError(f"{worker.name} has ended")
        self.on_death(seat)
        if not self._is_final and self.may_restart(failure):
            self._begin(seat, START_SECONDS)
        with self._changed:
            self._changed.notify_all()


def _close(workers: Sequence[RemoteObject], seconds: float = END_SECONDS) -> None:
    """Close `workers` side by side."""
    closing = [threading.Thread(target=worker.close, args=(seconds,)) for worker in workers]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


@dataclass(eq=False)
class Seat:
    """A place for a player: its process, and the version of its weights; None while it starts, or is gone."""

    number: int
    worker: RemoteObject | None = None
    version: PolicyVersionLabel | None = None
    is_starting: bool = False
    error: BaseException | None = None  # why its player could not be started

    @property
    def process(self) -> RemoteObject:
        """The process, which was started."""
        assert self.worker is not None
        return self.worker

    @property
    def playing(self) -> RemoteObject | None:
        """The process, if it plays; one that has just died may be returned, one that still starts never is."""
        worker = self.worker  # before `version`, which is None as long as another one starts
        return worker if worker is not None and self.version is not None and worker.failure is None else None
