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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from rlpost.catalog import row_of
from rlpost.config.schema import flat
from rlpost.errors import named
from rlpost.files import expanded, json_in, replaced
from rlpost.imports import require
from rlpost.record import MetricsFile
from rlpost.settings import training
from rlpost.text import no_formula

log = logging.getLogger("rlpost")
METRICS_FILE = "metrics.jsonl"  # in a run folder
MARK_FILE = "tracking.json"  # in a run folder: each tracker's id of the run, and the last step that it logged
LOOK_SECONDS = 0.5  # between two looks at metrics.jsonl
REASON_LENGTH = 300  # characters
MARKUP = re.compile(r"[!-+\-/:-@\[-`{-~]")  # ASCII's signs without , and . : some are markup in markdown or HTML
SILENT_SECONDS = 2.0  # a longer wait for the end is announced
PROJECT = "rlpost"  # default project or experiment


class Status(Enum):
    """How a run ended."""

    finished = "finished"
    stopped = "stopped"  # by a signal
    failed = "failed"  # with an error


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker starts or resumes.

    `config` is the resolved configuration, nested. `known_as` is the tracker's own id of a run that it resumes, else
    None. `first_step` is the first step that will be logged: resuming from an earlier checkpoint has undone what the
    tracker has of this step and later ones.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    known_as: str | None
    first_step: int


COLUMNS = ("step", "prompt", "completion", "reward", "parts", "advantage", "finish_reason")  # of a table of completions
Row = Mapping[str, Any]  # one completion of a table, by column


class Tracker(Protocol):
    """One tracker of one run. Each call may raise anything and take any time."""

    name: str  # as in `tracking=NAME`

    def start(self, run: TrackedRun) -> str:
        """Open or resume the run; returns the id that becomes `known_as` when the run is resumed."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        """Log the finite numbers of one line of metrics.jsonl, under their names, and a table of `completions`."""
        ...

    def finish(self, status: Status) -> None:
        """Deliver everything, and close the run."""
        ...


def described(run: TrackedRun) -> dict[str, Any]:
    """The configuration with the run's folder, as trackers show it beside the metrics."""
    return {**run.config, "run_folder": str(run.folder)}


def described_flat(run: TrackedRun) -> dict[str, str]:
    """`described` as text by dotted keys: `{"optim": {"lr": 0.1}}` becomes `{"optim.lr": "0.1"}`."""
    return {key: str(value) for key, value in flat(described(run)).items()}


# Which tracker the settings ask for: settings first, then environment variables, then defaults


def chosen_tracker(settings: training.TrackingSettings) -> Tracker | None:
    """The tracker of `settings`, not started; None for tracking=none. Imports no tracker's package.

    Raises MissingExtraError if its package is not installed.
    """
    row = row_of("tracking", type(settings))
    return row.build(settings) if row.builds else None


def tensorboard(settings: training.TensorBoardSettings) -> Tracker:
    """TensorBoard."""
    _require("tensorboard")
    return TensorBoardTracker()


def wandb(settings: training.WandbSettings) -> Tracker | None:
    """Weights & Biases; None if it is disabled."""
    mode = settings.mode.value if settings.mode else os.environ.get("WANDB_MODE") or training.WandbMode.offline.value
    if mode == training.WandbMode.disabled.value:
        return None
    _require("wandb")
    return WandbTracker(
        project=settings.project or os.environ.get("WANDB_PROJECT") or PROJECT,
        entity=settings.entity or os.environ.get("WANDB_ENTITY"),
        mode=mode,
        folder=_absolute(settings.folder or os.environ.get("WANDB_DIR")),
    )


def trackio(settings: training.TrackioSettings) -> Tracker:
    """trackio."""
    _require("trackio")
    return TrackioTracker(settings.project, _absolute(settings.folder or os.environ.get("TRACKIO_DIR")))


def mlflow(settings: training.MLflowSettings) -> Tracker:
    """MLflow."""
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
    _require("mlflow", *(("sqlalchemy", "alembic") if uri is None else ()))
    return MLflowTracker(uri, settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)


def _require(tracker: str, *more: str) -> None:
    for package in (tracker, *more):
        require(package, tracker, f"tracking={tracker}")


