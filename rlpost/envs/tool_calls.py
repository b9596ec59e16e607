"""The tools of an environment: how calls are read out of a reply, and how they are answered.

Every tool understands two forms of call: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
which Hermes and Qwen models write, and `<tool>name` with a line of JSON and `</tool>`. A tool may add
forms of its own, such as fenced code. Calls inside a `<think>` block are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Semaphore
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolLimits, ToolResult, ToolTransform
from rlpost.errors import ConfigError, RlpostError
from rlpost.text import did_you_mean, nearest

AT_ONCE = 16  # most conversations of one `answer` whose tools run at the same time

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_TOOL = re.compile(r"<tool>\s*([\w.\-]*)(.*?)(</tool>|\Z)", re.DOTALL)
# control tokens of chat templates, and the tags around parts of a turn
_CONTROL = re.compile(
    r"<(?=[|｜][^<>\n]{1,40}[|｜]>|/?s>|(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>|/?tool_(?:call|response|result)s?>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z]+)\])"
)
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@dataclass
class Tools:
    """The tools of an environment together: reads the calls of a reply and answers each with a message."""

    role: str = "user"  # of messages with a tool's answer
    limits: ToolLimits = field(default_factory=ToolLimits)
    transforms: list[ToolTransform] = field(default_factory=list)
    _room: dict[int, Semaphore] = field(default_factory=dict)  # id of a tool -> its limit of parallel calls

    def add(self, transform: ToolTransform) -> None:
        """Add the functions of `transform`."""
        transform.role = self.role
        if transform.at_once is not None:
            self._room[id(transform)] = Semaphore(transform.at_once)
        self.transforms.append(transform)

    def check_names(self) -> None:
        """Raise ConfigError for two functions of one name; may start the tools to learn their names."""
        names = [name for each in self.transforms for name in each.names()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two tools are named {twice[0]}: a model could not tell them apart; leave one out")

    def calls_of(self, reply: str) -> list[ToolCall]:
        """The calls of a reply, in order; a call inside another is part of that one."""
        shown = _THINKING.sub(lambda match: " " * len(match.group()), reply)
        found = [*_tagged_calls(shown), *(call for each in self.transforms for call in each.calls_in(shown))]
        calls: list[ToolCall] = []
        for call in sorted(found, key=lambda call: (call.place, -call.end)):
            if not calls or call.place >= calls[-1].end:
                calls.append(call)
        return calls

    def answer(self, conversations: Iterable[Conversation]) -> None:
        """Run the calls of each conversation's last reply and append the answers, several conversations at once.

        Several threads may call this, each with its own conversations. A truncated reply is skipped: its calls may be
        incomplete.
        """
        asked = [(c, self.calls_of(c.response_text)) for c in conversations if c.finish_reason == "stop"]
        asked = [(conversation, calls) for conversation, calls in asked if calls]
        if not asked:
            return
        if len(asked) == 1:
            self._answer(*asked[0])
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(asked)), "rlpost-tools") as pool:
            for done in [pool.submit(self._answer, conversation, calls) for conversation, calls in asked]:
                done.result()

    def _answer(self, conversation: Conversation, calls: Sequence[ToolCall]) -> None:
        run = calls[: self.limits.max_calls_per_turn]
        for number, call in enumerate(run, start=1):
            try:
                ok, text = self._reply(conversation, number, call)
            except RlpostError:
                raise
            except Exception as error:  # noqa: BLE001  recorded, counted and excluded, like a failed reward
                conversation.valid = False
                conversation.error = f"the tool {call.name} failed: {type(error).__name__}: {error}"
                conversation.truncated = True
                return
            conversation.tool_errors += not ok
            self._say(conversation, text, call.name)
        if len(run) < len(calls):
            conversation.tool_errors += len(calls) - len(run)
            self._say(
                conversation,
                f"Tool call failed:\nonly {len(run)} tool calls are run in one turn, and this has {len(calls)}",
            )

    def _say(self, conversation: Conversation, text: str, name: str = "") -> None:
        message = {"role": self.role, "content": without_control_tokens(text)}
        conversation.messages.append(message | ({"name": name} if self.role == "tool" and name else {}))

    def _tool_of(self, name: str) -> ToolTransform | None:
        """The tool that shows `name`, otherwise the first one that takes it."""
        shown = next((each for each in self.transforms if name in each.names()), None)
        return shown or next((each for each in self.transforms if each.takes(name)), None)

    def _reply(self, conversation: Conversation, number: int, call: ToolCall) -> tuple[bool, str]:
        """Run one call: whether it succeeded, and the text for the model."""
        tool = self._tool_of(call.name)
        if tool is None:
            return False, f"Tool call {number} failed:\n{call.fault or self._unknown(call.name)}"
        limit = self.limits.max_calls
        if call.fault is not None:
            result = ToolResult(call.fault, ok=False)
        elif limit is not None and conversation.tool_calls >= limit:
            result = ToolResult(f"all {limit} tool calls are used: answer without tools", ok=False)
        else:
            conversation.tool_calls += 1
            with self._room.get(id(tool)) or nullcontext():
                result = tool.call(conversation, call)
        return result.ok, tool.message(number, call, self._shortened(result))

    def _unknown(self, name: str) -> str:
        names = [shown for each in self.transforms for shown in each.names()]
        hint = did_you_mean(nearest(name, names), f"there are {', '.join(names)}")
        return f"there is no tool {name[:80]!r}{hint}"

    def _shortened(self, result: ToolResult) -> ToolResult:
        """The result; a long text with its middle replaced by a note."""
        surplus = len(result.text) - self.limits.max_output_chars
        if surplus <= 0:
            return result
        head = (self.limits.max_output_chars + 1) // 2
        tail = self.limits.max_output_chars - head
        note = f"\n[{surplus} characters left out]\n"
        return ToolResult(result.text[:head] + note + result.text[len(result.text) - tail :], result.ok)


def without_control_tokens(text: str) -> str:
    """`text` with a space after the opening bracket of anything that a tokenizer could read as a control token.

    A tool shows text from others: a page that holds `<|im_end|>` must not end the turn that shows it.
    """
    return _CONTROL.sub(lambda match: f"{match.group()} ", text)


def _tagged_calls(reply: str) -> list[ToolCall]:
    """The calls of `reply` in the two forms that every tool understands."""
    calls = [_json_call(m.group(1), m.start(), m.end(), closed=bool(m.group(2))) for m in _TOOL_CALL.finditer(reply)]
    return calls + [_named_call(match) for match in _TOOL.finditer(reply)]


def _json_call(body: str, place: int, end: int, *, closed: bool) -> ToolCall:
    """A call of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    if not closed:
        return ToolCall("", {}, place, "the call is never closed", end)
    content, fault = json_object(body)
    if fault is not None:
        return ToolCall("", {}, place, fault, end)
    name = content.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, place, 'a call has to give the function\'s "name"', end)
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON inside the JSON
        arguments, fault = json_object(arguments)
    elif not isinstance(arguments, Mapping):
        fault = f'"arguments" must be a JSON object, and is {type(arguments).__name__}'
    return ToolCall(name, {} if fault else arguments, place, fault, end)


def _named_call(match: re.Match[str]) -> ToolCall:
    """A call of the form `<tool>name` with JSON arguments and `</tool>`."""
    name, body, closing = match.groups()
    if not closing:
        return ToolCall(name, {}, match.start(), "the call is never closed", match.end())
    if not name:
        return ToolCall("", {}, match.start(), "a call has to give the function's name", match.end())
    arguments, fault = json_object(body) if body.strip() else ({}, None)
    return ToolCall(name, arguments, match.start(), fault, match.end())


def json_object(text: str) -> tuple[dict[str, Any], str | None]:
    """Parse a JSON object; returns it and None, or an empty one and the fault."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"the call is not valid JSON: {error}"
    if not isinstance(content, dict):
        return {}, f"the call must be a JSON object, and is {type(content).__name__}"
    return content, None
