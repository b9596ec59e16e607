"""The commands, the options that each can choose, the recipes, and where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import rlpost
from rlpost.catalog import CHOICES, COMMANDS, Command
from rlpost.config.keys import Key, keys_of, types_of
from rlpost.errors import ConfigError


def built_in_folder(name: str) -> Path:
    """rlpost's own `conf` or `recipes`: inside the wheel, or at the root of an editable checkout."""
    package = Path(rlpost.__file__).parent
    for folder in (package / "_builtin" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"rlpost's own {name}/ is not where it was installed ({package}): install rlpost again")


def search_folders(name: str) -> list[Path]:
    """The folders in which `conf` or `recipes` are looked for: the user's first."""
    users, own = Path(os.path.realpath(name)), built_in_folder(name).resolve()  # a link to itself is no folder
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
    return [name for name in names if command is None or command in commands_of(group, name)]


def classes_of(command: Command[Any], group: str) -> dict[str, type]:
    """Row -> settings class, of those that `command` can choose: those of the class that its settings declare."""
    declared = types_of(command.settings).get(group)
    rows = {} if declared is None else CHOICES[group]
    return {name: row.cls for name, row in rows.items() if issubclass(row.cls, cast(type, declared))}


def commands_of(group: str, option: str) -> list[Command[Any]]:
    """The commands that can choose an option; all that have the group where its file names no schema."""
    cls = class_of(group, option)
    having = [command for command in COMMANDS if group in types_of(command.settings)]
    return [c for c in having if cls is None or issubclass(cls, types_of(c.settings)[group])]


def class_of(group: str, option: str, seen: frozenset[str] = frozenset()) -> type | None:
    """The settings class of an option, as its file or else its row names it; None where neither does.

    `seen` are the options whose files led here.
    """
    rows = CHOICES[group]
    file = conf_file(f"{group}/{option}")
    if file is None:
        return rows[option].cls if option in rows else None
    for entry in map(str, _defaults(file)):
        if entry == schema_name(name := entry.removesuffix("_schema")) and name in rows:
            return rows[name].cls
        if entry not in ("_self_", option, *seen) and (cls := class_of(group, entry, seen | {option})) is not None:
            return cls
    return None


def schema_name(row: str) -> str:
    """What a file of conf/ calls a row's settings class in its `defaults:` list."""
    return f"{row}_schema"


def read_yaml(file: Path | None) -> dict[str, Any]:
    """The content of a YAML file; empty where there is none, or it cannot be read, which composing it will say."""
    if file is None:
        return {}
    import yaml

    from rlpost.config.plain_yaml import check_plain

    try:
        check_plain(file)
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):  # a ConfigError among them
        return {}
    return content if isinstance(content, dict) else {}


def _defaults(file: Path) -> list[Any]:
    """The entries of a file's `defaults:` list; none where it is no list, which `check_conf` will say."""
    entries = read_yaml(file).get("defaults")
    return entries if isinstance(entries, list) else []


def check_conf(names: Iterable[str]) -> None:
    """Raise ConfigError for a file of conf/ that cannot be read, could fill the memory, or names no list of defaults.

    Looked at are the files of `names` and those that their `defaults:` lists lead on to.
    """
    from rlpost.config.plain_yaml import check_plain

    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or (file := conf_file(name)) is None:
            continue
        seen.add(name)
        try:
            check_plain(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        entries = read_yaml(file).get("defaults", [])
        if not isinstance(entries, list):
            raise ConfigError(f"{file}: defaults: is a list; write defaults: [NAME_schema, _self_]")
        for entry in entries:
            waiting += _led_on_to(entry, name.rpartition("/")[0])


def _led_on_to(entry: object, group: str) -> list[str]:
    """The files of conf/ that an entry of a `defaults:` list in a file of this group names."""
    names = []
    for pair in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
        last_words = [text.split()[-1] for text in map(str, pair) if text.strip()]  # after `optional` and `override`
        path = "/".join(word.partition("@")[0] for word in last_words)
        names.append(path[1:] if path.startswith("/") else f"{group}/{path}")
    return names


def recipes() -> dict[str, Path]:
    """Recipe name -> file, the user's own included."""
    return _yaml_files(search_folders("recipes"))


def describe(group: str, option: str) -> str:
    """What an option is: the first line of its file, or the words of its row."""
    file = conf_file(f"{group}/{option}")
    return CHOICES[group][option].words if file is None else description(file)


def description(file: Path) -> str:
    """The comment on the first line of an option's or recipe's file; empty if it has none."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""


def all_keys(command: Command[Any]) -> dict[str, list[str]]:
    """Dotted key -> the rows (`env=gsm8k`) that have it, for every choice of a command's groups.

    A key that does not depend on a choice maps to an empty list.
    """
    rows = [(group, name, cls) for group in CHOICES for name, cls in classes_of(command, group).items()]
    return dict(_all_keys(command, tuple(rows)))


@lru_cache(maxsize=64)
def _all_keys(command: Command[Any], rows: tuple[tuple[str, str, type], ...]) -> dict[str, list[str]]:
    """Those of a command and of rows (group, name, settings class), to which a plugin may have added some."""
    owners: dict[str, list[str]] = {key.name: [] for key in keys_of(command.settings) if not _in_group(key)}
    for group, name, settings in rows:
        for key in keys_of(settings, f"{group}."):
            owners.setdefault(key.name, []).append(f"{group}={name}")
    return {name: where for name, where in owners.items() if name not in command.without}


def _in_group(key: Key) -> bool:
    return key.name.partition(".")[0] in CHOICES


def _yaml_files(folders: list[Path]) -> dict[str, Path]:
    """Name -> file; a name in an earlier folder hides the same name in a later one, an editor's hidden file is none."""
    files = [file for folder in reversed(folders) for file in folder.glob("*.yaml")]
    found = {file.stem: file for file in files if file.is_file() and not file.name.startswith(".")}
    return dict(sorted(found.items()))
