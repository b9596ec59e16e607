"""The tools of an OpenEnv server's MCP environment: each call is a step of the conversation's own episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.openenv_actions import tool_failure
from rlpost.envs.openenv_sessions import Answer, Episode
from rlpost.envs.tool_calls import Tools, calls_of_message

_SHORTENED = ("characters left out]\n", " tool calls are run in one turn")  # in answers that are not the result alone


class ServerTools(ToolTransform):
    """Offers the tools that a server `listed`.

    `episode_of` gives a conversation's episode, and `play` plays an action in it: see `Sessions.play`.
    """

    def __init__(
        self,
        listed: Sequence[dict[str, Any]],
        episode_of: Callable[[Conversation], Episode],
        play: Callable[[Episode, dict[str, Any]], Answer | None],
    ) -> None:
        self._schemas = list(listed)
        self._episode_of = episode_of
        self._play = play

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        return self._schemas

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """See `ToolTransform.call`; a failure of the server becomes the episode's error, which ends it."""
        episode = self._episode_of(conversation)
        if episode.done:
            return ToolResult("the episode is over", ok=False)
        answer = self._play(episode, action_of(call)) if episode.error is None else None
        failure = None if answer is None else tool_failure(answer.observation)
        if failure == "transport_error":
            episode.error = f"the tool {call.name} failed: {episode.text}"
        if answer is None or episode.error is not None:
            return ToolResult(episode.error or episode.text, ok=False)
        return ToolResult(episode.text, ok=failure is None)

    def ran(
        self, conversation: Conversation, turns: int, tools: Tools, role: str
    ) -> list[tuple[dict[str, Any], str | None]]:
        """The steps of the first `turns` turns of the policy, in `role`: each call, and the text shown for it.

        The text is None where it stands shortened in the conversation.
        """
        replies = [n for n, message in enumerate(conversation.messages) if message["role"] == role]
        own = replies[len(replies) - conversation.turns :]  # without assistant messages of the prompt
        ran: list[tuple[dict[str, Any], str | None]] = []
        for place, end in list(zip(own, [*own[1:], len(conversation.messages)], strict=True))[:turns]:
            message = conversation.messages[place]
            calls = calls_of_message(message)
            calls = tools.calls_of(message["content"]) if calls is None else calls
            for call, answer in zip(calls, conversation.messages[place + 1 : end], strict=False):
                limited = tools.limits.max_calls is not None and len(ran) >= tools.limits.max_calls
                if call.fault is None and self.takes(call.name) and not limited:
                    text = answer["content"].partition("\n")[2]
                    ran.append((action_of(call), None if any(part in text for part in _SHORTENED) else text))
        return ran


def action_of(call: ToolCall) -> dict[str, Any]:
    """The step that calls a tool."""
    return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
