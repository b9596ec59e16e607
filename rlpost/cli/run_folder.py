"""Which folder a run writes to, and whether it may."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from rlpost.config.paths import RUNS, SWEEP_FILE, checkpoints, is_checkpoint_folder, is_run_folder, never_began
from rlpost.errors import CheckpointError, ConfigError
from rlpost.folding import shortened
from rlpost.home import expanded
from rlpost.nearest import did_you_mean, nearest

RESUME_WORDS = ("auto", "latest")
LONGEST_NAME, LONGEST_SHOWN = 255, 60  # bytes of a file's name; columns of one in a message
NAMELESS = re.compile(r"model|checkpoints|latest|best|step-\d+")  # folders inside a run that do not tell runs apart


def choose_folder(out: Path | None, name: str | None, resume: str | None, stem: str) -> Path:
    """The run folder that `--out`, `--name` and `--resume` ask for; `runs/STEM-N` where they leave it open.

    Nothing is created, and a run that failed before it did anything leaves its name free. Raises
    ConfigError for a name that is taken or cannot be one, and for a `--resume` that finds no run;
    CheckpointError for one that finds a run without a checkpoint.
    """
    asked = asked_folder(out, name)
    if asked is not None and (asked / SWEEP_FILE).is_file():
        raise ConfigError(f"{asked} holds a sweep: add -m to go on with it, or give another --name")
    if resume is None:
        return _new(asked, stem)
    if resume in RESUME_WORDS:
        return _resumed(asked, resume, stem)
    return _resumed_from(asked, resume)


def run_to_resume(out: Path | None, name: str | None, resume: str) -> Path | None:
    """The run that `--resume` goes on with; None where only the settings can say which it is.

    Raises ConfigError for a `--resume` that is no run and no checkpoint.
    """
    return asked_folder(out, name) if resume in RESUME_WORDS else _run_at(resume)


def choose_sweep_folder(out: Path | None, name: str | None, resume: str | None, stem: str) -> Path:
    """The folder of a sweep, in which each job gets one; see `choose_folder`. A sweep knows `--resume auto` alone."""
    asked = asked_folder(out, name)
    if resume not in (None, "auto"):
        raise ConfigError(f"--resume {resume} is for one run: a sweep goes on with --resume auto")
    if asked is not None and is_run_folder(asked):
        raise ConfigError(f"{asked} holds a single run, no sweep: give another --name")
    if resume is None and asked is not None and (asked / SWEEP_FILE).is_file():
        raise ConfigError(f"{asked} already holds a sweep: add --resume auto to go on with it, or give another --name")
    if asked is not None:
        return asked
    return (_last_numbered(stem) if resume else None) or first_free(stem)


def slug(path: str) -> str:
    """A short folder name for a model path: `Qwen/Qwen2.5-0.5B` -> `qwen2.5-0.5b`."""
    parts = [part for part in Path(path).parts if not NAMELESS.fullmatch(part)]
    return re.sub(r"[^a-z0-9.]+", "-", parts[-1].lower()).strip("-.") if parts else "model"


def asked_folder(out: Path | None, name: str | None, *, root: Path = RUNS, kind: str = "a run") -> Path | None:
    """The folder that `--out` or, inside `root`, `--name` gives; None where neither does.

    Raises ConfigError for both, for a name that cannot be one, and for a file.
    """
    if out is not None and name is not None:
        raise ConfigError(f"--out and --name both say where {kind} goes: give one of them")
    if name is not None and not _is_name(name):
        raise ConfigError(
            f"--name {shortened(name, LONGEST_SHOWN)!r} is no name of {kind}: give one word such as my-run, or --out "
            "for a path"
        )
    if out is not None and not str(out).isprintable():
        raise ConfigError(f"--out {str(out)!r} has characters that cannot be shown: give another folder")
    asked = expanded(out) if out is not None else root / name if name is not None else None
    if asked is not None and asked.exists() and not asked.is_dir():
        raise ConfigError(f"{asked} is a file: {kind} needs a folder")
    return asked


def _is_name(name: str) -> bool:
    """Whether a folder of this name can stand in runs/ and in one line of text."""
    beyond = name != name.strip() or not name.isprintable() or set(name) & {"/", "\\"} or name[:1] in (".", "-")
    return bool(name) and not beyond and len(os.fsencode(name)) <= LONGEST_NAME


def _new(asked: Path | None, stem: str) -> Path:
    if asked is None:
        return first_free(stem)
    if is_run_folder(asked) and not never_began(asked):
        raise ConfigError(f"{asked} already holds a run: add --resume auto to go on with it, or give another --name")
    return asked


def _resumed(asked: Path | None, resume: str, stem: str) -> Path:
    """`auto` begins where there is nothing to resume, `latest` does not."""
    folder = asked if asked is not None else _last_numbered(stem)
    if folder is not None and is_run_folder(folder):
        if resume == "latest" and not checkpoints(folder / "checkpoints"):
            raise CheckpointError(
                f"--resume latest: {folder} has no complete checkpoint; --resume auto begins it again, with its own "
                "settings"
            )
        return folder
    if resume == "latest":
        where = folder if folder is not None else RUNS / f"{stem}-1"
        raise ConfigError(f"--resume latest: there is no run in {where}; leave --resume out to begin one")
    return asked if asked is not None else first_free(stem)


def _resumed_from(asked: Path | None, resume: str) -> Path:
    run = _run_at(resume)
    if asked is None:
        return run
    if is_run_folder(asked) and asked.resolve() != run.resolve():
        raise ConfigError(f"{asked} already holds another run than --resume {resume}: give another --name")
    return asked


def _run_at(resume: str) -> Path:
    """The run that a path means, its own or that of one of its checkpoints."""
    source = expanded(resume)
    if not source.is_dir():
        named = RUNS / resume if is_run_folder(RUNS / resume) else None
        meant = f"--resume {named}" if named else nearest(resume, RESUME_WORDS)
        hint = did_you_mean(meant, "give auto, latest, a run folder or a checkpoint")
        raise ConfigError(f"--resume {resume}: there is no such folder{hint}")
    if is_checkpoint_folder(source):
        if not re.fullmatch(r"step-\d+", source.resolve().name):
            raise ConfigError(f"--resume {resume}: the folder of a checkpoint is called step-NUMBER; give it that name")
        return source.parent.parent
    if is_run_folder(source):
        return source
    raise ConfigError(f"--resume {resume} is neither a run folder nor one of its checkpoints/step-...")


def first_free(stem: str, root: Path = RUNS) -> Path:
    """`root`/STEM-N with the lowest N that is not taken."""
    return next(folder for n in itertools.count(1) if not (folder := root / f"{stem}-{n}").exists())


def _last_numbered(stem: str) -> Path | None:
    """The run of this stem with the highest number."""
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    names = [p.name for p in RUNS.iterdir()] if RUNS.is_dir() else []
    numbers = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return RUNS / f"{stem}-{max(numbers)}" if numbers else None
