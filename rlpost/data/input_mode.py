"""The form in which a policy is asked, and an environment asks."""

from __future__ import annotations

from enum import Enum

from rlpost.nearest import member


class InputMode(Enum):
    """Messages, the text that a chat template makes of them, or the ids of that text."""

    history = "history"
    text = "text"
    tokens = "tokens"

    @classmethod
    def of(cls, given: InputMode | str) -> InputMode:
        """The mode that is called `given`. Raises ConfigError for none."""
        return member(cls, "input_mode", given)
