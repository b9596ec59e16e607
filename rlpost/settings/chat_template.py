"""What a chat template is told beside the messages: a mapping, written as text so that any road can carry it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rlpost.errors import ConfigError
from rlpost.folding import shortened

# what a template is always told, what rendering itself takes, and what jinja calls something else
TAKEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "bos_token", "eos_token"}
    | {"true", "false", "none", "null", "True", "False", "None", "not", "and", "or", "in", "is", "if", "else", "loop"}
)
_MOST_SHOWN = 60  # columns of what somebody wrote
_MOST_LEVELS = 100  # of lists and mappings within each other: what reads and writes them calls itself for each
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_QUOTED_OR_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|(?<![\w.])[A-Za-z_][\w.-]*""")  # not the e of 1e3
_JSON_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def template_variables(key: str, text: str | None) -> dict[str, Any]:
    """The mapping that `text`, the value of `key`, writes as JSON, quotes left out or not: `{enable_thinking: false}`.

    Raises ConfigError for what is no mapping of names to plain values.
    """
    if text is None or not text.strip():
        return {}
    try:
        read = json.loads(_QUOTED_OR_WORD.sub(_as_json, text))
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ConfigError(
            f"{key}={shortened(text, _MOST_SHOWN)} is no mapping: write names and values, as in "
            f"{key}={{enable_thinking: false}}"
        )
    for name, value in read.items():
        if not _NAME.fullmatch(name) or name in TAKEN:
            shown = shortened(repr(name), _MOST_SHOWN)
            raise ConfigError(f"{key}: {shown} cannot be told to a chat template: leave it out")
        if (wrong := _wrong_with(value)) is not None:
            raise ConfigError(f"{key}: {shortened(name, _MOST_SHOWN)} {wrong}")
    return read


def _wrong_with(value: Any) -> str | None:
    """Why a template cannot be told a value, at any depth of it; None where it can."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        for each in level:
            if isinstance(each, float) and not math.isfinite(each):
                return f"holds {each}: every number in it must be finite"
        holding = [each for each in level if isinstance(each, list | dict)]
        if not holding:
            return None
        level = [inner for each in holding for inner in (each.values() if isinstance(each, dict) else each)]
    return f"is nested too deep ({_MOST_LEVELS} levels at most): flatten it"


def _as_json(found: re.Match[str]) -> str:
    word = found[0]
    if word.startswith("'"):
        return json.dumps(word[1:-1])
    return word if word.startswith('"') else _JSON_WORDS.get(word.lower()) or json.dumps(word)
