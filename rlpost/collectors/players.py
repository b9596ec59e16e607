"""The players of a training: the processes that sample, each in its seat; one that dies is replaced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlpost.collectors.process import START_SECONDS, NotReady, RemoteObject
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import PolicyError

log = logging.getLogger("rlpost")

PUSH_SECONDS = 900.0  # longest wait for weights to be loaded, the groups under way included where they are waited for
LOOK_SECONDS = 1.0

NewWorker = Callable[[int], RemoteObject]  # makes the process of a seat, which is not started yet


class Seat:
    """A place for a player: its process, and the version of the weights there; None while it starts, or is gone."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: RemoteObject | None = None
        self.version: PolicyVersionLabel | None = None
        self.is_starting = False

    @property
    def is_ready(self) -> bool:
        """Whether its player plays."""
        return self.playing is not None

    @property
    def playing(self) -> RemoteObject | None:
        """The process, where it plays; one that was dead a moment ago may be told, never one that still starts."""
        worker = self.worker  # before `version`, which is None as long as another one starts
        return worker if worker is not None and self.version is not None and worker.failure is None else None


class Players:
    """`count` players that `new_worker` makes, each started, and replaced where it dies, in a thread of its own.

    `on_event` is told the seat and what its player says, `on_death` the seat whose player is gone, and `on_ready` that
    one more can play. `may_restart` is asked at each death whether there may be another process, and told why. All
    are called by threads of this class. A player begins with the weights it was built with, those of
    `first_version`: who takes it up later brings it the present ones.
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
        return [seat for seat in self.seats if seat.is_ready]

    @property
    def failure(self) -> BaseException | None:
        """Why nobody plays and nobody will; None as long as somebody does, or starts."""
        with self._changed:
            gone = not any(seat.is_ready or seat.is_starting for seat in self.seats)
            return self._over or (self._last if gone else None)

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start every player, and return when the first can play; the others follow.

        Raises what building it raised, or PolicyError.
        """
        for seat in self.seats:
            self._begin(seat, seconds)
        self.wait()

    def wait(self) -> list[Seat]:
        """The seats whose players play, once there is one. Raises why there will be none."""
        with self._changed:
            while (failure := self.failure) is None:
                if ready := self.ready:
                    return ready
                if self.is_closed:
                    raise PolicyError("the processes that sample are closed")
                self._changed.wait(LOOK_SECONDS)
        raise failure

    def close(self) -> None:
        """Let every player close, and end its process; those that start too."""
        with self._changed:
            self.is_closed = True
            workers = [seat.worker for seat in self.seats if seat.worker is not None]
            self._changed.notify_all()
        closing = [threading.Thread(target=worker.close) for worker in workers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def give_up(self, why: str) -> None:
        """Nobody can be reached any more: end them all, replace none, and say `why` to whoever waits for them."""
        self._over = PolicyError(f"every process that samples {why}")
        for seat in self.seats:
            if seat.worker is not None:
                seat.worker.lose(why)
        self.on_ready()
        with self._changed:
            self._changed.notify_all()

    def set_version(self, version: PolicyVersionLabel) -> None:
        """The weights that all players were built with are those of `version`: of a run that goes on."""
        self.first_version = version
        for seat in self.seats:
            if (worker := seat.playing) is not None:
                worker.call("set_version", version)
                seat.version = version

    def push(self, folder: Path, version: PolicyVersionLabel, *, seats: list[Seat], wait: bool, adapter: bool) -> None:
        """Have the players in `seats` sample with the weights in `folder` from now on; returns when they all do.

        One that dies meanwhile is passed over: what takes its place is behind. Raises PolicyError where one refuses.
        """
        if not seats:
            return

        def load(seat: Seat) -> None:
            if (worker := seat.playing) is None:
                return
            try:
                worker.call("push", worker.bring(folder), version, wait=wait, adapter=adapter, seconds=PUSH_SECONDS)
                seat.version = version
            except PolicyError:
                if worker.failure is None:
                    raise
            finally:
                worker.taken_back(folder)

        with ThreadPoolExecutor(len(seats), "rlpost-push") as threads:
            for loaded in [threads.submit(load, seat) for seat in seats]:
                loaded.result()

    @property
    def _is_final(self) -> bool:
        """Whether nobody is replaced any more."""
        return self.is_closed or self._over is not None

    def _begin(self, seat: Seat, seconds: float) -> None:
        seat.is_starting = True
        threading.Thread(target=self._started, args=(seat, seconds), name="rlpost-start-player", daemon=True).start()

    def _started(self, seat: Seat, seconds: float) -> None:
        """Start the player of a seat, and another where it does not come up, as long as there may be."""
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
                died = died_of(worker, error)
                worker.close()
                if died is not None and not self._is_final and self.may_restart(died):
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
            seat.version, seat.is_starting = version, False
            self._last = error or self._last
            closed = self.is_closed
            self._changed.notify_all()
        if closed and seat.worker is not None:
            seat.worker.close()

    def _died(self, seat: Seat, worker: RemoteObject) -> None:
        """A player has ended that had begun to play: put another in its seat, where there may be one."""
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


def died_of(worker: RemoteObject, error: BaseException) -> PolicyError | None:
    """`error` where it says how `worker` died by itself; None where it is another's, or the worker was ended."""
    told = worker.failure is not None and error.args == worker.failure.args
    return error if isinstance(error, PolicyError) and told and not isinstance(error, NotReady) else None
