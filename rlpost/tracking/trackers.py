"""Trackers: TensorBoard, Weights & Biases, trackio and MLflow, the choice among them, and the process that runs one.

A tracker has a process of its own, `rlpost.tracking.worker`, which follows metrics.jsonl. So it logs the lines of that
file and nothing else, cannot slow a step, and can be ended from outside if it hangs.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from rlpost.catalog import row_of
from rlpost.config.schema import flat
from rlpost.errors import ConfigError
from rlpost.files import expanded, json_in, replaced
from rlpost.imports import require
from rlpost.remote.child import MARK, ending, kill_group, python_module
from rlpost.settings import training

METRICS_FILE = "metrics.jsonl"  # in a run folder
MARK_FILE = "tracking.json"  # in a run folder: each tracker's id of the run, and the last step that it logged
DONE = "done"  # the worker's last word if all went well
GRACE_SECONDS = 5.0  # lets the worker's own deadline pass first: its error says more
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


class Tracker(Protocol):
    """One tracker of one run. Each call may raise anything and take any time."""

    def start(self, run: TrackedRun) -> str:
        """Open or resume the run; returns the id that becomes `known_as` when the run is resumed."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite numbers of one line of metrics.jsonl, under their names."""
        ...

    def finish(self, status: Status) -> None:
        """Deliver everything, and close the run."""
        ...


def described(run: TrackedRun) -> dict[str, Any]:
    """The configuration with the run's folder, as trackers show it beside the metrics."""
    return {**run.config, "run_folder": str(run.folder)}


def described_flat(run: TrackedRun) -> dict[str, str]:
    """The same as text by dotted keys: `{"optim": {"lr": 0.1}}` becomes `{"optim.lr": "0.1"}`."""
    return {key: str(value) for key, value in flat(described(run)).items()}


# Which tracker the settings ask for: settings first, then environment variables, then defaults


@dataclass(frozen=True)
class TrackerChoice:
    """A tracker still to be made: `factory` is `module:class`, `options` are the class's arguments."""

    name: str
    factory: str
    options: dict[str, Any]
    timeout_seconds: float


def chosen_tracker(settings: training.TrackingSettings) -> TrackerChoice | None:
    """The tracker of `settings`; None for tracking=none. Imports no tracker's package.

    Raises MissingExtraError if its package is not installed, ConfigError for an environment variable with an unknown
    value.
    """
    row = row_of("tracking", type(settings))
    return row.build(settings) if row.builds else None


def tensorboard(settings: training.TensorBoardSettings) -> TrackerChoice:
    """TensorBoard."""
    _require("tensorboard", "tensorboard")
    return _choice("tensorboard", "TensorBoardTracker", settings)


def wandb(settings: training.WandbSettings) -> TrackerChoice | None:
    """Weights & Biases; None if it is disabled."""
    mode = settings.mode.value if settings.mode else _wandb_mode()
    if mode == training.WandbMode.disabled.value:
        return None
    _require("wandb", "wandb")
    return _choice(
        "wandb",
        "WandbTracker",
        settings,
        project=settings.project or os.environ.get("WANDB_PROJECT") or PROJECT,
        entity=settings.entity or os.environ.get("WANDB_ENTITY"),
        mode=mode,
        folder=_absolute(settings.folder or os.environ.get("WANDB_DIR")),
    )


def trackio(settings: training.TrackioSettings) -> TrackerChoice:
    """trackio."""
    _require("trackio", "trackio")
    folder = _absolute(settings.folder or os.environ.get("TRACKIO_DIR"))
    return _choice("trackio", "TrackioTracker", settings, project=settings.project, folder=folder)


def mlflow(settings: training.MLflowSettings) -> TrackerChoice:
    """MLflow."""
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
    _require("mlflow", "mlflow", *(("sqlalchemy", "alembic") if uri is None else ()))
    experiment = settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    return _choice("mlflow", "MLflowTracker", settings, uri=uri, experiment=experiment)


def _choice(name: str, tracker: str, settings: training.TrackerSettings, **options: Any) -> TrackerChoice:
    return TrackerChoice(name, f"rlpost.tracking.trackers:{tracker}", options, settings.timeout_seconds)


def _require(extra: str, *packages: str) -> None:
    for package in packages:
        require(package, extra, f"tracking={extra}")


def _wandb_mode() -> str:
    mode = os.environ.get("WANDB_MODE") or training.WandbMode.offline.value
    if mode not in training.WandbMode.__members__:
        raise ConfigError(f"WANDB_MODE={mode} is unknown: it is one of {', '.join(training.WandbMode.__members__)}")
    return mode


def _absolute(folder: str | None) -> str | None:
    return str(expanded(folder).resolve()) if folder else None


# The tracker's process, seen from the training: given little and never waited for


