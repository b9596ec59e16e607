"""Chat messages as text, by a tokenizer's chat template, and rows as text, by a prompt template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from jinja2.exceptions import TemplateError

from rlpost.data.conversation import Message
from rlpost.errors import ConfigError, DataError

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]
_PROBE = "probe"

# exceptions of templates over messages they do not expect
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


# Parts of a message


@dataclass(frozen=True, slots=True)
class ContentBase:
    """One part of a message: `History(role="user", content=[ContentBase("text", text="What is this?"), ...])`.

    A `text` has its text; an `image`, `audio`, `video` or `file` either a `url` (or path) or `data`,
    its bytes in base64, and may have `mime_type` ("image/png"), `name` and `size` (bytes); a
    `function_call` has its `function_name` and `function_args`.

    A message carries its parts as they are. Any tokenizer renders text; the processor of a multimodal model
    renders the rest.

    Raises DataError for an unknown type.
    """

    type: ContentType
    text: str | None = None
    url: str | None = None
    data: str | None = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type not in get_args(ContentType):
            raise DataError(f"unknown type of a part, {self.type!r}: it is one of {', '.join(get_args(ContentType))}")

    def to_part(self) -> dict[str, Any]:
        """The part as processors of transformers read it: `{"type": "image", "url": ...}`; nothing is lost."""
        if self.type == "function_call":
            arguments = {} if self.function_args is None else {"arguments": self.function_args}
            return {"type": "function_call", "name": self.function_name, **arguments}
        fields = {"text": self.text, "url": self.url, "base64": self.data}
        fields |= {"mime_type": self.mime_type, "name": self.name, "size": self.size}
        return {"type": self.type, **{key: value for key, value in fields.items() if value is not None}}

    @classmethod
    def from_part(cls, part: Mapping[str, Any]) -> ContentBase:
        """The part from what `to_part` wrote."""
        if part["type"] == "function_call":
            return cls("function_call", function_name=part["name"], function_args=part.get("arguments"))
        return cls(**{"data" if name == "base64" else name: value for name, value in part.items()})


# Rendering


def tokenizer_name(tokenizer: Any) -> str:
    """The name of `tokenizer` in messages."""
    return Path(str(getattr(tokenizer, "name_or_path", "") or "")).name or type(tokenizer).__name__


def template_name(tokenizer: Any) -> str:
    """The name of the chat template of `tokenizer` in messages."""
    return f"the chat template of {tokenizer_name(tokenizer)}"


def template_messages(chat: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[Message]:
    """The messages in the form that chat templates read; `is_complete` stays for `render`.

    Each of a message's `tool_responses`, a text or the entries of a message, becomes a message of
    role "tool" behind it. Content of several parts becomes one text, or for a processor the parts'
    dicts. Raises DataError for a part that a tokenizer cannot render.
    """
    if all(isinstance(m.get("content"), str) and "tool_responses" not in m for m in chat):
        return [dict(m) for m in chat]
    takes_parts = getattr(tokenizer, "tokenizer", None) is not None  # the processor of a multimodal model
    messages: list[Message] = []
    for number, message in enumerate(chat):
        shown = {name: value for name, value in message.items() if name != "tool_responses"}
        content = shown.get("content")
        if isinstance(content, list | tuple | ContentBase):
            shown["content"] = _parts(content) if takes_parts else _text(content, number)
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
    """`messages` as text, by `template` or else the one that `template_to_write` finds for the tokenizer.

    A message with `is_complete` False ends with its content, without the text that the template writes
    behind a message of that role. Raises DataError where the template refuses the messages, or one of them
    cannot be left unfinished.
    """
    name = template_name(tokenizer) if template is None else "the chat template"
    if template is None and not getattr(tokenizer, "chat_template", None):
        from rlpost.data.chat_templates import template_to_write

        template = template_to_write(tokenizer)

    given = dict(variables or {})
    if (day := getattr(tokenizer, "shown_day", None)) is not None:
        given["strftime_now"] = day.strftime  # instead of the function by which templates ask for the time

    def write(shown: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(shown),
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                tokenize=False,
                **given,
            )
        except _REFUSALS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name} refuses this conversation: {reason}") from error

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


def set_day(tokenizer: Any, day: str) -> None:
    """Let `render` show the chat template of `tokenizer` this day, as 2026-11-28, as the current one."""
    tokenizer.shown_day = date.fromisoformat(day)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """`text` as ids, beginning with the bos token where the tokenizer adds one and the text lacks it."""
    begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"]


def _parts(content: Any) -> list[dict[str, Any]]:
    parts = [content] if isinstance(content, ContentBase) else content
    return [part.to_part() if isinstance(part, ContentBase) else dict(part) for part in parts]


def _text(content: Any, number: int) -> str:
    """The parts of message `number` as one text. Raises DataError for a part that is not text."""
    parts = _parts(content)
    for part in parts:
        if part.get("type") != "text":
            raise DataError(
                f"message {number + 1} has a part of type {part.get('type')}, which a tokenizer cannot render: give in "
                "its place the processor of a model that reads it (AutoProcessor)"
            )
    return "".join(part["text"] for part in parts)


# A row in a prompt template


def filled(template: str, row: Mapping[str, Any], key: str = "env.prompt_template") -> str:
    """The value of `key` with the fields of a row. Raises ConfigError, from a KeyError for a missing field."""
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        wrong = f"{{{error.args[0]}}} is not a field" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{key}={template!r} does not fit: {wrong}; "
            f"the fields are {', '.join(map(str, row))}; write {{{{ and }}}} for braces"
        ) from error
