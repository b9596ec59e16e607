"""Reward functions of a file, called in processes of their own; and the search for the rows that make one fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from rlpost.errors import ConfigError, RewardError
from rlpost.rewards.calls import LIMIT, RowValues, joined, late, row_values
from rlpost.rewards.patience import Patience
from rlpost.rewards.workers import Outcome, Worker, call_each
from rlpost.text import printable

GRACE_SECONDS = 1.0  # for async calls to be given up inside their process, which then need not be killed
PRINTED_SHOWN = 200  # characters of what a failed call printed

log = logging.getLogger("rlpost")

Offer = Callable[[Any, Sequence[int]], Mapping[str, Any]]

_Order = tuple[str, str, str, str, bool]
_workers: WeakValueDictionary[_Order, Worker] = WeakValueDictionary()  # each ends with the last that uses it


@dataclass(eq=False)
class WorkerReward:
    """The function `name` of the file at `path`, or that this plugin `registered`, in a warm process of its own.

    Those of one reference share the process, which ends with the last of them, or with their `close`.
    `served` is what makes the function in there, as `rlpost.rewards.calls.serve` does; `limit` is how
    messages call what sets the deadline.
    """

    name: str
    reference: str
    path: str
    function: str
    registered: bool = False
    served: str = "rlpost.rewards.calls:serve"
    limit: str = LIMIT
    _worker: Worker | None = field(default=None, init=False)

    def named(self, name: str) -> WorkerReward:
        """The same function, called `name` in the metrics."""
        return replace(self, name=name)

    def served_by(self, served: str) -> WorkerReward:
        """The same function, made by something else in its process."""
        return replace(self, served=served)

    @property
    def _order(self) -> _Order:
        return self.served, self.reference, self.path, self.function, self.registered

    @property
    def worker(self) -> Worker:
        """The process's, which is started if it is not there; returns at once."""
        if self._worker is None:
            worker = _workers.get(self._order)
            if worker is None:
                worker = _workers[self._order] = self.new_worker()
            self._worker = worker
            worker.start()
        return self._worker

    def new_worker(self, environment: Mapping[str, str] | None = None) -> Worker:
        """One that nobody shares, with `environment` on top of this process's."""
        served, *arguments = self._order
        return Worker(served, arguments, environment=environment)

    def about(self) -> dict[str, Any]:
        """What the function takes, once its file is imported. Raises ConfigError where that fails."""
        try:
            return self.worker.about or self.worker.ready()
        except RewardError as error:
            raise ConfigError(f"{self.reference}: {error}") from error

    def required(self) -> list[str]:
        """The parameters that have no default."""
        return self.about()["required"]

    def close(self) -> None:
        """Let the process go."""
        self._worker = None

    def request(self, offer: Offer, calls: Sequence[Sequence[int]], seconds: float) -> tuple[Worker, Any, float]:
        """A call of the worker for some calls of the function, each of some rows."""
        about = self.about()

        def taken(rows: Sequence[int]) -> dict[str, Any]:
            offered = offer(self, rows)
            return {n: v for n, v in offered.items() if about["takes"] is None or n in about["takes"]}

        item = {"calls": [(taken(rows), len(rows)) for rows in calls], "seconds": seconds, "limit": self.limit}
        return self.worker, item, seconds + (GRACE_SECONDS if about["is_async"] else 0.0)

    def failure(self, outcome: Outcome, seconds: float) -> str:
        """What to say of a call whose process was late or died."""
        if not outcome.late:
            return f"{self.reference} failed: {outcome.error}"
        line = outcome.line_in(self.path)
        return late(self.reference, seconds, self.limit, f", at line {line}" if line else "")

    def said(self, outcome: Outcome, counts: Sequence[int], seconds: float) -> list[RowValues]:
        """What each call of a request said of its rows."""
        printed = printable(" ".join(outcome.printed.split()))
        if printed:
            log.info("%s printed: %s", self.reference, printed)
        tolds = outcome.value if outcome.error is None else [{"error": self.failure(outcome, seconds)}] * len(counts)
        shown = f"; it printed: {printed[:PRINTED_SHOWN]}" if printed else ""
        with_output = [told | {"error": told["error"] + shown} if "error" in told else told for told in tolds]
        return [row_values(told, count) for told, count in zip(with_output, counts, strict=True)]


def call_apart(rewards: Sequence[WorkerReward], offer: Offer, count: int, seconds: float) -> list[RowValues]:
    """What each says of rows 0 to `count` - 1, `count` at least 1, all at the same time, within `seconds`.

    `offer(reward, rows)` is what it can take. One that fails is called again row by row, to find the
    rows at fault, a deadline each; not one that returns a list of another length. Raises ConfigError and
    DataError that a function raised.
    """
    distinct = {reward.reference: reward for reward in rewards}
    outcomes = call_each([reward.request(offer, [range(count)], seconds) for reward in distinct.values()])
    said: dict[str, RowValues] = {}
    for reward, outcome in zip(distinct.values(), outcomes, strict=True):
        [whole] = reward.said(outcome, [count], seconds)
        if whole.failed and count > 1:
            log.info("scoring %d rows one by one to find the rows that fail", count)
            whole = _one_by_one(reward, offer, count, seconds, together=not outcome.lost)
        said[reward.reference] = whole
    return [said[reward.reference] for reward in rewards]


def _one_by_one(reward: WorkerReward, offer: Offer, count: int, seconds: float, *, together: bool) -> RowValues:
    """What the function says of each row alone; of an async one's all at the same time, if `together` may be tried."""
    if together and reward.about()["is_async"]:
        [outcome] = call_each([reward.request(offer, [[i] for i in range(count)], seconds)])
        if not outcome.lost:
            return joined(reward.said(outcome, [1] * count, seconds))
    rows: list[RowValues] = []
    patience = Patience()
    for row in range(count):
        if patience.refusal:
            rows.append(row_values({"error": patience.refusal}, 1))
            continue
        [outcome] = call_each([reward.request(offer, [[row]], seconds)])
        rows += reward.said(outcome, [1], seconds)
        patience.note(rows[-1].errors[0] if outcome.lost else None)
    return joined(rows)
