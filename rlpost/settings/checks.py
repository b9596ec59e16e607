"""What the settings dataclasses share: the mark of a value still to be chosen, and the limits of numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeVar

from rlpost.errors import ConfigError

MISSING: Any = "???"  # how OmegaConf writes a value that has none yet; composing fills it in
LIMITS = "rlpost.limits"  # the key in a field's metadata
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """The numbers that a setting may have; a bound that is None does not hold."""

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


def limited(
    default: T, at_least: float | None = None, at_most: float | None = None, *, above: float | None = None
) -> T:
    """A field of a settings class with the lowest and the highest value that `Settings` lets it have beside None."""
    return field(default=default, metadata={LIMITS: Limits(at_least, at_most, above)})


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
        self.check_limits(**vars(self))

    @classmethod
    def check_limits(cls, **values: Any) -> None:
        """Raise ConfigError for a value of a field of this class that is out of its limits; others are passed over."""
        for name, limits in limits_of(cls).items():
            value = values.get(name)
            if value is not None and not limits.hold(value):
                raise ConfigError(f"{cls._prefix}{name}={value} is out of range: it must {limits}")


@cache
def limits_of(settings: type) -> dict[str, Limits]:
    """Field -> its limits, which stay where a derived class gives a field another default."""
    return {
        name: own.metadata[LIMITS]
        for cls in reversed(settings.__mro__)
        for name, own in getattr(cls, "__dataclass_fields__", {}).items()
        if LIMITS in own.metadata
    }
