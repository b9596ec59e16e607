"""Notes which settings are read, and by whom."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config.schema import classes_of, groups_of
from rlpost.settings.base import Settings

Read = tuple[type, str]  # a settings class and one of its fields


def fields_of(command: Command[Any]) -> dict[str, list[type]]:
    """Key -> the settings classes that hold it, of every option there is."""
    parts = {name: [cls] for name, cls in _parts(command.settings).items()}
    groups = {group: _own(classes_of(command, group).values()) for group in groups_of(command.settings)}
    fields: dict[str, list[type]] = {}
    for part, classes in {"": [command.settings], **parts, **groups}.items():
        for cls in classes:
            names = [field.name for field in dataclasses.fields(cls) if part or field.name not in {*parts, *groups}]
            for name in (f"{part}.{name}" if part else name for name in names):
                fields.setdefault(name, []).append(cls)
    return {name: classes for name, classes in fields.items() if name not in command.without}


def settings_classes() -> list[type]:
    """Every class that holds a key of a command."""
    return list(dict.fromkeys(cls for command in COMMANDS for held in fields_of(command).values() for cls in held))


def _own(classes: Iterable[type]) -> list[type]:
    """Those of rlpost, each once; what the plugin of another test has added is no concern here."""
    return [cls for cls in dict.fromkeys(classes) if cls.__module__.startswith("rlpost.")]


def _parts(settings: type) -> dict[str, type]:
    """The parts of a command that are no groups (`sampling`), and their classes."""
    made = {f.name: f.default_factory() for f in dataclasses.fields(settings) if callable(f.default_factory)}
    return {name: type(value) for name, value in made.items() if dataclasses.is_dataclass(value)}


@contextmanager
def reads_noted(classes: Iterable[type]) -> Iterator[set[Read]]:
    """Meanwhile every field of `classes` that a component of rlpost reads is added to the set.

    What the settings classes themselves, the composing of a configuration, the command line and
    `dataclasses` (a copy, a comparison) read does not count: nothing would follow from such a value.
    `plugin` alone is used up by composing.
    """
    noted: set[Read] = set()
    undo: list[tuple[Any, Callable[..., Any] | None]] = []

    def noting(self: Any, name: str) -> Any:
        cls = type(self)
        if name in cls.__dataclass_fields__:
            reader = _asker(sys._getframe(1))
            if _counts(reader.f_globals.get("__name__", ""), name):
                noted.add((cls, name))
        return object.__getattribute__(self, name)

    for cls in classes:
        undo.append((cls, cls.__dict__.get("__getattribute__")))
        cls.__getattribute__ = noting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield noted
    finally:
        for cls, before in undo:
            assert before is None
            del cls.__getattribute__


def _asker(frame: Any) -> Any:
    """The frame for which `frame` reads: properties and public methods of settings read for whoever asks them."""
    while issubclass(owner := type(frame.f_locals.get("self")), Settings):
        asked = inspect.getattr_static(owner, frame.f_code.co_name, None)
        if isinstance(asked, property):
            frame = frame.f_back.f_back  # by way of `noting`
        elif inspect.isfunction(asked) and not frame.f_code.co_name.startswith("_"):
            frame = frame.f_back
        else:
            break
    return frame


def _counts(module: str, name: str) -> bool:
    if name == "plugin" and module == "rlpost.config.compose":
        return True
    return module.startswith("rlpost.") and module.split(".")[1] not in ("settings", "config", "cli")
