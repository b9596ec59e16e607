"""Shell completion: the candidates for a half-typed word. Typer brings the scripts, and completes verbs and flags.

A person waits for each answer, so this module does not load Hydra. Files are left to the shell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

import typer

from rlpost.catalog import CHOICES, COMMANDS, EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config import schema
from rlpost.config.paths import RUNS, SWEEP_FILE, evaluation_names, is_run_folder
from rlpost.errors import RlpostError
from rlpost.settings.base import MISSING

VARIABLE = "_RLPOST_COMPLETE"  # set by the shell's script, to complete_bash or another shell
NOTHING_TO_OFFER = 1
Answers = list[tuple[str, str]]


def is_requested() -> bool:
    """Whether a shell asks for completions."""
    return VARIABLE in os.environ


def answer(command: Any) -> NoReturn:
    """Print the completions of the word under the cursor, and end the process."""
    before = join_broken_words(os.environ) if os.environ[VARIABLE] == "complete_bash" else ""
    try:
        command(prog_name="rlpost", obj=before)
    except RlpostError:  # an unfinished line is wrong in many ways, and a message would land in the middle of it
        sys.exit(NOTHING_TO_OFFER)
    sys.exit()


def join_broken_words(environ: MutableMapping[str, str]) -> str:
    """Join in COMP_WORDS the words that bash broke at `=`; returns the current word up to its last `=`.

    With the cursor after `env=gs` the words `env`, `=`, `gs` become `gs`, and `env=` is returned: bash wants only the
    part after the sign.
    """
    count = int(environ["COMP_CWORD"]) + 1
    raw = environ["COMP_WORDS"].split("\n")[:count]
    raw += [""] * (count - len(raw))
    joined = "\n".join(raw).replace("\n=", "=").replace("=\n", "=").split("\n")
    piece = "" if raw[-1] == "=" else raw[-1]
    environ["COMP_WORDS"] = "\n".join([*joined[:-1], piece])
    environ["COMP_CWORD"] = str(len(joined) - 1)
    return joined[-1].removesuffix(piece)


def complete_training(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of the training verb that the line names."""
    return _settings(next(c for c in COMMANDS if c.verb.split()[-1] == ctx.info_name), ctx, incomplete)


