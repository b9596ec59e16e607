"""Conversations as token ids, turn by turn: what was sampled stays, only what is new is tokenised.

Rendering a conversation anew and tokenising that text would give other ids than the model sampled,
and a policy gradient of tokens that were never drawn. So the first prompt is rendered once, sampled
ids are carried forward, and of each later rendering only the part behind the messages that have their
ids is used: that is right where every rendering begins with the one before it, which is checked each time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

from rlpost.data.conversation import Completion, Conversation, Message
from rlpost.data.rendering import render, template_name
from rlpost.errors import DataError

_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}},
}


class Continuation:
    """Renders conversations with a tokenizer's chat template, as ids that only ever grow.

    Tools are described as the template describes them; one that knows no tools gets a description
    in the system message.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._last: tuple[Any, str, list[int]] | None = None  # that was begun: what it was of, its prompt's text, ids

    def begin(self, conversation: Conversation) -> None:
        """Set `prompt_text` and `prompt_ids`. Raises DataError where the template refuses the messages."""
        opening = conversation.opening
        begun = (conversation.messages[:opening], conversation.tools, conversation.chat)
        last = self._last
        if last is None or last[0] != begun:  # the samples of a group begin alike, one after the other
            text = self._render(conversation, opening, asking=True)
            # a template writes what a text begins with itself; for plain text the tokenizer does
            ids = self.tokenizer(text, add_special_tokens=not conversation.chat)["input_ids"]
            self._last = last = (deepcopy(begun), text, ids)
        _, conversation.prompt_text, ids = last
        conversation.prompt_ids = list(ids)

    def observation_ids(self, conversation: Conversation) -> list[int]:
        """The ids of the messages that have none, and of the next turn's opening; for a later turn than the first.

        Raises DataError for a template that renders what came before differently once more follows.
        """
        ids = self.tokenizer(self._observation(conversation), add_special_tokens=False)["input_ids"]
        if not conversation.chat or not conversation.ends_sampled or conversation.response_ids[-1] == self.end_of_turn:
            return ids
        return [self.end_of_turn, *ids]  # a turn that ended with another stop token

    def _observation(self, conversation: Conversation) -> str:
        """What `observation_ids` are of, without the end of the model's turn."""
        tokenised, count = conversation.tokenised or conversation.opening, len(conversation.messages)
        if not conversation.chat:
            return "".join(message["content"] for message in conversation.messages[tokenised:])
        whole = self._render(conversation, count, asking=True)
        if conversation.ends_sampled:
            asked = self._render(conversation, tokenised - 1, asking=True)
            answered = self._render(conversation, tokenised, asking=False)
            end_of_turn = self.tokenizer.decode([self.end_of_turn])
            # sampled ids end with the end-of-turn token; what the template puts behind it was not sampled
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
        """All that was said and, unless it is over, the opening of the model's turn; DataError where it is refused."""
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
        """What messages call the template."""
        return template_name(self.tokenizer)

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts behind a turn. Raises DataError where it puts none."""
        from rlpost.data.chat_mask import ChatMask

        token = ChatMask(self.tokenizer).end_of_turn
        if token is None:
            raise DataError(
                f"{self.template} ends a turn with no special token, so several turns cannot be trained on: use "
                "single-turn tasks with this model"
            )
        return token

    @cached_property
    def _knows_tools(self) -> bool:
        """Whether the template itself describes tools."""
        probe = [{"role": "user", "content": "probe"}]
        return self._applied(probe, [_PROBE_TOOL], asking=True) != self._applied(probe, [], asking=True)

    def _render(self, conversation: Conversation, count: int, *, asking: bool) -> str:
        """The first `count` messages as text, with the opening of the model's turn where it is `asking` for one."""
        messages, tools = conversation.messages[:count], conversation.tools
        if not conversation.chat:
            return "".join(message["content"] for message in messages)
        if tools and not self._knows_tools:
            return self._applied(_with_tools_described(messages, tools), [], asking=asking)
        return self._applied(messages, tools, asking=asking)

    def _applied(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, asking: bool) -> str:
        return render(self.tokenizer, messages, tools=list(tools) or None, add_generation_prompt=asking)


def _with_tools_described(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages with the tools told in the system message, in the form in which Hermes models are told them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\nA call is written so:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
    )
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
