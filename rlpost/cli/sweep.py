"""`-m`: every job's configuration is checked, then each runs in a process of its own, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.catalog import EVAL, Command
from rlpost.cli.checks import compose_and_check
from rlpost.cli.resume import settings_of_run
from rlpost.cli.run_folder import choose_sweep_folder
from rlpost.cli.sweep_jobs import Outcome, Sweep, SweepJob, SweepOptions
from rlpost.cli.terminal import print_json
from rlpost.config.paths import SWEEP_FILE
from rlpost.errors import CheckpointError, RlpostError
from rlpost.files import json_in
from rlpost.text import printable


def sweep(command: Command[Any], words: Sequence[str], typed: list[str], options: SweepOptions) -> int:
    """Run `command` once for each combination of the values in `words`; returns the exit code of the worst job.

    Nothing is begun before every configuration is checked: one that cannot work raises ConfigError
    or DataError and names its job.
    """
    planned = plan(command, words, typed, options)
    if options.cfg:
        _print_configurations(planned, options)
        return 0
    if options.dry_run:
        _print_plan(planned, options)
        return 0
    from rlpost.cli.sweep_run import run_jobs

    planned.exit_code = run_jobs(planned, options)
    planned.save()
    if options.as_json:
        print_json(planned.as_dict())
    return planned.exit_code


def plan(command: Command[Any], words: Sequence[str], typed: list[str], options: SweepOptions) -> Sweep:
    """The sweep with every job composed, and with what its folder says of jobs that are done already."""
    from rlpost.config.sweep import expand

    jobs = expand(words)
    composed = []
    for number, job in enumerate(jobs, start=1):
        try:
            kept = settings_of_run(job.words, ["rlpost", "eval", *job.words]) if command is EVAL else []
            composed.append(compose_and_check(command, job.words, kept, as_json=options.as_json))
        except RlpostError as error:
            where = f"job {number} of {len(jobs)} ({job.title})"
            raise type(error)(f"{where}: {error}; no job was begun") from error
    folder = choose_sweep_folder(options.out, options.name, options.resume, f"sweep-{command.name}")
    done = _recorded(folder) if options.resume is not None else {}
    planned = []
    for job, its in zip(jobs, composed, strict=True):
        known = done.get(job.name)
        finished = known is not None and known["exit_code"] == 0 and known["overrides"] == its.overrides
        outcome = Outcome(0, known["seconds"], None, known["result"]) if known and finished else Outcome()
        planned.append(SweepJob(job, its, folder / job.name, outcome))
    return Sweep(command, typed, folder, planned, named=options.out is not None or options.name is not None)


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> what sweep.json says of the job; nothing where no sweep has been here."""
    file = folder / SWEEP_FILE
    if not file.is_file():
        return {}
    try:
        jobs = json_in(file)["jobs"]
        return {job["name"]: {key: job[key] for key in ("overrides", "exit_code", "seconds", "result")} for job in jobs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): remove it to run every job") from error


def _print_configurations(planned: Sweep, options: SweepOptions) -> None:
    if options.as_json:
        print_json({job.job.name: job.composed.as_dict() for job in planned.jobs})
        return
    for number, job in enumerate(planned.jobs, start=1):
        print(f"--- # job {number} of {len(planned.jobs)}: {printable(job.job.title)}")
        print(job.composed.yaml, end="")


def _print_plan(planned: Sweep, options: SweepOptions) -> None:
    if options.as_json:
        print_json(planned.as_dict())
        return
    from rlpost.cli.columns import fitted_table, output_width

    rows = [
        (str(number), "done" if job.outcome.exit_code == 0 else "", job.job.name, printable(job.job.title))
        for number, job in enumerate(planned.jobs, start=1)
    ]
    print(f"{len(rows)} jobs of rlpost {planned.command.verb}, one after the other, in {planned.folder}")
    print("\n".join(fitted_table(rows, output_width(200), right=[0], cuttable=[2, 3])))
