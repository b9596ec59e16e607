"""Chat messages as text and as token ids: content parts, rendering, the assistant's mask, and multi-turn continuation.

Which tokens of a rendered conversation are the assistant's is read off the template itself, whichever it is.
Rendered up to an assistant's message and with the generation prompt, the conversation ends where that answer
begins, which is where the model takes over when it samples; rendered with the message, it ends behind the
answer. Both have to be prefixes of the whole rendering, which is tokenised once, never in pieces: pieces would
merge into other tokens. Trained is everything rendered from there on (including what a template strips or adds)
up to the end-of-turn token, but not a line break that the template puts behind it.

A token that crosses the beginning of an answer is trained if its part of the template is white space alone, as
`" Four"` after `Assistant: `: the word is the assistant's, and without it no answer would have a first word. With
anything visible of the template in it, or nothing visible of the answer, it is not trained.

A conversation of several turns (`Continuation`) keeps the ids that were sampled and tokenises only new messages.
Rendering the conversation anew and tokenising that text would give other ids than the model sampled, and a policy
gradient of tokens that were never drawn. So the first prompt is rendered once, sampled ids are carried forward,
and of each later rendering only the part behind the messages that have their ids is used: that is right where
every rendering begins with the one before it, which is checked each time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from jinja2.exceptions import TemplateError

from rlpost.data.conversation import Completion, Conversation, Message
from rlpost.data.demonstrations import ChatMessage, Fault
from rlpost.errors import ConfigError, DataError

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]

_PROBE, _QUESTION = "probe", "question"
_EXCHANGE: list[Message] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _PROBE}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}},
}

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

    # As dicts of chat templates and APIs

    def to_part(self) -> dict[str, Any]:
        """The part as processors of transformers read it: `{"type": "image", "url": ...}`; nothing is lost."""
        if self.type == "function_call":
            arguments = {} if self.function_args is None else {"arguments": self.function_args}
            return {"type": "function_call", "name": self.function_name, **arguments}
        said = {"text": self.text, "url": self.url, "base64": self.data}
        said |= {"mime_type": self.mime_type, "name": self.name, "size": self.size}
        return {"type": self.type, **{key: value for key, value in said.items() if value is not None}}

    def to_openai(self) -> dict[str, Any]:
        """The part as OpenAI's chat API takes it.

        Names and sizes are left out, except a file's name. Raises DataError for a type that the API lacks, such
        as video and audio by URL.
        """
        if self.type == "text":
            return {"type": "text", "text": self.text}
        if self.type == "image":
            return {"type": "image_url", "image_url": {"url": self.url or self._data_url()}}
        if self.type == "audio" and self.data is not None:
            return {"type": "input_audio", "input_audio": {"data": self.data, "format": self._subtype()}}
        if self.type == "file" and self.data is not None:
            name = {} if self.name is None else {"filename": self.name}
            return {"type": "file", "file": {"file_data": self._data_url(), **name}}
        how = f" by its {'url' if self.url else 'function_name'}" if self.type != "video" else ""
        raise DataError(f"OpenAI's chat messages take no part of type {self.type}{how}: give its data, or leave it out")

    @classmethod
    def from_part(cls, part: Mapping[str, Any]) -> ContentBase:
        """The part from a dict of either form."""
        kind = part.get("type")
        match kind:
            case "image_url" | "audio_url" | "video_url":
                return cls._media(str(kind).removesuffix("_url"), part[kind]["url"], {})
            case "input_audio":
                sound = part["input_audio"]
                return cls("audio", data=sound["data"], mime_type=f"audio/{sound['format']}")
            case "file" if "file" in part:
                return cls._media("file", part["file"]["file_data"], {"name": part["file"].get("filename")})
            case "function_call":
                return cls("function_call", function_name=part["name"], function_args=part.get("arguments"))
            case "image" | "audio" | "video" | "file":
                return cls._from_processor_part(str(kind), part)
            case _:
                return cls(kind, text=part.get("text"))  # type: ignore[arg-type]  # refused there, if unknown

    @classmethod
    def _from_processor_part(cls, kind: str, part: Mapping[str, Any]) -> ContentBase:
        more = {name: part.get(name) for name in ("mime_type", "name", "size")}
        if "base64" in part:
            return cls(kind, data=part["base64"], **more)  # type: ignore[arg-type]
        source = next((part[name] for name in ("url", "path", kind) if name in part), None)
        return cls._media(kind, source, more) if kind in part else cls(kind, url=source, **more)  # type: ignore[arg-type]

    @classmethod
    def _media(cls, kind: str, source: str | None, more: dict[str, Any]) -> ContentBase:
        """A medium by its URL; a `data:` URL becomes its bytes."""
        if source is not None and source.startswith("data:") and ";base64," in source:
            mime_type, _, data = source.removeprefix("data:").partition(";base64,")
            return cls(kind, data=data, **{**more, "mime_type": mime_type or more.get("mime_type")})  # type: ignore[arg-type]
        return cls(kind, url=source, **more)  # type: ignore[arg-type]

    def _data_url(self) -> str:
        return f"data:{self.mime_type};base64,{self.data}"

    def _subtype(self) -> str:
        return (self.mime_type or "").partition("/")[2]


# Rendering


def is_processor(tokenizer: Any) -> bool:
    """Whether `tokenizer` is the processor of a multimodal model, which holds a tokenizer."""
    return getattr(tokenizer, "tokenizer", None) is not None


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
    takes_parts = is_processor(tokenizer)
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
    """`text` as ids, beginning with the bos token where the tokenizer adds one and the text lacks it."""
    begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"]


def check_parts_are_written(tokenizer: Any, messages: Sequence[Message], text: str, **options: Any) -> None:
    """Raise DataError if the template leaves out the parts of some type: without them it writes the same `text`."""
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


# The assistant's tokens


class MaskError(DataError):
    """The mask of a conversation cannot be found: `fault` is the kind, the message the reason."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Rendered:
    """A whole conversation as text and tokens; token i covers the characters `spans[i]`."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]


class ChatMask:
    """Renders conversations with a tokenizer's chat template and finds the assistant's tokens in them.

    `template` replaces the tokenizer's own, `variables` are passed to it. Raises ConfigError for a tokenizer
    without character offsets.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, variables: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {tokenizer_name(tokenizer)} has no fast form, which alone says where a token stands in "
                "the text: save one as tokenizer.json beside it"
            )
        self.tokenizer = tokenizer
        self._template, self._variables = template, variables
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        self._special_texts = sorted(tokenizer.convert_ids_to_tokens(sorted(self.special)), key=len, reverse=True)

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """The ids of the whole conversation, and for each whether it is trained.

        Every assistant's message is trained, except those with `weight: 0`; one with `is_complete` False has
        no end of turn to train. Raises MaskError for a conversation that the template refuses or renders
        differently once more follows, and for answers without an end-of-turn token.
        """
        if self.header_left_out:
            raise MaskError(
                Fault.template,
                f"{self.template} writes {self.header_left_out!r} before an answer but not as its generation prompt: "
                "let it do so under {% if add_generation_prompt %}",
            )
        try:
            weighted = template_messages(messages, self.tokenizer)
        except DataError as error:
            raise MaskError(Fault.template, str(error)) from error
        shown = [{name: value for name, value in message.items() if name != "weight"} for message in weighted]
        text = self._render(shown, tools)
        prompted = self._render(shown, tools, add_generation_prompt=True) if add_generation_prompt else text
        rendered = self._tokenise(prompted)
        mask = [False] * len(rendered.ids)
        for number, message in enumerate(weighted):
            if message["role"] == "assistant" and message.get("weight") != 0:
                for place in self._answer(shown, number, tools, rendered, text):
                    mask[place] = True
        mask[:1] = [False] * len(mask[:1])  # nothing predicts the first token
        return rendered.ids, mask

    @property
    def template(self) -> str:
        """The name of the template in messages."""
        return template_name(self.tokenizer)

    # The template's habits, seen on a conversation of two words

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends an answer; None if it is unknown.

        Where several follow each other, as in Command R, it is the last that stays once a question follows: the model
        has to write all of them. Phi writes one more behind the last answer alone, which is not part of the turn.
        """
        try:
            text = self._render(_EXCHANGE, None)
        except MaskError:
            return None
        _, found, tail = text.rpartition(_PROBE)
        if not found:
            return None
        behind = len(text) - len(tail)
        rendered = self._tokenise(text)
        ends = [
            (token, last - behind)
            for token, (first, last) in zip(rendered.ids, rendered.spans, strict=True)
            if first >= behind and token in self.special
        ]
        stays = _shared_length(self._kept_behind_an_answer(), tail)
        return next((token for token, last in reversed(ends) if last <= stays), ends[0][0] if ends else None)

    def _kept_behind_an_answer(self) -> str:
        """The text between an answer and the next question; empty if the template may write a header there."""
        try:
            if self._writes_no_prompt:
                return ""
            text = self._render([*_EXCHANGE, {"role": "user", "content": _QUESTION}], None)
        except MaskError:
            return ""
        return text.rpartition(_PROBE)[2].rpartition(_QUESTION)[0]

    @cached_property
    def header_left_out(self) -> str:
        """The header before an answer that the template leaves out of its generation prompt; mostly empty."""
        try:
            text, before = self._render(_EXCHANGE, None), self._render(_EXCHANGE[:1], None)
            if not self._writes_no_prompt or not text.startswith(before):
                return ""
        except MaskError:
            return ""
        return text[len(before) :].partition(_PROBE)[0].strip()

    @cached_property
    def _writes_no_prompt(self) -> bool:
        """Whether the template renders a question alike with and without the generation prompt."""
        question = _EXCHANGE[:1]
        return self._render(question, None, add_generation_prompt=True) == self._render(question, None)

    # One answer

    def _answer(
        self,
        messages: Sequence[ChatMessage],
        number: int,
        tools: list[dict[str, Any]] | None,
        rendered: Rendered,
        text: str,
    ) -> range:
        """The places of the tokens of the assistant's message `number`, its end-of-turn token included.

        `text` is the conversation without a generation prompt.
        """
        if number == 0:
            raise MaskError(Fault.template, "message 1 is the assistant's: begin with what it answers")
        before = self._render(messages[:number], tools, add_generation_prompt=True)
        through = text if number == len(messages) - 1 else self._render(messages[: number + 1], tools)
        begin, end = len(before), _shared_length(through, rendered.text)
        if not rendered.text.startswith(before) or end < begin:
            raise self._does_not_nest(number)
        places = [i for i, span in enumerate(rendered.spans) if _belongs(rendered.text, span, begin, end)]
        if not messages[number].get("is_complete", True):
            if end < len(through):
                raise self._does_not_nest(number)
            return range(places[0], places[-1] + 1) if places else range(0)
        last = self._end_of_turn_among(places, rendered)
        if end < len(through) and (last is None or self._visible(through[rendered.spans[last][1] :])):
            raise self._does_not_nest(number)
        if last is None:
            raise MaskError(
                Fault.endless,
                f"{self.template} ends message {number + 1} with no special token, so the model would never learn to "
                "stop: let the template write eos_token behind an answer",
            )
        answer = rendered.text[begin : rendered.spans[last][0]]
        for name in _called(messages[number]):
            if name not in answer:
                raise MaskError(
                    Fault.template,
                    f"{self.template} leaves out the call of {name} in message {number + 1}: add "
                    "model.chat_template=qwen, take a model whose own writes tool calls, or write the call as content",
                )
        return range(places[0], last + 1)

    def _end_of_turn_among(self, places: Sequence[int], rendered: Rendered) -> int | None:
        """The last token of `places` that ends a turn: nothing visible comes behind it.

        That is the template's end-of-turn token, or else the last special token.
        """
        closing: int | None = None
        end = rendered.spans[places[-1]][1] if places else 0
        for place in reversed(places):
            if self._visible(rendered.text[rendered.spans[place][1] : end]):
                break
            if rendered.ids[place] == self.end_of_turn:
                return place
            if closing is None and rendered.ids[place] in self.special:
                closing = place
        return closing

    def _visible(self, text: str) -> bool:
        """Whether `text` holds anything but special tokens and white space."""
        for special in self._special_texts:
            text = text.replace(special, "")
        return bool(text.strip())

    def _does_not_nest(self, number: int) -> MaskError:
        return MaskError(
            Fault.nesting,
            f"{self.template} renders message {number + 1} differently once more follows, so what the model would say "
            "there is not what it would be trained on: give it weight 0, or one row for each answer with what comes "
            "before as weight 0",
        )

    # Text and tokens

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text. Raises MaskError where the template refuses it."""
        try:
            return render(
                self.tokenizer,
                messages,
                template=self._template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                variables=self._variables,
            )
        except DataError as error:
            raise MaskError(Fault.template, str(error)) from error

    def _tokenise(self, text: str) -> Rendered:
        """`text` as tokens, without a bos token: the template writes its own."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: list[tuple[int, int]] = []
        reached = 0
        for first, behind in encoded["offset_mapping"]:
            # white space that a tokenizer leaves out of its offsets belongs to the token that follows
            spans.append((min(first, reached), behind))
            reached = max(reached, behind)
        return Rendered(text, encoded["input_ids"], spans)


def end_of_turn(tokenizer: Any) -> int | None:
    """The token with which the chat template of `tokenizer` ends an answer; None if it is unknown or there is none."""
    return ChatMask(tokenizer).end_of_turn if tokenizer.is_fast else None


def stop_ids(tokenizer: Any) -> list[int]:
    """The ids that end a completion: the end of turn, and the tokenizer's eos token where that is another one.

    A base model's eos token ends texts, and its chat template may end turns with another token.
    """
    ends = (end_of_turn(tokenizer), tokenizer.eos_token_id)
    return list(dict.fromkeys(token for token in ends if token is not None))


def _belongs(text: str, span: tuple[int, int], begin: int, end: int) -> bool:
    """Whether a token belongs to the characters [begin, end); the top of this module says when a crossing one does."""
    first, behind = span
    if first >= end or (first < begin and behind <= begin):
        return False
    of_template, of_answer = text[first:begin], text[max(first, begin) : behind]
    begins = first >= begin or (of_template.isspace() and bool(of_answer.strip()))
    return begins and (behind <= end or text[end:behind].isspace())  # an end-of-turn token may swallow a line break


def _shared_length(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _called(message: ChatMessage) -> list[str]:
    """The names of the functions that a message calls."""
    calls = message.get("tool_calls") or []
    return [str(call.get("function", call).get("name", "")) for call in calls]


# Conversations turn by turn


class Continuation:
    """Renders conversations with a tokenizer's chat template, as ids that are only ever appended to.

    The template describes the tools; if it has no place for tools, the system message describes them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # the last opening: its messages, text, ids, and ids with its hint
        self._last: tuple[Any, str, list[int], list[int]] | None = None

    def begin(self, conversation: Conversation) -> None:
        """Set the text and the ids of the first prompt. Raises DataError where the template refuses the messages."""
        opening, hint = conversation.opening, conversation.hint
        begun = (conversation.messages[:opening], conversation.tools, conversation.chat, hint)
        last = self._last
        if last is None or last[0] != begun:  # the samples of a group follow each other and share an opening
            text = self._render(conversation, opening, asking=True)
            hinted: list[int] = []
            if hint is not None:
                messages = with_system_message(begun[0], hint) if hint else begun[0]
                told = replace(conversation, messages=messages)
                hinted = self._ids(self._render(told, len(messages), asking=True), conversation)
            self._last = last = (deepcopy(begun), text, self._ids(text, conversation), hinted)
        _, conversation.prompt_text, ids, hinted = last
        conversation.prompt_ids, conversation.hinted_ids = list(ids), list(hinted)

    def _ids(self, text: str, conversation: Conversation) -> list[int]:
        # a template writes the bos token itself; for plain text the tokenizer does
        return self.tokenizer(text, add_special_tokens=not conversation.chat)["input_ids"]

    def observation_ids(self, conversation: Conversation) -> list[int]:
        """The ids of the messages that have none yet, and of the next turn's opening; for turns after the first.

        Raises DataError for a template that renders earlier messages differently once more follows.
        """
        ids = self.tokenizer(self._observation(conversation), add_special_tokens=False)["input_ids"]
        if not conversation.chat or not conversation.ends_sampled or conversation.response_ids[-1] == self.end_of_turn:
            return ids
        return [self.end_of_turn, *ids]  # a turn that ended with another stop token

    def _observation(self, conversation: Conversation) -> str:
        """The text of `observation_ids`, without the end of the model's turn."""
        tokenised, count = conversation.tokenised or conversation.opening, len(conversation.messages)
        if not conversation.chat:
            return "".join(message["content"] for message in conversation.messages[tokenised:])
        whole = self._render(conversation, count, asking=True)
        if conversation.ends_sampled:
            asked = self._render(conversation, tokenised - 1, asking=True)
            answered = self._render(conversation, tokenised, asking=False)
            end_of_turn = self.tokenizer.decode([self.end_of_turn])
            # sampled ids end with the end-of-turn token; the text that the template puts behind it was not sampled
            kept = answered[: answered.rfind(end_of_turn) + len(end_of_turn)]
        else:
            asked = kept = self._render(conversation, tokenised, asking=True)
        if not kept.startswith(asked) or not whole.startswith(kept):
            raise DataError(
                f"{self.template} does not render a conversation as a continuation of its beginning, so several turns "
                "cannot be trained on: use single-turn tasks with this model, or another tool_role"
            )
        return whole[len(kept) :]

    def text(self, conversation: Conversation) -> str:
        """The whole conversation and, unless it is over, the opening of the model's turn. May raise DataError."""
        return self._render(conversation, len(conversation.messages), asking=not conversation.done)

    def check(self, role: str, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Raise DataError, naming the template, unless it can go on after a message of `role`."""
        probe = Conversation(
            task={}, messages=[{"role": "user", "content": "probe"}], tools=list(tools), max_completion_tokens=1
        )
        self.begin(probe)
        for turn in ("one", "two"):
            probe.add_completion(Completion([self.end_of_turn], [0.0], f"reply {turn}", "stop", 0))
            answer: Message = {"role": role, "content": f"answer {turn}"}
            probe.messages.append(answer | ({"name": "probe"} if role == "tool" else {}))
            probe.add_observation(self.observation_ids(probe))
            if f"answer {turn}" not in self.tokenizer.decode(probe.response_ids):
                raise DataError(f"{self.template} leaves out messages of the role {role}: choose another tool_role")

    @property
    def template(self) -> str:
        """The name of the template in messages."""
        return template_name(self.tokenizer)

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts behind a turn. Raises DataError if there is none."""
        token = end_of_turn(self.tokenizer)
        if token is None:
            raise DataError(
                f"{self.template} ends a turn with no special token, so several turns cannot be trained on: use "
                "single-turn tasks with this model"
            )
        return token

    @cached_property
    def _knows_tools(self) -> bool:
        """Whether the template describes tools."""
        probe = [{"role": "user", "content": "probe"}]
        return self._applied(probe, [_PROBE_TOOL], asking=True) != self._applied(probe, [], asking=True)

    def _render(self, conversation: Conversation, count: int, *, asking: bool) -> str:
        """The first `count` messages as text, with the opening of the model's turn if `asking`."""
        messages, tools = conversation.messages[:count], conversation.tools
        if not conversation.chat:
            return "".join(message["content"] for message in messages)
        if tools and not self._knows_tools:
            return self._applied(_with_tools_described(messages, tools), [], asking=asking)
        return self._applied(messages, tools, asking=asking)

    def _applied(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, asking: bool) -> str:
        return render(self.tokenizer, messages, tools=list(tools) or None, add_generation_prompt=asking)


def _with_tools_described(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages with the tools described in the system message, in the form of Hermes models."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nA call is written so:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
    )
    return with_system_message(messages, told)


def with_system_message(messages: Sequence[Message], text: str) -> list[Message]:
    """`messages` with `text` at the end of their system message, or as one."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
