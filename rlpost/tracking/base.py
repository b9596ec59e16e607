"""What a tracker is: told of a run's figures as they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from rlpost.config.keys import flat

METRICS_FILE = "metrics.jsonl"  # of a run folder: what is followed
MARK_FILE = "tracking.json"  # of a run folder: each tracker's id of the run and the last step it was told


class Status(Enum):
    """How a run ended."""

    finished = "finished"
    stopped = "stopped"  # by a signal
    failed = "failed"  # with an error


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it.

    `config` is the resolved configuration, nested. `known_as` is the tracker's own id of the run where
    it goes on with one, else None. `first_step` is the first that will be logged: what the tracker has
    of it and later ones was undone by resuming from an earlier checkpoint.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    known_as: str | None
    first_step: int


class Tracker(Protocol):
    """One tracker of one run. Each call may raise whatever it likes and take as long as it likes."""

    def start(self, run: TrackedRun) -> str:
        """Open the run, or go on with it; returns the id that `known_as` gives back when it is resumed."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The finite numbers of one line of metrics.jsonl, under their names."""
        ...

    def finish(self, status: Status) -> None:
        """Deliver everything, and close the run."""
        ...


def described(run: TrackedRun) -> dict[str, Any]:
    """The configuration with the run's folder, as trackers show it beside the figures."""
    return {**run.config, "run_folder": str(run.folder)}


def described_flat(run: TrackedRun) -> dict[str, str]:
    """The same as text by dotted keys: `{"optim": {"lr": 0.1}}` becomes `{"optim.lr": "0.1"}`."""
    return {key: str(value) for key, value in flat(described(run)).items()}
