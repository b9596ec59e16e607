"""The folder that a run writes to, and the settings that a resumed or evaluated run keeps."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import EVAL, Command
from rlpost.config.paths import RUNS, SWEEP_FILE, is_checkpoint_folder, is_run_folder, resolve_model_path
from rlpost.config.schema import as_text, flat
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded
from rlpost.runs.reader import (
    RunRecord,
    checkpoints,
    find_run,
    never_began,
    newest_checkpoint,
    playable,
    read_run,
    run_of_model,
    step_of,
)
from rlpost.runs.removal import check_resumable
from rlpost.text import did_you_mean, nearest, shortened

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override

_RESUME_WORDS = ("auto", "latest")
LONGEST_NAME, _LONGEST_SHOWN = 255, 60  # bytes of a file's name; columns of a name in a message
EARLIER_DEFAULTS = {"loss.kl_estimator": "k3"}  # a run that began with one of them keeps it
NOT_PLAYED = {  # settings that choose among a run's training prompts: an evaluation does not keep them
    "env.split",
    "env.limit",
    "env.pass_rates",
    "env.min_pass_rate",
    "env.max_pass_rate",
}


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
    if resume in _RESUME_WORDS:
        return _resumed(given, resume, stem)
    run = _run_at(resume)
    if given is not None and holds_run and given.resolve() != run.resolve():
        raise ConfigError(f"{given} already holds another run than --resume {resume}: give another --name")
    return given or run


def run_to_resume(out: Path | None, name: str | None, resume: str) -> Path | None:
    """The run that `--resume` continues; None if only the settings can say which it is.

    Raises ConfigError for a `--resume` that is neither a run nor a checkpoint.
    """
    return given_folder(out, name) if resume in _RESUME_WORDS else _run_at(resume)


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
    source = folder if resume in _RESUME_WORDS else expanded(resume)
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
        meant = f"--resume {named}" if named else nearest(resume, _RESUME_WORDS)
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


def kept_settings(command: Command[Any], run: Path, resume: str, words: Sequence[str]) -> list[Override] | None:
    """The settings of `run`, to compose under the `words` given now, whether or not it has a checkpoint yet.

    None if there is nothing to keep: no run yet, a run that did nothing and whose overrides.txt cannot be
    read, or a job that its sweep resumes with all its words. Raises CheckpointError if overrides.txt cannot
    be read, if the named run has no checkpoint, or if the checkpoint keeps the model alone; ConfigError for
    a run of another command, and for code that the words do not name again: a folder may be anybody's.
    """
    if resume in _RESUME_WORDS and (run.parent / SWEEP_FILE).is_file():
        return None
    if not is_run_folder(run):
        return None
    found = newest_checkpoint(run if resume in _RESUME_WORDS else expanded(resume).resolve())
    if resume not in _RESUME_WORDS and found is None:
        raise CheckpointError(
            f"--resume {resume}: there is no complete checkpoint; --out {run} --resume auto begins the run again, with "
            "its own settings"
        )
    if found is not None:
        check_resumable(found)
    if (its := read_run(run).verb) not in (None, command.verb):
        if never_began(run):
            return None
        raise ConfigError(f"--resume: {run} is a run of rlpost {its}, not of rlpost {command.verb}")
    try:
        return recorded_settings(run, words, "--resume")
    except CheckpointError:
        if never_began(run):
            return None
        raise


def recorded_settings(run: Path, words: Sequence[str], caller: str) -> list[Override]:
    """The settings that `run` was given, to compose under the `words` given now.

    Raises CheckpointError if overrides.txt cannot be read, and ConfigError, which begins with `caller`, for code that
    the words do not name again: a folder may be anybody's.
    """
    file = run / "overrides.txt"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}), so nothing says what the run was asked: give another --name to begin one"
        ) from error
    numbered = [(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1) if "=" in line]
    recorded, given_keys = flat(read_run(run).config), {word.partition("=")[0] for word, _ in numbered}
    numbered += [
        (f"{key}={earlier}", str(run / "config.yaml"))
        for key, earlier in EARLIER_DEFAULTS.items()
        if recorded.get(key) == earlier and key not in given_keys
    ]
    kept, code = _without_code(numbered, {word.partition("=")[0] for word in words})
    if code:
        raise ConfigError(
            f"{caller}: {run} used your code or another machine; for safety that is not taken from the run "
            f"folder: add {shlex.join(code)}"
        )
    return kept


@dataclass(frozen=True)
class RunEnvironment:
    """The environment that a command takes of a run, and the words that go on.

    `words` are the command's without `env=RUN`, `kept` the settings to compose under them, `note` a line about the
    environment, empty where no run is named.
    """

    words: list[str]
    kept: list[Override]
    note: str


def environment_of_runs(command: Command[Any], words: Sequence[str], typed: Sequence[str]) -> RunEnvironment:
    """The environment of the run that `env=RUN` names, else of the teacher's or the model's run.

    Environment, tools and stop strings. A run that learned from pairs gives the environment of the run that it began
    from. A command that learns from pairs takes none of its model. Raises ConfigError for an `env=RUN` that is not one,
    for a run without an environment, and for settings of the run that name code where the words do not; that message
    shows the command as `typed`, with the code.
    """
    from rlpost.config.compose import expand
    from rlpost.config.overrides import parse_words

    envs = [word.removeprefix("env=") for word in words if word.startswith("env=")]
    if envs and (named := _run_named(envs[-1])) is not None:
        rest = [word for word in words if not word.startswith("env=")]
        run = _played(named, command)
        overrides = _environment(command, run, {word.partition("=")[0] for word in rest}, typed)
        words = [*(f"{each.key}={each.text}" for each in overrides), *rest]
        return RunEnvironment(words, [], f"environment of {run}: {_about(read_run(run))}")

    given = {override.key: override.text for override in expand(command, parse_words(words))}
    found = [(who, run) for who in ("teacher", "model.path") if (run := run_of_model(given.get(who, ""))) is not None]
    of_no_run = RunEnvironment(list(words), [], "")
    if not found or getattr(command.settings, "learns_from_pairs", False):
        return of_no_run
    who, its = found[0]
    if "env" in given and playable(its) is None:
        return of_no_run
    run = _played(its, command)
    record = read_run(run)
    env, now = record.choice("env"), given.get("env")
    if env is None:
        return of_no_run
    path = given.get("env.path", str(record.part("env").get("path")))
    if now is not None and (now, path) != (env, str(record.part("env").get("path"))):
        named = f"env={now}" + (f" env.path={path}" if "env.path" in given else "")
        return RunEnvironment(list(words), [], f"{its} was trained on {_about(record)}; this is {named}")
    whose = "teacher" if who == "teacher" else "model"
    note = f"environment of {run}, the {whose}'s run: {_about(record)}; env=NAME takes another"
    return RunEnvironment(list(words), _environment(command, run, given, typed), note)


def _run_named(text: str) -> Path | None:
    """The run that a value of `env` names as `model` does: by its path, or by its name in runs/ if no option has it.

    Raises ConfigError for a path in runs/ without a run.
    """
    from rlpost.config.schema import options

    if "/" in text:
        is_of_runs = text.startswith(f"{RUNS}/")
        return run_of_model(text) or (find_run(text) if is_of_runs else None)
    return RUNS / text if text and text not in options("env") and is_run_folder(RUNS / text) else None


def _played(run: Path, command: Command[Any]) -> Path:
    """The run whose environment `run` stands for in `command`. Raises ConfigError where there is none."""
    found = run if getattr(command.settings, "learns_from_pairs", False) else playable(run)
    if found is None:
        raise ConfigError(
            f"{run} learned from pairs of replies, which nobody can answer: name an environment, as in "
            "env=runs/NAME or env=gsm8k"
        )
    return found


def _environment(command: Command[Any], run: Path, given: Container[str], typed: Sequence[str]) -> list[Override]:
    """The settings of `run` that say what is played. Raises ConfigError for code whose keys are not `given`."""
    record = read_run(run)
    groups = {each.name for each in fields(command.settings)}
    lines = [f"env={record.choice('env')}"]
    for line in record.overrides:
        key = line.partition("=")[0]
        is_played = key.startswith(("env.", "tools.")) or key in ("plugin", "sampling.stop", "max_tokens")
        is_left_out = key in command.without or (command is EVAL and key in NOT_PLAYED)
        if is_played and not is_left_out and key.partition(".")[0] in groups:
            lines.append(line)
    kept, code = _without_code([(line, str(run / "overrides.txt")) for line in lines], given)
    if code:
        raise ConfigError(
            f"{run} used your code; for safety it is not taken from the run folder. Type: {shlex.join([*typed, *code])}"
        )
    return kept


def _about(record: RunRecord) -> str:
    """The environment of a run and where its rows come from, in words."""
    path = record.part("env").get("path")
    return f"{record.choice('env')}{f' from {path}' if isinstance(path, str) else ''}"


def check_kept(composed: Composed[Any], run: Path | None, kept: list[Override] | None) -> list[str]:
    """The changes of `run`'s settings by the words given now, as `optim.lr: 1e-05 -> 2e-05`; empty if it never began.

    Raises ConfigError for a setting that must stay.
    """
    if kept is None or run is None or never_began(run):
        return []
    from rlpost.config.compose import merge_all

    before, now = merge_all(composed.command, [], kept), composed.settings
    changed = {key: (before.config[key], getattr(now, key)) for key in now.must_stay}
    changed["env"] = (before.choices["env"], composed.choices["env"])  # a run's position in the rows belongs to it
    if _is_there(before.config.model.path):
        changed["model.path"] = (before.config.model.path, now.model.path)
    for name in ("chat_template", "chat_template_kwargs"):  # the run's checkpoints hold them
        changed[f"model.{name}"] = (before.config.model[name], getattr(now.model, name))
    for key, (old, new) in changed.items():
        if old != new:
            raise ConfigError(f"--resume: the run began with {key}={as_text(old)}, not {as_text(new)}; keep it")
    lines = (run / "overrides.txt").read_text(encoding="utf-8").splitlines()
    earlier = {key: text for key, _, text in (line.partition("=") for line in lines)}  # code included
    given = {key: text for key, _, text in (word.partition("=") for word in composed.overrides)}
    recorded = {key: as_text(value) for key, value in flat(read_run(run).config).items()}  # chosen values included
    changes = {key: (earlier.get(key) or recorded.get(key) or before.text_of(key), text) for key, text in given.items()}
    return [f"{key}: {old} -> {new}" for key, (old, new) in changes.items() if old != new]


def _without_code(words: Iterable[tuple[str, str]], given: Container[str]) -> tuple[list[Override], list[str]]:
    """Split a run's words, each with its source, into overrides, and words of code whose keys are not `given`."""
    from rlpost.config.code import choices_in, code_word
    from rlpost.config.overrides import Override

    parted = [(*word.partition("=")[::2], source) for word, source in words]
    overrides = [Override(key, text, source) for key, text, source in parted]
    choices = choices_in(overrides)
    kept: list[Override] = []
    code: list[str] = []
    for override in overrides:
        if (word_to_add := code_word(override, choices)) is None:
            kept.append(override)
        elif override.key not in given:
            code.append(word_to_add)
    return kept, code


def _is_there(model_path: str) -> bool:
    """Whether a model's path still resolves: a folder may have moved since the run began."""
    try:
        resolve_model_path(model_path)
    except ConfigError:
        return False
    return True
