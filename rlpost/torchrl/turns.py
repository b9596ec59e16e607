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

    In the mode history what a `continuation` makes of the messages is there as well: the text, and
    the ids of first prompts. Raises DataError where the chat template refuses a conversation, or, in
    the other modes, renders what came before differently once more follows.
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
        if continuation is not None:
            shown["text"] = {"prompt": strings([continuation.text(c) for c in conversations])}
            if not any(c.turns for c in conversations):
                shown["tokens"] = {"prompt": _ids(conversations, continuation)}
    elif mode is InputMode.text:
        shown["text"] = {"prompt": strings([prompt_text(c, continuation) for c in conversations])}
    else:
        shown["tokens"] = {"prompt": _ids(conversations, continuation)}
    return shown


def prompt_text(conversation: Conversation, continuation: Continuation | None) -> str:
    """The conversation so far as the text that the next turn goes on from."""
    if not conversation.chat:
        if continuation is not None and conversation.response_ids:  # with the special tokens that were sampled
            return conversation.prompt_text + continuation.tokenizer.decode(conversation.response_ids)
        return "".join(message["content"] for message in conversation.messages)
    assert continuation is not None  # which a chat's mode asks a tokenizer for
    if conversation.turns and _is_asked(conversation):
        continuation.observation_text(conversation)  # raises where the text would not go on from what was said
    return continuation.text(conversation)


def prompt_ids(conversation: Conversation, continuation: Continuation | None) -> list[int]:
    """The conversation so far as the ids that the next turn goes on from: those carried, and of new messages."""
    carried = conversation.prompt_ids + conversation.response_ids
    if continuation is None:  # which ids that began as ids do without
        return carried
    if not carried:
        opened = conversation.copy()
        continuation.begin(opened)
        return opened.prompt_ids
    if conversation.turns and _is_asked(conversation):
        return carried + continuation.observation_ids(conversation)
    return carried


def _is_asked(conversation: Conversation) -> bool:
    """Whether the environment has said something that the policy is to answer."""
    return not conversation.done and conversation.messages[-1]["role"] != "assistant"


def _ids(conversations: Sequence[Conversation], continuation: Continuation | None) -> torch.Tensor:
    return ragged([torch.tensor(prompt_ids(c, continuation), dtype=torch.int64) for c in conversations])


def scores(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Rewards and accuracies after a step, (B, 1) each."""

    names = sorted({name for c in conversations for name in c.reward_parts})
    return {
        "reward": one_each([(c.reward or 0.0) if c.valid else None for c in conversations]),
        "reward_parts": {name: one_each([c.reward_parts.get(name) for c in conversations]) for name in names},
        "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
        "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
    }
