"""The habits of a tokenizer's chat template, found by rendering short conversations with it.

A template is a program of somebody else. Nothing is known of it in advance: where it keeps thoughts, which form of a
call it reads, how it ends an answer, whether it writes an earlier answer as it stood when it was the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlpost.data.conversation import Message
from rlpost.data.rendering import render, template_messages, template_name
from rlpost.errors import DataError

STAND_IN = "standin4c1f"  # written instead of an answer or an argument: no message holds it
THOUGHTS = "reasoning_content"  # the entry of a message that holds its thoughts
THOUGHT_KEYS = (THOUGHTS, "reasoning", "thinking")  # the names that data sets and templates have for it
THINK, END_THINK = "<think>", "</think>"  # around thoughts in a message's content
MARKS = (  # around thoughts in a template's text
    (THINK, END_THINK),
    ("<think:opensource>", "</think:opensource>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
PREFILL = "prefill"  # entry of an answer: the text at its beginning that the prompt holds already
CALL_ID = "probe0001"  # nine letters, as Mistral's templates want
_QUESTION, _RESULT = "question4c1f", "result4c1f"
_USER_TURN: list[Message] = [{"role": "user", "content": _QUESTION}]
_ANSWERED: list[Message] = [*_USER_TURN, {"role": "assistant", "content": STAND_IN}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}},
    },
}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template reads calls: `arguments` as JSON text or a dict, and the content beside them."""

    arguments_as_text: bool
    empty: str | None  # the content of a message that has calls and no text


class Habits:
    """The habits of a tokenizer's own chat template, or of `template`, to which `variables` are passed."""

    def __init__(self, tokenizer: Any, template: str | None = None, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._template, self._variables = template, variables

    @property
    def name(self) -> str:
        """The template's name in messages."""
        return template_name(self.tokenizer)

    # Writing messages in the template's form

    def write(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, *, asking: bool = False
    ) -> str:
        """The messages as text, and if `asking` the beginning of the model's turn.

        Thoughts are under `reasoning_content`, arguments of calls are dicts; both are given in the template's own
        form. The system message describes the tools where the template has no place for them. Raises DataError where
        the template refuses the messages.
        """
        if tools and not self.knows_tools:
            messages, tools = _with_tools_described(messages, tools), None
        shown = [self._in_parts(self._in_form(m)) for m in template_messages(messages, self.tokenizer)]
        return self._render(shown, tools, asking=asking)

    def _in_form(self, message: Message) -> Message:
        shown = {name: value for name, value in message.items() if name not in ("weight", PREFILL)}
        if (thoughts := shown.pop(THOUGHTS, None)) and self.thoughts_key is not None:
            shown[self.thoughts_key] = thoughts
        if shown.get("tool_calls") and (form := self.call_form) is not None:
            shown = _with_calls(shown, form)
        return shown

    def _in_parts(self, message: Message) -> Message:
        if not self.reads_parts or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, asking: bool = False) -> str:
        return render(
            self.tokenizer,
            messages,
            template=self._template,
            tools=tools or None,
            add_generation_prompt=asking,
            variables=self._variables,
        )

    def _found(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, *, asking: bool = False
    ) -> str:
        """The rendering of a probe, with a tool where the template refuses it without; empty where it refuses both."""
        shown = [self._in_parts(message) for message in messages]
        return self._tried(shown, tools, asking=asking) or self._tried(shown, tools or [_TOOL], asking=asking)

    def _tried(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, *, asking: bool = False
    ) -> str:
        try:
            return self._render(messages, tools, asking=asking)
        except DataError:
            return ""

    # The habits

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template reads content in parts alone, and leaves out a text."""
        if STAND_IN in self._tried([{"role": "user", "content": STAND_IN}]):
            return False
        return STAND_IN in self._tried([{"role": "user", "content": [{"type": "text", "text": STAND_IN}]}])

    @cached_property
    def thoughts_key(self) -> str | None:
        """The entry of a message under which the template reads thoughts; None if it reads none."""
        for key in THOUGHT_KEYS:
            if STAND_IN in self._found([*_USER_TURN, {"role": "assistant", "content": _QUESTION, key: STAND_IN}]):
                return key
        return None

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form in which the template reads calls; None if it writes none."""
        for form in (CallForm(as_text, empty) for as_text in (False, True) for empty in ("", None)):
            text = self._found([*_USER_TURN, _with_calls(probe_call({"word": STAND_IN}), form)], [_TOOL])
            # a template that wants text writes a dict as Python does, and one that wants a dict escapes text
            written = "probe" in text.partition(_QUESTION)[2] and STAND_IN in text
            if written and f"'word': '{STAND_IN}'" not in text and f'\\"{STAND_IN}' not in text:
                return form
        return None

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template describes tools."""
        shown = self._found(_USER_TURN, [_TOOL], asking=True)
        return "probe" in shown and shown != self._tried(_USER_TURN, asking=True)

    @cached_property
    def header_left_out(self) -> str:
        """The header before an answer that the template leaves out of its generation prompt; mostly empty."""
        text, before = self._found(_ANSWERED), self._found(_USER_TURN)
        if not before or not self.writes_no_prompt or not text.startswith(before):
            return ""
        return text[len(before) :].partition(STAND_IN)[0].strip()

    @cached_property
    def writes_no_prompt(self) -> bool:
        """Whether the template renders a question alike with and without the generation prompt."""
        return self._found(_USER_TURN, asking=True) == self._found(_USER_TURN)

    @cached_property
    def before_a_question(self) -> str:
        """The text before the first question."""
        return self._found(_USER_TURN).partition(_QUESTION)[0]

    @cached_property
    def around_messages(self) -> str:
        """The text of two turns and a prompt, without what they say."""
        return self._found([*_ANSWERED, *_USER_TURN], asking=True)

    @cached_property
    def behind_an_answer(self) -> tuple[str, str]:
        """The text behind the last answer, and the text between an answer and the next question."""
        last = self._found(_ANSWERED).rpartition(STAND_IN)[2]
        if self.writes_no_prompt:  # it may write a header there
            return last, ""
        return last, self._found([*_ANSWERED, *_USER_TURN]).rpartition(STAND_IN)[2].rpartition(_QUESTION)[0]

    @cached_property
    def behind_a_call(self) -> tuple[str, str]:
        """The text behind the argument of a call that comes last, and the text between it and the call's result.

        Both are empty for a template that writes no calls.
        """
        if self.call_form is None:
            return "", ""
        called = [*_USER_TURN, self._in_form(probe_call({"word": STAND_IN}))]
        result = {"role": "tool", "content": _RESULT, "name": "probe", "tool_call_id": CALL_ID}
        last, answered = self._found(called, [_TOOL]), self._found([*called, result], [_TOOL])
        return last.rpartition(STAND_IN)[2], answered.rpartition(STAND_IN)[2].partition(_RESULT)[0]


def probe_call(arguments: dict[str, Any]) -> Message:
    """An assistant's message with one call."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_calls(message: Message, form: CallForm) -> Message:
    calls = [{**call, "function": _in_call_form(call.get("function", call), form)} for call in message["tool_calls"]]
    content = message.get("content") or form.empty
    return {**message, "content": content, "tool_calls": calls}


