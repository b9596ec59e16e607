"""Which folder a run writes to, and whether it may.

A run's own settings, under those of the command line: where it goes on (`--resume`), or its model is evaluated.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import EVAL, Command
from rlpost.config.paths import (
    RUNS,
    SWEEP_FILE,
    check_resumable,
    checkpoints,
    is_checkpoint_folder,
    is_run_folder,
    never_began,
    newest_checkpoint,
    resolve_model_path,
    run_of_model,
    step_of,
)
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded
from rlpost.runs.reader import command_of, read_run
from rlpost.text import did_you_mean, nearest, shortened

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override

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


def kept_settings(command: Command[Any], run: Path, resume: str, words: Sequence[str]) -> list[Override] | None:
    """What `run` was asked, to compose under the `words` given now, whether or not it has a checkpoint yet.

    None where there is nothing to keep: no run yet, one that did nothing and does not say what it was
    asked, and a job that its sweep resumes, which is told everything. Raises CheckpointError where the
    run does not say what it was asked, or has no checkpoint where one was named, or one that keeps the
    model alone, and ConfigError for a run of another command and where it names code to run that the
    words do not: a folder may be anybody's.
    """
    if resume in RESUME_WORDS and (run.parent / SWEEP_FILE).is_file():
        return None
    if not is_run_folder(run):
        return None
    found = newest_checkpoint(run if resume in RESUME_WORDS else expanded(resume).resolve())
    if resume not in RESUME_WORDS and found is None:
        raise CheckpointError(
            f"--resume {resume}: there is no complete checkpoint; --out {run} --resume auto begins the run again, with "
            "its own settings"
        )
    from rlpost.config.code import is_code
    from rlpost.config.overrides import Override

    if found is not None:
        check_resumable(found)

    file = run / "overrides.txt"
    if (its := command_of(run)) not in (None, command):
        if never_began(run):
            return None
        raise ConfigError(f"--resume: {run} is a run of rlpost {its.verb}, not of rlpost {command.verb}")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        if never_began(run):
            return None
        raise CheckpointError(
            f"{file} cannot be read ({error}), so nothing says what the run was asked: give another --name to begin one"
        ) from error
    given = {word.partition("=")[0] for word in words}
    if code := [word for word in code_words(lines) if word.partition("=")[0] not in given]:
        raise ConfigError(
            f"--resume: {run} was trained with code or on other machines, which a run folder cannot name: give it "
            f"again, as {shlex.join(code)}"
        )
    parts = [(number, *line.partition("=")) for number, line in enumerate(lines, start=1)]
    kept = [Override(key, text, f"{file}, line {number}") for number, key, equals, text in parts if equals]
    return [override for override in kept if not is_code(override)]  # what is code the words give


NOT_PLAYED = {  # of a run's settings: they choose among its training prompts
    "env.split",
    "env.limit",
    "env.pass_rates",
    "env.min_pass_rate",
    "env.max_pass_rate",
}


def settings_of_run(words: Sequence[str], typed: Sequence[str]) -> list[Override]:
    """What an evaluation plays of its model's run: environment, tools, stop strings, to compose under its `words`.

    Empty where the model is of no run, or the words name another environment. Raises ConfigError where the run's
    settings name code that the words do not; the message has the command as it was `typed`, and the code.
    """
    from rlpost.config.code import is_code
    from rlpost.config.compose import expand
    from rlpost.config.overrides import Override, parse_words

    given = {override.key: override.text for override in expand(EVAL, parse_words(words))}
    run = run_of_model(given.get("model.path", ""))
    record = read_run(run) if run is not None else None
    if run is None or record is None or (env := record.choice("env")) is None or given.get("env", env) != env:
        return []
    lines = [f"env={env}"]
    for line in record.overrides:
        key = line.partition("=")[0]
        is_played = key.startswith(("env.", "tools.")) or key in ("plugin", "sampling.stop")
        if is_played and key not in NOT_PLAYED and key not in EVAL.without:
            lines.append(line)
    if code := [word for word in code_words(lines) if word.partition("=")[0] not in given]:
        raise ConfigError(
            f"{run} was trained with code of yours, which is never taken from a run's folder. Name it again: "
            f"{shlex.join([*typed, *code])}"
        )
    kept = [Override(key, text, str(run / "overrides.txt")) for key, _, text in (line.partition("=") for line in lines)]
    return [override for override in kept if not is_code(override)]


def code_words(overrides: Sequence[str]) -> list[str]:
    """Those of a run's overrides that make something run, which are given again where it goes on."""
    from rlpost.config.code import code_word
    from rlpost.config.overrides import Override

    parts = [word.partition("=") for word in overrides]
    return [word for key, _, text in parts if (word := code_word(Override(key, text))) is not None]


def check_kept(composed: Composed[Any], run: Path | None, kept: list[Override] | None) -> list[str]:
    """What the words given now change of `run`, as `optim.lr: 1e-05 -> 2e-05`; nothing where it has not begun.

    Raises ConfigError for what it cannot change any more.
    """
    if kept is None or run is None or never_began(run):
        return []
    from rlpost.config.compose import merge_all
    from rlpost.config.overrides import as_text

    before, now = merge_all(composed.command, [], kept), composed.settings
    changed = {key: (before.config[key], getattr(now, key)) for key in now.must_stay}
    changed["env"] = (before.choices["env"], composed.choices["env"])  # the position in its rows is one of that
    if _is_there(before.config.model.path):
        changed["model.path"] = (before.config.model.path, now.model.path)
    for name in ("chat_template", "chat_template_kwargs"):  # its checkpoints hold them
        changed[f"model.{name}"] = (before.config.model[name], getattr(now.model, name))
    for key, (old, new) in changed.items():
        if old != new:
            raise ConfigError(f"--resume: the run began with {key}={as_text(old)}, not {as_text(new)}; keep it")
    lines = (run / "overrides.txt").read_text(encoding="utf-8").splitlines()
    earlier = {key: text for key, _, text in (line.partition("=") for line in lines)}  # its code too
    given = {key: text for key, _, text in (word.partition("=") for word in composed.overrides)}
    asked = {key: (earlier.get(key) or before.text_of(key), text) for key, text in given.items()}
    return [f"{key}: {old} -> {new}" for key, (old, new) in asked.items() if old != new]


def point_of(folder: Path, resume: str) -> str:
    """Where a run in `folder` that is resumed goes on, as `--dry-run` says it."""
    source = folder if resume in RESUME_WORDS else expanded(resume)
    found = newest_checkpoint(source.resolve())
    if found:
        return f"going on after step {step_of(found)}"
    again = "beginning again with its own settings" if is_run_folder(source) else "beginning"
    return f"{again}: it has no checkpoint yet"


def _is_there(model_path: str) -> bool:
    """Whether a model's path still means something: a folder may have been moved since the run began."""
    try:
        resolve_model_path(model_path)
    except ConfigError:
        return False
    return True
