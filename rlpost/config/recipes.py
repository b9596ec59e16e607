"""Recipes: a complete run in one YAML file of the same keys as the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rlpost.catalog import COMMANDS, Command
from rlpost.config import schema
from rlpost.config.overrides import YAML_ERRORS, Override, as_model_path, shown
from rlpost.config.paths import nearby
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.text import did_you_mean, nearest

_MAPPINGS = ("model.chat_template_kwargs",)  # keys whose text is a mapping


def read_recipe(name: str, command: Command[Any]) -> list[Override]:
    """The overrides of a recipe, given by name or by path.

    Keys may be nested or dotted. Raises ConfigError for an unknown recipe, a recipe of another command, and a file
    that cannot be read.
    """
    file = find_recipe(name)
    content = _load(file)
    lines = line_numbers(file)
    values = schema.flat({key: _as_text_if_mapping(key, value) for key, value in content.items() if key != "command"})
    given = [Override(key, schema.as_text(value), f"{file}, line {lines.get(key, 1)}") for key, value in values.items()]
    if next(iter(content), None) != "command":
        _check_it_is_ours(given, file, command)
    meant = _command(content, file, command)
    if meant is not command:
        raise ConfigError(f"recipe={name} is a recipe for rlpost {meant.verb}, not for rlpost {command.verb}")
    return [as_model_path(override) for override in given]


def command_of(name: str) -> Command[Any]:
    """The command of a recipe, given by name or by path. Raises ConfigError if the file names none."""
    file = find_recipe(name)
    return _command(_load(file), file, COMMANDS[0])


def find_recipe(name: str) -> Path:
    """The file of a recipe, given by name or by path. Raises ConfigError if there is none."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        file = expanded(name)
        if not file.is_file():
            near = nearby(file, (".yaml", ".yml"))
            raise ConfigError(f"recipe={shown(name)} does not exist{near or ': give the path of a YAML file'}")
        return file
    known = schema.recipes()
    if name not in known:
        here = next((file for ending in (".yaml", ".yml") if expanded(file := f"{name}{ending}").is_file()), None)
        near = nearest(name, known) if here is None or not name else f"recipe={here}"
        hint = did_you_mean(near, f"the recipes are {', '.join(known)}")
        raise ConfigError(f"recipe={shown(name)} is unknown{hint}")
    return known[name]


def line_numbers(file: Path) -> dict[str, int]:
    """Dotted key -> its line, of a YAML file that can be read; the keys in a list have the list's name before them."""
    return dict(_lines_below(yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), ""))


def _check_it_is_ours(given: list[Override], file: Path, command: Command[Any]) -> None:
    """Raise ConfigError, with what to write instead, for a file without a command that holds others' settings."""
    from rlpost.config.unknown import Vocabulary

    words = Vocabulary(command, schema.default_choices(command))
    if unknown := [override for override in given if override.key not in words.names]:
        raise words.refusal(unknown, f"{file}: a recipe begins with the line command: {command.verb}; ")


def _command(content: dict[str, Any], file: Path, expected: Command[Any]) -> Command[Any]:
    if next(iter(content), None) != "command":
        raise ConfigError(f"{file}: the first line of a recipe is its command; begin it with command: {expected.verb}")
    verbs = {command.verb: command for command in COMMANDS}
    verb = str(content["command"])
    if verb not in verbs:
        raise ConfigError(f"{file}: command: {verb} is unknown{did_you_mean(nearest(verb, verbs))}")
    return verbs[verb]


def _load(file: Path) -> dict[str, Any]:
    try:
        # OmegaConf's loader, unlike PyYAML's, reads 1e-6 as a number and refuses a key that occurs twice
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}, line {line}: this is not YAML: {error.problem}") from None
    except ConfigError:
        raise
    except YAML_ERRORS as error:
        raise ConfigError(f"{file} cannot be read: {[*str(error).splitlines(), type(error).__name__][0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a recipe is a list of lines such as optim.lr: 1e-6")
    return {str(key): value for key, value in content.items()}


def _lines_below(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _lines_below(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for element in node.value:
            yield from _lines_below(element, prefix)


def _as_text_if_mapping(key: str, value: Any) -> Any:
    return json.dumps(value) if key in _MAPPINGS and isinstance(value, dict) else value
