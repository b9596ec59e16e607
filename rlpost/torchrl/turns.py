"""Between conversations and the TensorDicts of `reset` and `step`: one row a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.continuation import Continuation
from rlpost.data.conversation import Conversation
from rlpost.data.history import History
from rlpost.data.input_mode import InputMode
from rlpost.data.ragged import column, one_each, ragged, strings
from rlpost.errors import DataError


def rows_of(tensordict: TensorDictBase) -> list[dict[str, Any]]:
    """The entries of a reset TensorDict as one mapping a row; a plain `text` becomes `query`.

    Raises DataError without `text` and `query`.
    """
    plain = [name for name, value in tensordict.items() if not isinstance(value, TensorDict)]
    columns = {name: column(tensordict, name) for name in plain}
    if "query" not in columns and "text" not in columns:
        raise DataError(
            f"reset was given {', '.join(columns)} but neither 'text' nor 'query': give one of them, a str a row"
        )
    if "text" in columns:
        columns.setdefault("query", columns.pop("text"))
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def conversations_of(tensordict: TensorDictBase) -> list[Conversation]:
    """The conversations a reset or step put into `tensordict`. Raises DataError where there are none."""
    if "conversation" not in tensordict:
        raise DataError("this TensorDict holds no conversation: call reset, and give step what it returned")
    return column(tensordict, "conversation")


def observation(
    conversations: Sequence[Conversation], mode: InputMode, continuation: Continuation | None
) -> dict[str, Any]:
    """What a policy is shown of `conversations`, in the form that `mode` says.

    In the mode history the text and the ids that a `continuation` makes of the messages are there as well.
    Raises DataError where the chat template refuses a conversation, or renders what came before differently
    once more follows.
    """
    shown: dict[str, Any] = {
        "query": strings([c.query for c in conversations]),
        "conversation": strings(conversations),
        "group_id": torch.tensor([c.group_id for c in conversations]),
        "sample": torch.tensor([c.sample for c in conversations]),
        "done": one_each([c.done for c in conversations], torch.bool),
        "terminated": one_each([c.terminated for c in conversations], torch.bool),
        "truncated": one_each([c.truncated for c in conversations], torch.bool),
    }
    if mode is InputMode.history:
        shown["history"] = History.from_chats([c.messages for c in conversations])
        if continuation is None:
            return shown
    ids = [_read(c, continuation) for c in conversations]
    if mode is not InputMode.tokens:
        texts = [_text(c, read, continuation) for c, read in zip(conversations, ids, strict=True)]
        shown["text"] = {"prompt": strings(texts)}
    if mode is not InputMode.text:
        shown["tokens"] = {"prompt": ragged([torch.tensor(read, dtype=torch.int64) for read in ids])}
    return shown


def _read(conversation: Conversation, continuation: Continuation | None) -> list[int]:
    """The ids that a policy reads next: those carried, and those of new messages unless the conversation is over."""
    asked = conversation.copy()
    if continuation is not None:  # without which prompts that began as ids go on
        if not asked.prompt_ids:
            continuation.begin(asked)
        if asked.turns and not asked.done:
            asked.add_observation(continuation.observation_ids(asked))
    return asked.prompt_ids + asked.response_ids


def _text(conversation: Conversation, read: list[int], continuation: Continuation | None) -> str:
    """The text of the ids that a policy `read`s next; where they are not those of all messages, of the messages."""
    if continuation is None:  # the text of plain prompts
        return "".join(message["content"] for message in conversation.messages)
    if conversation.turns and (conversation.ends_sampled or not conversation.done):
        return continuation.tokenizer.decode(read)
    return continuation.text(conversation)


def scores(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Rewards and accuracies after a step, (B, 1) each."""

    names = sorted({name for c in conversations for name in c.reward_parts})
    return {
        "reward": one_each([(c.reward or 0.0) if c.valid else None for c in conversations]),
        "reward_parts": {name: one_each([c.reward_parts.get(name) for c in conversations]) for name in names},
        "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
        "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
    }
