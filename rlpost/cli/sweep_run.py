"""The jobs of a sweep, one subprocess after the other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rlpost.child import shell_code
from rlpost.cli.sweep_jobs import Outcome, Sweep, SweepJob, SweepOptions
from rlpost.cli.sweep_screen import SweepScreen
from rlpost.config.paths import RESULT, SAMPLES, is_run_folder
from rlpost.errors import STOPPED_BY, CheckpointError, ConfigError
from rlpost.orphans import unguarded

LOOK_EVERY = 0.3  # seconds
LOG_END = 4096  # bytes of a job's log that are searched for its error


class Stop:
    """Ctrl-C, SIGTERM and SIGHUP, passed on to the job under way, which saves and ends.

    The job has a session of its own, so that one Ctrl-C reaches it once and only through here; a
    second one is passed on too, and it leaves at once.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals are passed on meanwhile, and are as before afterwards."""
        previous = {number: signal.signal(number, self._on_signal) for number in STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def reaching(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Signals go to `process` meanwhile, one that has come already too."""
        self._process = process
        if self.exit_code:
            process.send_signal(signal.SIGINT)
        try:
            yield
        finally:
            self._process = None
            if process.poll() is None:  # this process fails: it leaves no job behind
                process.terminate()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = self.exit_code or STOPPED_BY[signal.Signals(number)]
        if self._process is not None:
            # a job takes SIGHUP for the end; it saves on SIGTERM
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def run_jobs(sweep: Sweep, options: SweepOptions) -> int:
    """Run what is not done yet, show it, record it; returns the exit code of the whole sweep.

    That of the signal that stopped it, else the highest of a job's. A failed job does not keep the
    others from running, unless it failed by its configuration (2), which is theirs too.
    """
    screen = SweepScreen(sweep, sys.stderr if options.as_json else sys.stdout)
    stop = Stop()
    sweep.save()
    screen.begin()
    with stop.caught():
        for number, job in enumerate(sweep.jobs, start=1):
            if job.outcome.exit_code == 0:
                screen.ended(number, job, known=True)
                continue
            screen.begun(number, job)
            job.outcome = _run(sweep, number, job, screen, stop)
            sweep.save()
            screen.ended(number, job)
            if stop.exit_code or job.outcome.exit_code == ConfigError.exit_code:
                break
    screen.end()
    return stop.exit_code or max(job.outcome.exit_code or 0 for job in sweep.jobs)


def _run(sweep: Sweep, number: int, job: SweepJob, screen: SweepScreen, stop: Stop) -> Outcome:
    """One job from beginning to end, what it says in its log.txt and what it results in on its stdout."""
    log_file = job.folder / "log.txt"
    command = job_command(sweep, job)
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        for left in (RESULT, SAMPLES):  # by an evaluation of a job that is to be done again
            (job.folder / left).unlink(missing_ok=True)
        log = log_file.open("ab")
    except OSError as error:
        raise CheckpointError(f"cannot write to {job.folder}: {error}; give another --out") from error
    begun = time.monotonic()
    with log, tempfile.TemporaryFile() as answer:
        said_before = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answer, stderr=log, start_new_session=True, env=unguarded()
        )
        with stop.reaching(process):
            while process.poll() is None:
                screen.show(number, job, time.monotonic() - begun, stopping=stop.exit_code != 0)
                _wait(process)
        answer.seek(0)
        said = answer.read()
    exit_code = shell_code(process.returncode)
    result = _result(said)
    error = None
    if exit_code not in (0, *STOPPED_BY.values()):
        error = _last_words(log_file, said_before)
    elif exit_code == 0 and result is None:
        error = "it ended well but its result cannot be read"
    return Outcome(exit_code, round(time.monotonic() - begun, 1), error, result)


def job_command(sweep: Sweep, job: SweepJob) -> list[str]:
    """What is run for a job; `-P`: a folder that is called vllm and lies where the user is must not be imported."""
    command = [sys.executable, "-P", "-m", "rlpost", *sweep.command.verb.split(), *job.job.words, "--json"]
    goes_on = job.trains and is_run_folder(job.folder)
    return [*command, "--out", str(job.folder), *(["--resume", "auto"] if goes_on else [])]


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(LOOK_EVERY)
    except subprocess.TimeoutExpired:
        return


def _result(said: bytes) -> dict[str, Any] | None:
    """What a job's `--json` printed first; None for a job that failed before its end and printed nothing."""
    try:
        result, _ = json.JSONDecoder().raw_decode(said.decode(errors="replace"))
    except ValueError:
        return None
    return result


def _last_words(log: Path, begin: int) -> str:
    """The error in what a job wrote after `begin` bytes: its last `error:` line, else its last line."""
    with log.open("rb") as stream:
        stream.seek(max(begin, log.stat().st_size - LOG_END))
        lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else lines[-1] if lines else "it said nothing"
