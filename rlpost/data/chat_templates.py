"""The chat formats that are known by name, and which one a tokenizer's conversations are written and read in.

Shipped are chatml, qwen (2.5 and 3), llama3, llama4, gemma (2 and 3), mistral (v7) and deepseek (V3,
R1). Each writes the published format, with two differences that let a text be read back exactly: a
message's content is written as it is, where some published templates strip it or take thinking out
of it, and no system message is added of its own accord. What describes the tools is rlpost's wording.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlpost.data.conversation import Message
from rlpost.data.templates import chatml, deepseek, gemma, jinja, llama, mistral
from rlpost.data.templates.parsing import UnparsedTextError
from rlpost.errors import ConfigError
from rlpost.nearest import did_you_mean, nearest


@runtime_checkable
class OneChat(Protocol):
    """A `History` of one chat."""

    def to_chats(self) -> list[list[Message]]:
        """Its messages, in a list of one."""
        ...


InverseParser = Callable[[str], Sequence[Mapping[str, Any]] | OneChat]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnknownTemplateError(ConfigError, NotImplementedError):
    """A chat template asked for by a name that none has, or one that cannot be read back."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat format: its jinja `template`, and `parse`, which reads a text of it back.

    `keywords` are what names of its tokenizers hold, in small letters; `marks` what a tokenizer's own
    template holds, all of them, where it writes this format.
    """

    name: str
    template: str
    parse: InverseParser | None = None
    keywords: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def _shipped(name: str, parse: InverseParser, keywords: tuple[str, ...], marks: tuple[str, ...]) -> ChatTemplate:
    return ChatTemplate(name, jinja(name), parse, keywords, marks)


# in the order of looking for keywords and marks: DeepSeek's distilled models are named after Qwen and
# Llama too, and ChatML's marks are those of everything that is built on it
_SHIPPED = (
    _shipped("deepseek", deepseek.parse_deepseek, ("deepseek",), ("<｜Assistant｜>",)),
    _shipped("llama4", llama.parse_llama4, ("llama-4", "llama4", "llama_4"), ("<|header_start|>", "<|eot|>")),
    _shipped("llama3", llama.parse_llama3, ("llama-3", "llama3", "llama_3"), ("<|start_header_id|>", "<|eot_id|>")),
    _shipped("gemma", gemma.parse_gemma, ("gemma",), ("<start_of_turn>",)),
    _shipped("mistral", mistral.parse_mistral, ("mistral", "ministral"), ("[INST]", "[/INST]")),
    _shipped("qwen", chatml.parse_qwen, ("qwen",), ("<|im_start|>", "<tool_call>")),
    _shipped("chatml", chatml.parse_chatml, ("chatml", "smollm"), ("<|im_start|>",)),
)
TEMPLATES: dict[str, ChatTemplate] = {each.name: each for each in _SHIPPED}


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: InverseParser | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Make a chat format known by `template_name`, to `History` and to all that renders with it.

    `inverse_parser` takes a text and returns its messages, as a list of dicts or a `History` of one
    chat: `History.from_text` reads with it. Tokenizers without a template of their own whose name
    holds one of `model_family_keywords` are given this one.

    Raises ConfigError (a ValueError) for a name that is taken, and for a template without
    `{% generation %}` and `{% endgeneration %}` around what the model says, the end of its turn
    included: they tell trainers built on transformers what to learn.
    """
    if template_name in TEMPLATES:
        raise ConfigError(f"there is a chat template {template_name!r} already: choose another name")
    if not _GENERATION.search(template):
        raise ConfigError(
            f"the chat template {template_name!r} has no {{% generation %}}: put it, and {{% endgeneration %}}, "
            "around what the model says and the end of its turn"
        )
    keywords = tuple(keyword.lower() for keyword in model_family_keywords or ())
    TEMPLATES[template_name] = ChatTemplate(template_name, template, inverse_parser, keywords)


def chat_template(name: str) -> ChatTemplate:
    """The format of that name. Raises UnknownTemplateError, with the nearest one, where there is none."""
    if name not in TEMPLATES:
        known, suggestion = ", ".join(sorted(TEMPLATES)), did_you_mean(nearest(name, TEMPLATES))
        raise UnknownTemplateError(f"no chat template is named {name!r}: known are {known}{suggestion}")
    return TEMPLATES[name]


def template_to_write(tokenizer: Any, template: str | None = None, name: str | None = None) -> str | None:
    """The jinja template to render with; None for the tokenizer's own.

    That is `template`, else the one named `name`, else the tokenizer's own, else the one a keyword of
    which the tokenizer's name holds (those added last come first), else ChatML.
    """
    if template is not None:
        return template
    if name is not None:
        return chat_template(name).template
    if getattr(tokenizer, "chat_template", None):
        return None
    return (_by_name(tokenizer) or TEMPLATES["chatml"]).template


def template_to_read(tokenizer: Any = None, name: str | None = None) -> ChatTemplate:
    """The format to read a text as.

    That is the one named `name`, else the one the marks of which stand in the tokenizer's own
    template, else the one a keyword of which the tokenizer's name holds, else ChatML.
    """
    if name is not None:
        return chat_template(name)
    own = str(getattr(tokenizer, "chat_template", None) or "")
    marked = next((t for t in TEMPLATES.values() if t.marks and all(mark in own for mark in t.marks)), None)
    return marked or _by_name(tokenizer) or TEMPLATES["chatml"]


def parse_chat(text: str, known: ChatTemplate) -> list[Message]:
    """The messages of a text in the format `known`.

    Raises UnknownTemplateError for a format without a parser, UnparsedTextError for a text that is
    no conversation of it.
    """
    if known.parse is None:
        raise UnknownTemplateError(f"the chat template {known.name!r} was added without an inverse_parser: give it one")
    try:
        parsed = known.parse(text)
    except UnparsedTextError as error:
        raise _unparsed(text, known, str(error)) from None
    chat = parsed.to_chats()[0] if isinstance(parsed, OneChat) else [dict(message) for message in parsed]
    if not chat:
        raise _unparsed(text, known, "its parser found no message")
    return chat


def _unparsed(text: str, known: ChatTemplate, reason: str) -> UnparsedTextError:
    quoted = repr(text[:60] + "..." if len(text) > 60 else text)
    return UnparsedTextError(
        f"{quoted} cannot be read as {known.name} messages: {reason}. Mostly the special tokens are missing: decode "
        "with skip_special_tokens=False, and keep the stop string in the output (include_stop_str_in_output=True)"
    )


def _by_name(tokenizer: Any) -> ChatTemplate | None:
    """The format whose keyword the name of the tokenizer holds, those added by users first, the last one first."""
    name = str(getattr(tokenizer, "name_or_path", "") or "").lower()
    added = [each for each in TEMPLATES.values() if each not in _SHIPPED]
    candidates = [*reversed(added), *_SHIPPED]
    return next((each for each in candidates if any(keyword in name for keyword in each.keywords)), None)
