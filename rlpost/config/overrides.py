"""The words `key=value` that a user types: read, refused with a reason, and turned into typed values."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.config.paths import DATA_FILES, GGUF, RUNS, as_model, is_run_folder
from rlpost.config.schema import NULL, Key, as_text, options, recipes
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.text import did_you_mean, nearest

# errors of the YAML readers: `!!int abc` is a ValueError, `!!bool abc` a KeyError, and so on
YAML_ERRORS = (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, KeyError, AttributeError, TypeError)

SEVERAL = "is several values; add -m to run the command once for each"


@dataclass(frozen=True)
class Override:
    """One setting as given: `text` is everything after the first `=`."""

    key: str
    text: str
    source: str = ""  # the recipe's file and line; empty for the command line

    def __str__(self) -> str:
        return f"{self.key}={shown(self.text)}"


def parse_words(words: Sequence[str]) -> list[Override]:
    """The overrides of a command line, the last of each key only.

    Raises ConfigError for a word that is not `key=value`.
    """
    overrides = [_parse_word(word, words[max(i - 1, 0) : i], words[i + 1 :]) for i, word in enumerate(words)]
    return list({override.key: override for override in overrides}.values())


def merge(recipe: Sequence[Override], given: Sequence[Override]) -> list[Override]:
    """The recipe's overrides and then the user's, which replace the recipe's of the same key.

    If the user chooses another option of a group than the recipe does (`env=arithmetic`), the recipe's
    settings of its own option (`env.path`) are dropped; choosing a model also drops the recipe's `model.path`.
    """
    replaced = {override.key: override.text for override in given}
    chosen = {override.key: override.text for override in recipe}
    left = {f"{key}." for key, text in replaced.items() if key in chosen and chosen[key] != text}
    if "model" in replaced and "model" not in chosen:
        replaced["model.path"] = ""
    kept = [o for o in recipe if o.key not in replaced and not o.key.startswith(tuple(left))]
    return [*kept, *given]


def parse_value(key: Key, text: str) -> Any:
    """Parse `text` as the value of `key`.

    A text value is taken literally, so that a path or a prompt needs no second pair of quotes; one pair
    around the whole value is removed, and JSON escapes work inside double quotes. A list is written in
    brackets, as JSON or in Hydra's grammar, which needs no quotes; a single value of it needs no brackets.
    Raises ConfigError for a value that does not fit the key's type.
    """
    if text.strip() == NULL:
        if not key.optional:
            raise ConfigError(f"{key.name}=null is refused: it takes {_wanted(key)}")
        return None
    if not key.is_list:
        return _one_value(key, text)
    if text.lstrip().startswith("["):
        return [_one_value(key, as_text(element)) for element in _elements(key, text)]
    if "," in text and _unquoted(text) == text:
        bracketed = shlex.quote(f"{key.name}=[{shown(text)}]")
        raise ConfigError(f"{key.name}={shown(text)} is several values; write {bracketed}")
    return [_one_value(key, text)]


def values_of(override: Override) -> list[str]:
    """The texts of a sweep's values for one setting: one, unless Hydra's grammar reads several.

    Raises ConfigError for values that cannot be read or are equal.
    """
    try:
        parsed = OverridesParser.create().parse_override(f"{override.key}={override.text}")
    except HydraException:
        if "," in override.text:
            raise ConfigError(f"{override} cannot be read as several values; write each of them in quotes") from None
        return [override.text]  # a text that needs no quotes in rlpost, or a mistake that composing explains
    if not parsed.is_sweep_override():
        return [override.text]
    values = list(parsed.sweep_string_iterator())
    if len(set(values)) < len(values):
        raise ConfigError(f"{override}: a value is given twice; remove one")
    return values


def shown(text: str, longest: int = 60) -> str:
    """A user's text on one line of an error message, shortened to `longest` characters."""
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= longest else f"{line[:longest]}..."


