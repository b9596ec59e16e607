"""Why a key or an option is unknown, and which one was probably meant."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config import schema
from rlpost.config.other_words import NOT_HERE, answers, ends_of, meant_by
from rlpost.config.overrides import Override, error_at, parse_value, shown
from rlpost.config.paths import DATA_FILES, HUB_ID, RUNS
from rlpost.errors import ConfigError
from rlpost.text import did_you_mean, nearest, nearest_key, one_typo_away

NOT_KNOWN = "not known here"
_QUALIFIED = 2  # a key is named with its options if there are at most this many


@dataclass(frozen=True)
class Vocabulary:
    """The words that `command` takes where each group has the option of `choices`, and so the settings of `keys`."""

    command: Command[Any]
    keys: Mapping[str, schema.Key]
    choices: Mapping[str, str]

    @classmethod
    def by_default(cls, command: Command[Any]) -> Vocabulary:
        """The words of `command` where nothing is chosen."""
        choices = schema.default_choices(command)
        classes = {group: kind for group, option in choices.items() if (kind := schema.class_of(group, option))}
        return cls(command, schema.keys_under(command, classes), choices)

    @cached_property
    def everywhere(self) -> dict[str, list[str]]:
        """The keys under any choices, each with the options that have it."""
        return schema.all_keys(self.command)

    @cached_property
    def names(self) -> list[str]:
        """All keys and groups; the keys that the chosen options have come first."""
        return [*self.keys, *schema.groups_of(self.command.settings), *self.everywhere]

    def refusal(self, unknown: Sequence[Override], before: str = "") -> ConfigError:
        """The error for unknown settings and options: one, or all at once in a message begun by `before`."""
        if len(unknown) > 1 or before:
            return ConfigError(several([(each, self.instead_of(each)) for each in unknown], self.command, before))
        [one] = unknown
        return error_at(one, self.wrong_option(one) if one.key in self.choices else self.unknown_key(one))

    def unknown_key(self, override: Override) -> str:
        """The message for a key that is none of `keys`."""
        what, reason, meant = self.unknown(override)
        otherwise = "" if reason else f"see rlpost config show {self.command.verb}"
        why = f": {reason.removeprefix(NOT_HERE)}" if reason else ""
        return f"{shown(override.key)} {what}{why}{did_you_mean(meant, otherwise)}"

    def wrong_option(self, override: Override) -> str:
        """The message for an option that the command cannot choose: it belongs to others, or nobody has it."""
        known = schema.options(override.key, self.command)
        if override.text not in schema.options(override.key):
            return unknown_option(override, known)
        others = ", ".join(f"rlpost {other.verb}" for other in schema.commands_of(override.key, override.text))
        return f"{override} is for {others}; rlpost {self.command.verb} takes one of {', '.join(known)}"

    def instead_of(self, override: Override) -> str:
        """One row of a list: the setting to write instead of an unknown one, or why rlpost has none."""
        if override.key in self.choices:
            return self.wrong_option(override).removeprefix(f"{override} ").removeprefix("is unknown; ")
        if override.text == schema.NULL:
            return "leave it out, it has no value"
        _, reason, meant = self.unknown(override)
        return self.written(meant, override) if meant else reason or NOT_KNOWN

    def equivalent_setting(self, override: Override) -> str | None:
        """The setting for one of another tool, or for rlpost's own in another group; None if there is none.

        `optim.lr` for `actor.optim.lr`, `tracking=wandb` for `report_to=wandb`, `sampling.temperature` for
        `loss.temperature`. Begins with `NOT_HERE` if rlpost has nothing of the kind.
        """
        *dotted, last = ends_of(override.key)
        meant = meant_by(override.key) or ""
        if meant.startswith(NOT_HERE):
            return meant
        if end := next((end for end in dotted[1:] if end in self.names), None):
            return end
        is_exact = any(end in answers("settings") for end in dotted) or self._option(override.text, meant)
        if not is_exact and (named := _of_that_name(last, self.names, least=1)):
            return named
        for alternative in meant.split(" | "):
            if alternative.startswith(NOT_HERE):
                return alternative
            names, bracket, remark = alternative.partition(" (")
            words = [word for word in names.split() if word.partition("=")[0] in self.names or self._is_flag(word)]
            if len(words) > 1:  # with its meaning, each tells itself from the others
                docs = schema.docs_of(self.command.settings)
                choices = [f"{word} ({docs[word].partition(';')[0]})" if word in docs else word for word in words]
                return " or ".join([", ".join(choices[:-1]), choices[-1]])
            if words:
                return f"{self._with_value(words[0], override.text)}{bracket}{remark}"
        return None

    def unknown(self, override: Override) -> tuple[str, str, str | None]:
        """For an unknown key: the complaint, its reason if known, and a suggested key or None."""
        key, nothing = override.key, f"is not a setting of rlpost {self.command.verb}"
        if inside := [name for name in self.keys if name.startswith(f"{key}.")]:
            values = {name: self.keys[name].choices for name in inside} | {f"{key}.enabled": ["true", "false"]}
            takes = [name for name in inside if override.text in values[name]]
            meant = f"{takes[0]}={override.text}" if len(takes) == 1 else None
            return "is a group of settings", f"set {', '.join(inside)}", meant
        if key == "recipe":
            return "is not a setting but a file of them", "rlpost config list prints the recipes", None
        if owners := self.everywhere.get(key):
            group = key.partition(".")[0]
            return f"is not a setting of {group}={self.choices[group]}", f"it belongs to {' and '.join(owners)}", None
        equivalent = self.equivalent_setting(override)
        if equivalent is not None and equivalent.startswith(NOT_HERE):
            return nothing, equivalent, None
        for other in COMMANDS:
            if key in schema.all_keys(other) or key in schema.groups_of(other.settings):
                return nothing, f"it belongs to rlpost {other.verb}", equivalent
        candidates = [*self.names, "recipe"]
        near = _of_that_name(key, candidates) or one_typo_away(key, candidates) or equivalent
        if near is None and meant_by(key):
            for other in COMMANDS:
                if elsewhere := Vocabulary.by_default(other).equivalent_setting(override):
                    return nothing, f"{NOT_HERE}{elsewhere} belongs to rlpost {other.verb}", None
        return nothing, "", near or nearest_key(key, candidates)

    def written(self, meant: str, override: Override) -> str:
        """The suggested word, with the given value if the suggested key accepts it; in a file as lines of it."""
        name, equals, _ = meant.partition("=")
        if equals and override.text == "false":  # lora.enabled=false of use_peft=false
            meant = name
        if (key := self.keys.get(meant)) is not None and override.text:
            with suppress(ConfigError):
                parse_value(key, override.text)
                meant = f"{meant}={shown(override.text)}"
                if not override.source:
                    return shlex.quote(meant)
        if override.source and meant.startswith("--"):
            return f"{meant}, on the command line"
        words = meant.split()
        if not override.source or not all("=" in word for word in words):
            return meant
        return ", ".join(word.replace("=", ": ", 1) for word in words)

    def _with_value(self, word: str, text: str) -> str:
        """A key or group as one types it: with the given option, or with the option that has the key."""
        is_file = text.endswith(DATA_FILES)
        if option := self._option(text, word):
            return f"{word}={option}"
        if (word == "env.path" and word not in self.keys) or (word == "env" and is_file):
            return f"env=dataset env.path={shown(text) if is_file or HUB_ID.fullmatch(text) else 'FILE'}"
        owners = self.everywhere.get(word, [])
        if owners and word not in self.keys and len(owners) <= _QUALIFIED:
            return f"{word} of {' or '.join(owners)}"
        return word

    def _option(self, text: str, group: str) -> str | None:
        """The option of a group that has this name here or in another tool; None where `group` is none."""
        known = schema.options(group, self.command) if group in self.choices else []
        return next((name for name in (text, answers("options").get(text.lower())) if name in known), None)

    def _is_flag(self, word: str) -> bool:
        return word in ("--out", "--name") or (word == "--resume" and self.command.verb.startswith("train "))


def unknown_option(override: Override, known: Sequence[str]) -> str:
    """The message for an option that no command has."""
    return f"{override.key}={shown(override.text)} is unknown{_instead_of_option(override.key, override.text, known)}"


def several(rows: Sequence[tuple[Override, str]], command: Command[Any], before: str = "") -> str:
    """The message for several unknown words: each with its answer and, in a file, its line number.

    The message begins with `before`, or with the file if `before` is empty.
    """
    groups = schema.groups_of(command.settings)
    file = next((override.source.rpartition(", line ")[0] for override, _ in rows if override.source), "")
    names = [str(override) if override.key in groups else shown(override.key) for override, _ in rows]
    lines = [override.source.rpartition(", ")[2] for override, _ in rows]
    width, of_line = max(map(len, names)), max(map(len, lines))
    answered = [
        f"  {line:<{of_line}}{'  ' if of_line else ''}{name:<{width}}  {answer}"
        for line, name, (_, answer) in zip(lines, names, rows, strict=True)
    ]
    begin = before or (f"{file}: " if file else "")
    header = f"{begin}rlpost {command.verb} does not know {len(rows)} of these settings; write instead:"
    return "\n".join([header, *answered, f"rlpost config explain {command.verb} prints every setting"])


def _instead_of_option(group: str, text: str, known: Sequence[str]) -> str:
    """The rest of the message about an option that nobody has: the one meant, or why there is nothing of the kind."""
    near, one_of = _near_option(text, known), f"it is one of {', '.join(known)}"
    answer = answers("options").get(text.lower(), "")
    if text.startswith("["):
        return "; it takes one option, not a list"
    if "," in text:
        return "; it takes one option: add -m to run the command once for each of several"
    if group == "loss" and answer.startswith(NOT_HERE):
        return f": {answer.removeprefix(NOT_HERE)}; {one_of}"
    if group == "env" and text.endswith(".py"):
        return f"; write plugin={shown(text)} env=NAME"
    if group == "env" and text.endswith(DATA_FILES):
        return f"; write env=dataset env.path={shown(text)}"
    if group == "env" and "/" in text:
        named = _near_option(text.rpartition("/")[2], known)
        return did_you_mean(f"{f'env={named} or ' if named else ''}env=dataset env.path={shown(text)}")
    if group != "model":
        return did_you_mean(near, one_of)
    if text and (RUNS / text).is_dir():
        return did_you_mean(f"model={RUNS / text}")
    models = answers("models")
    family = max((name for name in models if text.lower().startswith(name)), key=len, default=None)
    is_typo = near is not None and "-" in near and SequenceMatcher(None, text.lower(), near).ratio() > 0.8
    meant = f"model.path={models[family]}" if family and not is_typo and answer not in known else near
    return f"{did_you_mean(meant, one_of)} (any other: model.path=OWNER/NAME of the hub, or a folder)"


def _near_option(text: str, known: Sequence[str]) -> str | None:
    """The option that was probably meant: misspelt, named so in another tool, or longer than ours, qwen3 for qwen."""
    lowered = text.lower()
    other = answers("options").get(lowered)
    begun = max((name for name in known if lowered.startswith(name)), key=len, default=None)
    return (other if other in known else None) or one_typo_away(text, known) or begun or nearest(text, known)


def _of_that_name(word: str, keys: Sequence[str], least: int = 2) -> str | None:
    """The keys whose last part is `word`, if there are `least` of them: `model.path or env.path` for `path`."""
    named = list(dict.fromkeys(key for key in keys if f".{key}".endswith(f".{word}")))
    return " or ".join(named) if len(named) >= least else None
