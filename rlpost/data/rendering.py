"""Messages as a chat template reads them, and the text that it writes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from rlpost.data.content import ContentBase
from rlpost.data.conversation import Message
from rlpost.errors import DataError

_PROBE = "probe"
# what templates raise over messages that are not as they expect, besides their own complaints
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def is_processor(tokenizer: Any) -> bool:
    """Whether it is the processor of a model that reads more than text, which holds its tokenizer."""
    return getattr(tokenizer, "tokenizer", None) is not None


def tokenizer_name(tokenizer: Any) -> str:
    """What messages call `tokenizer`."""
    return Path(str(getattr(tokenizer, "name_or_path", "") or "")).name or type(tokenizer).__name__


def template_name(tokenizer: Any) -> str:
    """What messages call the chat template of `tokenizer`."""
    return f"the chat template of {tokenizer_name(tokenizer)}"


def template_messages(chat: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[Message]:
    """The messages in the form that chat templates know; `is_complete` stays for `render`.

    Each of a message's `tool_responses`, a text or the entries of a message, becomes a message of
    role "tool" behind it. Content of several parts becomes one text, or for a processor the parts'
    dicts. Raises DataError for a part that a tokenizer cannot render.
    """
    if all(isinstance(m.get("content"), str) and "tool_responses" not in m for m in chat):
        return [dict(m) for m in chat]
    takes_parts = is_processor(tokenizer)
    messages: list[Message] = []
    for number, message in enumerate(chat):
        shown = {name: value for name, value in message.items() if name != "tool_responses"}
        content = shown.get("content")
        if isinstance(content, list | tuple | ContentBase):
            shown["content"] = _parts(content, number) if takes_parts else _text(content, number)
        responses = message.get("tool_responses") or ()
        if shown.get("content") or shown.get("tool_calls") or not responses:
            messages.append(shown)
        for response in responses:
            entries = response if isinstance(response, Mapping) else {"content": response}
            messages.append({"role": "tool", **entries})
    return messages


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text that `template` writes of `messages`, else the one that `template_to_write` finds for the tokenizer.

    A message with `is_complete` False ends with its content: what the template writes behind any
    message of that role is left out. Raises DataError where the template refuses the messages, or one of
    them cannot be left unfinished.
    """
    name = template_name(tokenizer) if template is None else "the chat template"
    if template is None and not getattr(tokenizer, "chat_template", None):
        from rlpost.data.chat_templates import template_to_write

        template = template_to_write(tokenizer)

    def write(shown: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(shown),
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                tokenize=False,
                **(variables or {}),
            )
        except _REFUSALS as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name} refuses this conversation: {said}") from error

    unfinished = [number for number, message in enumerate(messages) if not message.get("is_complete", True)]
    shown = messages
    if unfinished:
        shown = [{name: value for name, value in message.items() if name != "is_complete"} for message in messages]
    text = write(shown, prompt=add_generation_prompt)
    for number in reversed(unfinished):
        until = write(shown[: number + 1])
        probe = {**shown[number], "content": _PROBE}
        probe.pop("tool_calls", None)
        _, found, behind = write([*shown[:number], probe]).rpartition(_PROBE)
        if not found or not until.endswith(behind) or not text.startswith(until):
            raise DataError(
                f"message {number + 1} is unfinished (is_complete=False), and {name} does not let it end there: set "
                "is_complete=True"
            )
        text = until.removesuffix(behind) + text[len(until) :]
    return text


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """`text` as ids, with what the tokenizer begins a text with, unless a template has written that already."""
    begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"]


def check_parts_are_written(tokenizer: Any, messages: Sequence[Message], text: str, **options: Any) -> None:
    """Raise DataError where leaving out the parts of some type would give the same `text`."""
    parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
    for kind in dict.fromkeys(part["type"] for part in parts if part["type"] != "text"):
        without = [
            {**m, "content": [part for part in m["content"] if part["type"] != kind]}
            if isinstance(m.get("content"), list)
            else m
            for m in messages
        ]
        if render(tokenizer, without, **options) == text:
            raise DataError(
                f"{template_name(tokenizer)} leaves parts of type {kind} out: take the processor of a model that reads "
                f"{kind}, or leave the part out"
            )


def _parts(content: Any, number: int) -> list[dict[str, Any]]:
    parts = [content] if isinstance(content, ContentBase) else content
    for part in parts:
        if not isinstance(part, ContentBase | Mapping):
            raise DataError(
                f"message {number + 1} has a list of {type(part).__name__} as its content: give a text, or parts as "
                "ContentBase or dicts with a type"
            )
    return [part.to_part() if isinstance(part, ContentBase) else dict(part) for part in parts]


def _text(content: Any, number: int) -> str:
    """The parts of message `number` as one text, which is all that a tokenizer can render."""
    parts = _parts(content, number)
    for part in parts:
        if part.get("type") != "text":
            raise DataError(
                f"message {number + 1} has a part of type {part.get('type')}, which a tokenizer cannot render: give in "
                "its place the processor of a model that reads it (AutoProcessor)"
            )
    return "".join(part["text"] for part in parts)
