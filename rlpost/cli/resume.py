"""A run's own settings, under those of the command line: where it goes on (`--resume`), or its model is evaluated."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import EVAL, Command
from rlpost.cli.run_folder import RESUME_WORDS
from rlpost.config.paths import (
    SWEEP_FILE,
    is_run_folder,
    never_began,
    newest_checkpoint,
    resolve_model_path,
    run_of_model,
    step_of,
)
from rlpost.errors import CheckpointError, ConfigError
from rlpost.home import expanded
from rlpost.runs.reader import command_of, read_run

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override


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
    from rlpost.runs.resumable import check_resumable

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
