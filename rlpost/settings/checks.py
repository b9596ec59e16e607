"""What the settings dataclasses share: the mark of a value still to be chosen, and range checks."""

from __future__ import annotations

from typing import Any

from rlpost.errors import ConfigError

MISSING: Any = "???"  # how OmegaConf writes a value that has none yet; composing fills it in


def at_least(key: str, value: float | None, minimum: float) -> None:
    """Raise ConfigError unless `value` is None or >= `minimum`."""
    if value is not None and not value >= minimum:
        raise ConfigError(f"{key}={value} is out of range: it must be at least {minimum}")


def above(key: str, value: float | None, minimum: float) -> None:
    """Raise ConfigError unless `value` is None or > `minimum`."""
    if value is not None and not value > minimum:
        raise ConfigError(f"{key}={value} is out of range: it must be above {minimum}")


def between(key: str, value: float | None, minimum: float, maximum: float) -> None:
    """Raise ConfigError unless `value` is None or within [minimum, maximum]."""
    if value is not None and not minimum <= value <= maximum:
        raise ConfigError(f"{key}={value} is out of range: it must lie between {minimum} and {maximum}")
