"""The form in which a policy is asked, and an environment asks."""

from __future__ import annotations

from enum import Enum

from rlpost.errors import ConfigError


class InputMode(Enum):
    """Messages, the text that a chat template makes of them, or the ids of that text."""

    history = "history"
    text = "text"
    tokens = "tokens"

    @classmethod
    def of(cls, given: InputMode | str) -> InputMode:
        """The mode that is called `given`. Raises ConfigError for none."""
        names = [mode.value for mode in cls]
        name = given.value if isinstance(given, InputMode) else given
        if name not in names:
            raise ConfigError(f"input_mode={given!r} is none of {', '.join(names)}")
        return cls(name)
