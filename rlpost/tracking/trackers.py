"""Trackers: TensorBoard, Weights & Biases, trackio and MLflow, the choice among them, and the thread that feeds one.

A tracker is given the lines of metrics.jsonl and, if asked for, some completions of each step. No step waits for it.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import sqlite3
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlpost.catalog import row_of
from rlpost.config.schema import flat
from rlpost.errors import named
from rlpost.files import expanded, json_in, replaced
from rlpost.imports import require
from rlpost.record import MetricsFile
from rlpost.settings import training
from rlpost.text import no_formula, without_passwords

log = logging.getLogger("rlpost")
MARK_FILE = "tracking.json"  # in a run folder: each tracker's id of the run, and the last step that it logged
LOOK_SECONDS = 0.5  # between two looks at metrics.jsonl
REASON_LENGTH = 300  # characters
MARKUP = re.compile(r"[!-+\-/:-@\[-`{-~]")  # ASCII's signs without , and . : some are markup in markdown or HTML
SILENT_SECONDS = 2.0  # a longer wait for the end is announced
PROJECT = "rlpost"  # default project or experiment
REFUSED = re.compile(r"[^\w\-. :/]")  # by MLflow, in the name of a metric


Status = Literal["finished", "stopped", "failed"]  # how a run ended: stopped by a signal, failed with an error
COLUMNS = ("step", "prompt", "completion", "reward", "parts", "advantage", "finish_reason")  # of a table of completions
Row = list[Any]  # one completion of a table: its cells in the order of `COLUMNS`


class Tracker(ABC):
    """One tracker of one run. Each call may raise anything and take any time.

    What the settings leave out comes from the tracker's own environment variables, then from rlpost's defaults.
    """

    name: str  # as in `tracking=NAME`, and of its package

    def __init__(self, settings: Any) -> None:
        require(self.name, self.name, f"tracking={self.name}")
        self.settings = settings

    @abstractmethod
    def start(self, folder: Path, config: dict[str, Any], known_as: str | None, first_step: int) -> str:
        """Open the run in `folder`, or resume the one that the tracker has as `known_as`; returns its id.

        `config` is nested. `first_step` is the first step that will be logged: resuming from an earlier checkpoint has
        undone what the tracker has of this step and later ones.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        """Log the finite numbers of one line of metrics.jsonl, under their names, and a table of `completions`."""

    @abstractmethod
    def finish(self, status: Status) -> None:
        """Deliver everything, and close the run."""


def chosen_tracker(settings: training.TrackingSettings) -> Tracker | None:
    """The tracker of `settings`, not started; None for tracking=none. Imports no tracker's package.

    Raises MissingExtraError if its package is not installed.
    """
    row = row_of("tracking", type(settings))
    return row.build(settings) if row.builds else None


def set_by(setting: Any, variable: str, default: str) -> str:
    """A setting, else the value of an environment variable, else the default."""
    return setting or os.environ.get(variable) or default


# The tracker, followed from a thread


