"""The folder that a run writes to, from `--out`, `--name` and `--resume`."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from rlpost.config.paths import RUNS, SWEEP_FILE, is_checkpoint_folder, is_run_folder
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded
from rlpost.runs.kept import RESUME_WORDS
from rlpost.runs.reader import checkpoints, never_began, newest_checkpoint, step_of
from rlpost.text import did_you_mean, nearest, shortened

LONGEST_NAME, _LONGEST_SHOWN = 255, 60  # bytes of a file's name; columns of a name in a message


def choose_folder(out: Path | None, name: str | None, resume: str | None, stem: str) -> Path:
    """The run folder that `--out`, `--name` and `--resume` ask for; `runs/STEM-N` if they leave it open.

    Creates nothing. A run that failed before it did anything leaves its name free. Raises ConfigError
    for a name that is taken or invalid and for a `--resume` that finds no run, CheckpointError for a
    `--resume` that finds a run without a checkpoint.
    """
    given = given_folder(out, name)
    if given is not None and (given / SWEEP_FILE).is_file():
        raise ConfigError(f"{given} holds a sweep: add -m to go on with it, or give another --name")
    holds_run = given is not None and is_run_folder(given)
    if resume is None:
        if given is not None and holds_run and not never_began(given):
            raise ConfigError(
                f"{given} already holds a run: add --resume auto to go on with it, or give another --name"
            )
        return given or first_free(stem)
    if resume in RESUME_WORDS:
        return _resumed(given, resume, stem)
    run = _run_at(resume)
    if given is not None and holds_run and given.resolve() != run.resolve():
        raise ConfigError(f"{given} already holds another run than --resume {resume}: give another --name")
    return given or run


def run_to_resume(out: Path | None, name: str | None, resume: str) -> Path | None:
    """The run that `--resume` continues; None if only the settings can say which it is.

    Raises ConfigError for a `--resume` that is neither a run nor a checkpoint.
    """
    return given_folder(out, name) if resume in RESUME_WORDS else _run_at(resume)


def choose_sweep_folder(out: Path | None, name: str | None, resume: str | None, stem: str) -> Path:
    """The folder of a sweep, which has a folder for each job; see `choose_folder`. `resume` is None or auto."""
    given = given_folder(out, name)
    if resume not in (None, "auto"):
        raise ConfigError(f"--resume {resume} is for one run: a sweep goes on with --resume auto")
    if given is not None and is_run_folder(given):
        raise ConfigError(f"{given} holds a single run, no sweep: give another --name")
    if resume is None and given is not None and (given / SWEEP_FILE).is_file():
        raise ConfigError(f"{given} already holds a sweep: add --resume auto to go on with it, or give another --name")
    if given is not None:
        return given
    return (_last_numbered(stem) if resume else None) or first_free(stem)


def given_folder(out: Path | None, name: str | None, *, root: Path = RUNS, kind: str = "a run") -> Path | None:
    """The folder that `--out` or, inside `root`, `--name` gives; None if neither is given.

    Raises ConfigError if both are given, for an invalid name, and for a file.
    """
    if out is not None and name is not None:
        raise ConfigError(f"--out and --name both say where {kind} goes: give one of them")
    if name is not None and not _is_name(name):
        raise ConfigError(
            f"--name {shortened(name, _LONGEST_SHOWN)!r} is not a name of {kind}: give one word such as my-run, "
            "or --out for a path"
        )
    folder = expanded(out) if out is not None else root / name if name is not None else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: {kind} needs a folder")
    return folder


def first_free(stem: str, root: Path = RUNS) -> Path:
    """`root`/STEM-N with the lowest N that is free."""
    return next(folder for n in itertools.count(1) if not (folder := root / f"{stem}-{n}").exists())


def point_of(folder: Path, resume: str) -> str:
    """The point where a resumed run in `folder` goes on, for `--dry-run`."""
    source = folder if resume in RESUME_WORDS else expanded(resume)
    found = newest_checkpoint(source.resolve())
    if found:
        return f"going on after step {step_of(found)}"
    again = "beginning again with its own settings" if is_run_folder(source) else "beginning"
    return f"{again}: it has no checkpoint yet"


def _is_name(name: str) -> bool:
    """Whether this is a valid name of a folder in runs/, and prints on one line."""
    beyond = name != name.strip() or not name.isprintable() or set(name) & {"/", "\\"} or name[:1] in (".", "-")
    return bool(name) and not beyond and len(os.fsencode(name)) <= LONGEST_NAME


def _resumed(given: Path | None, resume: str, stem: str) -> Path:
    """The folder of `--resume auto`, which begins the run that is named if there is none, or of `latest`."""
    folder = given or _last_numbered(stem)
    if folder is not None and is_run_folder(folder):
        if resume == "latest" and not checkpoints(folder / "checkpoints"):
            raise CheckpointError(
                f"--resume latest: {folder} has no complete checkpoint; --resume auto begins it again, with its own "
                "settings"
            )
        return folder
    if resume == "latest" or given is None:
        where = folder if folder is not None else RUNS / f"{stem}-1"
        raise ConfigError(f"--resume {resume}: there is no run in {where}; leave --resume out to begin one")
    return given


def _run_at(resume: str) -> Path:
    """The run of a path: a run folder, or one of its checkpoints."""
    source = expanded(resume)
    if not source.is_dir():
        named = RUNS / resume if is_run_folder(RUNS / resume) else None
        meant = f"--resume {named}" if named else nearest(resume, RESUME_WORDS)
        hint = did_you_mean(meant, "give auto, latest, a run folder or a checkpoint")
        raise ConfigError(f"--resume {resume}: there is no such folder{hint}")
    if is_checkpoint_folder(source):
        return source.parent.parent
    if is_run_folder(source):
        return source
    raise ConfigError(f"--resume {resume} is neither a run folder nor one of its checkpoints/step-...")


def _last_numbered(stem: str) -> Path | None:
    """The run of this stem with the highest number; None if there is none."""
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    names = [p.name for p in RUNS.iterdir()] if RUNS.is_dir() else []
    numbers = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return RUNS / f"{stem}-{max(numbers)}" if numbers else None
