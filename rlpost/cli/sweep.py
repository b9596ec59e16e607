"""`-m`: one job for each combination of several values, all checked before the first begins.

Each job runs in a process of its own, one after the other. The screen shows a line a job, the running one live,
and a table at the end; sweep.json records each job's outcome.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import yaml

from rlpost.catalog import Command
from rlpost.cli.plan import compose_and_check, resolved
from rlpost.cli.run_folder import choose_sweep_folder
from rlpost.cli.terminal import output_width, print_json
from rlpost.cli.views import candidate_lines, table
from rlpost.config.overrides import parse_words, shown, values_of
from rlpost.config.paths import RESULT, SAMPLES, SWEEP_FILE, is_run_folder
from rlpost.errors import STOPPED_BY, CheckpointError, ConfigError, RlpostError
from rlpost.files import json_in, replaced
from rlpost.record import LOSS, MetricsFile, interval, main_figure, trained_loss
from rlpost.remote.child import shell_code, unguarded
from rlpost.text import printable, shortened

LONGEST_NAME = 60  # characters of a job's folder name
LOOK_EVERY = 0.3  # seconds between two updates of the live line
LOG_END = 4096  # bytes at the end of a job's log that are searched for its error


@dataclass(frozen=True)
class SweepOptions:
    """The flags given with `-m`; `out` and `name` give the sweep's folder, which has a folder for each job."""

    out: Path | None = None
    name: str | None = None
    resume: str | None = None
    dry_run: bool = False
    cfg: bool = False
    as_json: bool = False


@dataclass
class Job:
    """One combination of values: its folder's name, the settings that differ (key -> text), and all its words."""

    name: str
    differs: dict[str, str]
    words: list[str]

    @property
    def title(self) -> str:
        """The settings that differ, on one line; long texts are cut."""
        return " ".join(f"{key}={shown(text)}" for key, text in self.differs.items())


@dataclass
class SweepJob(Job):
    """A job with its folder, its configuration as checked, and how it ended."""

    folder: Path
    overrides: list[str]  # that compose to the same configuration again
    yaml: str
    steps: int | None  # to train; None if the settings do not say
    exit_code: int | None = None  # until it has ended
    seconds: float = 0.0
    error: str | None = None
    result: dict[str, Any] | None = None  # the output of its `--json`

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = ("name", "folder", "differs", "overrides", "exit_code", "seconds", "error", "result")
        return {name: getattr(self, name) for name in names} | {"folder": str(self.folder)}