class Tracking:
    """A tracker that follows the metrics.jsonl of one run folder, from a thread of its own.

    It is given up at its first failure, or when it takes longer than `timeout_seconds` for one call. No failure raises
    here or stops the run. The completions that `completions_of` gives of a step, under the names of
    rlpost.runs.rollouts.SCHEMA, are logged as a table.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        config: dict[str, Any],
        timeout_seconds: float,
        completions_of: Callable[[int], Sequence[Mapping[str, Any]]] = lambda step: [],
    ) -> None:
        self.tracker = tracker
        self.name = tracker.name
        self.timeout_seconds = timeout_seconds
        self.completions_of = completions_of
        self.folder = folder.resolve()
        self.config = {**config, "run_folder": str(self.folder)}
        self.last_step = -1  # that the tracker logged
        self._thread: threading.Thread | None = None
        self._call, self._deadline = "start", math.inf  # the latest call of the tracker, and until when it may take
        self._given_up: str | None = None  # the reason
        self._status: Status | None = None  # how the run ended
        self._over = threading.Event()  # set once `_status` is known

    def start(self, kept_step: int) -> None:
        """Follow metrics.jsonl, which exists; `kept_step` is the last step that a resumed run kept, else -1."""
        self._thread = threading.Thread(target=self._run, args=(kept_step,), name="rlpost-tracking", daemon=True)
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._thread is not None

    def failure(self) -> str | None:
        """Why the tracker was given up; None while it works or has not begun. Returns at once."""
        if self._given_up is None and time.monotonic() > self._deadline:
            self._given_up = f"no answer to {self._call} within {self.timeout_seconds:g} s"
        return self._given_up

    def close(self, status: Status, note: Callable[[str], None]) -> str | None:
        """Let the tracker finish, within its deadline; returns why it is incomplete, or None if it is complete.

        A long wait is announced through `note`. An interrupt ends the wait and the tracker.
        """
        assert self._thread is not None
        self._status = status
        self._over.set()
        announced = time.monotonic() + SILENT_SECONDS
        try:
            while self._thread.is_alive() and self.failure() is None:
                self._thread.join(0.05)
                if time.monotonic() > announced:
                    limit, announced = self.timeout_seconds, math.inf
                    note(f"waiting for {self.name} to finish, at most {limit:g} s; Ctrl-C leaves without it")
        except KeyboardInterrupt:
            self._given_up = "the wait for it was interrupted"
        return self._given_up

    # In the thread

    def _run(self, kept_step: int) -> None:
        try:
            self._follow(kept_step)
        except (Exception, SystemExit) as error:
            log.warning("tracking with %s has failed", self.name, exc_info=error)
            reason = without_passwords(f"{self._call}: {named(error).rstrip('.')}")  # MLflow's errors name its server
            self._given_up = self._given_up or reason[:REASON_LENGTH]

    def _follow(self, kept_step: int) -> None:
        """Give the tracker every step of metrics.jsonl that it does not have yet, until the run ends."""
        mark = self._marks().get(self.name) if kept_step >= 0 else None
        first_step = min(mark["step"], kept_step) + 1 if mark else 0
        self.last_step = first_step - 1
        known_as = mark["known_as"] if mark else None
        known_as = self._answer("start", self.tracker.start, self.folder, self.config, known_as, first_step)
        self._write_mark(known_as)
        metrics, over = MetricsFile(self.folder / "metrics.jsonl"), False
        while not over:
            over = self._over.wait(LOOK_SECONDS)  # before the look, so that nothing written before the end is missed
            for row in metrics.new_rows():
                step = row.pop("step")
                if step >= first_step:
                    finite = {name: value for name, value in row.items() if value is not None}
                    self._answer(f"logging step {step}", self._log, step, finite)
                    self.last_step = step
                    self._write_mark(known_as)
        self._answer("finish", self.tracker.finish, self._status)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        rows = []
        for found in self.completions_of(step):
            parts = ", ".join(f"{name} {value:.4g}" for name, value in found["reward_parts"].items())
            rows.append([{**found, "parts": parts}[column] for column in COLUMNS])
        self.tracker.log(step, metrics, rows)

    def _answer(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call of the tracker. Raises TimeoutError if the tracker was given up meanwhile."""
        self._call, self._deadline = name, time.monotonic() + self.timeout_seconds
        answer = call(*arguments)
        if self._given_up is not None:
            raise TimeoutError(self._given_up)
        self._deadline = math.inf
        return answer

    def _marks(self) -> dict[str, dict[str, Any]]:
        """Each tracker's own id of the run (`known_as`), and the last step that it logged (`step`)."""
        file = self.folder / MARK_FILE
        return json_in(file) if file.is_file() else {}

    def _write_mark(self, known_as: str) -> None:
        """Keep how far the tracker is; the marks of others stay."""
        marks = {**self._marks(), self.name: {"known_as": known_as, "step": self.last_step}}
        with replaced(self.folder / MARK_FILE) as making:
            making.write_text(json.dumps(marks, indent=1) + "\n")


