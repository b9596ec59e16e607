"""Why a key or an option is unknown, and which one was probably meant."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config import comments, schema
from rlpost.config.other_words import NOT_HERE, answers, ends_of, meant_by
from rlpost.config.overrides import Override, parse_value, shown
from rlpost.config.paths import DATA_FILES, HUB_ID, RUNS
from rlpost.errors import ConfigError
from rlpost.text import did_you_mean, nearest, nearest_key, one_typo_away

NOT_KNOWN = "not known here"
_QUALIFIED = 2  # a key is named with its options if there are at most this many


def unknown_key(
    override: Override, command: Command[Any], keys: Mapping[str, schema.Key], choices: Mapping[str, str]
) -> str:
    """The message for a key that is not in `keys`, under the present choices."""
    what, reason, meant = _unknown(override, command, keys, choices)
    otherwise = "" if reason else f"see rlpost config show {command.verb}"
    why = f": {reason.removeprefix(NOT_HERE)}" if reason else ""
    return f"{shown(override.key)} {what}{why}{did_you_mean(meant, otherwise)}"


def wrong_option(override: Override, command: Command[Any]) -> str:
    """The message for an option that `command` cannot choose: it belongs to other commands, or nobody has it."""
    known = schema.options(override.key, command)
    if override.text not in schema.options(override.key):
        return unknown_option(override, known)
    others = ", ".join(f"rlpost {other.verb}" for other in schema.commands_of(override.key, override.text))
    return f"{override} is for {others}; rlpost {command.verb} takes one of {', '.join(known)}"


def unknown_option(override: Override, known: Sequence[str]) -> str:
    """The message for an option that no command has."""
    return f"{override.key}={shown(override.text)} is unknown{_instead_of_option(override.key, override.text, known)}"


def _instead_of_option(group: str, text: str, known: Sequence[str]) -> str:
    """The end of that message: what to write, or why there is nothing of the kind."""
    near, one_of = _near_option(text, known), f"it is one of {', '.join(known)}"
    answer = answers("options").get(text.lower(), "")
    if text.startswith("["):
        return "; it takes one option, not a list"
    if "," in text:
        return "; it takes one option: add -m to run the command once for each of several"
    if answer.startswith(NOT_HERE):
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


def several(rows: Sequence[tuple[Override, str]], command: Command[Any], before: str = "") -> str:
    """The message for several unknown words: each with its answer and, in a file, its line number.

    The message begins with `before`, or with the file if `before` is empty.
    """
    groups = schema.groups_of(command.settings)
    file = next((override.source.rpartition(", line ")[0] for override, _ in rows if override.source), "")
    names = [str(override) if override.key in groups else shown(override.key) for override, _ in rows]
    lines = [override.source.rpartition(", ")[2] for override, _ in rows]
    width, of_line = max(map(len, names)), max(map(len, lines))
    begin = before or (f"{file}: " if file else "")
    return "\n".join(
        [
            f"{begin}rlpost {command.verb} does not know {len(rows)} of these settings; write instead:",
            *(
                f"  {line:<{of_line}}{'  ' if of_line else ''}{name:<{width}}  {answer}"
                for line, name, (_, answer) in zip(lines, names, rows, strict=True)
            ),
            f"rlpost config explain {command.verb} prints every setting",
        ]
    )


def instead_of(
    override: Override, command: Command[Any], keys: Mapping[str, schema.Key], choices: Mapping[str, str]
) -> str:
    """One row of a list: the setting to write instead of an unknown key, or why rlpost has none."""
    if override.text == schema.NULL:
        return "leave it out, it has no value"
    _, reason, meant = _unknown(override, command, keys, choices)
    return _written(meant, override, keys) if meant else reason or NOT_KNOWN


def equivalent_setting(override: Override, command: Command[Any], keys: Sequence[str]) -> str | None:
    """The setting of `command` for one of another tool, or for rlpost's own in another group; None if there is none.

    `optim.lr` for `actor.optim.lr`, `tracking=wandb` for `report_to=wandb`, `sampling.temperature` for
    `loss.temperature`. Begins with `NOT_HERE` if rlpost has nothing of the kind.
    """
    groups, everywhere = schema.groups_of(command.settings), schema.all_keys(command)
    known = [*keys, *groups, *everywhere]
    *dotted, last = ends_of(override.key)
    meant = meant_by(override.key) or ""
    if meant.startswith(NOT_HERE):
        return meant
    if end := next((end for end in dotted[1:] if end in known), None):
        return end
    is_exact = any(end in answers("settings") for end in dotted) or (
        meant in groups and _option(override.text, meant, command)
    )
    if not is_exact and (named := _of_that_name(last, known, least=1)):
        return named
    for alternative in meant.split(" | "):
        if alternative.startswith(NOT_HERE):
            return alternative
        names, bracket, remark = alternative.partition(" (")
        words = [word for word in names.split() if word.partition("=")[0] in known or _is_flag_of(word, command)]
        if len(words) > 1:  # with its meaning, each tells itself from the others
            docs = comments.docs_of(command.settings)
            choices = [f"{word} ({docs[word].partition(';')[0]})" if word in docs else word for word in words]
            return " or ".join([", ".join(choices[:-1]), choices[-1]])
        if words:
            one = _with_value(words[0], override.text, command, everywhere.get(words[0], []), words[0] in keys)
            return f"{one}{bracket}{remark}"
    return None


def keys_by_default(command: Command[Any]) -> tuple[dict[str, schema.Key], dict[str, str]]:
    """The keys of `command` under its default choices, and those choices."""
    choices = schema.default_choices(command)
    classes = {group: cls for group, option in choices.items() if (cls := schema.class_of(group, option)) is not None}
    return schema.keys_under(command, classes), choices


def _unknown(
    override: Override, command: Command[Any], keys: Mapping[str, schema.Key], choices: Mapping[str, str]
) -> tuple[str, str, str | None]:
    """For an unknown key: the complaint, its reason if known, and a suggested key or None."""
    verb = f"rlpost {command.verb}"
    nothing = f"is not a setting of {verb}"
    inside = [key for key in keys if key.startswith(f"{override.key}.")]
    if inside:
        switch = f"{override.key}.enabled"
        values = {switch: ["true", "false"]} | {key: keys[key].choices for key in inside if keys[key].choices}
        takes = [key for key in inside if override.text in values.get(key, [])]
        meant = f"{takes[0]}={override.text}" if len(takes) == 1 else None
        return "is a group of settings", f"set {', '.join(inside)}", meant
    if override.key == "recipe":
        return "is not a setting but a file of them", "rlpost config list prints the recipes", None
    everywhere = schema.all_keys(command)
    if owners := everywhere.get(override.key):
        group = override.key.partition(".")[0]
        return f"is not a setting of {group}={choices[group]}", f"it belongs to {' and '.join(owners)}", None
    equivalent = equivalent_setting(override, command, list(keys))
    if equivalent is not None and equivalent.startswith(NOT_HERE):
        return nothing, equivalent, None
    for other in COMMANDS:
        if override.key in schema.all_keys(other) or override.key in schema.groups_of(other.settings):
            return nothing, f"it belongs to rlpost {other.verb}", equivalent
    candidates = [*keys, *schema.groups_of(command.settings), "recipe", *everywhere]
    near = _of_that_name(override.key, candidates) or one_typo_away(override.key, candidates) or equivalent
    if near is None and meant_by(override.key):
        for other in COMMANDS:
            if elsewhere := equivalent_setting(override, other, list(schema.all_keys(other))):
                return nothing, f"{NOT_HERE}{elsewhere} belongs to rlpost {other.verb}", None
    return nothing, "", near or nearest_key(override.key, candidates)


def _written(meant: str, override: Override, keys: Mapping[str, schema.Key]) -> str:
    """The suggested word, with the given value if the suggested key accepts it."""
    name, equals, _ = meant.partition("=")
    if equals and override.text == "false":  # lora.enabled=false of use_peft=false
        meant = name
    key = keys.get(meant)
    if key is not None and override.text:
        with suppress(ConfigError):
            parse_value(key, override.text)
            meant = f"{meant}={shown(override.text)}"
            if not override.source:
                return shlex.quote(meant)
    if not override.source:
        return meant
    words = meant.split()  # as lines of a file
    if meant.startswith("--"):
        return f"{meant}, on the command line"
    return ", ".join(word.replace("=", ": ", 1) for word in words) if all("=" in word for word in words) else meant


def _is_flag_of(word: str, command: Command[Any]) -> bool:
    return word in ("--out", "--name") or (word == "--resume" and command.verb.startswith("train "))


def _with_value(word: str, text: str, command: Command[Any], owners: Sequence[str], is_key: bool) -> str:
    """A key or group as one types it: with the given option, or with the option that has the key."""
    is_file = text.endswith(DATA_FILES)
    if word in schema.groups_of(command.settings) and (option := _option(text, word, command)):
        return f"{word}={option}"
    if (word == "env.path" and not is_key) or (word == "env" and is_file):
        return f"env=dataset env.path={shown(text) if is_file or HUB_ID.fullmatch(text) else 'FILE'}"
    if owners and not is_key and len(owners) <= _QUALIFIED:
        return f"{word} of {' or '.join(owners)}"
    return word


def _option(text: str, group: str, command: Command[Any]) -> str | None:
    """The option of a group that has this name here or in another tool."""
    return next(
        (name for name in (text, answers("options").get(text.lower())) if name in schema.options(group, command)), None
    )


def _of_that_name(word: str, keys: Sequence[str], least: int = 2) -> str | None:
    """The keys whose last part is `word`, if there are `least` of them: `model.path or env.path` for `path`."""
    named = list(dict.fromkeys(key for key in keys if f".{key}".endswith(f".{word}")))
    return " or ".join(named) if len(named) >= least else None


def _near_option(text: str, known: Sequence[str]) -> str | None:
    """The option that was probably meant: misspelt, named so in another tool, or longer than ours, qwen3 for qwen."""
    lowered = text.lower()
    other = answers("options").get(lowered)
    begun = max((name for name in known if lowered.startswith(name)), key=len, default=None)
    return (other if other in known else None) or one_typo_away(text, known) or begun or nearest(text, known)