@dataclass
class Sweep:
    """A sweep and its record, rewritten after every job; `named`: the user gave its folder."""

    command: Command[Any]
    typed: list[str]
    folder: Path
    jobs: list[SweepJob]
    named: bool
    exit_code: int | None = None
    found: dict[str, Any] | None = None  # once the jobs have ended: what `rlpost.evaluation.sweeps` reads from them

    @property
    def is_of_trainings(self) -> bool:
        """Whether its jobs are trainings rather than evaluations."""
        return self.command.verb.startswith("train ")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "command": self.command.verb,
            "typed": self.typed,
            "folder": str(self.folder),
            "exit_code": self.exit_code,
            "found": self.found,
            "jobs": [job.as_dict() for job in self.jobs],
        }

    def save(self) -> None:
        """Write sweep.json whole or not at all. Raises CheckpointError if it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self.folder / SWEEP_FILE) as making:
                making.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error}; give another --out") from error


def sweep(command: Command[Any], words: Sequence[str], typed: list[str], options: SweepOptions) -> int:
    """Run `command` once for each combination of the values in `words`; returns the exit code of the worst job.

    Checks every configuration before it begins the first job: one that cannot work raises ConfigError
    or DataError and names its job.
    """
    planned = plan(command, words, typed, options)
    if options.cfg:
        _print_configurations(planned, options)
        return 0
    if options.dry_run:
        _print_plan(planned, options)
        return 0
    planned.exit_code = run_jobs(planned, options)
    planned.save()
    if options.as_json:
        print_json(planned.as_dict())
    return planned.exit_code


def plan(command: Command[Any], words: Sequence[str], typed: list[str], options: SweepOptions) -> Sweep:
    """The sweep with every job composed, and the recorded outcomes of jobs that are done already."""
    jobs = expand(words)
    composed = []
    for number, job in enumerate(jobs, start=1):
        try:
            composed.append(resolved(compose_and_check(command, job.words, as_json=options.as_json))[0])
        except RlpostError as error:
            where = f"job {number} of {len(jobs)} ({job.title})"
            raise type(error)(f"{where}: {error}; no job was begun") from error
    folder = choose_sweep_folder(options.out, options.name, options.resume, f"sweep-{command.name}")
    resumes = options.resume is not None and (folder / SWEEP_FILE).is_file()
    recorded = {job["name"]: job for job in json_in(folder / SWEEP_FILE)["jobs"]} if resumes else {}
    planned = []
    for job, its in zip(jobs, composed, strict=True):
        steps = getattr(its.settings, "steps", None)
        each = SweepJob(**vars(job), folder=folder / job.name, overrides=its.overrides, yaml=its.yaml, steps=steps)
        known = recorded.get(job.name)
        if known is not None and known["exit_code"] == 0 and known["overrides"] == its.overrides:
            each.exit_code, each.seconds, each.result = 0, known["seconds"], known["result"]
        planned.append(each)
    return Sweep(command, typed, folder, planned, named=options.out is not None or options.name is not None)


def run_jobs(sweep: Sweep, options: SweepOptions) -> int:
    """Run, show and record the jobs that are not done yet; returns the exit code of the sweep.

    It is the code of the signal that stopped the sweep, else the highest of the jobs. After a failed job
    the others run all the same, unless it failed by its configuration (2), which would fail them too.
    """
    screen = SweepScreen(sweep, sys.stderr if options.as_json else sys.stdout)
    stop = Stop()
    sweep.save()
    screen.begin()
    with stop.caught():
        for number, job in enumerate(sweep.jobs, start=1):
            if job.exit_code == 0:
                screen.ended(number, job, known=True)
                continue
            screen.begun(number, job)
            _run(sweep, number, job, screen, stop)
            sweep.save()
            screen.ended(number, job)
            if stop.exit_code or job.exit_code == ConfigError.exit_code:
                break
    from rlpost.evaluation.sweeps import read_sweep

    sweep.found = read_sweep(sweep.folder).as_dict()
    screen.end()
    return stop.exit_code or max(job.exit_code or 0 for job in sweep.jobs)


def _print_configurations(planned: Sweep, options: SweepOptions) -> None:
    if options.as_json:
        print_json({job.name: yaml.safe_load(job.yaml) for job in planned.jobs})
        return
    for number, job in enumerate(planned.jobs, start=1):
        print(f"--- # job {number} of {len(planned.jobs)}: {printable(job.title)}")
        print(job.yaml, end="")


def _print_plan(planned: Sweep, options: SweepOptions) -> None:
    if options.as_json:
        print_json(planned.as_dict())
        return
    rows = [
        (str(number), "done" if job.exit_code == 0 else "", job.name, printable(job.title))
        for number, job in enumerate(planned.jobs, start=1)
    ]
    print(f"{len(rows)} jobs of rlpost {planned.command.verb}, one after the other, in {planned.folder}")
    print("\n".join(table(rows, output_width(200), right=[0], cuttable=[2, 3])))


# Running the jobs


class Stop:
    """Passes Ctrl-C, SIGTERM and SIGHUP on to the running job, which saves and ends.

    The job has a session of its own, so that each Ctrl-C reaches it once and only through this class;
    at the second one it leaves at once.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals meanwhile."""
        previous = {number: signal.signal(number, self._on_signal) for number in STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def reaching(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Pass signals on to `process` meanwhile, also one that has come already."""
        self._process = process
        if self.exit_code:
            process.send_signal(signal.SIGINT)
        try:
            yield
        finally:
            self._process = None
            if process.poll() is None:  # an error in this process must not leave the job behind
                process.terminate()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = self.exit_code or STOPPED_BY[signal.Signals(number)]
        if self._process is not None:
            # a job dies of SIGHUP; it saves on SIGTERM
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def job_command(sweep: Sweep, job: SweepJob) -> list[str]:
    """The command of a job; `-P` keeps a folder of the user's, vllm for example, from being imported."""
    command = [sys.executable, "-P", "-m", "rlpost", *sweep.command.verb.split(), *job.words, "--json"]
    goes_on = sweep.is_of_trainings and is_run_folder(job.folder)
    return [*command, "--out", str(job.folder), *(["--resume", "auto"] if goes_on else [])]