def as_model_path(override: Override) -> Override:
    """`model=runs/x` as `model.path=runs/x`, and x as runs/x where that is a run; any other override unchanged."""
    key, text = override.key, override.text
    if key not in ("model", "model.path", "teacher") or not text:
        return override
    path = "model.path" if key == "model" else key
    hidden = text in options("model") if key == "model" else expanded(text).exists()
    if is_run_folder(RUNS / text) and not hidden:
        return replace(override, key=path, text=str(RUNS / text))
    if key == "model" and ("/" in text or text.startswith((".", "~")) or text.endswith(GGUF)):
        return replace(override, key=path)
    return override


def _parse_word(word: str, before: Sequence[str], following: Sequence[str]) -> Override:
    key, equals, text = word.partition("=")
    bare = word.lstrip("-+~")
    if bare != word:
        raise ConfigError(f"{shown(word)}: settings are written without -, + and ~; write {shown(bare)}")
    if key and equals and key == key.strip() and text == text.lstrip():
        return Override(key, text)
    meant = None if equals else _as_setting(word)
    whole = " ".join([*before, word, *takewhile(lambda each: "=" not in each, following)])
    if "=" in "".join(before) and (meant is None or expanded(whole.partition("=")[2]).exists()):
        quoted = shown(shlex.quote(whole), longest=200)
        raise ConfigError(f"{shown(word)} is not a setting: quote a value with spaces; write {quoted}")
    hint = did_you_mean(meant) or " without spaces, as in steps=20"
    raise ConfigError(f"{shown(word)} is not a setting: settings are written key=value{hint}")


def _as_setting(word: str) -> str | None:
    """The setting that a bare word probably means: `model=qwen` for `qwen`, `recipe=my.yaml` for `my.yaml`."""
    verbs = {part for command in COMMANDS for part in command.verb.split()}
    if word in recipes() or word.endswith((".yaml", ".yml")):
        return f"recipe={word}"
    if word.endswith(DATA_FILES):
        return f"env=dataset env.path={word}"
    if word.endswith(".py"):
        return f"plugin={word}"
    if word.endswith(GGUF):
        return f"model={word}"
    if run := next((folder for folder in (expanded(word), RUNS / word) if is_run_folder(folder)), None):
        return f"model={as_model(run)}"
    return next((f"{group}={word}" for group in CHOICES if word in options(group) and word not in verbs), None)


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in ("'", '"'):
        if text[0] == '"':
            try:
                return json.loads(text, strict=False)
            except ValueError:  # a bare " or \ inside: remove the quotes and keep the rest
                return text[1:-1]
        return text[1:-1]
    return text


def _elements(key: Key, text: str) -> list[Any]:
    """The elements of a list in brackets."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        elements = OverridesParser.create().parse_override(f"{key.name}={text}").value()
    except HydraException:
        elements = None
    if not isinstance(elements, list):
        wrong = f"cannot be read: it takes {_wanted(key)}" if elements is None else SEVERAL
        raise ConfigError(f"{key.name}={shown(text)} {wrong}")
    return elements


def _one_value(key: Key, text: str) -> Any:
    """One value of the type of `key`'s elements."""
    kind, bare = key.element, _unquoted(text)
    if "${" in bare:
        raise ConfigError(f"{key.name}={shown(text)} is refused: a value cannot refer to another; write it out")
    if key.choices:
        if bare not in key.choices:
            hint = did_you_mean(nearest(bare, key.choices))
            raise ConfigError(f"{key.name}={shown(text)} is unknown: it is one of {', '.join(key.choices)}{hint}")
        return bare if kind is str else kind[bare]
    if kind is str:
        return bare
    try:
        return {"true": True, "false": False}[bare.lower()] if kind is bool else kind(bare)
    except (ValueError, KeyError):
        is_several = "," in bare and not bare.startswith("[")
        wrong = SEVERAL if is_several else f"is of the wrong type: it takes {_wanted(key)}"
        raise ConfigError(f"{key.name}={shown(text)} {wrong}") from None


def _wanted(key: Key) -> str:
    """The type of `key` with its article, as an error names it."""
    return key.type_name if key.type_name.startswith(("text", "true")) else f"a {key.type_name}"


def error_at(override: Override, message: str) -> ConfigError:
    """The error with the file and line of the override, if it is from a file."""
    return ConfigError(f"{override.source}: {message}" if override.source else message)
