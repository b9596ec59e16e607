"""Parts of all settings dataclasses: values still to be chosen, limits of numbers, rows of options, marks of code.

A field whose value makes something run (code to import, a program to start, a wall to take down, a machine to send to)
says so in its `metadata`. `rlpost.config.code` lets such a value come from a command line alone, where a person typed
it: a recipe, a file of conf/ and a run folder may be anybody's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast

from rlpost.errors import ConfigError
from rlpost.text import did_you_mean, first_line_of, nearest

MISSING: Any = "???"  # OmegaConf's mark for a missing value; composing fills it in
DOC, LIMITS, NAMES, RUNS = "rlpost.doc", "rlpost.limits", "rlpost.names", "rlpost.runs"  # keys of a field's metadata
T = TypeVar("T")
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class Limits:
    """The range of a number setting; a bound that is None does not apply."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"lie between {self.at_least} and {self.at_most}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        return "be " + " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)

    def hold(self, value: float) -> bool:
        """Whether `value` lies within all bounds; NaN does not."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
        )


def doc(
    default: T | Callable[[], T],
    text: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    above: float | None = None,
    runs: Runs | None = None,
    names: Mapping[str, Any] | None = None,
) -> T:
    """A field of a settings class: its default, what it means, and for a number the lowest and the highest value.

    `default` is a value, or the settings class of a part of the configuration. `runs` marks a setting whose value makes
    something run; `names` are the values that a text may have. A derived class that gives the field another default
    alone keeps its meaning and limits.
    """
    limits = Limits(at_least, at_most, above)
    given = {DOC: text or None, LIMITS: None if limits == Limits() else limits, RUNS: runs, NAMES: names}
    marks = {mark: value for mark, value in given.items() if value is not None}
    if isinstance(default, list):
        return field(default_factory=lambda: cast(T, [*default]), metadata=marks)
    if isinstance(default, type):
        return field(default_factory=default, metadata=marks)
    return field(default=cast(T, default), metadata=marks)


class Settings:
    """Base of the settings classes, `class ChildSettings(Settings, group="optim")`: checks the limits of its fields.

    `group` is what the keys begin with, optim.lr for example; without one they have no beginning.
    """

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, *, group: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        if group:
            cls._prefix = f"{group}."

    def __post_init__(self) -> None:
        for name, limits in marks_of(type(self), LIMITS).items():
            value = getattr(self, name)
            if value is not None and not limits.hold(value):
                raise ConfigError(f"{self._prefix}{name}={value} is out of range: it must {limits}")
        if MISSING not in vars(self).values():
            self.check()

    def check(self) -> None:
        """Raise ConfigError for values that do not go together; called when all of them are there."""


@cache
def marks_of(settings: type, mark: str) -> dict[str, Any]:
    """Field -> what its metadata hold under `mark`, in the class or else in the nearest base that has it."""
    return {
        name: own.metadata[mark]
        for cls in reversed(settings.__mro__)
        for name, own in getattr(cls, "__dataclass_fields__", {}).items()
        if mark in own.metadata
    }


def opened(place: str) -> Any:
    """The object that `module:name` under rlpost names."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(f"rlpost.{module}"))


@dataclass(frozen=True)
class Choice:
    """An option that is chosen by its name: its settings class, a line of words, and what makes the component.

    `words` describe it; without them `line` is the first line of the docstring of its settings class.

    `settings` is `module:Class` under rlpost.settings and `builds` `module:name` under rlpost, or the class and the
    callable themselves, as a plugin registers them. `settings` is None where an option has no settings of its own.
    """

    settings: str | type | None
    words: str = ""
    builds: str | Callable[..., Any] = ""

    @cached_property
    def cls(self) -> type:
        """The settings class."""
        assert self.settings is not None, f"{self.words} has no settings of its own"
        return opened(f"settings.{self.settings}") if isinstance(self.settings, str) else self.settings

    @property
    def line(self) -> str:
        """The words, or else the first line of the settings class."""
        return self.words or first_line_of(self.cls).removesuffix(".")

    @property
    def build(self) -> Callable[..., Any]:
        """The factory of the component that these settings describe."""
        return opened(self.builds) if isinstance(self.builds, str) else self.builds


NAME = re.compile(r"[A-Za-z][\w-]*")  # of anything that a plugin registers; not a file name


@dataclass(frozen=True)
class Runs:
    """Marks a setting whose value runs code: `no_file` completes "a file cannot ...", `by` tests a value.

    `beside` names the harmless values, and `example` is one that runs code.
    """

    no_file: str
    by: Callable[[Any], bool]
    beside: str = ""
    example: str = ""


def _is_given(value: Any) -> bool:
    return value is not None and value != []


def _beyond_names(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return _is_given(value) and not all(isinstance(name, str) and NAME.fullmatch(name) for name in names)


CODE = Runs("name code to run", _is_given)
# of rewards: a plain name stands for a registered reward
CODE_UNLESS_NAMES = Runs("name code to run", _beyond_names, "a name", "FILE.py:FUNCTION")
CODE_IF_MODULE = Runs("name code to run", lambda value: ":" in str(value), "a name")
MACHINE = Runs(  # its workers receive the code, the model and the rows
    "send code and data to another machine",
    lambda value: value not in ("auto", "local"),
    "auto or local",
    "HOST:6379",
)
PROGRAM = Runs("name a program to start", _is_given)
SANDBOX = Runs(
    "let programs out of the sandbox", lambda value: getattr(value, "name", value) != "bubblewrap", "bubblewrap"
)


# names of a reward's parts that are taken: reward/mean and so on are figures of the step, the last two are penalties
RESERVED_PARTS = ("mean", "std", "failed", "mean_drawn", "kl_penalty", "overlong", "length_penalty")
BUILT_IN_REWARDS = ("exact", "number", "contains", "math")  # defined in rlpost/rewards/builtin.py

REWARDS: dict[str, Callable[..., Any]] = {}
REWARD_FILES: dict[str, str] = {}  # reward -> full path of the plugin that registered it
TOOLS: dict[str, Callable[..., Any]] = {}


def member(kind: type[E], key: str, name: E | str) -> E:
    """The member of `kind` called `name`, or `name` itself if it is one. Raises ConfigError, which names `key`."""
    if isinstance(name, kind):
        return name
    known = kind.__members__
    if name not in known:
        raise ConfigError(
            f"{key}={name} is unknown: it is one of {', '.join(known)}{did_you_mean(nearest(str(name), known))}"
        )
    return known[str(name)]
