"""Why a key or an option is unknown, and which one was probably meant."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config import schema
from rlpost.config.other_words import NOT_HERE, answers
from rlpost.config.overrides import Override, error_at, parse_value, shown
from rlpost.config.paths import DATA_FILES
from rlpost.errors import ConfigError
from rlpost.text import did_you_mean, nearest, nearest_key, one_typo_away


class Vocabulary:
    """The words that `command` takes where each group has the option of `choices`, and the `flags` of its verb."""

    def __init__(self, command: Command[Any], choices: Mapping[str, str], flags: Sequence[str] = ()) -> None:
        self.command, self.choices, self.flags = command, choices, flags
        chosen = {group: kind for group, name in choices.items() if (kind := schema.class_of(group, name))}
        self.keys = schema.keys_under(command, chosen)
        # the keys that the chosen options have come first
        self.names = [*self.keys, *schema.groups_of(command.settings), *schema.all_keys(command)]

    def refusal(self, unknown: Sequence[Override], before: str = "") -> ConfigError:
        """The error for unknown settings, options and flags: one, or all at once in a message begun by `before`."""
        if len(unknown) == 1 and not before:
            return error_at(unknown[0], self.complaint(unknown[0]))
        lines = [f"{before}rlpost {self.command.verb} does not know {len(unknown)} of these settings; write instead:"]
        for each in unknown:
            answer = f"{shown(each.key)}: {self.instead_of(each) or 'not known here'}"
            lines.append(f"  {error_at(each, answer)}")
        return ConfigError("\n".join([*lines, f"rlpost config explain {self.command.verb} prints all settings"]))

    def complaint(self, given: Override) -> str:
        """The message for one unknown key, option or flag."""
        meant, verb = self.meant(given), self.command.verb
        what, otherwise = f"{shown(given.key)} is not a setting of rlpost {verb}", f"see rlpost config show {verb}"
        if given.key in self.choices:
            known = ", ".join(schema.options(given.key, self.command))
            what, otherwise = f"{given} is unknown", f"it is one of {known}"
        if meant.startswith(NOT_HERE):
            return f"{what}: {meant.removeprefix(NOT_HERE)}"
        others = " (any other: model.path=OWNER/NAME of the hub, or a folder)" if given.key == "model" else ""
        return f"{what}{did_you_mean(meant or None, otherwise)}{others}"

    def instead_of(self, given: Override) -> str:
        """As `meant`, with the value where it fits."""
        meant = self.meant(given)
        if given.key in self.choices and meant in schema.options(given.key):
            return f"{given.key}={meant}"
        if meant in self.keys:
            with suppress(ConfigError):
                parse_value(self.keys[meant], given.text)
                return shlex.quote(f"{meant}={shown(given.text)}")
        return meant

    def meant(self, given: Override) -> str:
        """The option, the key or the settings to write instead; why there is none, after `NOT_HERE`; or nothing."""
        key, owners = given.key, schema.all_keys(self.command)
        if key.startswith("-"):
            flag = answers("flags").get(key) or one_typo_away(key, self.flags)
            return flag or self.instead_of(Override(key.lstrip("-").replace("-", "_"), given.text))
        if key in self.choices:
            return self._option(key, given.text)
        if key in owners:
            return key if key in self.keys else f"{NOT_HERE}it belongs to {' and '.join(owners[key][1])}"
        parts = key.lower().replace("-", "_").split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts))]  # actor.optim.lr, optim.lr, lr
        table, names = answers("settings"), [*self.names, "recipe"]
        verbs = [c.verb for c in COMMANDS if key in (*schema.all_keys(c), *schema.groups_of(c.settings))]
        alike = [name for name in names if f".{name}".endswith(f".{ends[-1]}") or name.startswith(f"{key}.")]
        guesses = [
            *(table[part] for part in parts if table.get(part, "").startswith(NOT_HERE)),
            *(end for end in ends if end in self.names),
            *(self._in_our_words(table[end], given.text) for end in ends if end in table),
            *(f"{NOT_HERE}it belongs to rlpost {verb}" for verb in verbs),
            one_typo_away(key, names),
            " or ".join(dict.fromkeys(alike)),
            *(f"{NOT_HERE}other verbs have {table[end]} for it" for end in ends if end in table),
            nearest_key(key, names),
        ]
        return next(filter(None, guesses), "")

    def _in_our_words(self, other: str, text: str) -> str:
        """The first alternative of an answer to another tool's key that the command has; nothing if it has none."""
        value = "..." if text[:1] in ("", "[") else shown(text)
        for alternative in other.split(" | "):
            words, bracket, remark = alternative.partition(" (")
            ours = [each for each in words.split(" or ") if each[:2] == "--" or each.partition("=")[0] in self.names]
            if ours or alternative.startswith(NOT_HERE):
                return (" or ".join(ours) or words).replace("{}", value) + bracket + remark
        return ""

    def _option(self, group: str, text: str) -> str:
        """The option of `group` to write instead of an unknown one; or settings, a reason or nothing as in `meant`."""
        known = schema.options(group, self.command)
        if text in schema.options(group):
            verbs = [f"rlpost {each.verb}" for each in schema.commands_of(group, text)]
            return text if text in known else f"{NOT_HERE}it is for {', '.join(verbs)}"
        if "," in text:
            return f"{NOT_HERE}it takes one option; add -m to run the command once for each of several"
        if group == "env" and ("/" in text or text.endswith((*DATA_FILES, ".py"))):
            return f"plugin={shown(text)} env=NAME" if text.endswith(".py") else f"env=dataset env.path={shown(text)}"
        words = {name: name for name in known}
        words |= {word: meant for word, meant in answers("options").items() if meant in known or "=" in meant}
        begun = max((word for word in words if len(word) > 3 and text.lower().startswith(word)), key=len, default="")
        return words.get(text.lower()) or one_typo_away(text, known) or words.get(begun) or nearest(text, known) or ""
