"""Explains a configuration: what a key means, who set it, what papers used.

Writes a recipe to begin with too: every setting with its value and meaning, rarely changed ones commented out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from rlpost.catalog import COMMANDS, TRAIN_GRPO, Command
from rlpost.config import schema
from rlpost.config.code import is_code
from rlpost.config.compose import Merged, compose, merge_all
from rlpost.config.overrides import Override, parse_value, shown
from rlpost.config.recipes import line_numbers
from rlpost.config.unknown import Vocabulary
from rlpost.errors import ConfigError
from rlpost.settings.base import MISSING

COMMAND_LINE = "the command line"


def explain(name: str, command: Command[Any] | None, words: Sequence[str]) -> dict[str, Any]:
    """The meaning of a key (`optim.lr`), a group (`env`) or a part (`sampling`), as JSON: only a group has `keys`.

    Without a `command` it is the first that has the name. A key of an option that is not chosen
    (`env.path`) is explained with that option chosen, unless `words` choose another. Raises
    ConfigError for an unknown name, with the nearest one, and what `merge_all` raises.
    """
    command = command or next((c for c in COMMANDS if _has(c, name)), TRAIN_GRPO)
    merged = merge_all(command, words)
    _, owners = schema.all_keys(command).get(name, (None, []))
    is_open = name.partition(".")[0] not in {override.key for override in merged.given}
    if owners and is_open and name not in {key.name for key in merged.keys}:
        words = [*words, owners[0]]
        merged = merge_all(command, words)
    typed = {"command": " ".join(["rlpost", command.verb, *words])}
    keys = {key.name: key for key in merged.keys}
    if name in keys:
        more = {"set_by": set_by(name, merged), "of": _owners_of(name), "papers": _papers(name)}
        return _row(keys[name], merged) | more | typed
    if any(key.startswith(f"{name}.") for key in keys):
        return _group(name, merged) | typed
    raise Vocabulary(command, merged.choices).refusal([Override(name, "")])


def search(word: str) -> list[dict[str, str]]:
    """The keys whose name or meaning has `word`, each with its meaning and the owners; empty if it is a name itself."""
    if any(_has(command, word) for command in COMMANDS):
        return []
    found: dict[str, dict[str, str]] = {}
    for command in COMMANDS:
        for name, (key, _) in schema.all_keys(command).items():
            if word.lower() in f"{name} {key.about}".lower():
                found.setdefault(name, {"key": name, "meaning": key.about, "of": _owners_of(name)})
    return sorted(found.values(), key=lambda row: word.lower() not in row["key"])


def every_key(command: Command[Any], words: Sequence[str]) -> list[dict[str, Any]]:
    """All keys under the choices in `words`, those of no group first. Raises what `merge_all` raises."""
    merged = merge_all(command, words)
    return [_row(key, merged) for key in sorted(merged.keys, key=lambda key: "." in key.name)]


def value_of(merged: Merged[Any], name: str) -> Any:
    """The value of a dotted key; `MISSING` where nobody gave one."""
    part, _, field = name.rpartition(".")
    if OmegaConf.is_missing(OmegaConf.select(merged.config, part) if part else merged.config, field):
        return MISSING
    value = OmegaConf.select(merged.config, name)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def set_by(name: str, merged: Merged[Any]) -> str | None:
    """Who set a key or chose a group's option last: the command line, a file with its line, or a class.

    None for a key that has no value yet.
    """
    if (given := next((override for override in merged.given if override.key == name), None)) is not None:
        return given.source or COMMAND_LINE
    own = schema.conf_file(merged.command.name)
    if name in merged.choices:
        return f"{merged.command.verb} in rlpost/catalog.py" if own is None else _place(own, f"defaults.{name}")
    group, _, field = name.partition(".")
    files = (
        [(file, field) for file in schema.made_of(group, merged.choices[group])[0]] if group in merged.choices else []
    )
    value, key = value_of(merged, name), next(key for key in merged.keys if key.name == name)
    for file, inner in [(own, name), *files]:
        held = {} if file is None else schema.flat(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file))))
        if file is not None and inner in held and parse_value(key, schema.as_text(held[inner])) == value:
            return _place(file, inner)
    return None if value == MISSING else _class_of(name, merged)


def _has(command: Command[Any], name: str) -> bool:
    keys = schema.all_keys(command)
    return name in keys or any(key.startswith(f"{name}.") for key in keys)


def _owners_of(name: str) -> str:
    """The verbs that have a key, and the options that it belongs to unless every option of its group has it."""
    having = [command for command in COMMANDS if name in schema.all_keys(command)]
    group = name.partition(".")[0]
    options = list(dict.fromkeys(option for command in having for option in schema.all_keys(command)[name][1]))
    rows = {f"{group}={row}" for command in having for row in schema.classes_of(command, group)}
    verbs = "rlpost " + ", ".join(command.verb for command in having)
    return f"{verbs}; of {', '.join(options)}" if options and {*options} != rows else verbs


def _row(key: schema.Key, merged: Merged[Any]) -> dict[str, Any]:
    """A key as JSON: its present value (null where nobody gave one), that as a word, its type and its meaning."""
    value = value_of(merged, key.name)
    return {
        "key": key.name,
        "value": None if value == MISSING else _as_json(value),
        "text": schema.as_text(value),
        "type": key.type_name,
        "meaning": key.doc,
    }


def _papers(name: str) -> list[dict[str, Any]]:
    rows = schema.read_yaml(Path(__file__).parent / "papers.yaml").get(name, [])
    return [dict(zip(("value", "paper", "where"), row, strict=True)) for row in rows]


def _group(name: str, merged: Merged[Any]) -> dict[str, Any]:
    """A group, its options and its settings; a part without options (`sampling`) has nothing chosen."""
    about = inspect.getdoc(cast(type, OmegaConf.get_type(merged.config, name))) or ""
    chosen = merged.choices.get(name)
    options = schema.options(name, merged.command) if chosen else []
    return {
        "group": name,
        "meaning": schema.docs_of(merged.command.settings).get(name, ""),
        "chosen": chosen,
        "set_by": set_by(name, merged) if chosen else None,
        "description": about,
        "options": {option: schema.describe(name, option) for option in options},
        "keys": [_row(key, merged) for key in merged.keys if key.name.startswith(f"{name}.")],
    }


def _as_json(value: Any) -> Any:
    """A setting's value as JSON: an Enum's member by its name."""
    if isinstance(value, Enum):
        return value.name
    return [_as_json(element) for element in value] if isinstance(value, list) else value


def _class_of(name: str, merged: Merged[Any]) -> str:
    """`OptimSettings in rlpost/settings/training.py`: the class that declares the field, a base of the chosen one."""
    part, _, field = name.rpartition(".")
    owner = cast(type, OmegaConf.get_type(merged.config, part)) if part else merged.command.settings
    cls = next(cls for cls in owner.__mro__ if field in inspect.get_annotations(cls))
    own = cls.__module__.partition(".")[0] == "rlpost"
    return f"{cls.__name__} in {cls.__module__.replace('.', '/') + '.py' if own else inspect.getsourcefile(cls)}"


def _place(file: Path, name: str) -> str:
    """A line of a file of conf/, its path relative to the current folder or to rlpost's own."""
    bases = [Path.cwd(), *(folder.parent for folder in schema.search_folders("conf"))]
    shown_path = next((file.relative_to(base) for base in bases if file.is_relative_to(base)), file)
    return f"{shown_path}, line {line_numbers(file)[name]}"


