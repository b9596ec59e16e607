"""Which configured verb a list of words is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpost.catalog import COMMANDS, TRAIN_GRPO, Command
from rlpost.errors import ConfigError
from rlpost.nearest import did_you_mean, nearest


def verb_and_rest(words: Sequence[str]) -> tuple[Command[Any], list[str]]:
    """The verb that `words` begin with, whole or by its last word, and the settings after it.

    Where no verb is named it is `train grpo`. Raises ConfigError for an unknown verb.
    """
    count = next((i for i, word in enumerate(words) if "=" in word), len(words))
    verb, rest = " ".join(words[:count]), list(words[count:])
    if not verb:
        return TRAIN_GRPO, rest
    names = {name: command for command in COMMANDS for name in (command.verb, command.name)}
    if verb not in names:
        hint = did_you_mean(nearest(verb, names), f"it is {' or '.join(c.verb for c in COMMANDS)}")
        raise ConfigError(f"{verb} has no configuration{hint}")
    return names[verb], rest
