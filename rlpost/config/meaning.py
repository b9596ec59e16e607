"""What a key, a group or a part of the configuration is: value, meaning, who set it, what papers used."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlpost.catalog import COMMANDS, TRAIN_GRPO, Command
from rlpost.config.compose import Merged, merge_all
from rlpost.config.keys import Key, docs_of
from rlpost.config.overrides import Override, as_text, parse_words
from rlpost.config.papers import PAPER_VALUES
from rlpost.config.provenance import Layer, Provenance, owner_of, provenance, value_of
from rlpost.config.registry import all_keys, describe, options
from rlpost.config.unknown import unknown_key
from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING


@dataclass(frozen=True)
class KeyLine:
    """A key in a list: its present value and its meaning."""

    key: str
    value: Any  # as JSON has it
    text: str  # as a command line has it
    meaning: str


@dataclass(frozen=True)
class KeyMeaning:
    """Everything about one key, under the choices in `command`."""

    key: str
    command: str  # as typed: rlpost train grpo env=gsm8k
    value: Any  # as JSON has it
    text: str  # as a command line has it
    type: str
    meaning: str
    set_by: str | None  # None: it has no value yet
    layers: list[Layer]
    papers: list[dict[str, str]]


@dataclass(frozen=True)
class GroupMeaning:
    """Everything about a group; a part without options (`sampling`) has no `chosen`."""

    group: str
    command: str
    meaning: str
    chosen: str | None
    set_by: str | None
    options: dict[str, str]  # option -> its description
    layers: list[Layer]
    keys: list[KeyLine]


def explain(name: str, command: Command[Any] | None, words: Sequence[str]) -> KeyMeaning | GroupMeaning:
    """The meaning of a key (`optim.lr`), a group (`env`) or a part (`sampling`).

    Without a `command` the first that has the name is taken. A key of an option that is not chosen
    (`env.path`) is explained with that option chosen, unless `words` choose another. Raises
    ConfigError for an unknown name, with the nearest one, and what `merge_all` raises.
    """
    command = command or next((c for c in COMMANDS if _has(c, name)), TRAIN_GRPO)
    words = [*words, *_option_needed(name, command, words)]
    told = provenance(command, words)
    typed = " ".join(["rlpost", command.verb, *words])
    by_name = {key.name: key for key in told.merged.keys}
    if name in by_name:
        return _key_meaning(by_name[name], told, typed)
    if any(key.startswith(f"{name}.") for key in by_name):
        return _group_meaning(name, told, typed)
    raise ConfigError(unknown_key(Override(name, ""), command, by_name, told.merged.choices))


def every_key(command: Command[Any], words: Sequence[str]) -> list[KeyLine]:
    """All keys under the choices in `words`, those of no group first. Raises what `merge_all` raises."""
    told = provenance(command, words)
    return [_line(key, told) for key in sorted(told.merged.keys, key=lambda key: "." in key.name)]


def meaning_of(merged: Merged[Any], name: str) -> str:
    """The comment beside the field that a dotted key is; empty if there is none."""
    return docs_of(owner_of(merged, name)).get(name.rpartition(".")[2], "")


def as_json(value: Any) -> Any:
    """A setting's value as JSON has it: an Enum's member by its name."""
    if isinstance(value, Enum):
        return value.name
    return [as_json(element) for element in value] if isinstance(value, list) else value


def _has(command: Command[Any], name: str) -> bool:
    keys = all_keys(command)
    return name in keys or any(key.startswith(f"{name}.") for key in keys)


def _option_needed(name: str, command: Command[Any], words: Sequence[str]) -> list[str]:
    """The word that chooses an option with the key `name`, where only some options have it and none is chosen."""
    given = {override.key for override in parse_words(words)}
    owners = [owner for owner in all_keys(command).get(name, []) if _exists(owner)]
    group = name.partition(".")[0]
    if not owners or given & {group, "recipe"}:
        return []
    present = {key.name for key in merge_all(command, words).keys}
    return [] if name in present else owners[:1]


def _exists(owner: str) -> bool:
    group, _, option = owner.partition("=")
    return option in options(group)


def _line(key: Key, told: Provenance[Any]) -> KeyLine:
    value = value_of(told.merged, key.name)
    return KeyLine(key.name, _json_value(value), as_text(value), meaning_of(told.merged, key.name))


def _json_value(value: Any) -> Any:
    """A value that nobody has given yet is null."""
    return None if value == MISSING else as_json(value)


def _key_meaning(key: Key, told: Provenance[Any], typed: str) -> KeyMeaning:
    value = value_of(told.merged, key.name)
    winner = told.winner(key.name)
    return KeyMeaning(
        key=key.name,
        command=typed,
        value=_json_value(value),
        text=as_text(value),
        type=key.type_name,
        meaning=meaning_of(told.merged, key.name),
        set_by=winner.where if winner is not None else None,
        layers=told.keys[key.name],
        papers=[
            {"value": p.value, "paper": p.paper.name, "arxiv": p.paper.arxiv, "where": p.where}
            for p in PAPER_VALUES.get(key.name, ())
        ],
    )


def _group_meaning(name: str, told: Provenance[Any], typed: str) -> GroupMeaning:
    command = told.merged.command.settings
    chosen = told.merged.choices.get(name)
    winner = told.winner(name) if chosen is not None else None
    doc = docs_of(command).get(name) or inspect.getdoc(owner_of(told.merged, f"{name}.")) or ""
    return GroupMeaning(
        group=name,
        command=typed,
        meaning=doc.partition("\n")[0],
        chosen=chosen,
        set_by=winner.where if winner is not None else None,
        options={option: describe(name, option) for option in options(name, told.merged.command)}
        if chosen is not None
        else {},
        layers=told.groups[name] if chosen is not None else [],
        keys=[_line(key, told) for key in told.merged.keys if key.name.startswith(f"{name}.")],
    )


def as_dict(meaning: KeyMeaning | GroupMeaning) -> dict[str, Any]:
    """The meaning as JSON has it."""
    return dataclasses.asdict(meaning)