def _in_call_form(function: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    if form.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


# Thoughts


def opened_thought(text: str) -> str:
    """The mark at the end of `text` that begins a thought, such as "<think>" and a line break; empty if none does."""
    bare = text.rstrip()
    return next((text[len(bare) - len(mark) :] for mark, _ in MARKS if bare.endswith(mark)), "")


def closing_mark(opened: str) -> str:
    """The mark that ends a thought which `opened` begins."""
    return next(end for mark, end in MARKS if opened.startswith(mark))


def part_thoughts(content: str) -> tuple[str, str] | None:
    """(thoughts, answer) of a content that begins with thoughts between <think> and </think>; None of any other."""
    begun, found, answer = content.lstrip().partition(END_THINK)
    if not found or not begun.startswith(THINK):
        return None
    return begun.removeprefix(THINK).strip("\n"), answer.lstrip("\n")


def with_thoughts_inside(message: Message) -> Message:
    """The message with its thoughts in the content, between <think> and </think>."""
    inside = {name: value for name, value in message.items() if name != THOUGHTS}
    if thoughts := message.get(THOUGHTS):
        inside["content"] = f"{THINK}\n{thoughts.strip()}\n{END_THINK}\n\n{message.get('content') or ''}"
    return inside


def with_thoughts_apart(message: Message) -> Message:
    """The message with thoughts in its content under `reasoning_content`."""
    content = message.get("content")
    if not isinstance(content, str) or message.get(THOUGHTS) or (parted := part_thoughts(content)) is None:
        return message
    return {**message, THOUGHTS: parted[0], "content": parted[1]}


def without_thoughts(message: Message) -> Message:
    """The message without its thoughts, also those in its content."""
    if message["role"] != "assistant":
        return message
    return {name: value for name, value in with_thoughts_apart(message).items() if name != THOUGHTS}


# What the model said


def reply_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Sampled ids as text, without special tokens.

    Thoughts between other marks are put between <think> and </think>, so that they stay apart from the answer
    though the marks may be special tokens; so are those in the channel `analysis` of gpt-oss.
    """
    text = tokenizer.decode(ids, skip_special_tokens=False)
    has_channels = "<|channel|>" in text and "<|message|>" in text
    if not has_channels and not any(mark in text for pair in MARKS for mark in pair):
        return tokenizer.decode(ids, skip_special_tokens=True)
    text = _without_channels(text) if has_channels else text
    text = with_one_mark(text)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - {THINK, END_THINK}
    return re.sub("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)", "", text)


def with_one_mark(text: str) -> str:
    """`text` with its thoughts between <think> and </think>, whatever marks they stand between."""
    for opening, closing in MARKS[1:]:
        if closing in text or " " not in opening:  # a sentence alone may be any model's
            text = text.replace(opening, THINK).replace(closing, END_THINK)
    return text


_MESSAGE = re.compile(r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|(?:end|return|call)\|>|\Z)", re.DOTALL)


def _without_channels(text: str) -> str:
    """A turn in channels as one text: the thoughts, then the answer or the call."""
    thoughts, answers = [], []
    for message in _MESSAGE.finditer(text):
        header, body = message["header"], message["body"]
        if "to=" in header:
            answers.append(f"{header}{body}")
        else:
            (thoughts if "<|channel|>analysis" in header else answers).append(body)
    inside = "\n\n".join(thoughts)
    return (f"{THINK}\n{inside}\n{END_THINK}\n\n" if inside else "") + "\n".join(answers)


# Further text in the system message


def _with_tools_described(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages with the tools described in the system message, in the form of Hermes models."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nA call is written so:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
    )
    return with_system_message(messages, description)


def with_system_message(messages: Sequence[Message], text: str) -> list[Message]:
    """`messages` with `text` at the end of their system message, or as one."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