def _run(sweep: Sweep, number: int, job: SweepJob, screen: SweepScreen, stop: Stop) -> None:
    """Run one job to its end: its stderr goes to its log.txt, its stdout is its result."""
    log_file = job.folder / "log.txt"
    command = job_command(sweep, job)
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        for left in (RESULT, SAMPLES):  # of an evaluation that is done again
            (job.folder / left).unlink(missing_ok=True)
        log = log_file.open("ab")
    except OSError as error:
        raise CheckpointError(f"cannot write to {job.folder}: {error}; give another --out") from error
    begun = time.monotonic()
    with log, tempfile.TemporaryFile() as answer:
        log_start = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answer, stderr=log, start_new_session=True, env=unguarded()
        )
        with stop.reaching(process):
            while process.poll() is None:
                screen.show(number, job, time.monotonic() - begun, stopping=stop.exit_code != 0)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY)
        answer.seek(0)
        output = answer.read()
    job.exit_code, job.result = shell_code(process.returncode), _result(output)
    job.seconds, job.error = round(time.monotonic() - begun, 1), None
    if job.exit_code not in (0, *STOPPED_BY.values()):
        job.error = _last_words(log_file, log_start)
    elif job.exit_code == 0 and job.result is None:
        job.error = "it ended well but its result cannot be read"


def _result(output: bytes) -> dict[str, Any] | None:
    """The JSON that a job printed; None if it failed before it printed any."""
    try:
        result, _ = json.JSONDecoder().raw_decode(output.decode(errors="replace"))
    except ValueError:
        return None
    return result


def _last_words(log: Path, begin: int) -> str:
    """The error in a job's log after `begin` bytes: its last `error:` line, else its last line."""
    with log.open("rb") as stream:
        stream.seek(max(begin, log.stat().st_size - LOG_END))
        lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else lines[-1] if lines else "it said nothing"


# What a sweep shows


class SweepScreen:
    """Lines on `stream`; a terminal shows the running job on a live line."""

    def __init__(self, sweep: Sweep, stream: TextIO) -> None:
        self.sweep = sweep
        self.stream = stream
        self._has_printed_stopping = False
        self._rows: MetricsFile  # of the running job
        self._last_row: Mapping[str, Any] | None
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"

    def begin(self) -> None:
        """Print the number of jobs and their folder."""
        count = len(self.sweep.jobs)
        self._line(f"{count} jobs of rlpost {self.sweep.command.verb}, one after the other; each has its log.txt in")
        self._line(f"{self.sweep.folder}/")

    def begun(self, number: int, job: SweepJob) -> None:
        """Print that a job begins, unless a live line shows it."""
        self._rows, self._last_row = MetricsFile(job.folder / "metrics.jsonl"), None
        if not self.live:
            self._line(self._row(number, job, "begun", "", 0.0))

    def show(self, number: int, job: SweepJob, seconds: float, *, stopping: bool) -> None:
        """Update the live line of a terminal; print once that the job is stopping."""
        if stopping and not self._has_printed_stopping:
            self._has_printed_stopping = True
            self._clear()
            self._line("stopping: the running job saves first; Ctrl-C again leaves at once")
        if not self.live:
            return
        state, figure = self._progress(job)
        line = self._row(number, job, "stopping" if stopping else state, figure, seconds)
        self.stream.write(f"\r\x1b[2K{line}")
        self.stream.flush()

    def _progress(self, job: SweepJob) -> tuple[str, str]:
        """How far the job is, `step 12/60`, and its figure."""
        if not self.sweep.is_of_trainings:
            return "evaluating", ""
        self._last_row = [self._last_row, *self._rows.new_rows()][-1]
        if self._last_row is None:
            return "starting", ""
        of = "" if job.steps is None else f"/{job.steps}"
        return f"step {self._last_row['step']}{of}", _figure(self._last_row)

    def ended(self, number: int, job: SweepJob, *, known: bool = False) -> None:
        """Print how a job ended, now or (`known`) in an earlier attempt."""
        words: dict[int | None, str] = {0: "done", **dict.fromkeys(STOPPED_BY.values(), "stopped")}
        state = "done before" if known else words.get(job.exit_code, f"failed ({job.exit_code})")
        self._clear()
        self._line(self._row(number, job, state, _result_figure(job.result), job.seconds))
        if job.error is not None:
            self._line(f"      {job.error}")
            self._line(f"      see {job.folder}/log.txt")

    def end(self) -> None:
        """Print what the sweep found, and how to go on if jobs are left."""
        from rlpost.evaluation.sweeps import read_sweep

        jobs = self.sweep.jobs
        self._line("")
        width = shutil.get_terminal_size().columns if self.stream.isatty() else None
        for line in candidate_lines(read_sweep(self.sweep.folder), width):
            self._line(line)
        left = sum(job.exit_code != 0 for job in jobs)
        if any(job.exit_code == ConfigError.exit_code for job in jobs):
            self._line("stopped: a configuration that cannot work would fail the other jobs too")
        if left:
            where = "" if self.sweep.named else f" --out {self.sweep.folder}"
            self._line(f"not done: {left} of {len(jobs)} jobs; to go on: the same command with --resume auto{where}")
        self._line(f"results  {self.sweep.folder}/sweep.json")

    def _row(self, number: int, job: SweepJob, state: str, figure: str, seconds: float) -> str:
        """A job's line, cut to the width of a terminal."""
        from rlpost.screen import clock

        total = len(self.sweep.jobs)
        row = f"{number:>{len(str(total))}}/{total}  {state:<12}  {figure:<14}  {clock(seconds):>7}  {job.title}"
        return shortened(printable(row), shutil.get_terminal_size().columns - 1 if self.stream.isatty() else 10**6)

    def _clear(self) -> None:
        if self.live:
            self.stream.write("\r\x1b[2K")

    def _line(self, text: str) -> None:
        print(printable(text), file=self.stream, flush=True)


