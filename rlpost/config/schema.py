"""All settings: the keys of each settings class, the options of each group, and the recipes.

Types, defaults and meanings are read from the settings classes, options from the files of conf/. A YAML file with
aliases or deep nesting is refused before it is loaded: it could fill the memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

import rlpost
from rlpost.catalog import CHOICES, COMMANDS, TRAIN_GRPO, Command
from rlpost.errors import ConfigError
from rlpost.settings.base import DOC, MISSING, NAMES, RUNS, Runs, marks_of
from rlpost.text import did_you_mean, nearest

TYPE_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
NULL = "null"


@dataclass(frozen=True)
class Key:
    """A setting that a command line or a recipe can name."""

    name: str  # dotted: optim.lr
    annotation: Any  # int, float, bool, str, an Enum, or a list of one of them
    optional: bool  # whether null is a value
    default: Any
    runs: Runs | None = None  # which of its values make something run, if any do
    names: Mapping[str, Any] | None = None  # the values allowed, where they are names that a plugin can add to
    doc: str = ""  # what it means

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.annotation) is list

    @property
    def element(self) -> Any:
        """The type of one value: that of the elements for a list."""
        return typing.get_args(self.annotation)[0] if self.is_list else self.annotation

    @property
    def choices(self) -> list[str]:
        """The words allowed, for an Enum and for names; empty for everything else."""
        if self.names is not None:
            return list(self.names)
        return list(self.element.__members__) if issubclass(self.element, Enum) else []

    @property
    def about(self) -> str:
        """The meaning of the setting, or its type where nothing says so."""
        return self.doc or self.type_name

    @property
    def type_name(self) -> str:
        """The type in words: `number`, `constant | linear`, `list of text`, `whole number or null`."""
        name = " | ".join(self.choices) or TYPE_NAMES[self.element]
        name = f"list of {name}" if self.is_list else name
        return f"{name} or null" if self.optional else name


def keys_of(settings: type, prefix: str = "", chosen: Mapping[str, type] | None = None) -> list[Key]:
    """The keys of a settings class, nested ones included.

    A group's field (one that has no default) is expanded as the class `chosen[name]`, or as its
    declared class where nothing is chosen.
    """
    return list(_keys_of(settings, prefix, tuple((chosen or {}).items())))


def keys_under(command: Command[Any], chosen: Mapping[str, type]) -> dict[str, Key]:
    """Dotted key -> key of `command`, where each group of `chosen` has that settings class."""
    return {key.name: key for key in keys_of(command.settings, chosen=chosen) if key.name not in command.without}


@cache
def _keys_of(settings: type, prefix: str, chosen: tuple[tuple[str, type], ...]) -> list[Key]:
    """The keys of a settings class. Cached, because every unknown key needs those of all options."""
    keys: list[Key] = []
    docs = docs_of(settings)
    for field in dataclasses.fields(settings):
        name = f"{prefix}{field.name}"
        annotation, optional = _without_none(types_of(settings)[field.name])
        if dataclasses.is_dataclass(annotation):
            keys += keys_of(cast(type, dict(chosen).get(name, annotation)), f"{name}.")
        else:
            runs, names = field.metadata.get(RUNS), field.metadata.get(NAMES)
            keys.append(Key(name, annotation, optional, _default(field), runs, names, docs.get(field.name, "")))
    return keys


@cache
def types_of(settings: type) -> dict[str, Any]:
    """Field name -> type, which takes a millisecond to find and is asked for again with every unknown key."""
    return typing.get_type_hints(settings)


def docs_of(settings: type) -> dict[str, str]:
    """Field name -> what it means, of the fields that say so."""
    return marks_of(settings, DOC)


def groups_of(settings: type) -> list[str]:
    """The fields that are chosen by an option (`model=qwen`): those without a value of their own."""
    return [f.name for f in dataclasses.fields(settings) if f.default is MISSING]


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested mappings."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        values |= flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return values


def as_text(value: Any) -> str:
    """The text, always on one line, that `parse_value` reads as `value`."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], str) and "," not in value[0] and not value[0].startswith("["):
            return as_text(value[0])  # which needs no quotes in a shell
        return "[" + ",".join(json.dumps(v) if isinstance(v, str) else as_text(v) for v in value) + "]"
    text = str(value)
    plain = text == text.strip() and text.isprintable() and text != NULL and text[:1] not in ("'", '"')
    return text if plain or not isinstance(value, str) else json.dumps(text)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether it had it."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kept = [a for a in typing.get_args(annotation) if a is not type(None)]
        return kept[0], True
    return annotation, False


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def built_in_folder(name: str) -> Path:
    """rlpost's own `conf` or `recipes`: inside the wheel, or at the root of an editable checkout."""
    return _inside(Path(rlpost.__file__).parent, name)


@cache  # it is asked for with every option and setting
def _inside(package: Path, name: str) -> Path:
    for folder in (package / "_builtin" / name, package.parent / name):
        if folder.is_dir():
            return folder.resolve()
    raise ConfigError(f"rlpost's own {name}/ is not where it was installed ({package}): install rlpost again")


def search_folders(name: str) -> list[Path]:
    """The folders in which `conf` or `recipes` are looked for: the user's first."""
    users, own = Path(os.path.realpath(name)), built_in_folder(name)  # a link to itself is not a folder
    return [users, own] if users.is_dir() and users != own else [own]


def conf_file(name: str) -> Path | None:
    """The file conf/NAME.yaml, the user's before rlpost's own; None where there is none."""
    return next((f for folder in search_folders("conf") if (f := folder / f"{name}.yaml").is_file()), None)


def default_choices(command: Command[Any]) -> dict[str, str]:
    """Group -> its option where none is chosen, as conf/COMMAND.yaml says it, or else the command's row."""
    file = conf_file(command.name)
    entries = [command.choices] if file is None else _defaults(file)
    return {str(g): str(o) for entry in entries if isinstance(entry, Mapping) for g, o in entry.items()}


def options(group: str, command: Command[Any] | None = None) -> list[str]:
    """The options of a group: rows of the catalogue, those of plugins included, and files of conf/, the user's too.

    With a `command` those only that it can choose (`loss=sft` is nothing to `train grpo`).
    """
    files = _yaml_files([folder / group for folder in search_folders("conf")])
    names = sorted({*CHOICES[group]} - {group} | {*files})
    return [name for name in names if command is None or _takes(command, group, class_of(group, name))]


def classes_of(command: Command[Any], group: str) -> dict[str, type]:
    """Row -> settings class, for the rows that `command` can choose."""
    return {name: row.cls for name, row in CHOICES.get(group, {}).items() if _takes(command, group, row.cls)}


def commands_of(group: str, option: str) -> list[Command[Any]]:
    """The commands that can choose an option; all that have the group where its file names no schema."""
    cls = class_of(group, option)
    return [command for command in COMMANDS if _takes(command, group, cls)]


def _takes(command: Command[Any], group: str, cls: type | None) -> bool:
    """Whether `command` can choose an option with the settings class `cls` (None: unknown): one of its field's class.

    Training on rows takes no environment whose tasks come without replies.
    """
    declared = types_of(command.settings).get(group)
    if declared is None or cls is None:
        return declared is not None
    return issubclass(cls, cast(type, declared)) and (not command.rows or getattr(cls, "has_replies", True))


def class_of(group: str, option: str) -> type | None:
    """The settings class of an option, as its file or else its row names it; None where neither does."""
    _, row = made_of(group, option)
    return CHOICES[group][row].cls if row else None


def made_of(group: str, option: str) -> tuple[list[Path], str | None]:
    """The files of conf/ that an option is made of, its own first, and the row that they name, if they name one."""
    files: list[Path] = []
    names = [option]
    for name in names:  # grows by the options that a file builds on
        file = conf_file(f"{group}/{name}")
        if file is None and name in CHOICES[group]:
            return files, name
        if file is None:
            continue
        files.append(file)
        for entry in map(str, _defaults(file)):
            row = entry.removesuffix("_schema")
            if entry == schema_name(row) and row in CHOICES[group]:
                return files, row
            if entry not in ("_self_", *names):
                names.append(entry)
    return files, None


def describe(group: str, option: str) -> str:
    """The description of an option: the first line of its file, or its row's."""
    file = conf_file(f"{group}/{option}")
    return CHOICES[group][option].line if file is None else description(file)


def description(file: Path) -> str:
    """The comment on the first line of an option's or recipe's file; empty if it has none."""
    first = next(iter(file.read_text(encoding="utf-8", errors="replace").splitlines()), "")
    return first.lstrip("# ") if first.startswith("#") else ""


def schema_name(row: str) -> str:
    """The name that a file of conf/ gives a row's settings class in its `defaults:` list."""
    return f"{row}_schema"


def read_yaml(file: Path | None) -> dict[str, Any]:
    """The content of a YAML file; empty where there is none, or it cannot be read, which composing it will say."""
    if file is None:
        return {}
    import yaml

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):  # a ConfigError among them
        return {}
    return content if isinstance(content, dict) else {}


