"""Why a key or an option is unknown, and which one was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config.keys import Key, docs_of, groups_of
from rlpost.config.other_words import KEYS, NO_PREFERENCES, OPTIONS, PREFERENCES, ends_of, meant_by, not_here
from rlpost.config.overrides import Override, shown
from rlpost.config.paths import DATA_FILES
from rlpost.config.registry import all_keys, commands_of, options
from rlpost.nearest import did_you_mean, nearest, nearest_key, one_typo_away

QUALIFIED = 2  # options that have a key are named with it, unless they are more


def unknown_key(override: Override, command: Command[Any], keys: Mapping[str, Key], choices: Mapping[str, str]) -> str:
    """The message for a key that is none of `keys` under the present choices."""
    name = shown(override.key)
    verb = f"rlpost {command.verb}"
    inside = [key for key in keys if key.startswith(f"{override.key}.")]
    if inside:
        switch = f"{override.key}.enabled"
        values = {switch: ["true", "false"]} | {key: keys[key].choices for key in inside if keys[key].choices}
        takes = [key for key in inside if override.text in values.get(key, [])]
        meant = f"{takes[0]}={override.text}" if len(takes) == 1 else None
        return f"{name} is a group of settings: set {', '.join(inside)}{did_you_mean(meant)}"
    if override.key == "recipe":
        return "recipe is no setting but a file of them: rlpost config list prints those there are"
    everywhere = all_keys(command)
    if owners := everywhere.get(override.key):
        group = override.key.partition(".")[0]
        return f"{name} is no setting of {group}={choices[group]}: it belongs to {' and '.join(owners)}"
    said_here = said_as(override, command, list(keys))
    for other in COMMANDS:
        if override.key in all_keys(other) or override.key in groups_of(other.settings):
            return f"{name} is no setting of {verb}: it belongs to rlpost {other.verb}{did_you_mean(said_here)}"
    if reason := not_here(override.key):
        return f"{name} is no setting of {verb}: {reason}"
    candidates = [*keys, *groups_of(command.settings), "recipe", *everywhere]
    near = _of_that_name(override.key, candidates) or one_typo_away(override.key, candidates) or said_here
    near = near or nearest_key(override.key, candidates)
    return f"{name} is no setting of {verb}{did_you_mean(near, f'see rlpost config show {command.verb}')}"


def said_as(override: Override, command: Command[Any], keys: Sequence[str]) -> str | None:
    """How a setting of another tool, or one of rlpost's own behind another group, is said to `command`; else None.

    `optim.lr` for `actor.optim.lr`, `tracking=wandb` for `report_to=wandb`, `sampling.temperature` for
    `loss.temperature`.
    """
    groups, everywhere = groups_of(command.settings), all_keys(command)
    known = [*keys, *groups, *everywhere]
    *dotted, last = ends_of(override.key)
    if end := next((end for end in dotted[1:] if end in known), None):
        return end
    meant = meant_by(override.key)
    is_exact = any(end in KEYS for end in dotted) or (meant in groups and _option(override.text, meant, command))
    if not is_exact and (named := _of_that_name(last, known, least=1)):
        return named
    for alternative in (meant or "").split("|"):
        words = [word for word in alternative.split() if word.partition("=")[0] in known or _is_flag_of(word, command)]
        if len(words) > 1:  # several are told apart by the words beside them
            docs = docs_of(command.settings)
            told = [f"{word} ({docs[word].partition(';')[0]})" if word in docs else word for word in words]
            return " or ".join([", ".join(told[:-1]), told[-1]])
        if words:
            return _with_value(words[0], override.text, command, everywhere.get(words[0], []), words[0] in keys)
    return None


def _is_flag_of(word: str, command: Command[Any]) -> bool:
    return word in ("--out", "--name") or (word == "--resume" and command.verb.startswith("train "))


def _with_value(word: str, text: str, command: Command[Any], owners: Sequence[str], is_key: bool) -> str:
    """A key or group with what has to stand beside it: the option that was given, or the one that has the key."""
    is_file = text.endswith(DATA_FILES)
    if word in groups_of(command.settings) and (option := _option(text, word, command)):
        return f"{word}={option}"
    if (word == "env.path" and not is_key and is_file) or (word == "env" and is_file):
        return f"env=dataset env.path={shown(text)}"
    if owners and not is_key and len(owners) <= QUALIFIED:
        return f"{word} of {' or '.join(owners)}"
    return word


def _option(text: str, group: str, command: Command[Any]) -> str | None:
    """The option of a group that is called so here or elsewhere."""
    return next((name for name in (text, OPTIONS.get(text.lower())) if name in options(group, command)), None)


def _of_that_name(word: str, keys: Sequence[str], least: int = 2) -> str | None:
    """The keys whose last part is `word`, where there are `least` of them: `model.path or env.path` for `path`."""
    named = list(dict.fromkeys(key for key in keys if f".{key}".endswith(f".{word}")))
    return " or ".join(named) if len(named) >= least else None


def unknown_option(override: Override, known: Sequence[str]) -> str:
    """The message for a group option without a file in conf/."""
    text = override.text
    hint = did_you_mean(_near_option(text, known), f"it is one of {', '.join(known)}")
    if override.key == "model":
        hint += " (any other: model.path=OWNER/NAME of the hub, or a folder)"
        if (Path("runs") / text).is_dir() and text:
            hint = f"; did you mean model=runs/{text}?"
    if override.key == "loss" and text.lower() in PREFERENCES:
        hint = f": {NO_PREFERENCES}; it is one of {', '.join(known)}"
    if override.key == "env" and text.endswith((".py", *DATA_FILES)):
        own = f"plugin={shown(text)} env=NAME" if text.endswith(".py") else ""
        hint = f"; write {own or f'env=dataset env.path={shown(text)}'}"
    elif override.key == "env" and "/" in text:
        named = _near_option(text.rpartition("/")[2], known)
        hint = did_you_mean(
            " or ".join(filter(None, [named and f"env={named}", f"env=dataset env.path={shown(text)}"]))
        )
    if text.startswith("["):
        hint = "; it takes one option, not a list"
    elif "," in text:
        hint = "; it takes one option: add -m to run the command once for each of several"
    return f"{override.key}={shown(text)} is unknown{hint}"


def _near_option(text: str, known: Sequence[str]) -> str | None:
    """The option that is meant: misspelt, called so elsewhere, or the beginning of what was typed, qwen of qwen3."""
    lowered = text.lower()
    other = OPTIONS.get(lowered)
    begun = max((name for name in known if lowered.startswith(name)), key=len, default=None)
    return one_typo_away(text, known) or (other if other in known else begun or nearest(text, known))


def option_of_others(override: Override, command: Command[Any], known: Sequence[str]) -> str:
    """The message for a group option that other commands have."""
    others = " and ".join(f"rlpost {other.verb}" for other in commands_of(override.key, override.text))
    return f"{override} is for {others}; rlpost {command.verb} takes one of {', '.join(known)}"
