"""The settings that a resumed or repeated run keeps, and the environment of the run that a model comes from.

A run folder may be anybody's, so nothing of it names code: the words given now have to name it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import EVAL, Command
from rlpost.config.paths import RUNS, SWEEP_FILE, is_run_folder, resolve_model_path
from rlpost.config.schema import as_text, flat
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded
from rlpost.runs.reader import (
    RunRecord,
    code_of,
    find_run,
    never_began,
    newest_checkpoint,
    playable,
    read_run,
    run_of_model,
)
from rlpost.runs.removal import check_resumable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override

RESUME_WORDS = ("auto", "latest")  # values of --resume other than a path
EARLIER_DEFAULTS = {"loss.kl_estimator": "k3"}  # a run that began with one of them keeps it
NOT_PLAYED = {  # settings that choose among a run's training prompts: an evaluation does not keep them
    "env.split",
    "env.limit",
    "env.pass_rates",
    "env.min_pass_rate",
    "env.max_pass_rate",
}


# The settings of a run that goes on


def kept_settings(command: Command[Any], run: Path, resume: str, words: Sequence[str]) -> list[Override] | None:
    """The settings of `run`, to compose under the `words` given now, whether or not it has a checkpoint yet.

    None if there is nothing to keep: no run yet, a run that did nothing and whose overrides.txt is missing, or a job
    that its sweep resumes with all its words. Raises CheckpointError if overrides.txt is missing, if the named run has
    no checkpoint, or if the checkpoint keeps the model alone; ConfigError for a run of another command, and for code
    that the words do not name again.
    """
    is_of_sweep = resume in RESUME_WORDS and (run.parent / SWEEP_FILE).is_file()
    if is_of_sweep or not is_run_folder(run):
        return None
    found = newest_checkpoint(run if resume in RESUME_WORDS else expanded(resume).resolve())
    if resume not in RESUME_WORDS and found is None:
        raise CheckpointError(
            f"--resume {resume}: there is no complete checkpoint; --out {run} --resume auto begins the run again, with "
            "its own settings"
        )
    if found is not None:
        check_resumable(found)
    record = read_run(run)
    is_of_another = record.verb not in (None, command.verb)
    if never_began(run) and (is_of_another or not _has_overrides(run)):
        return None
    if is_of_another:
        raise ConfigError(f"--resume: {run} is a run of rlpost {record.verb}, not of rlpost {command.verb}")
    return recorded_settings(run, words, "--resume")


def recorded_settings(run: Path, words: Sequence[str], caller: str) -> list[Override]:
    """The settings that `run` was given, to compose under the `words` given now.

    Raises CheckpointError if overrides.txt is missing, and ConfigError, which begins with `caller`, for code that the
    words do not name again.
    """
    if not _has_overrides(run):
        raise CheckpointError(
            f"{run}/overrides.txt is missing, so nothing says what the run was asked: give another --name to begin one"
        )
    record = read_run(run)
    recorded, given = flat(record.config), [word for word in record.overrides if "=" in word]
    keys = set(map(_key, given))
    began_with = [(key, text) for key, text in EARLIER_DEFAULTS.items() if recorded.get(key) == text]
    given += [f"{key}={text}" for key, text in began_with if key not in keys]
    kept, code = _without_code(given, run, set(map(_key, words)))
    if code:
        raise ConfigError(
            f"{caller}: {run} used your code or another machine; for safety that is not taken from the run "
            f"folder: add {shlex.join(code)}"
        )
    return kept


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
    record = read_run(run)
    earlier, given = (
        {_key(word): word.partition("=")[2] for word in words} for words in (record.overrides, composed.overrides)
    )
    recorded = {key: as_text(value) for key, value in flat(record.config).items()}  # chosen values included
    changes = {key: (earlier.get(key) or recorded.get(key) or before.text_of(key), text) for key, text in given.items()}
    return [f"{key}: {old} -> {new}" for key, (old, new) in changes.items() if old != new]


def _has_overrides(run: Path) -> bool:
    return (run / "overrides.txt").is_file()


def _is_there(model_path: str) -> bool:
    """Whether a model's path still resolves: a folder may have moved since the run began."""
    try:
        resolve_model_path(model_path)
    except ConfigError:
        return False
    return True


def _without_code(words: Sequence[str], run: Path, given: Container[str]) -> tuple[list[Override], list[str]]:
    """A run's words as overrides, without code; and the words of code whose keys are not `given`."""
    from rlpost.config.code import choices_in, is_code
    from rlpost.config.overrides import Override

    overrides = [Override(_key(word), word.partition("=")[2], f"{run}/overrides.txt") for word in words]
    choices = choices_in(overrides)
    kept = [override for override in overrides if not is_code(override, choices)]
    return kept, [word for word in code_of(words) if _key(word) not in given]


def _key(word: str) -> str:
    return word.partition("=")[0]


# The environment of a run that is named, or whose model is


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
        overrides = _environment(command, run, set(map(_key, rest)), typed)
        words = [*(f"{each.key}={each.text}" for each in overrides), *rest]
        return RunEnvironment(words, [], f"environment of {run}: {_about(read_run(run))}")

    given = {override.key: override.text for override in expand(command, parse_words(words))}
    found = [(who, run) for who in ("teacher", "model.path") if (run := run_of_model(given.get(who, ""))) is not None]
    of_no_run = RunEnvironment(list(words), [], "")
    if not found or _learns_from_pairs(command):
        return of_no_run
    who, its = found[0]
    if "env" in given and playable(its) is None:
        return of_no_run
    run = _played(its, command)
    record = read_run(run)
    env, path = record.choice("env"), str(record.part("env").get("path"))
    if env is None:
        return of_no_run
    about = _about(record)
    if "env" in given and (given["env"], given.get("env.path", path)) != (env, path):
        return RunEnvironment(list(words), [], f"{its} was trained on {about}; this is env={given['env']}")
    whose = "teacher" if who == "teacher" else "model"
    note = f"environment of {run}, the {whose}'s run: {about}; env=NAME takes another"
    return RunEnvironment(list(words), _environment(command, run, given, typed), note)


def _learns_from_pairs(command: Command[Any]) -> bool:
    return getattr(command.settings, "learns_from_pairs", False)


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
    found = run if _learns_from_pairs(command) else playable(run)
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
    left_out = {*command.without, *(NOT_PLAYED if command is EVAL else ())}
    words = [f"env={record.choice('env')}"]
    for word in record.overrides:
        key = _key(word)
        is_played = key.startswith(("env.", "tools.")) or key in ("plugin", "sampling.stop", "max_tokens")
        if is_played and key not in left_out and key.partition(".")[0] in groups:
            words.append(word)
    kept, code = _without_code(words, run, given)
    if code:
        raise ConfigError(
            f"{run} used your code; for safety it is not taken from the run folder. Type: {shlex.join([*typed, *code])}"
        )
    return kept


def _about(record: RunRecord) -> str:
    """The environment of a run and where its rows come from, in words."""
    path = record.part("env").get("path")
    return f"{record.choice('env')}{f' from {path}' if isinstance(path, str) else ''}"


def training_of(run: Path) -> str:
    """The environment that `run` was trained on, in words."""
    began, record = playable(run), read_run(run)
    if began not in (run, None):
        return f"learned from pairs; the environment is that of {began}"
    return f"trained on {_about(record)}" if record.part("env") else f"{run} does not say what it was trained on"
