"""The tools of an environment: how calls are read out of a reply, and how they are answered.

Every tool understands two forms of call: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
which Hermes and Qwen models write, and `<tool>name` with a line of JSON and `</tool>`. A tool may add
forms of its own, such as fenced code. Other families write calls in forms of their own, which a `CallReader`
of `rlpost.tools.parsers` reads; `Tools.follow` chooses it once the tokenizer is known. Calls among thoughts are
ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Semaphore
from typing import Any

from rlpost.catalog import CALL_READER
from rlpost.data.conversation import Conversation, Message
from rlpost.data.habits import with_thoughts_apart
from rlpost.envs.base import ToolCall, ToolLimits, ToolResult, ToolTransform
from rlpost.errors import ConfigError, RlpostError
from rlpost.text import did_you_mean, nearest

PLAIN = "plain"  # the name of rlpost's own forms of a call
AT_ONCE = 16  # most conversations whose tools run at the same time

TAG = "<tool_call>"
CALLED = "called"  # entry of an assistant's message: calls of it that the chat template cannot write
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_TOOL = re.compile(r"<tool>\s*([\w.\-]*)(.*?)(</tool>|\Z)", re.DOTALL)
# control tokens of chat templates, and the tags around parts of a turn
_CONTROL = re.compile(
    r"<(?=[|｜][^<>\n]{1,40}[|｜]>|/?s>|(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>|/?tool_(?:call|response|result)s?>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z]+)\])"
)
_THINKING = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass
class Tools:
    """The tools of an environment together: reads the calls of a reply and answers each with a message.

    `parser` names the forms in which calls are read (None: those of the chat template), and `role` the role of
    answers (None: `tool` where calls are read in a form of the template's own, else `user`); `follow` applies both
    to a tokenizer. Until then rlpost's own forms are read.
    """

    role: str = "user"  # of messages with a tool's answer
    limits: ToolLimits = field(default_factory=ToolLimits)
    transforms: list[ToolTransform] = field(default_factory=list)
    parser: str | None = None
    follows_role: bool = False  # whether `follow` chooses the role
    reader: Any = None  # the CallReader that `follow` chose
    _room: dict[int, Semaphore] = field(default_factory=dict)  # id of a tool -> its limit of parallel calls

    def add(self, transform: ToolTransform) -> None:
        """Add the functions of `transform`."""
        transform.role = self.role
        if transform.at_once is not None:
            self._room[id(transform)] = Semaphore(transform.at_once)
        self.transforms.append(transform)

    def follow(self, tokenizer: Any) -> list[str]:
        """Read calls as `parser` says, or as the chat template of `tokenizer` writes them; returns notes about it.

        Raises ConfigError for an unknown parser or one that does not fit, MissingExtraError without its package.
        """
        self.reader, note = CALL_READER.build(tokenizer, self.parser)
        if self.follows_role:
            self.role = self.reader.answer_role
            for transform in self.transforms:
                transform.role = self.role
        if note and self.reads_native:
            note += f", and answered in the role {self.role}"
        return [note] if note else []

    @property
    def reads_native(self) -> bool:
        """Whether calls are read in a form of the chat template's own."""
        return self.reader is not None and self.reader.name != PLAIN

    @property
    def keeps_calls(self) -> bool:
        """Whether calls become part of the reply's message, as the chat template writes them."""
        return self.reader is not None and (self.reads_native or self.role == "tool") and self.reader.takes(self.role)

    def check_names(self) -> None:
        """Raise ConfigError for two functions of one name; may start the tools to learn their names."""
        names = [name for each in self.transforms for name in each.names()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two tools are named {twice[0]}: a model could not tell them apart; leave one out")

    # Reading

    def calls_in(self, conversation: Conversation) -> list[ToolCall]:
        """The calls of a conversation's last reply, in order."""
        return self._read(conversation).calls

    def calls_of(self, reply: str) -> list[ToolCall]:
        """The calls of a reply in rlpost's own forms, in order; a call inside another is part of that one."""
        shown = _THINKING.sub(lambda match: " " * len(match.group()), reply)
        found = [*_tagged_calls(shown), *(call for each in self.transforms for call in each.calls_in(shown))]
        calls: list[ToolCall] = []
        for call in sorted(found, key=lambda call: (call.place, -call.end)):
            if not calls or call.place >= calls[-1].end:
                calls.append(call)
        return calls

    def _read(self, conversation: Conversation) -> _Reply:
        """The calls of the last reply: in the form of the chat template, else in rlpost's own."""
        fault: str | None = None
        if self.reads_native:
            schemas = [schema for each in self.transforms for schema in each.schemas()]
            content, native, fault = self.reader.read(self._sampled(conversation), schemas)
            if native:
                named = [(call["function"]["name"], call["function"]["arguments"]) for call in native]
                calls = [ToolCall(name, arguments, place) for place, (name, arguments) in enumerate(named)]
                return _Reply(calls, content, [call["id"] for call in native], native=True)
        reply = conversation.reply
        calls = self.calls_of(reply)
        if fault is not None and all(call.fault for call in calls):
            return _Reply([ToolCall("", {}, 0, fault)], native=True)
        if self.role == "tool" and all(not call.fault and reply.startswith(TAG, call.place) for call in calls):
            edges = [0, *(edge for call in calls for edge in (call.place, call.end)), len(reply)]
            return _Reply(calls, "".join(reply[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)))
        return _Reply(calls)

    def _sampled(self, conversation: Conversation) -> str:
        """The last reply with its special tokens, which stand in its ids alone; a reply given as text as it is."""
        if not conversation.ends_sampled or conversation.tokenised < len(conversation.messages):
            return conversation.reply
        first = len(conversation.mask)
        while first and conversation.mask[first - 1]:
            first -= 1
        ids = conversation.response_ids[first:]
        return conversation.opened + self.reader.tokenizer.decode(ids, skip_special_tokens=False)

    # Answering

    def answer(self, conversations: Iterable[Conversation]) -> None:
        """Run the calls of each conversation's last reply and append the answers, several conversations at once.

        Several threads may call this, each with its own conversations. A truncated reply is skipped: its calls may be
        incomplete. Calls that the chat template can write become part of the reply's message, as its `tool_calls`.
        """
        replies = [(c, self._read(c)) for c in conversations if c.finish_reason == "stop"]
        replies = [(conversation, reply) for conversation, reply in replies if reply.calls]
        together(lambda each: self._answer(*each), replies)

    def _answer(self, conversation: Conversation, reply: _Reply) -> None:
        calls = reply.calls
        run = calls[: self.limits.max_calls_per_turn]
        kept = self._keep(conversation, reply, run)
        answers: list[Message] = []
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
            entries = {"name": call.name} if call.name else {}
            if kept:
                entries["tool_call_id"] = kept[number - 1]["id"]
            # behind a message without calls a template may refuse the role tool
            role = self.role if kept or not reply.native else "user"
            answers.append(self._message(role, text, **entries))
            conversation.messages.append(answers[-1])
        if len(run) < len(calls):
            conversation.tool_errors += len(calls) - len(run)
            over = f"only {len(run)} tool calls are run in one turn, and this has {len(calls)}"
            if kept:  # each answer belongs to a call
                answers[-1]["content"] += f"\n{over}"
            else:
                conversation.messages.append(self._message(answers[-1]["role"], f"Tool call failed:\n{over}"))

    def answered_calls(self, conversation: Conversation) -> Iterator[tuple[int, ToolCall, str]]:
        """The calls that earlier turns ran: the number of each in its turn, and the answer that the model has read."""
        counted = 0
        own = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant" and n >= conversation.opening]
        for place, end in zip(own, [*own[1:], len(conversation.messages)], strict=True):
            message, answers = conversation.messages[place], conversation.messages[place + 1 : end]
            calls = calls_of_message(message)
            if calls is None:
                calls = self.calls_of(message["content"])
            run = calls[: self.limits.max_calls_per_turn]
            for number, (call, answer) in enumerate(zip(run, answers, strict=False), start=1):
                over = self.limits.max_calls is not None and counted >= self.limits.max_calls
                if self._tool_of(call.name) is not None and call.fault is None and not over:
                    counted += 1
                    yield number, call, answer["content"]

    def differs(self, answer: str, tool: ToolTransform, number: int, call: ToolCall, result: ToolResult) -> str | None:
        """The text for the `number`-th call of a turn if its `answer` of before is another; None if it is the same."""
        text = self._message(self.role, tool.message(number, call, self._shortened(result)))["content"]
        return None if answer == text or answer.startswith(f"{text}\nonly ") else text  # a limit of calls adds a line

    def _message(self, role: str, text: str, **entries: str) -> Message:
        """A message with a tool's answer; only the role tool has further entries."""
        shown = without_control_tokens(text)
        if self.reader is not None:
            shown = self.reader.special.sub(_apart, shown)
        return {"role": role, "content": shown, **(entries if role == "tool" else {})}

    def _keep(self, conversation: Conversation, reply: _Reply, run: Sequence[ToolCall]) -> list[Message]:
        """Keep the calls that are run in the reply's message; returns them, none if the template cannot write them."""
        if self.reader is None or reply.content is None:
            return []
        before = sum(len(message.get("tool_calls") or ()) for message in conversation.messages)
        ids = [number or f"call{before + place:05}" for place, number in enumerate(reply.ids or [""] * len(run), 1)]
        calls = [
            {"id": number, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for number, call in zip(ids, run, strict=False)
        ]
        message = {**conversation.messages[-1], "content": reply.content.strip(), "tool_calls": calls}
        for written in (message, with_thoughts_apart(message)):
            if self.reader.writes(written, self.role):
                conversation.messages[-1] = written
                return calls
        if reply.native:
            conversation.messages[-1] = {**conversation.messages[-1], CALLED: calls}
        return []

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


@dataclass(frozen=True, slots=True)
class _Reply:
    """The calls of a reply; `content` is its text beside them, None if they are not kept apart from it."""

    calls: list[ToolCall]
    content: str | None = None
    ids: Sequence[str] = ()
    native: bool = False  # whether the calls stand in the chat template's form


def together(act: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`act` of each item, several at the same time."""
    if len(items) < 2:
        return [act(item) for item in items]
    with ThreadPoolExecutor(min(AT_ONCE, len(items)), "rlpost-tools") as pool:
        return list(pool.map(act, items))


def calls_of_message(message: Message) -> list[ToolCall] | None:
    """The calls that were read in an assistant's message; None if they stand in its content alone."""
    calls = message.get("tool_calls", message.get(CALLED))
    if calls is None:
        return None
    functions = [call["function"] for call in calls]
    return [ToolCall(f["name"], f["arguments"], place) for place, f in enumerate(functions)]


def without_control_tokens(text: str) -> str:
    """`text` with a space after the opening bracket of anything that a tokenizer could read as a control token.

    A tool shows text from others: a page that holds `<|im_end|>` must not end the turn that shows it.
    """
    return _CONTROL.sub(lambda match: f"{match.group()} ", text)


def _apart(token: re.Match[str]) -> str:
    """The token with a space behind its first character, so that it is read as text."""
    return f"{token.group()[0]} {token.group()[1:]}"


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


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function as a tool. Raises ConfigError for one without types or descriptions."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:  # of a type that is not imported
        raise ConfigError(
            f"the tool {name} does not say enough for a model to call it: {' '.join(str(error).split())}; give each "
            'parameter a type and a line "name: what it is" under "Args:" in the docstring'
        ) from error
    described = {key: value for key, value in schema["function"].items() if key != "return"}  # not part of the format
    return {"type": "function", "function": {**described, "name": name}}
