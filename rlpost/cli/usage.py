"""How verbs are declared and show their help, and which verb a misspelt one was probably meant as."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlpost.catalog import COMMANDS, TRAIN_GRPO
from rlpost.cli.completion import complete_settings_of_verb
from rlpost.config.other_words import NOT_HERE, answers
from rlpost.config.paths import RUNS, is_run_folder
from rlpost.config.schema import groups_of, options
from rlpost.errors import ConfigError
from rlpost.text import did_you_mean, nearest

OVERRIDES_HELP = (
    "A key (steps=20), an option (env=gsm8k) or a file of them (recipe=NAME). "
    "rlpost config explain prints every key, rlpost config list every option and recipe."
)
SECTIONS = TRAIN, LOOK, PREPARE = "Train and try", "Look at runs", "Choose and prepare"  # of rlpost --help
MULTIRUN_HELP = "Run once for each combination of several values: optim.lr=1e-5,3e-5 seed=0,1."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VERB] [KEY=VALUE]...",
        help="train grpo, where no verb is named, or another; then settings.",
        autocompletion=complete_settings_of_verb,
    ),
]


class Verb(TyperCommand):
    """A verb whose help writes its arguments as they are typed, without the types that Python gives them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(as_typed(parameter) for parameter in self.params if is_argument(parameter))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        declared: list[Any] = [parameter for parameter in self.params if is_argument(parameter)]
        arguments = [(as_typed(argument), argument.help or "") for argument in declared]
        options = [p.get_help_record(ctx) for p in self.get_params(ctx) if not is_argument(p)]
        for title, rows in (("Arguments", arguments), ("Options", [row for row in options if row is not None])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class VerbWithVerbs(Verb):
    """A verb that takes settings of its own, and hands over to another where its first word names that one."""

    @cached_property
    def below(self) -> dict[str, TyperCommand]:
        """Its verbs by name."""
        raise NotImplementedError

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        first = args[0] if args else ""
        if first in self.below:
            return self.below[first].make_context(f"{info_name} {first}", args[1:], parent=parent, **extra)
        meant = nearest(first, self.below) if first.isalpha() and not extra.get("resilient_parsing") else None
        if meant is not None and not is_run_folder(RUNS / first):
            raise ConfigError(f"rlpost {info_name} has no verb {first}{did_you_mean(f'rlpost {info_name} {meant}')}")
        return super().make_context(info_name, args, parent=parent, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.get_short_help_str(100)) for name, verb in self.below.items()])


class Verbs(TyperGroup):
    """A group of verbs that lists them by section, and answers an unknown one with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise ConfigError(_unknown_verb(self, ctx, args))
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """By section, and those with verbs of their own first."""
        order = {title: number for number, title in enumerate(SECTIONS)}

        def place(name: str) -> tuple[int, bool]:
            verb = self.commands[name]
            return order.get(_section(verb), len(order)), not isinstance(verb, TyperGroup)

        return sorted(self.commands, key=place)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            verb = self.commands[name]
            row = (name.ljust(width), verb.get_short_help_str(formatter.width - width - 6))
            sections.setdefault(_section(verb), []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class App(typer.Typer):
    """Verbs of rlpost: with `Verbs` for the group and `Verb` for each, and plain text for help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Verb, examples: str = "", **settings: Any
    ) -> Any:
        if examples:
            settings["epilog"] = f"\b\nExamples:\n{examples}"
        return super().command(name, cls=cls, **settings)


def command_of(root: Any, arguments: Sequence[str]) -> Any:
    """The verb that a command line is for, or the group where it names none."""
    command = root
    for word in arguments:
        if isinstance(command, TyperGroup):
            command = command.commands.get(word, command)
    return command


def is_argument(parameter: Any) -> bool:
    """Whether a parameter is an argument rather than an option."""
    return parameter.param_type_name == "argument"


def as_typed(parameter: Any) -> str:
    """An argument in a usage line: `A`, `[GROUP]`, `[KEY=VALUE]...`; what has brackets already stays as it is."""
    word = parameter.metavar or parameter.name.upper()
    if "[" in word:
        return word
    word = word if parameter.required else f"[{word}]"
    return word if parameter.nargs == 1 else f"{word}..."


def _section(verb: Any) -> str:
    return getattr(verb, "rich_help_panel", None) or "Verbs"


def _unknown_verb(group: TyperGroup, context: Any, words: Sequence[str]) -> str:
    word, path = words[0], context.command_path
    verbs = group.list_commands(context)
    if "=" in word:
        return f"{path} needs a verb before {word}: {' or '.join(f'{path} {verb}' for verb in verbs)}"
    is_general = path in ("rlpost", "rlpost train")
    answer = answers("verbs").get(word.lower(), "")
    if answer.startswith(NOT_HERE) and is_general:
        return f"{path} has no verb {word}: {_of_run(answer.removeprefix(NOT_HERE), words[1:])}"
    flags = [name for parameter in group.params for name in parameter.opts]
    elsewhere = (other for other in _paths(context.find_root().command, "rlpost") if other.endswith(f" {word}"))
    near = nearest(word, verbs)
    if answer.partition(" ")[0] in (*verbs, *flags, "--help"):
        meant = f"{path} {answer}"
    elif answer and is_general:
        meant = f"rlpost {answer}"
    else:
        meant = (_training_with(word) if is_general else None) or next(elsewhere, None) or (near and f"{path} {near}")
    known = f"it has {', '.join(verbs)}" + ("; a plugin's needs plugin=FILE.py" if path == "rlpost train" else "")
    return f"{path} has no verb {word}{did_you_mean(meant, known)}"


def _of_run(answer: str, behind: Sequence[str]) -> str:
    """rlpost's answer to a verb of another tool, of the run that is named behind it if there is any."""
    from rlpost.runs.reader import command_of as command_of_run

    named = next((word for word in behind if not word.startswith("-")), "NAME")
    run = Path(named) if "/" in named else RUNS / named
    return answer.format(run=shlex.quote(str(run)), verb=(command_of_run(run) or TRAIN_GRPO).verb)


def _training_with(loss: str) -> str | None:
    """The training that has a loss of this name, for `rlpost train dapo`; None for no loss and for a verb's name."""
    if any(command.verb.endswith(f" {loss}") for command in COMMANDS):
        return None
    owner = next((c for c in COMMANDS if "loss" in groups_of(c.settings) and loss in options("loss", c)), None)
    return f"rlpost {owner.verb} loss={loss}" if owner is not None else None


def _paths(command: Any, path: str) -> list[str]:
    """The full words of every verb below `command`."""
    if isinstance(command, VerbWithVerbs):
        return [path, *(f"{path} {name}" for name in command.below)]
    if not isinstance(command, TyperGroup):
        return [path]
    return [path, *(p for name, inner in command.commands.items() for p in _paths(inner, f"{path} {name}"))]