class TrackerProcess:
    """The process that follows one run folder; none of its failures raises here or stops the run.

    It is given up at its first failure. Its output goes to the run's log.txt.
    """

    def __init__(self, choice: TrackerChoice, folder: Path, config: dict[str, Any]) -> None:
        self.choice = choice
        self.folder = folder
        self.config = config
        self._process: subprocess.Popen[str] | None = None
        self._given_up: str | None = None  # the reason

    @property
    def name(self) -> str:
        """The tracker's name, as in `tracking=NAME`."""
        return self.choice.name

    def start(self, kept_step: int) -> None:
        """Follow metrics.jsonl, which exists; `kept_step` is the last step that a resumed run kept, else -1."""
        order = Order(**asdict(self.choice), folder=str(self.folder.resolve()), config=self.config, kept_step=kept_step)
        try:
            with (self.folder / "log.txt").open("a") as log:
                self._process = python_module(
                    "rlpost.tracking.worker",
                    environment={MARK: ""},  # lets it deliver everything even if the run is killed
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        except OSError as error:
            self._given_up = f"its process did not start: {error}"
            return
        self._say(json.dumps(asdict(order)))

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._process is not None or self._given_up is not None

    def failure(self) -> str | None:
        """Why the tracker was given up; None while it works or has not begun. Returns at once."""
        if self._given_up is None and self._process is not None and self._process.poll() is not None:
            self._read_last_word()
        return self._given_up

    def close(self, status: Status, note: Callable[[str], None]) -> str | None:
        """Let the tracker finish, within its deadline; returns why it is incomplete, or None if it is complete.

        A long wait is announced through `note`. An interrupt ends the wait and the tracker.
        """
        if self.failure() is None and self._process is not None:
            self._say(status.value)
            limit = self.choice.timeout_seconds
            try:
                try:
                    self._process.wait(SILENT_SECONDS)
                except subprocess.TimeoutExpired:
                    note(f"waiting for {self.name} to finish, at most {limit:g} s; Ctrl-C leaves without it")
                    self._process.wait(max(0.0, limit - SILENT_SECONDS) + GRACE_SECONDS)
                self._read_last_word()
            except subprocess.TimeoutExpired:
                self._given_up = f"no answer within {limit:g} s after the end of the run"
            except KeyboardInterrupt:
                self._given_up = "the wait for it was interrupted"
            finally:
                self._end()
        return self._given_up

    def last_step(self) -> int | None:
        """The last step that the tracker logged, None if it logged none."""
        with suppress(OSError, ValueError, TypeError):  # its own file may be what failed
            mark = read_mark(self.folder, self.name)
            return mark.step if mark is not None and mark.step >= 0 else None
        return None

    def _say(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # failure() finds out that it is gone
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    def _read_last_word(self) -> None:
        """Read the last word of the ended process."""
        assert self._process is not None
        assert self._process.stdout is not None
        kill_group(self._process.pid)  # a child that it left behind may hold the pipe open
        word = self._process.stdout.read().strip()
        if word != DONE:
            self._given_up = word or f"its process {ending(self._process.returncode)}"
        self._end()

    def _end(self) -> None:
        """End the process and its children, and close the pipes."""
        assert self._process is not None
        if self._process.returncode is None:
            kill_group(self._process.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@dataclass(frozen=True)
class Order:
    """One worker's order; `kept_step` is the last step that a resumed run kept, -1 for a new run."""

    name: str
    factory: str
    options: dict[str, Any]
    timeout_seconds: float
    folder: str
    config: dict[str, Any]
    kept_step: int


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


# TensorBoard


class TensorBoardTracker:
    """Event files in the run's folder: scalars, which TensorBoard rounds to float32, and the configuration as a text.

    A resumed run adds a file. It begins with TensorBoard's own mark that all steps from its first on were undone, so
    readers drop these steps from earlier files.
    """

    def start(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder))
        mark = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(session_log=mark, step=run.first_step, wall_time=time.time()))
        if run.known_as is None:
            # TensorBoard renders texts as markdown
            cells = {key: text.replace("|", "\\|").replace("\n", " ") for key, text in described_flat(run).items()}
            rows = [f"| {key} | {cell} |" for key, cell in cells.items()]
            event = Event(wall_time=time.time(), step=0)
            value = event.summary.value.add(tag="config", metadata=create_summary_metadata("config", ""))
            value.tensor.dtype = 7  # DT_STRING
            value.tensor.string_val.append("\n".join(["| key | value |", "| --- | --- |", *rows]).encode())
            self._writer.add_event(event)
        return folder.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        event = Event(wall_time=time.time(), step=step)
        for name, number in metrics.items():
            event.summary.value.add(tag=name, simple_value=number)
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

    project: str
    entity: str | None
    mode: str
    folder: str | None

    def start(self, run: TrackedRun) -> str:
        folder = self.folder or str(run.folder)
        os.environ.setdefault("WANDB_CACHE_DIR", os.path.join(folder, "wandb", "cache"))
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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

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
    they stay, and are there twice.
    """

    project: str
    folder: str | None

    def start(self, run: TrackedRun) -> str:
        os.environ["TRACKIO_DIR"] = self.folder or str(run.folder / "trackio")
        self._local = not any(os.environ.get(name) for name in REMOTE)
        if self._local:
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask the hub for the user's name
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(  # pyright: ignore[reportAttributeAccessIssue]
            project=self.project,
            name=run.name,
            config=described(run),
            resume="never" if run.known_as is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if run.known_as not in (None, self._run.id):
            raise RuntimeError(f"another run of project {self.project} is named {run.name}: give this one another name")
        if self._local:
            self._forget_from(run.first_step)
        self._last_step: int | None = None
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
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

    uri: str | None
    experiment: str

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        figures = [Metric(REFUSED.sub("_", name), number, now, step) for name, number in metrics.items()]
        self._client.log_batch(self._id, metrics=figures)

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
