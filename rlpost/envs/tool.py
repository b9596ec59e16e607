"""What an environment asks of a tool: its functions, its answer to a call, and how much of it a model may use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.transforms.base import Transform
from rlpost.settings.checks import Settings, limited

ROLES = ("user", "tool")  # of the messages that answer a call


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a reply: characters `place` to `end` of it; `fault` says why it cannot be run as it stands."""

    name: str
    arguments: Mapping[str, Any]
    place: int
    fault: str | None = None
    end: int = 0


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answers; `ok` is False where the call failed, which `text` explains to the model."""

    text: str
    ok: bool = True


class ToolTransform(Transform):
    """Functions that the model may call; a `ChatEnv` runs them and shows the model what they answered.

    `call` may be entered by several threads at once, never twice at once for one conversation; further
    calls than `at_once` wait for their turn. What is kept from turn to turn belongs to `conversation.key`,
    until `on_end`.
    """

    at_once: int | None = None  # calls that run at the same time; None: of as many conversations as call
    described: bool = True  # False: the model is not shown the schemas; its prompt says what it may call

    role: str = "user"  # of the messages that answer its calls: the environment's, once it is appended to one

    @abstractmethod
    def schemas(self) -> list[dict[str, Any]]:
        """The functions as the model is shown them: `{"type": "function", "function": {"name": ..., ...}}` each."""

    @abstractmethod
    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """Run one call, within a time limit.

        What the model did wrong is a `ToolResult` that says so. An exception is a fault of the tool:
        the conversation ends with it, without a reward; an `RlpostError` ends the run.
        """

    def calls_in(self, reply: str) -> list[ToolCall]:
        """The calls in forms that are this tool's own."""
        return []

    def message(self, number: int, call: ToolCall, result: ToolResult) -> str:
        """What the model is told of the `number`-th call of its turn."""
        if result.ok:
            return f"Tool {call.name} executed successfully:\n{result.text}"
        return f"Tool {call.name} failed:\n{result.text}"

    def names(self) -> list[str]:
        """The names of the functions."""
        return [schema["function"]["name"] for schema in self.schemas()]

    def takes(self, name: str) -> bool:
        """Whether a call of `name` is for this tool, which may go by shorter names than those it shows."""
        return name in self.names()

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """Show the functions to the model, where they are to be described."""
        for conversation in conversations if self.described else ():
            conversation.tools = [*conversation.tools, *self.schemas()]


@dataclass(frozen=True)
class ToolLimits(Settings):
    """How much of its tools a model may use.

    `max_calls` in a conversation and `max_calls_per_turn` in a reply are run, further ones answered
    with the limit; None: as many as it writes. Of an answer `max_output_chars` characters are shown.
    """

    max_calls: int | None = limited(None, at_least=1)
    max_calls_per_turn: int | None = limited(8, at_least=1)
    max_output_chars: int = limited(4000, at_least=1)
