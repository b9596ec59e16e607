"""`-m`: one job for each combination of several values, all checked before the first begins.

Each job runs in a process of its own, one after the other. A line says that a job begins, another how it ended, and
a table at the end compares the settings; sweep.json records each job's outcome.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rlpost.catalog import EVAL, Command
from rlpost.cli.plan import compose_and_check, resolved
from rlpost.cli.run_folder import choose_sweep_folder
from rlpost.cli.terminal import output_width, print_json, stdout_on_stderr
from rlpost.cli.views import candidate_lines, table
from rlpost.config.overrides import parse_words, shown, values_of
from rlpost.config.paths import RESULT, SAMPLES, SWEEP_FILE, is_run_folder
from rlpost.errors import STOPPED_BY, CheckpointError, ConfigError, RlpostError
from rlpost.files import json_in, replaced
from rlpost.remote.child import shell_code, unguarded
from rlpost.text import printable, shortened

LONGEST_NAME = 60  # characters of a job's folder name
LOG_END = 4096  # bytes at the end of a job's log that are searched for its error
HOW: dict[int | None, str] = {0: "done", **dict.fromkeys(STOPPED_BY.values(), "stopped")}  # exit code -> in a word
STOPPING = b"stopping: the running job saves first; Ctrl-C again leaves at once\n"


@dataclass(frozen=True)
class SweepOptions:
    """The flags given with `-m`; `out` and `name` give the sweep's folder, which has a folder for each job."""

    out: Path | None = None
    name: str | None = None
    resume: str | None = None
    dry_run: bool = False
    as_json: bool = False


@dataclass
class Job:
    """One combination of values: its folder's name, the settings that differ (key -> text), and all its words.

    `plan` adds its folder and its configuration as checked, `run_jobs` how it ended.
    """

    name: str
    differs: dict[str, str]
    words: list[str]
    folder: Path = Path()
    overrides: list[str] = field(default_factory=list)  # that compose to the same configuration again
    exit_code: int | None = None  # until it has ended
    seconds: float = 0.0
    error: str | None = None
    result: dict[str, Any] | None = None  # the output of its `--json`

    @property
    def title(self) -> str:
        """The settings that differ, on one line; long texts are cut."""
        return " ".join(f"{key}={shown(text)}" for key, text in self.differs.items())

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
    jobs: list[Job]
    named: bool
    exit_code: int | None = None
    found: dict[str, Any] | None = None  # once the jobs have ended: what `rlpost.evaluation.sweeps` reads from them

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
    if options.dry_run:
        print_json(planned.as_dict()) if options.as_json else print("\n".join(plan_lines(planned)))
        return 0
    with stdout_on_stderr() if options.as_json else nullcontext():
        planned.exit_code = run_jobs(planned)
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
    for job, its in zip(jobs, composed, strict=True):
        job.folder, job.overrides = folder / job.name, its.overrides
        known = recorded.get(job.name)
        if known is not None and known["exit_code"] == 0 and known["overrides"] == its.overrides:
            job.exit_code, job.seconds, job.result = 0, known["seconds"], known["result"]
    return Sweep(command, typed, folder, jobs, named=options.out is not None or options.name is not None)


def run_jobs(sweep: Sweep) -> int:
    """Run, show and record the jobs that are not done yet; returns the exit code of the sweep.

    It is the code of the signal that stopped the sweep, else the highest of the jobs. After a failed job
    the others run all the same, unless it failed by its configuration (2), which would fail them too.
    """
    stop = Stop()
    sweep.save()
    _say(f"{len(sweep.jobs)} jobs of rlpost {sweep.command.verb}, one after the other; each has its log.txt in")
    _say(f"{sweep.folder}/")
    handlers = {number: signal.signal(number, stop) for number in STOPPED_BY}
    try:
        for number, job in enumerate(sweep.jobs, start=1):
            place = f"{number}/{len(sweep.jobs)}"
            if job.exit_code == 0:
                _say_end(place, "done before", job)
                continue
            _say(f"{place}  {'begun':<21}  {job.title}")
            _run(sweep, job, stop)
            sweep.save()
            _say_end(place, HOW.get(job.exit_code, f"failed ({job.exit_code})"), job)
            if stop.exit_code or job.exit_code == ConfigError.exit_code:
                break
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    from rlpost.evaluation.sweeps import read_sweep

    found = read_sweep(sweep.folder)
    sweep.found = found.as_dict()
    print("\n".join(["", *candidate_lines(found, output_width(0) or None)]))
    if any(job.exit_code == ConfigError.exit_code for job in sweep.jobs):
        _say("stopped: a configuration that cannot work would fail the other jobs too")
    if left := sum(job.exit_code != 0 for job in sweep.jobs):
        where = "" if sweep.named else f" --out {sweep.folder}"
        _say(f"not done: {left} of {len(sweep.jobs)} jobs; to go on: the same command with --resume auto{where}")
    _say(f"results  {sweep.folder}/{SWEEP_FILE}")
    return stop.exit_code or max(job.exit_code or 0 for job in sweep.jobs)


def _say_end(place: str, how: str, job: Job) -> None:
    """Print how a job ended, with its time, its figure and its error."""
    from rlpost.evaluation.sweeps import figure_of
    from rlpost.screen import clock

    figure = figure_of(job.result) if job.result else ""
    _say(f"{place}  {how:<12}  {clock(job.seconds):>7}  {job.title}  {figure}".rstrip())
    if job.error is not None:
        _say(f"      {job.error}")
        _say(f"      see {job.folder}/log.txt")


def _say(line: str) -> None:
    width = output_width(0)
    print(shortened(printable(line), width) if width else printable(line), flush=True)


def plan_lines(planned: Sweep) -> list[str]:
    """The plan of a sweep: a row for each job, marked where it is done already."""
    rows = [
        (str(number), "done" if job.exit_code == 0 else "", job.name, printable(job.title))
        for number, job in enumerate(planned.jobs, start=1)
    ]
    head = f"{len(rows)} jobs of rlpost {planned.command.verb}, one after the other, in {planned.folder}"
    return [head, *table(rows, output_width(200), right=[0], cuttable=[2, 3])]


# Running the jobs


class Stop:
    """Passes Ctrl-C, SIGTERM and SIGHUP on to the running job, which saves and ends: a handler of signals.

    The job has a session of its own, so that each Ctrl-C reaches it once and only through this class;
    at the second one it leaves at once.
    """

    exit_code = 0  # of the sweep, once a signal has come
    process: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.exit_code:
            self.exit_code = STOPPED_BY[signal.Signals(number)]
            with suppress(OSError):  # there may be no terminal any more
                os.write(2, STOPPING)  # print is not safe within a signal handler
        if self.process is not None:
            # a job dies of SIGHUP; it saves on SIGTERM
            self.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def job_command(sweep: Sweep, job: Job) -> list[str]:
    """The command of a job; `-P` keeps a folder of the user's, vllm for example, from being imported."""
    command = [sys.executable, "-P", "-m", "rlpost", *sweep.command.verb.split(), *job.words, "--json"]
    goes_on = sweep.command is not EVAL and is_run_folder(job.folder)
    return [*command, "--out", str(job.folder), *(["--resume", "auto"] if goes_on else [])]


def _run(sweep: Sweep, job: Job, stop: Stop) -> None:
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
        process = stop.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answer, stderr=log, start_new_session=True, env=unguarded()
        )
        if stop.exit_code:  # the signal came before the process
            process.send_signal(signal.SIGINT)
        process.wait()
        stop.process = None
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
