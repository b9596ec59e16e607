"""Every key of a settings class: its dotted name, type, default and the comment beside it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from rlpost.settings.checks import MISSING
from rlpost.settings.code import RUNS, Runs

NUMBERS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
NULL = "null"


@dataclass(frozen=True)
class Key:
    """A setting that a command line or a recipe can name."""

    name: str  # dotted: optim.lr
    annotation: Any  # int, float, bool, str, an Enum, or a list of one of them
    optional: bool  # whether null is a value
    default: Any
    runs: Runs | None = None  # which of its values make something run, if any do

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.annotation) is list

    @property
    def element(self) -> Any:
        """The type of one value: that of the elements for a list."""
        return typing.get_args(self.annotation)[0] if self.is_list else self.annotation

    @property
    def choices(self) -> list[str]:
        """The words allowed, for an Enum; empty for everything else."""
        return list(self.element.__members__) if issubclass(self.element, Enum) else []

    @property
    def type_name(self) -> str:
        """The type in words: `number`, `constant | linear`, `list of text`, `whole number or null`."""
        name = " | ".join(self.choices) or NUMBERS[self.element]
        name = f"list of {name}" if self.is_list else name
        return f"{name} or null" if self.optional else name


def keys_of(settings: type, prefix: str = "", chosen: Mapping[str, type] | None = None) -> list[Key]:
    """The keys of a settings class, nested ones included.

    A group's field (one that has no default) is expanded as the class `chosen[name]`, or as its
    declared class where nothing is chosen.
    """
    return _keys_of(settings, prefix, chosen) if chosen else list(_declared_keys(settings, prefix))


@cache
def _declared_keys(settings: type, prefix: str) -> tuple[Key, ...]:
    """The keys where nothing is chosen: the same each time, and every unknown key asks for those of all options."""
    return tuple(_keys_of(settings, prefix, {}))


def _keys_of(settings: type, prefix: str, chosen: Mapping[str, type]) -> list[Key]:
    hints = types_of(settings)
    keys: list[Key] = []
    for field in dataclasses.fields(settings):
        name = f"{prefix}{field.name}"
        annotation, optional = _without_none(hints[field.name])
        if dataclasses.is_dataclass(annotation):
            nested = chosen.get(name, annotation)
            keys += keys_of(typing.cast(type, nested), f"{name}.")
        else:
            keys.append(Key(name, annotation, optional, _default(field), field.metadata.get(RUNS)))
    return keys


@cache
def types_of(settings: type) -> dict[str, Any]:
    """Field name -> type, which takes a millisecond to find and is asked for again with every unknown key."""
    return typing.get_type_hints(settings)


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


@cache
def docs_of(settings: type) -> dict[str, str]:
    """Field name -> the comment beside it, of a settings class and its bases; None is written null, as users do."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        if dataclasses.is_dataclass(cls):
            docs.update(_comments_of(cls))
    return docs


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


def _comments_of(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # an installation without source files: the keys are still listed, without comments
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        t.start[0]: re.sub(r"\bNone\b", NULL, t.string.lstrip("# ")) for t in tokens if t.type == tokenize.COMMENT
    }
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {
        typing.cast(ast.Name, node.target).id: comments[line]
        for node in fields
        for line in (node.lineno, node.end_lineno)
        if line in comments
    }


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
