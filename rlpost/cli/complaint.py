"""What Typer refuses in a command line, said in one line: what, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from rlpost.cli.usage import as_typed, command_of, is_argument, is_setting
from rlpost.nearest import did_you_mean, nearest

# flags that other tools have -> what does that here
OTHER_FLAGS = {
    "-V": "--version",
    "-v": "--version",
    "--config": "recipe=FILE.yaml",
    "--config-name": "recipe=NAME",
    "--recipe": "recipe=NAME",
    "--output-dir": "--out",
    "--output": "--out",
    "--run-name": "--name",
    "--checkpoint": "--resume",
    "--quiet": "--plain",
}


WANTED = {"int_parsing": "a whole number", "float_parsing": "a number"}  # by the name of Pydantic's complaint


def explain_usage(error: typer.TyperException, root: Any, arguments: Sequence[str]) -> str:
    """Typer's complaint about the command line `arguments` of `root` as one line.

    Where a verb is missing it is the help, of many lines.
    """
    context: Any = getattr(error, "ctx", None)
    kind = type(error).__name__
    if kind == "BadOptionUsage":
        return _without_value(getattr(error, "option_name", ""), command_of(root, arguments)) or error.format_message()
    if context is None:
        return error.format_message()
    if kind == "NoSuchOption":
        return _unknown_flag(getattr(error, "option_name", ""), context)
    parameter: Any = getattr(error, "param", None)
    if kind == "MissingParameter" and parameter is not None:
        return _missing(parameter, context)
    if kind == "BadParameter" and parameter is not None:
        return _unfit(parameter, error) or error.format_message()
    if extra := getattr(error, "message", "").partition("unexpected extra argument(s) ")[2]:
        return f"{_line(context)} does not take {extra.strip('()')}; see {context.command_path} --help"
    return error.format_message()


def _unknown_flag(flag: str, context: Any) -> str:
    key = flag.lstrip("-").replace("-", "_")
    flags = [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]
    path = context.command_path
    known = OTHER_FLAGS.get(flag)
    if known is not None and (known in flags or (known.startswith("recipe=") and _takes_settings(context))):
        return f"{path} has no option {flag}{did_you_mean(known)}"
    near = nearest(flag, [*flags, "--help"]) if flag.startswith("--") else None
    if near is None and is_setting(key):
        return f"{flag}: settings are written without dashes; write {key}=VALUE"
    return f"{path} has no option {flag}{did_you_mean(near, f'see {path} --help')}"


def _takes_settings(context: Any) -> bool:
    return any(parameter.name == "overrides" for parameter in context.command.params)


def _without_value(flag: str, command: Any) -> str:
    """For an option that stands last and wants a value; empty where `command` has no such option."""
    parameter = next((p for p in command.params if flag in p.opts), None)
    return f"{flag} needs a value: write {flag} {parameter.metavar}" if parameter is not None else ""


def _unfit(parameter: Any, error: typer.TyperException) -> str:
    """For a value of the wrong type or out of range; empty where what Typer says is all there is."""
    causes: Any = getattr(error.__cause__ or error.__context__, "errors", list)()
    if len(causes) != 1:
        return ""
    cause, flag = causes[0], parameter.opts[-1] if len(parameter.opts) == 1 else "/".join(parameter.opts)
    given, limits = f"{flag} {cause['input']}", cause.get("ctx", {})
    known = (parameter.metavar or "").split("|")
    if len(known) > 1:
        return f"{given} is unknown: it is one of {', '.join(known)}{did_you_mean(nearest(str(cause['input']), known))}"
    if cause["type"] in WANTED:
        return f"{given} is of the wrong type: it takes {WANTED[cause['type']]}"
    if "ge" in limits or "le" in limits:
        bound = f"at least {limits['ge']:g}" if "ge" in limits else f"at most {limits['le']:g}"
        return f"{given} is out of range: it must be {bound}"
    return ""


def _missing(parameter: Any, context: Any) -> str:
    path = context.command_path
    name = parameter.metavar or parameter.name.upper() if is_argument(parameter) else parameter.opts[0]
    return f"{path} needs {name}: write {_line(context)}; see {path} --help"


def _line(context: Any) -> str:
    """The verb and its arguments as they are typed."""
    return " ".join([context.command_path, *(as_typed(p) for p in context.command.params if is_argument(p))])
