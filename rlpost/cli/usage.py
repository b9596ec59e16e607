"""Misspelt verbs and flags: what was probably meant."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rlpost.config.keys import groups_of
from rlpost.config.nearest import did_you_mean, nearest
from rlpost.config.registry import COMMANDS, all_keys
from rlpost.errors import ConfigError

OVERRIDES_HELP = (
    "Settings: a key (steps=20), an option of a group (env=gsm8k; see rlpost config list), or recipe=NAME. "
    "rlpost config show prints every key."
)
MULTIRUN_HELP = "Run once for each combination of several values: optim.lr=1e-5,3e-5 seed=0,1."
JSON_HELP = "Print the result as JSON on stdout, everything else on stderr."


class Verbs(TyperGroup):
    """A group of verbs that answers an unknown one with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise ConfigError(_unknown_verb(self, ctx, args[0]))
        return super().resolve_command(ctx, args)


def explain_usage(error: typer.TyperException) -> str:
    """Typer's complaint about the command line as one line; an unknown flag gets the nearest one."""
    context: Any = getattr(error, "ctx", None)
    if not hasattr(error, "possibilities") or context is None:
        return error.format_message()
    flag: str = getattr(error, "option_name", "")
    key = flag.lstrip("-").replace("-", "_")
    flags = [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]
    near = nearest(flag, [*flags, "--help"]) if flag.startswith("--") else None
    if near is None and _is_setting(key):
        return f"{flag}: settings are written without dashes; write {key}=VALUE"
    return f"{context.command_path} has no option {flag}{did_you_mean(near, f'see {context.command_path} --help')}"


def _is_setting(key: str) -> bool:
    """Whether this is, or by its dot was meant as, a setting."""
    return "." in key or any(key in all_keys(c) or key in groups_of(c.settings) for c in COMMANDS)


def _unknown_verb(group: TyperGroup, context: Any, word: str) -> str:
    path = context.command_path
    verbs = list(group.commands)
    if "=" in word:
        return f"{path} needs a verb before {word}: {' or '.join(f'{path} {verb}' for verb in verbs)}"
    near = nearest(word, verbs)
    if near is not None:
        meant = f"{path} {near}"
    else:  # perhaps a verb of another group, as in `rlpost grpo`
        others = _paths(context.find_root().command, "rlpost")
        meant = next((other for other in others if other.endswith(f" {word}")), None)
    return f"{path} has no verb {word}{did_you_mean(meant, 'it has ' + ', '.join(verbs))}"


def _paths(command: Any, path: str) -> list[str]:
    """The full words of every verb below `command`."""
    if not isinstance(command, TyperGroup):
        return [path]
    return [path, *(p for name, inner in command.commands.items() for p in _paths(inner, f"{path} {name}"))]