# A recipe to begin with
_LIKELY = (  # what people change first; every other setting is commented out
    "steps",
    "seed",
    "prompts_per_step",
    "group_size",
    "env.path",
    "env.limit",
    "env.max_completion_tokens",
    "sampling.temperature",
    "loss.kl_coef",
    "optim.lr",
)
_REWARD = "env.reward"  # mostly one of the user's own
_PLAIN = re.compile(r"[A-Za-z][\w./:-]*\w")
_VALUE_COLUMN = 48  # column of the comments


def write_starter(file: Path, command: Command[Any], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Write the recipe of `command` under `words` to a new file.

    Returns the keys that still need a value in the recipe, and the words that the command line must give because
    they name code: the given ones, and an example for env.reward if it has no value.

    Raises ConfigError if the file exists, and what `compose` raises for words that cannot work.
    """
    if file.exists():
        raise ConfigError(f"{shown(str(file))} exists already: give another name, or remove it first")
    merged = merge_all(command, words)
    needed = [key for key in merged.keys if value_of(merged, key.name) == MISSING]
    beside = [key for key in needed if key.name == _REWARD]
    if not needed:
        compose(command, words)  # find an impossible combination here rather than in every later use
    code = [override for override in merged.given if is_code(override, merged.choices)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as stream:
        stream.write(_starter(merged, {override.key for override in code}))
    examples = [f"{key.name}={key.runs.example}" for key in beside if key.runs is not None]
    return [key.name for key in needed if key not in beside], [*(f"{o.key}={o.text}" for o in code), *examples]


def _starter(merged: Merged[Any], code: set[str]) -> str:
    """The text of the recipe; it composes to the same settings, with or without its commented lines.

    The keys of `code` are the exception: a recipe cannot name code, so those words stay on the command line.
    """
    given = {override.key for override in merged.given}
    lines = [
        f"# {merged.choices['model']} on {merged.choices['env']}",  # the description in rlpost config list
        f"command: {merged.command.verb}",
        "",
        "# A line with a # before its key says what holds anyway: take the # away to change it.",
    ]
    docs = schema.docs_of(merged.command.settings)
    part = ""
    for key in sorted(merged.keys, key=lambda key: "." in key.name):  # keys of no group first
        if (now := key.name.rpartition(".")[0]) != part:
            part = now
            chosen = merged.choices.get(part)
            options = f": {' | '.join(schema.options(part, merged.command))}" if chosen else ""
            lines += ["", f"# {docs.get(part, part)}{options}", *([f"{part}: {chosen}"] if chosen else [])]
        value = value_of(merged, key.name)
        active = key.name in given or key.name in _LIKELY
        text = f"{key.name}: {MISSING if value == MISSING else _yaml_text(_as_json(value))}"
        text = text if active and value != MISSING and key.name not in code else f"# {text}"
        beside = key.runs and (f"in a file {key.runs.beside} alone" if key.runs.beside else "on the command line only")
        remarks = ["needs a value" if value == MISSING else "", beside, " | ".join(key.choices), key.doc]
        lines.append(f"{text.ljust(_VALUE_COLUMN)}  # {'; '.join(filter(None, remarks))}")
    return "\n".join(lines) + "\n"


def _yaml_text(value: Any) -> str:
    """A value on one line of YAML that OmegaConf's loader reads as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(_yaml_text(element) for element in value) + "]"
    if not isinstance(value, str):
        return schema.as_text(value)
    if _PLAIN.fullmatch(value) and OmegaConf.create(f"a: {value}").a == value:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9).rstrip("\n")