def complete_sft(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of `rlpost train sft`, whichever verb takes them."""
    return _settings(TRAIN_SFT, ctx, incomplete)


def complete_replayed(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of the training that made the run which the line names."""
    from rlpost.runs.reader import command_of

    return _settings(command_of(RUNS / (ctx.params.get("run") or "")) or TRAIN_GRPO, ctx, incomplete)


def complete_eval(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of `rlpost eval`, or as its first word a verb for saved evaluations."""
    verbs = {} if _words(ctx) else {"compare": "a verb", "list": "a verb", "show": "a verb"}
    return [*_answers(ctx, verbs, incomplete), *_settings(EVAL, ctx, incomplete)]


def complete_evaluation(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of an evaluation."""
    return _answers(ctx, dict.fromkeys(evaluation_names(), ""), incomplete)


def complete_shown(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of an evaluation, or of a run, whose held-out completions can be shown too."""
    return _answers(ctx, dict.fromkeys(run_names(), "a run") | dict.fromkeys(evaluation_names(), ""), incomplete)


def complete_settings_of_verb(ctx: typer.Context, incomplete: str) -> Answers:
    """A verb, `train grpo` or `eval`, and then its settings."""
    verb = [word for word in _words(ctx) if "=" not in word]
    command = next((c for c in COMMANDS if verb in (c.verb.split(), [c.name])), TRAIN_GRPO)
    rest = [c.verb.split()[len(verb) :] for c in COMMANDS if c.verb.split()[: len(verb)] == verb]
    verbs = _answers(ctx, {words[0]: "a verb" for words in rest if words}, incomplete)
    return verbs if verb and verbs else [*verbs, *_settings(command, ctx, incomplete)]


def complete_explain(ctx: typer.Context, incomplete: str) -> Answers:
    """A key or a group; then a verb and its settings."""
    if _words(ctx):
        return _settings(TRAIN_GRPO, ctx, incomplete)
    keys = {name: about for command in COMMANDS for name, (_, about) in schema.meanings(command).items()}
    return _answers(ctx, keys | dict.fromkeys(CHOICES, "a group"), incomplete)


def complete_side(ctx: typer.Context, incomplete: str) -> Answers:
    """A recipe or a run, as `config diff` compares them."""
    return _answers(ctx, _recipes() | {f"{RUNS}/{name}": "a run" for name in run_names()}, incomplete)


def complete_run(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of a run."""
    return _answers(ctx, dict.fromkeys(run_names(), ""), incomplete)


def complete_run_or_sweep(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of a run or a sweep."""
    sweeps = sorted(file.parent.name for file in RUNS.glob(f"*/{SWEEP_FILE}"))
    return _answers(ctx, dict.fromkeys(sweeps, "a sweep") | dict.fromkeys(run_names(), ""), incomplete)


def complete_model(ctx: typer.Context, incomplete: str) -> Answers:
    """A run, or an option of model."""
    return _answers(ctx, _options("model") | dict.fromkeys(run_names(), "a run"), incomplete)


def complete_group(ctx: typer.Context, incomplete: str) -> Answers:
    """A group, or `recipe`."""
    return _answers(ctx, dict.fromkeys((*CHOICES, "recipe"), ""), incomplete)


def complete_env(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of an environment."""
    return _answers(ctx, _options("env"), incomplete)


def complete_env_settings(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings `env.KEY=VALUE`."""
    return _settings(EVAL, ctx, incomplete, within="env.")


def setting_candidates(command: Command[Any], typed: str) -> dict[str, str]:
    """The settings of `command` that begin with `typed`, each with its meaning; keys of every option are offered."""
    name, equals, _ = typed.partition("=")
    keys, groups = schema.meanings(command), schema.groups_of(command.settings)
    if not equals:
        docs = schema.docs_of(command.settings)
        about = {group: docs.get(group, "") for group in groups} | {"recipe": "a file of settings"}
        about |= {key: meaning for key, (_, meaning) in keys.items()}
        names = [key for key in about if key.startswith(typed)]
        # the shell puts a space behind a single completion; offering its values too keeps the cursor at the =
        values = setting_candidates(command, f"{names[0]}=") if len(names) == 1 else {}
        return {f"{key}=": about[key] for key in names} | values
    if name in groups:
        found = {option: schema.describe(name, option) for option in schema.options(name, command)}
        found |= {f"{RUNS}/{run}": "a run" for run in run_names()} if name == "model" else {}
    elif name == "recipe":
        found = _recipes(command)
    else:
        found = _values(keys[name][0]) if name in keys else {}
    return {word: about for value, about in found.items() if (word := f"{name}={value}").startswith(typed)}


def run_names() -> list[str]:
    """The names of the runs in ./runs."""
    try:
        return sorted(folder.name for folder in RUNS.iterdir() if is_run_folder(folder))
    except OSError:  # no such folder, or not readable
        return []


def _values(key: schema.Key) -> dict[str, str]:
    """The words that a key takes, or else its default."""
    meanings = {name: row.words for name, row in (key.names or {}).items()}
    words = ["true", "false"] if key.element is bool else key.choices
    if not words and key.default != MISSING:
        return {schema.as_text(key.default): "as it is"}
    return {word: meanings.get(word, "") for word in words}


def _recipes(command: Command[Any] | None = None) -> dict[str, str]:
    """The recipes, or those of one command, each with its description."""
    return {
        name: schema.description(file)
        for name, file in schema.recipes().items()
        if command is None or schema.read_yaml(file).get("command") == command.verb
    }


def _options(group: str) -> dict[str, str]:
    """The options of a group, each with its description."""
    return {name: schema.describe(group, name) for name in schema.options(group)}


def _settings(command: Command[Any], ctx: typer.Context, incomplete: str, *, within: str = "") -> Answers:
    given = {word.partition("=")[0] for word in _words(ctx)}
    found = setting_candidates(command, _before(ctx) + incomplete)
    offered = {w: about for w, about in found.items() if w.startswith(within) and w.partition("=")[0] not in given}
    return _answers(ctx, offered, incomplete)


def _answers(ctx: typer.Context, found: Mapping[str, str], incomplete: str) -> Answers:
    """Words and descriptions for Typer, without the part of the current word that bash keeps."""
    before = _before(ctx)
    words = [text for text in found if text.startswith(before + incomplete)]
    # Typer would read markup in square brackets, and zsh would double the quotes
    return [(word.removeprefix(before), found[word].replace("[", r"\[").replace("'", "’")) for word in words]


def _before(ctx: typer.Context) -> str:
    """The part of the current word that bash keeps."""
    return ctx.obj if isinstance(ctx.obj, str) else ""


def _words(ctx: typer.Context) -> list[str]:
    """The settings before the current word."""
    return list(ctx.params.get("overrides") or ctx.params.get("words") or [])