def _absolute(folder: str | None) -> str | None:
    return str(expanded(folder).resolve()) if folder else None


# The tracker, followed from a thread


class Tracking:
    """A tracker that follows the metrics.jsonl of one run folder, from a thread of its own.

    It is given up at its first failure, or when it takes longer than `timeout_seconds` for one call. No failure raises
    here or stops the run. `completions` of each step are logged in a table: `read_completions` gives that many of a
    step in a run folder, under the names of rlpost.runs.rollouts.SCHEMA.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        config: dict[str, Any],
        timeout_seconds: float,
        completions: int = 0,
        read_completions: Callable[[Path, int, int], Sequence[Row]] = lambda folder, step, count: [],
    ) -> None:
        self.tracker = tracker
        self.name = tracker.name
        self.timeout_seconds = timeout_seconds
        self.completions = completions
        self.read_completions = read_completions
        self.folder = folder
        self.config = config
        self._thread: threading.Thread | None = None
        self._current_call: tuple[str, float] | None = None  # a call of the tracker, and its deadline
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
        call = self._current_call
        if self._given_up is None and call is not None and time.monotonic() > call[1]:
            self._given_up = f"no answer to {call[0]} within {self.timeout_seconds:g} s"
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

    def last_step(self) -> int | None:
        """The last step that the tracker logged, None if it logged none."""
        with suppress(OSError, ValueError, TypeError):  # its own file may be what failed
            mark = read_mark(self.folder, self.name)
            return mark.step if mark is not None and mark.step >= 0 else None
        return None

    # In the thread

    def _run(self, kept_step: int) -> None:
        try:
            self._follow(kept_step)
        except (Exception, SystemExit) as error:
            log.warning("tracking with %s has failed", self.name, exc_info=error)
            doing = "" if self._current_call is None else f"{self._current_call[0]}: "
            self._given_up = self._given_up or f"{doing}{named(error).rstrip('.')}"[:REASON_LENGTH]

    def _follow(self, kept_step: int) -> None:
        """Give the tracker every step of metrics.jsonl that it does not have yet, until the run ends."""
        folder = self.folder.resolve()
        mark = read_mark(folder, self.name) if kept_step >= 0 else None
        first_step = min(mark.step, kept_step) + 1 if mark else 0
        tracked = TrackedRun(folder.name, folder, self.config, mark.known_as if mark else None, first_step)
        write_mark(folder, self.name, mark)
        mark = Mark(self._answer("start", self.tracker.start, tracked), first_step - 1)
        write_mark(folder, self.name, mark)
        metrics, over = MetricsFile(folder / METRICS_FILE), False
        while not over:
            over = self._over.wait(LOOK_SECONDS)  # before the look, so that nothing written before the end is missed
            for row in metrics.new_rows():
                step = row.pop("step")
                if step >= first_step:
                    finite = {name: value for name, value in row.items() if value is not None}
                    self._answer(f"logging step {step}", self._log, step, finite)
                    mark.step = step
                    write_mark(folder, self.name, mark)
        self._answer("finish", self.tracker.finish, self._status)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        found = self.read_completions(self.folder, step, self.completions) if self.completions else []
        self.tracker.log(step, metrics, [{**row, "parts": _as_text(row["reward_parts"])} for row in found])

    def _answer(self, doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call of the tracker. Raises TimeoutError if the tracker was given up meanwhile."""
        self._current_call = (doing, time.monotonic() + self.timeout_seconds)
        answer = call(*arguments)
        if self._given_up is not None:
            raise TimeoutError(self._given_up)
        self._current_call = None
        return answer


@dataclass
class Mark:
    """How far a tracker is: its id of the run, and the last step that it logged."""

    known_as: str
    step: int


def read_mark(folder: Path, tracker: str) -> Mark | None:
    """How far `tracker` is with the run in `folder`; None if it has not begun."""
    file = folder / MARK_FILE
    marks = json_in(file) if file.is_file() else {}
    return Mark(**marks[tracker]) if tracker in marks else None