def _result_figure(result: Mapping[str, Any] | None) -> str:
    """The main figure of a job's result: a held-out one, or else the last reward or loss."""
    if result is None:
        return ""
    if "result" in result:  # of an evaluation
        return f"reward {result['result']['reward_mean']:.2f}"
    held_out = result["evaluation_after"] or {}
    found = main_figure(held_out) or interval(held_out, LOSS)
    shown = found and (f"{found.value:.1%}" if found.is_share else f"{found.value:.3f}")
    return f"held-out {shown}" if shown else _figure(result["metrics"] or {})


def _figure(row: Mapping[str, Any]) -> str:
    reward, loss = row.get("reward/mean"), trained_loss(row)
    if reward is None:
        return "" if loss is None else f"loss {loss:.3f}"
    return f"reward {reward:.2f}"


# Settings with several values


def expand(words: Sequence[str]) -> list[Job]:
    """The jobs of `words`; the last setting with several values changes fastest.

    A setting has several values in Hydra's grammar: `a,b,c`, `choice(a,b,c)` or `range(start,stop,step)`
    (numbers below `stop`). Commas within quotes or brackets separate nothing. Composing each job checks the values.

    Raises ConfigError for a word that is not a setting, for values that cannot be read or are equal, and if no
    setting has several.
    """
    overrides = parse_words(words)
    values = {override.key: values_of(override) for override in overrides}
    swept = [override.key for override in overrides if values[override.key] != [override.text]]
    if not swept:
        raise ConfigError("-m runs once for each of several values, and no setting has several: as in seed=0,1,2")
    jobs = []
    for texts in itertools.product(*values.values()):
        chosen = dict(zip(values, texts, strict=True))
        differs = {key: chosen[key] for key in swept}
        jobs.append(Job(folder_name(differs), differs, [f"{key}={text}" for key, text in chosen.items()]))
    names = [job.name for job in jobs]
    for job in jobs:
        if not job.name or names.count(job.name) > 1:  # a few letters, a hash of its words, tell it apart
            letters = hashlib.sha256("\n".join(job.words).encode()).hexdigest()[:6]
            job.name = f"{job.name}_{letters}".lstrip("_")
    return jobs


def folder_name(differs: Mapping[str, str]) -> str:
    """`{"optim.lr": "1e-5", "group_size": "8"}` -> `lr-1e-5_group-size-8`."""
    last_parts = [key.rpartition(".")[2] for key in differs]
    parts = []
    for key, text in differs.items():
        last = key.rpartition(".")[2]
        parts.append(f"{_plain(last if last_parts.count(last) == 1 else key)}-{_plain(text)}")
    return "_".join(parts)[:LONGEST_NAME].strip("-_.")


def _plain(text: str) -> str:
    return re.sub(r"(?:[^\w.+-]|_)+", "-", text).strip("-.")