def _defaults(file: Path) -> list[Any]:
    """The entries of a file's `defaults:` list; none if it is not a list, which composing it will say."""
    entries = read_yaml(file).get("defaults")
    return entries if isinstance(entries, list) else []


def recipes() -> dict[str, Path]:
    """Recipe name -> file, the user's own included."""
    return _yaml_files(search_folders("recipes"))


def all_keys(command: Command[Any]) -> dict[str, tuple[Key, list[str]]]:
    """Dotted key -> the key and the rows (`env=gsm8k`) that have it, for every choice of a command's groups.

    A key that does not depend on a choice has no rows.
    """
    rows = ((group, name, cls) for group in CHOICES for name, cls in classes_of(command, group).items())
    return _table(command, tuple(rows))  # some of them are a plugin's


@lru_cache(maxsize=64)
def _table(command: Command[Any], rows: tuple[tuple[str, str, type], ...]) -> dict[str, tuple[Key, list[str]]]:
    """See `all_keys`."""
    found: dict[str, tuple[Key, list[str]]] = {key.name: (key, []) for key in keys_of(command.settings)}
    found = {name: entry for name, entry in found.items() if name.partition(".")[0] not in CHOICES}
    for group, name, settings in rows:
        for key in keys_of(settings, f"{group}."):
            found.setdefault(key.name, (key, []))[1].append(f"{group}={name}")
    return {name: entry for name, entry in found.items() if name not in command.without}


def _yaml_files(folders: list[Path]) -> dict[str, Path]:
    """Name -> file; a name in an earlier folder hides the same name in a later one, an editor's hidden file is none."""
    files = [file for folder in reversed(folders) for file in folder.glob("*.yaml")]
    found = {file.stem: file for file in files if file.is_file() and not file.name.startswith(".")}
    return dict(sorted(found.items()))


def verb_and_rest(words: Sequence[str]) -> tuple[Command[Any], list[str]]:
    """The verb that `words` begin with, whole or by its last word, and the settings after it.

    Where no verb is named it is `train grpo`. Raises ConfigError for an unknown verb.
    """
    count = next((i for i, word in enumerate(words) if "=" in word), len(words))
    verb, rest = " ".join(words[:count]), list(words[count:])
    if not verb:
        return TRAIN_GRPO, rest
    names = {name: command for command in COMMANDS for name in (command.verb, command.verb.split()[-1])}
    if verb not in names:
        hint = did_you_mean(nearest(verb, names), f"it is {' or '.join(c.verb for c in COMMANDS)}")
        raise ConfigError(f"{verb} has no configuration{hint}")
    return names[verb], rest
