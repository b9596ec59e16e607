"""What the tests of tools share: a tool that adds, calls of it, and how the environment's messages are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.data.conversation import Completion, Conversation, Message
from rlpost.envs import ChatEnv
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform


class Adder(ToolTransform):
    """Adds two numbers; remembers what it was asked and what has ended."""

    def __init__(self, run: Callable[[int, int], object] = lambda a, b: a + b, name: str = "add") -> None:
        self.run = run
        self.name = name
        self.asked: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []

    def schemas(self) -> list[dict[str, Any]]:
        number = {"type": "integer"}
        parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
        return [{"type": "function", "function": {"name": self.name, "description": "Add.", "parameters": parameters}}]

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        a, b = call.arguments.get("a"), call.arguments.get("b")
        if not isinstance(a, int) or not isinstance(b, int):
            return ToolResult("a and b must be integers", ok=False)
        self.asked.append((a, b))
        return ToolResult(str(self.run(a, b)))

    def on_end(self, conversations: Sequence[Conversation]) -> None:
        self.ended += [conversation.key for conversation in conversations]


def calling(a: Any, b: Any, name: str = "add") -> str:
    """A call in rlpost's own form."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}\n</tool_call>"


def begun(env: ChatEnv) -> Conversation:
    """A conversation of this environment."""
    return env.begin([{"query": "What is 2 + 3?"}])[0]


def replied(env: ChatEnv, conversation: Conversation, reply: str, finish_reason: str = "stop") -> list[Message]:
    """The messages with which the environment answers `reply`."""
    before = len(conversation.messages)
    conversation.add_completion(Completion([], [], reply, finish_reason, 0))
    env.advance([conversation])
    return conversation.messages[before + 1 :]


def result_in(message: Message) -> ToolResult:
    """The result of a call that a message shows."""
    head, _, text = message["content"].partition(":\n")
    return ToolResult(text, head.endswith("executed successfully"))
