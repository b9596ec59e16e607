"""Conversations of several turns, played with replies of the test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.base import EnvBase
from rlpost.envs.chat import ChatEnv


def call(name: str, **arguments: Any) -> str:
    """A reply that calls a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def say(env: EnvBase, conversations: Sequence[Conversation], *replies: str, reason: str = "stop") -> None:
    """Let the model reply, the i-th conversation with the i-th reply; a character is a token."""
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([1] * len(reply), [0.0] * len(reply), reply, reason, 0))
    env.advance(conversations)


def played(env: EnvBase, *replies: str) -> Conversation:
    """A conversation of one of the env's prompts with these replies, until it ends."""
    [conversation] = env.draw()
    for reply in replies:
        if not conversation.done:
            say(env, [conversation], reply)
    return conversation


def answered(env: ChatEnv, task: Mapping[str, Any], *replies: str) -> list[Conversation]:
    """Scored replies to one task, each in a conversation of its own; {gold} stands for the task's answer."""
    conversations = [Conversation(dict(task), env.opening_messages(task)) for _ in replies]
    say(env, conversations, *(reply.replace("{gold}", str(task["answer"])) for reply in replies))
    return conversations


def digit_of(conversation: Conversation) -> int:
    """The right guess in the games that let the model guess the last digit of their seed."""
    return conversation.task["start"] % 10


def wrong_for(conversation: Conversation) -> str:
    """A wrong guess in these games."""
    return str((digit_of(conversation) + 1) % 10)


def say_right(env: EnvBase, conversations: Sequence[Conversation]) -> None:
    """Let each conversation guess its digit."""
    say(env, conversations, *(str(digit_of(each)) for each in conversations))


def say_wrong(env: EnvBase, conversations: Sequence[Conversation]) -> None:
    """Let each conversation guess another digit."""
    say(env, conversations, *map(wrong_for, conversations))


def error_of(conversation: Conversation) -> str:
    """The error of a conversation that it has ended: then it is invalid, and its reward is None and not 0."""
    assert (conversation.done, conversation.valid, conversation.reward) == (True, False, None)
    assert conversation.error
    return conversation.error