def write_mark(folder: Path, tracker: str, mark: Mark | None) -> None:
    """Write the mark of `tracker`, or remove it; other trackers' marks stay."""
    file = folder / MARK_FILE
    marks = json_in(file) if file.is_file() else {}
    marks.pop(tracker, None)
    if mark is not None:
        marks[tracker] = asdict(mark)
    with replaced(file) as making:
        making.write_text(json.dumps(marks, indent=1) + "\n")


def _as_text(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in parts.items())


def cells_of(row: Row) -> list[Any]:
    """A completion's cells, in the order of `COLUMNS`."""
    return [row[column] for column in COLUMNS]


# TensorBoard


def as_markdown(cell: Any) -> str:
    """A cell of a markdown table that shows `cell` as it is: no markup in it counts, and line breaks stay."""
    text = "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", text).replace("\n", "<br>").replace("\r", "")


class TensorBoardTracker:
    """Event files in the run's folder: scalars, which TensorBoard rounds to float32, and the configuration as a text.

    A resumed run adds a file. It begins with TensorBoard's own mark that all steps from its first on were undone, so
    readers drop these steps from earlier files.
    """

    name = "tensorboard"

    def start(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder))
        mark = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(session_log=mark, step=run.first_step, wall_time=time.time()))
        if run.known_as is None:
            # TensorBoard renders texts as markdown
            cells = {key: text.replace("|", "\\|").replace("\n", " ") for key, text in described_flat(run).items()}
            self._writer.add_event(self._table("config", 0, ["key", "value"], cells.items()))
        return folder.name

    def _table(self, tag: str, step: int, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
        """The event of a text that is a table in markdown."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.plugins.text.metadata import create_summary_metadata

        lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
        event = Event(wall_time=time.time(), step=step)
        value = event.summary.value.add(tag=tag, metadata=create_summary_metadata(tag, ""))
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.string_val.append("\n".join(lines).encode())
        return event

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        event = Event(wall_time=time.time(), step=step)
        for name, number in metrics.items():
            event.summary.value.add(tag=name, simple_value=number)
        if completions:
            rows = [[as_markdown(cell) for cell in cells_of(row)] for row in completions]
            self._writer.add_event(self._table("completions", step, COLUMNS, rows))
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self, status: Status) -> None:
        self._writer.close()


# Weights & Biases

EXIT_CODES = {Status.finished: 0, Status.stopped: 130, Status.failed: 1}


@dataclass
class WandbTracker:
    """A W&B run, offline or online; `folder` is where its `wandb/` folder goes, None: the run's folder.

    A resumed run keeps its id; offline, each attempt leaves a folder, and all must be synced in their order. W&B takes
    no step twice: of the steps that a crash undid, it keeps the values from before the crash.
    """

    name = "wandb"

    project: str
    entity: str | None
    mode: str
    folder: str | None

    def start(self, run: TrackedRun) -> str:
        folder = self.folder or str(run.folder)
        os.environ.setdefault("WANDB_CACHE_DIR", os.path.join(folder, "wandb", "cache"))
        os.environ.setdefault("WANDB_DATA_DIR", os.path.join(folder, "wandb", "data"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # they would be of this process, not of the one that trains
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        known_as = run.known_as or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,  # pyright: ignore[reportArgumentType]
            dir=folder,
            id=known_as,
            name=run.name,
            resume="allow",
            config=described(run),
            settings=quiet,
        )
        return known_as

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        import wandb

        table = (
            {"completions": wandb.Table(list(COLUMNS), [cells_of(row) for row in completions])} if completions else {}
        )
        self._run.log({**metrics, **table}, step=step, commit=True)

    def finish(self, status: Status) -> None:
        import wandb

        self._run.finish(exit_code=EXIT_CODES[status])
        wandb.teardown()


# trackio

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


@dataclass
class TrackioTracker:
    """A trackio run in a local database; `folder` is the database's folder, None: `trackio` in the run's.

    A resumed run keeps its id, and the steps from its first on are deleted from the database. On a Space or a server
    they stay, and are there twice. trackio keeps the folder of the first run of a process.
    """

    name = "trackio"

    project: str
    folder: str | None

    def start(self, run: TrackedRun) -> str:
        os.environ["TRACKIO_DIR"] = self.folder or str(run.folder / "trackio")
        self._local = not any(os.environ.get(name) for name in REMOTE)
        import trackio  # pyright: ignore[reportMissingImports]
        from huggingface_hub import constants

        offline = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = offline or self._local  # it would ask the hub for the user's name
        try:
            self._run = trackio.init(  # pyright: ignore[reportAttributeAccessIssue]
                project=self.project,
                name=run.name,
                config=described(run),
                resume="never" if run.known_as is None else "must",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        finally:
            constants.HF_HUB_OFFLINE = offline
        if run.known_as not in (None, self._run.id):
            raise RuntimeError(f"another run of project {self.project} is named {run.name}: give this one another name")
        if self._local:
            self._forget_from(run.first_step)
        self._last_step: int | None = None
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        from trackio import Table  # pyright: ignore[reportMissingImports]

        table = {"completions": Table(list(COLUMNS), [cells_of(row) for row in completions])} if completions else {}
        self._run.log({**metrics, **table}, step=step)
        self._last_step = step

    def finish(self, status: Status) -> None:
        self._run.finish()
        # trackio turns its own failures into warnings, so look into the database
        if self._local and self._last_step is not None and self._held() != self._last_step:
            raise RuntimeError(f"it holds steps up to {self._held()} only, of {self._last_step}")

    def _held(self) -> int | None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        return SQLiteStorage.get_max_step_for_run(self.project, self._run.name, run_id=self._run.id)

    def _forget_from(self, step: int) -> None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        if (held := self._held()) is None or held < step:
            return
        with closing(sqlite3.connect(SQLiteStorage.get_project_db_path(self.project))) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self._run.id, step))


# MLflow

ENDINGS = {Status.finished: "FINISHED", Status.stopped: "KILLED", Status.failed: "FAILED"}
PARAMS_AT_ONCE = 100  # MLflow's limits
LONGEST_PARAM = 6000  # characters
REFUSED = re.compile(r"[^\w\-. :/]")  # in the name of a metric


@dataclass
class MLflowTracker:
    """An MLflow run on the server `uri`; None: in sqlite in the run's folder.

    Parameters are those of the first attempt, since MLflow lets none change; a character that it refuses in a metric's
    name becomes `_`. A resumed run keeps its id. MLflow cannot delete values: steps that a crash undid are there twice,
    and the later value counts.
    """

    name = "mlflow"

    uri: str | None
    experiment: str

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it makes its database
        own = run.folder / "mlflow"
        if self.uri is None:
            own.mkdir(parents=True, exist_ok=True)
        uri = self.uri and address_without_password(self.uri)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{(own / 'mlflow.db').resolve()}")
        if run.known_as is not None:
            self._client.update_run(run.known_as, status="RUNNING")
            self._id = run.known_as
            return self._id
        tags = {"rlpost.folder": str(run.folder)}
        self._id = self._client.create_run(self._experiment_id(own), run_name=run.name, tags=tags).info.run_id
        params = [Param(key, text[:LONGEST_PARAM]) for key, text in described_flat(run).items()]
        for begin in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[begin : begin + PARAMS_AT_ONCE])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Row]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        figures = [Metric(REFUSED.sub("_", name), number, now, step) for name, number in metrics.items()]
        self._client.log_batch(self._id, metrics=figures)
        if completions:  # a file for each step, since MLflow would read its one table again to add to it
            stream = io.StringIO()
            csv.writer(stream).writerows(
                [COLUMNS, *([no_formula(cell) for cell in cells_of(row)] for row in completions)]
            )
            self._client.log_text(self._id, stream.getvalue(), f"completions/step-{step:06d}.csv")

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, ENDINGS[status])

    def _experiment_id(self, own: Path) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return found.experiment_id
        # a server knows where its artifacts go; a database of one's own would put them into ./mlruns
        artifacts = None if self.uri else str((own / "artifacts").resolve())
        return self._client.create_experiment(self.experiment, artifact_location=artifacts)


def address_without_password(uri: str) -> str:
    """The server's `uri` without user and password, which go into the environment for MLflow.

    MLflow's errors name the address, and log.txt keeps them.
    """
    parts = urlsplit(uri)
    if not parts.scheme.startswith("http") or parts.password is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
