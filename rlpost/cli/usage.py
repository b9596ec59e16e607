"""How verbs are declared and show their help, and which verb a misspelt one was probably meant as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlpost.cli.completion import complete_settings_of_verb
from rlpost.config.other_words import NOT_HERE, answers
from rlpost.errors import ConfigError
from rlpost.text import did_you_mean, nearest

OVERRIDES_HELP = (
    "A key (steps=20), an option (env=gsm8k) or a file of them (recipe=NAME). "
    "rlpost config explain prints every key, rlpost config list every option and recipe."
)
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
        if first.isalnum() and not extra.get("resilient_parsing"):
            path, near = f"rlpost {info_name}", nearest(first, self.below)
            if meant := answers("old_verbs").get(f"{info_name}.{first}") or (near and f"{path} {near}"):
                raise ConfigError(f"{path} has no verb {first}{did_you_mean(meant)}")
        return super().make_context(info_name, args, parent=parent, **extra)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        _write_verbs(self.below, formatter)


class Verbs(TyperGroup):
    """A group of verbs that answers an unknown one with the nearest.

    The verbs of `more`, modules of rlpost.cli, are loaded when one is named that the group does not have yet.
    """

    more: Sequence[str] = ()

    @property
    def below(self) -> dict[str, Any]:
        """All its verbs by name, loaded."""
        context = typer.Context(self)
        return {name: self.get_command(context, name) for name in self.list_commands(context)}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        while cmd_name not in self.commands and self.more:
            first, *self.more = self.more
            self.commands.update(typer.main.get_group(import_module(f"rlpost.cli.{first}").app).commands)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self.get_command(ctx, "")
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise ConfigError(_unknown_verb(self, ctx, args))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        _write_verbs(self.below, formatter)


class App(typer.Typer):
    """Verbs of rlpost: with `Verbs` for the group and `Verb` for each, and plain text for help."""

    def __init__(self, *, cls: type[TyperGroup] = Verbs, add_completion: bool = False, **settings: Any) -> None:
        super().__init__(
            cls=cls, add_completion=add_completion, no_args_is_help=True, rich_markup_mode=None, **settings
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Verb, examples: str = "", **settings: Any
    ) -> Any:
        if examples:
            settings["epilog"] = f"\b\nExamples:\n{examples}"
        return super().command(name, cls=cls, **settings)


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


def _write_verbs(verbs: Mapping[str, Any], formatter: Any) -> None:
    with formatter.section("Verbs"):
        formatter.write_dl([(name, verb.get_short_help_str(100)) for name, verb in verbs.items()])


def _unknown_verb(group: Verbs, context: Any, words: Sequence[str]) -> str:
    word, path = words[0], context.command_path
    verbs = group.list_commands(context)
    if "=" in word:
        return f"{path} needs a verb before {word}: {' or '.join(f'{path} {verb}' for verb in verbs)}"
    full = ".".join([*path.split()[1:], word])
    meant = answers("old_verbs").get(full) or answers("verbs").get(word.lower(), "")
    if meant.startswith(NOT_HERE):
        return f"{path} has no verb {word}: {meant.removeprefix(NOT_HERE)}"
    alike = [full for full in _paths(context.find_root().command, "rlpost") if full.endswith(f" {word}")]
    near = [f"{path} {verb}" for verb in [nearest(word, verbs)] if verb]
    known = f"it has {', '.join(verbs)}" + ("; a plugin's needs plugin=FILE.py" if path == "rlpost train" else "")
    return f"{path} has no verb {word}{did_you_mean(meant or next(iter([*alike, *near]), None), known)}"


def _paths(command: Any, path: str) -> list[str]:
    """The full words of every verb below `command`."""
    return [path, *(p for name, verb in getattr(command, "below", {}).items() for p in _paths(verb, f"{path} {name}"))]
