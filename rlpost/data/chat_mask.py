"""Which tokens of a rendered conversation are the assistant's, for any chat template.

The template itself says where an answer stands. Rendered up to an assistant's message and with the
generation prompt, the conversation ends where that answer begins, which is where the model takes
over when it samples; rendered with the message, it ends behind the answer. Both have to be
beginnings of the whole rendering, which is tokenised once, never in pieces: pieces would join to
other tokens than the whole has. Trained is what was rendered from there on (what a template strips
or adds included) up to the end-of-turn token, and no line break that the template puts behind it.

A token that lies across the beginning of an answer is trained if all it holds of the template is
white space, as `" Four"` after `Assistant: `: the word is the assistant's, and without it no answer
would have a first word. With anything visible of the template in it, or nothing visible of the
answer, it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlpost.data.demonstrations import ChatMessage, Fault
from rlpost.data.rendering import render, template_messages, template_name, tokenizer_name
from rlpost.errors import ConfigError, DataError

_PROBE_REPLY = "probe"


class MaskError(DataError):
    """A conversation whose mask cannot be found: `fault` is the kind, the message the reason in words."""

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

    `template` is rendered with in place of the tokenizer's own, `variables` are further ones that a
    template reads. Raises ConfigError for a tokenizer that cannot say which characters a token stands for.
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

        Every assistant's message is trained but those with `weight: 0`; of one with `is_complete`
        False, which ends with its content, no end of turn is. Raises MaskError for a conversation
        that the template refuses, renders differently once more follows, or whose answers it ends
        with no token of their own.
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
        """What messages call the template."""
        return template_name(self.tokenizer)

    # The template's own habits, seen on a conversation of two words

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the template puts right behind an answer; None where that cannot be told."""
        if self._probe is None:
            return None
        text, begin = self._probe
        rendered = self._tokenise(text)
        behind = text.rfind(_PROBE_REPLY) + len(_PROBE_REPLY)
        tokens = zip(rendered.ids, rendered.spans, strict=True)
        return next((i for i, (first, _) in tokens if first >= max(behind, begin) and i in self.special), None)

    @cached_property
    def header_left_out(self) -> str:
        """What a template without a generation prompt writes before an answer; empty for one that has it, or none."""
        if self._probe is None:
            return ""
        text, begin = self._probe
        question = [{"role": "user", "content": _PROBE_REPLY}]
        if self._render(question, None, add_generation_prompt=True) != self._render(question, None):
            return ""
        return text[begin : text.rfind(_PROBE_REPLY)].strip()

    @cached_property
    def _probe(self) -> tuple[str, int] | None:
        """A short conversation rendered, and where its answer begins; None where the template does not take it."""
        chat = [{"role": "user", "content": _PROBE_REPLY}, {"role": "assistant", "content": _PROBE_REPLY}]
        try:
            text = self._render(chat, None)
            before = self._render(chat[:1], None, add_generation_prompt=True)
        except MaskError:
            return None
        return (text, len(before)) if text.startswith(before) and _PROBE_REPLY in text[len(before) :] else None

    # One answer

    def _answer(
        self,
        messages: Sequence[ChatMessage],
        number: int,
        tools: list[dict[str, Any]] | None,
        rendered: Rendered,
        text: str,
    ) -> range:
        """The places of the tokens of the assistant's message `number`, its end-of-turn token the last.

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

        It is the one that the template puts behind any answer, else the last special token.
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
        """`text` as one run of tokens; the template has written what begins it, so nothing is added."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: list[tuple[int, int]] = []
        reached = 0
        for first, behind in encoded["offset_mapping"]:
            # white space that a tokenizer leaves out of its offsets belongs to the token that follows
            spans.append((min(first, reached), behind))
            reached = max(reached, behind)
        return Rendered(text, encoded["input_ids"], spans)


def _belongs(text: str, span: tuple[int, int], begin: int, end: int) -> bool:
    """Whether a token is of the characters [begin, end); see the top of this module for one that lies across."""
    first, behind = span
    if first >= end or (first < begin and behind <= begin):
        return False
    of_template, of_answer = text[first:begin], text[max(first, begin) : behind]
    begins = first >= begin or (of_template.isspace() and bool(of_answer.strip()))
    return begins and (behind <= end or text[end:behind].isspace())  # an end-of-turn token may swallow a line break


def _shared_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _called(message: ChatMessage) -> list[str]:
    """The names of the functions that a message calls."""
    calls = message.get("tool_calls") or []
    return [str(call.get("function", call).get("name", "")) for call in calls]
