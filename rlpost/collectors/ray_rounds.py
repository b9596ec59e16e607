"""The batches of a RayCollector's workers: which are under way, which have come, and who is to be updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.collectors.ray_crew import Crew
from rlpost.data.plain import from_plain, to_plain

BATCH = "a batch"


class Rounds:
    """One batch at a time is under way at each worker. `update_interval` is as `max_weight_update_interval`."""

    def __init__(self, crew: Crew, *, sync: bool, total_frames: int, update_interval: int) -> None:
        self._crew = crew
        self.sync = sync
        self.total_frames = total_frames
        self.update_interval = update_interval
        self.delivered: dict[int, int] = {}  # turns or frames of each worker that were given
        self.since_update: dict[int, int] = {}  # batches of each worker that were given since it was updated
        self.is_held = False  # nothing is to begin
        self._under_way: dict[int, Any] = {}  # by worker, oldest first
        self._waiting: deque[tuple[int, Any]] = deque()  # what has come and was not given yet, with its worker
        self._owed: list[int] = []  # workers whose batch was given last

    @property
    def wants_more(self) -> bool:
        """Whether there is to be another batch."""
        return self.total_frames < 0 or sum(self.delivered.values()) < self.total_frames

    def take(self) -> list[tuple[int, Any]]:
        """The next batch of every worker, or of the first that is ready, each with its worker's number.

        Raises what a worker raised, PolicyError for one that was lost or where none comes in time, and RuntimeError
        where nothing may begin.
        """
        self._crew.check()
        self._ask()
        wanted = set(self._crew.members) if self.sync else set()
        while not self._waiting or wanted - {number for number, _ in self._waiting}:
            if not self._under_way:
                raise RuntimeError("no batch is collected inside a block of pause(): take it before or after the block")
            self._land(self._crew.first(self._under_way, BATCH))
        taken = sorted(self._waiting, key=lambda each: each[0]) if self.sync else [self._waiting.popleft()]
        if self.sync:
            self._waiting.clear()
        for number, batch in taken:
            size = batch if isinstance(batch, int) else batch.numel()
            self.delivered[number] = self.delivered.get(number, 0) + size
            self.since_update[number] = self.since_update.get(number, 0) + 1
        self._owed = [number for number, _ in taken]
        if not self.sync:  # the others go on, and this one too, unless it is to be updated first
            self._ask()
        return taken

    def due(self) -> list[int]:
        """Of the workers whose batch was given last, those that are to be updated before they go on."""
        if self.update_interval < 0:
            return []
        return [number for number in self._owed if self.since_update.get(number, 0) > self.update_interval]

    def settled(self) -> None:
        """Those that were due may go on."""
        self._owed = []

    def _ask(self) -> None:
        """Ask each worker for a batch that has none under way, or waiting, as long as more are wanted."""
        if self.is_held:
            return
        busy = {*self._under_way, *(number for number, _ in self._waiting)}
        due = self.due()
        for number in self._crew.members:
            if number in busy or number in due:
                continue
            expected = sum(self.delivered.values()) + sum(self._crew.members[n].frames_per_batch for n in busy)
            if self.sync or self.total_frames < 0 or expected < self.total_frames:
                self._under_way[number] = self._crew.submit(number, "next")
                busy.add(number)

    def _land(self, number: int) -> None:
        """Take in the batch of worker `number`."""
        batch = self._crew.result(number, self._under_way.pop(number), BATCH)
        self._waiting.append((number, self._crew.moved(number, batch)))

    def land_all(self) -> None:
        """Wait for all that is under way."""
        for number in list(self._under_way):
            self._land(number)

    def forget(self) -> None:
        """Let go of what is under way, once it has come, and of what was not given."""
        self.land_all()
        self._waiting.clear()
        self.settled()

    def state_of(self, number: int) -> dict[str, Any]:
        """What worker `number` has collected that was not given, once all has come, and how much was."""
        plain = to_plain if self._crew.members[number].is_language else (lambda batch: batch)
        waiting = [plain(batch) for n, batch in self._waiting if n == number and not isinstance(batch, int)]
        return {"waiting": waiting, "delivered": self.delivered.get(number, 0)}

    def load_state_of(self, number: int, state: Mapping[str, Any]) -> None:
        """Go on with worker `number` where `state_of` was taken, in the place of what was forgotten."""
        read = from_plain if self._crew.members[number].is_language else (lambda batch: batch)
        kept: Sequence[Any] = state.get("waiting", ())
        self._waiting += [(number, read(batch)) for batch in kept]
        self.delivered[number] = state.get("delivered", 0)
