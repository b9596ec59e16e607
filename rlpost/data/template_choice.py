"""The chat template of a model, its own or a chosen one, and the values of its variables.

Both are written into the tokenizer, so everything that uses the tokenizer renders alike, and a checkpoint
saved with it has them too. The values become defaults of the template's variables, which later users of the
checkpoint can still override.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlpost.data.chat import end_of_turn
from rlpost.data.rendering import render, set_day, template_name
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded
from rlpost.text import did_you_mean, nearest

TEMPLATE_KEY, VARIABLES_KEY = "model.chat_template", "model.chat_template_kwargs"
PLAIN = "plain"  # for a tokenizer whose only special token is eos_token
GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
THINKING_TOKENS = 1024  # fewer seldom hold both the thinking and the answer
_FILE_ENDINGS = (".jinja", ".jinja2", ".j2")
_QUESTION = [{"role": "user", "content": "2 + 2?"}]


def named_template(name: str) -> str:
    """The template that `model.chat_template` names: a known format, or a jinja file.

    Raises ConfigError for an unknown name, and for a file that is unreadable or not a template.
    """
    if not (name.endswith(_FILE_ENDINGS) or "/" in name):
        from rlpost.data.chat_templates import TEMPLATES, jinja

        if name == PLAIN:
            return jinja(PLAIN)
        if name in TEMPLATES:
            return TEMPLATES[name].template
        known = [PLAIN, *sorted(TEMPLATES)]
        hint = did_you_mean(nearest(name, known))
        raise ConfigError(f"{TEMPLATE_KEY}={name} is unknown: it is one of {', '.join(known)}, or a FILE.jinja{hint}")
    try:
        text = expanded(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or not a path
        raise ConfigError(f"{TEMPLATE_KEY}={name} cannot be read: {error}") from error
    try:
        variables_read(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{TEMPLATE_KEY}={name}, line {error.lineno}: {error.message}") from error
    return text


def templates_of(tokenizer: Any) -> list[str]:
    """The chat templates of a tokenizer: several, one or none."""
    own = tokenizer.chat_template
    return [*own.values()] if isinstance(own, dict) else [own] if own else []


def with_choice(tokenizer: Any, name: str | None, variables: Mapping[str, Any], day: str | None = None) -> Any:
    """`tokenizer` with the template `name` (None: its own) and `variables` as that template's defaults.

    The template writes `day` (None: the current one) as today; a saved tokenizer does not keep it.
    Raises ConfigError for a name that `named_template` refuses, for a format whose end-of-turn token the
    tokenizer lacks, and for a variable that the template does not read.
    """
    if name is None and not variables and day is None:
        return tokenizer
    chosen = copy.copy(tokenizer)
    if day is not None:
        set_day(chosen, day)
    if name is not None:
        _give_template(chosen, name)
    if variables and chosen.chat_template:
        own = chosen.chat_template
        read = set().union(*map(variables_read, templates_of(chosen)))
        for variable in variables:
            if variable not in read:
                raise ConfigError(
                    f"{VARIABLES_KEY}: {template_name(chosen)} does not read {variable}"
                    f"{did_you_mean(nearest(variable, read), 'leave it out')}"
                )
        filled = [with_defaults(template, variables) for template in templates_of(chosen)]
        chosen.chat_template = dict(zip(own, filled, strict=True)) if isinstance(own, dict) else filled[0]
    return chosen


def with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """`template` with defaults for `variables`; the latest defaults win."""
    head = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in variables.items()
    )
    head += "\n"  # trim_blocks removes it, so the template begins on a line of its own
    return template if template.startswith(head) else head + template


def variables_read(template: str) -> set[str]:
    """The variables that a template reads. Raises TemplateSyntaxError if it is malformed."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return meta.find_undeclared_variables(environment.parse(GENERATION_TAGS.sub("", template)))


def not_read(tokenizer: Any, variables: Mapping[str, Any] | None) -> list[str]:
    """A note for each of a row's variables that no chat template of the tokenizer reads."""
    if not variables:
        return []
    read = set().union(*map(variables_read, templates_of(tokenizer)))
    by = f"which {template_name(tokenizer)} does not read"
    return [f"not used: {name} of chat_template_kwargs, {by}" for name in variables if name not in read]


def thinking_cut_short(tokenizer: Any, tokens: int, key: str) -> str | None:
    """A warning if the model thinks before it answers and `tokens`, the value of `key`, are too few; else None."""
    if tokens >= THINKING_TOKENS or not tokenizer.chat_template:
        return None
    try:
        text = render(tokenizer, _QUESTION, add_generation_prompt=True)
        on, off = (
            render(tokenizer, _QUESTION, add_generation_prompt=True, variables={"enable_thinking": value})
            for value in (True, False)
        )
    except DataError:
        return None  # the error is raised where a question is asked
    is_switchable = on != off
    if not (is_switchable and text == on) and text.rfind("<think>") <= text.rfind("</think>"):
        return None
    remedy = f"add {VARIABLES_KEY}={{enable_thinking:false}}, or give" if is_switchable else "give"
    return (
        f"with {template_name(tokenizer)} the model thinks before it answers, and {key}={tokens} will often cut it off "
        f"in its thoughts: {remedy} {key} {THINKING_TOKENS} or more"
    )


def _give_template(tokenizer: Any, name: str) -> None:
    template = named_template(name)
    if tokenizer.bos_token and "bos_token" not in template and tokenizer.bos_token not in template:
        begun = tokenizer("")["input_ids"]
        if begun[:1] == [tokenizer.bos_token_id]:  # the template has to write the bos token
            template = "{{- bos_token -}}" + template
    tokenizer.chat_template = template
    if end_of_turn(tokenizer) is None:
        plain = f"take {TEMPLATE_KEY}={PLAIN}, which ends one with the eos_token"
        raise ConfigError(
            f"{TEMPLATE_KEY}={name} ends a turn with no special token that the tokenizer has: "
            + ("give it an eos_token" if name == PLAIN else plain)
        )


def _literal(value: Any) -> str:
    """`value` as a jinja literal: JSON, except for null."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