# The trackers


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in markdown that shows each cell as it is: no markup in it counts, and line breaks stay."""

    def shown(cell: Any) -> str:
        text = "" if cell is None else str(cell)
        return MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", text).replace("\n", "<br>").replace("\r", "")

    lines = [list(columns), *(list(map(shown, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class TensorBoardTracker(Tracker):
    """Event files in the run's folder: scalars, which TensorBoard rounds to float32, and the configuration as a text.

    A resumed run adds a file. It begins with TensorBoard's own mark that all steps from its first on were undone, so
    readers drop these steps from earlier files.
    """

    name = "tensorboard"

    def start(self, folder: Path, config: dict[str, Any], known_as: str | None, first_step: int) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)
        if known_as is None:
            self._writer.add_text("config", markdown_table(["key", "value"], flat(config).items()), 0)
        return "tensorboard"

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        for name, number in metrics.items():
            self._writer.add_scalar(name, number, step)
        if completions:
            self._writer.add_text("completions", markdown_table(COLUMNS, completions), step)
        self._writer.flush()

    def finish(self, status: Status) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """A W&B run, offline or online; `folder` is where its `wandb/` folder goes, None: the run's folder.

    A resumed run keeps its id; offline, each attempt leaves a folder, and all must be synced in their order. W&B takes
    no step twice: of the steps that a crash undid, it keeps the values from before the crash.
    """

    name = "wandb"
    exit_codes: ClassVar = {"finished": 0, "stopped": 130, "failed": 1}

    def start(self, folder: Path, config: dict[str, Any], known_as: str | None, first_step: int) -> str:
        place = str(expanded(set_by(self.settings.folder, "WANDB_DIR", str(folder))).resolve())
        os.environ.setdefault("WANDB_CACHE_DIR", f"{place}/wandb/cache")
        os.environ.setdefault("WANDB_DATA_DIR", f"{place}/wandb/data")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        known_as = known_as or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=set_by(self.settings.project, "WANDB_PROJECT", PROJECT),
            entity=self.settings.entity,
            mode=set_by(self.settings.mode and self.settings.mode.value, "WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            dir=place,
            id=known_as,
            name=folder.name,
            resume="allow",
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        return known_as

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        import wandb

        table = {"completions": wandb.Table(list(COLUMNS), list(completions))} if completions else {}
        self._run.log({**metrics, **table}, step=step, commit=True)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=self.exit_codes[status])


class TrackioTracker(Tracker):
    """A trackio run in a local database; `folder` is the database's folder, None: `trackio` in the run's.

    A resumed run keeps its id, and the steps from its first on are deleted from the database. On a Space or a server
    they stay, and are there twice. trackio keeps the folder of the first run of a process, and asks the hub for the
    name of a user who is logged in.
    """

    name = "trackio"

    def start(self, folder: Path, config: dict[str, Any], known_as: str | None, first_step: int) -> str:
        place = set_by(self.settings.folder, "TRACKIO_DIR", str(folder / "trackio"))
        os.environ["TRACKIO_DIR"] = str(expanded(place).resolve())
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        project = self.settings.project
        self._run = trackio.init(  # pyright: ignore[reportAttributeAccessIssue]
            project=project,
            name=folder.name,
            config=config,
            resume="never" if known_as is None else "must",
            embed=False,
        )
        if known_as not in (None, self._run.id):
            raise RuntimeError(f"another run of project {project} is named {folder.name}: give this one another name")
        if known_as is not None and not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            with closing(sqlite3.connect(SQLiteStorage.get_project_db_path(project))) as database, database:
                database.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (known_as, first_step))
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        from trackio import Table  # pyright: ignore[reportMissingImports]

        table = {"completions": Table(list(COLUMNS), list(completions))} if completions else {}
        self._run.log({**metrics, **table}, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()


class MLflowTracker(Tracker):
    """An MLflow run on the server `uri`; None: in sqlite in the run's folder.

    Parameters are those of the first attempt, since MLflow lets none change; a character that it refuses in a metric's
    name becomes `_`. A resumed run keeps its id. MLflow cannot delete values: steps that a crash undid are there twice,
    and the later value counts.
    """

    name = "mlflow"
    endings: ClassVar = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def start(self, folder: Path, config: dict[str, Any], known_as: str | None, first_step: int) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it makes its database
        own = folder / "mlflow"
        uri = set_by(self.settings.uri, "MLFLOW_TRACKING_URI", "")
        name = set_by(self.settings.experiment, "MLFLOW_EXPERIMENT_NAME", PROJECT)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{own / 'mlflow.db'}")
        if known_as is not None:
            self._id = known_as
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        if not uri:
            own.mkdir(parents=True, exist_ok=True)
        if experiment := self._client.get_experiment_by_name(name):
            experiment_id = experiment.experiment_id
        else:  # a server knows where its artifacts go; a database of one's own would put them into ./mlruns
            experiment_id = self._client.create_experiment(name, None if uri else str(own / "artifacts"))
        tags = {"rlpost.folder": str(folder)}
        self._id = self._client.create_run(experiment_id, run_name=folder.name, tags=tags).info.run_id
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in flat(config).items()])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        figures = [Metric(REFUSED.sub("_", name), number, now, step) for name, number in metrics.items()]
        self._client.log_batch(self._id, metrics=figures)
        if completions:  # a file for each step, since MLflow would read its one table again to add to it
            stream = io.StringIO()
            csv.writer(stream).writerows([COLUMNS, *(map(no_formula, row) for row in completions)])
            self._client.log_text(self._id, stream.getvalue(), f"completions/step-{step:06d}.csv")

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, self.endings[status])
