"""Shell completion: the candidates for a half-typed word. Typer brings the scripts, and completes verbs and flags.

Every verb imports this module, so it loads the catalog when a shell asks, and Hydra never. Files are left to the shell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from rlpost.errors import RlpostError

if TYPE_CHECKING:
    from rlpost.catalog import Command

VARIABLE = "_RLPOST_COMPLETE"  # set by the shell's script, to complete_bash or another shell
NOTHING_TO_OFFER = 1
FOLDERS = {"run": "runs", "evaluation": "evals"}
Answers = list[tuple[str, str]]
Completer = Callable[[typer.Context, str], Answers]


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


def setting_candidates(command: Command[Any], typed: str) -> dict[str, str]:
    """The settings of `command` that begin with `typed`, each with its meaning; keys of every option are offered."""
    from rlpost.config import schema
    from rlpost.settings.base import MISSING

    name, equals, _ = typed.partition("=")
    keys, groups = schema.all_keys(command), schema.groups_of(command.settings)
    if not equals:
        docs = schema.docs_of(command.settings)
        about = {group: docs.get(group, "") for group in groups} | {"recipe": "a file of settings"}
        about |= {name: key.about for name, (key, _) in keys.items()}
        names = [key for key in about if key.startswith(typed)]
        # the shell puts a space behind a single completion; offering its values too keeps the cursor at the =
        values = setting_candidates(command, f"{names[0]}=") if len(names) == 1 else {}
        return {f"{key}=": about[key] for key in names} | values
    found: dict[str, str] = {}
    if name in (*groups, "recipe"):
        found = _candidates(name, command)
    elif name in keys:
        key = keys[name][0]
        found = dict.fromkeys(["true", "false"] if key.element is bool else key.choices, "")
        if not found and key.default != MISSING:
            found = {schema.as_text(key.default): "as it is"}
    if name == "model":
        found |= {f"runs/{run}": about for run, about in _candidates("run").items()}
    return {word: about for value, about in found.items() if (word := f"{name}={value}").startswith(typed)}


def _candidates(kind: str, command: Command[Any] | None = None) -> dict[str, str]:
    """The words of one kind: run, evaluation, recipe, verb, key, group, or the options of the group of that name.

    With a `command`, only the recipes and options that it takes.
    """
    from rlpost.catalog import CHOICES, COMMANDS
    from rlpost.config import schema

    if kind in FOLDERS:
        return {folder.name: f"a {kind}" for folder in sorted(Path(FOLDERS[kind]).glob("*/"))}
    if kind == "recipe":
        files = schema.recipes().items()
        verbs = [command.verb] if command else [each.verb for each in COMMANDS]
        return {name: schema.description(f) for name, f in files if schema.read_yaml(f).get("command") in verbs}
    if kind == "verb":
        return {each.verb.split()[-1]: each.short for each in COMMANDS}
    if kind == "key":
        return {name: key.about for each in COMMANDS for name, (key, _) in schema.all_keys(each).items()}
    if kind == "group":
        return dict.fromkeys((*CHOICES, "recipe"), "a group")
    return {name: schema.describe(kind, name) for name in schema.options(kind, command)}


def _offering(*kinds: str) -> Completer:
    """A function for Typer that offers words of some kinds."""

    def complete(ctx: typer.Context, incomplete: str) -> Answers:
        return _answers(ctx, {word: about for kind in kinds for word, about in _candidates(kind).items()}, incomplete)

    return complete


def _offering_settings(default: str, verbs: Callable[[], Mapping[str, str]] = dict) -> Completer:
    """A function for Typer that offers the settings of the verb on the line, or else of `default`.

    Before the first setting `verbs` are offered too.
    """

    def complete(ctx: typer.Context, incomplete: str) -> Answers:
        from rlpost.catalog import COMMANDS

        words = [*ctx.command_path.split(), *_words(ctx)]
        command = next(c for word in [*words, default] for c in COMMANDS if c.verb.split()[-1] == word)
        found = {} if any("=" in word for word in words) else verbs()
        return _answers(ctx, {**found, **setting_candidates(command, _before(ctx) + incomplete)}, incomplete)

    return complete


def complete_explain(ctx: typer.Context, incomplete: str) -> Answers:
    """A key or a group; then a verb and its settings."""
    complete = complete_settings_of_verb if _words(ctx) else _offering("key", "group")
    return complete(ctx, incomplete)


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
    """The words before the current one, without the verb."""
    return list(ctx.params.get("overrides") or ctx.params.get("words") or [])


complete_run = complete_run_or_sweep = _offering("run")
complete_evaluation = _offering("evaluation")
complete_shown = _offering("run", "evaluation")
complete_side = _offering("recipe", "run")
complete_model = _offering("model", "run")
complete_env = _offering("env")
complete_group = _offering("group")
complete_training = complete_replayed = _offering_settings("grpo")
complete_sft = _offering_settings("sft")
complete_eval = _offering_settings("eval", lambda: {"compare": "a verb", "show": "a verb"})
complete_env_settings = _offering_settings("eval")
complete_settings_of_verb = _offering_settings("grpo", lambda: _candidates("verb"))
