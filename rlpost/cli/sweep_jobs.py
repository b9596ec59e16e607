"""A sweep, its jobs and how each stands: what runs it, what shows it and what records it agree on these."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import Command
from rlpost.config.paths import SWEEP_FILE
from rlpost.errors import CheckpointError
from rlpost.files import replaced

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.sweep import Job


@dataclass(frozen=True)
class SweepOptions:
    """The flags beside `-m`; `out` and `name` say where the sweep goes, each job gets a folder in it."""

    out: Path | None = None
    name: str | None = None
    resume: str | None = None
    dry_run: bool = False
    cfg: bool = False
    as_json: bool = False


@dataclass
class Outcome:
    """How a job stands; `exit_code` is None until it has ended, `result` what its `--json` printed."""

    exit_code: int | None = None
    seconds: float = 0.0
    error: str | None = None
    result: dict[str, Any] | None = None


@dataclass
class SweepJob:
    """One job: what differs, its checked configuration, its folder and how it stands."""

    job: Job
    composed: Composed[Any]
    folder: Path
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def trains(self) -> bool:
        """Whether this is a training rather than an evaluation."""
        return self.composed.command.verb.startswith("train ")

    @property
    def steps(self) -> int | None:
        """Steps to train; None where nothing says so yet."""
        return getattr(self.composed.settings, "steps", None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.job.name,
            "folder": str(self.folder),
            "differs": self.job.differs,
            "overrides": self.composed.overrides,
            **asdict(self.outcome),
        }


@dataclass
class Sweep:
    """A sweep and its record, which is rewritten after every job; `named`: the user said where it goes."""

    command: Command[Any]
    typed: list[str]
    folder: Path
    jobs: list[SweepJob]
    named: bool
    exit_code: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "command": self.command.verb,
            "typed": self.typed,
            "folder": str(self.folder),
            "exit_code": self.exit_code,
            "jobs": [job.as_dict() for job in self.jobs],
        }

    def save(self) -> None:
        """Write sweep.json whole or not at all. Raises CheckpointError where the disk does not take it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self.folder / SWEEP_FILE) as making:
                making.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error}; give another --out") from error
