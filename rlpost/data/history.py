"""Conversations as messages, batched: what a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorClass

PADDING_ROLE = "<none>"  # fills the short rows of a ragged batch; never rendered
_OPTIONAL = ("tool_calls", "tool_responses")


class History(TensorClass["nocast"]):
    """Messages of batch size (*B, M), the last dimension counting messages; () is a single message.

    Rows shorter than the longest end in messages of role "<none>", which `to_chats` and
    `apply_chat_template` leave out. `is_complete` is False for a message cut off before its end of
    turn. `tool_calls` and `tool_responses` are None where no message of the batch has any.
    """

    role: Any
    content: Any
    is_complete: Any = True
    tool_calls: Any = None
    tool_responses: Any = None

    @classmethod
    def from_chats(cls, chats: Sequence[Sequence[Mapping[str, Any]]]) -> History:
        """History (B, M) of B chats, M the length of the longest, and at least 1.

        A message has `role` and `content`, and may have `is_complete`, `tool_calls` and
        `tool_responses`. Raises ValueError for no chats, or a message without role or content.
        """
        if not chats:
            raise ValueError("History.from_chats was given no chats: a history holds at least one")
        width = max(1, *(len(chat) for chat in chats))
        for row, chat in enumerate(chats):
            for place, message in enumerate(chat):
                if "role" not in message or "content" not in message:
                    raise ValueError(f"message {place} of chat {row} lacks role or content: {dict(message)!r:.100}")
        padding = {"role": PADDING_ROLE, "content": ""}
        rows = [[*chat, *[padding] * (width - len(chat))] for chat in chats]

        def grid(name: str) -> NonTensorStack:
            return NonTensorStack(*(NonTensorStack(*(m.get(name) for m in row)) for row in rows))

        complete = [[bool(m.get("is_complete", True)) for m in row] for row in rows]
        used = [name for name in _OPTIONAL if any(m.get(name) for row in rows for m in row)]
        return cls(
            role=grid("role"),
            content=grid("content"),
            is_complete=torch.tensor(complete, dtype=torch.bool),  # (B, M)
            **{name: grid(name) for name in used},
            batch_size=[len(rows), width],
        )

    def to_chats(self) -> list[list[dict[str, Any]]]:
        """One list of messages a row, padding left out; a history of one dimension is one row.

        A message has `role` and `content`, `is_complete` only where it is False, and its tool
        entries only where it has some. Raises ValueError for other than one or two dimensions.
        """
        if self.ndim not in (1, 2):
            raise ValueError(f"a history of batch size {tuple(self.batch_size)} is no list of chats: flatten it first")
        columns = [self._rows_of(name) for name in ("role", "content", "is_complete", *_OPTIONAL)]
        return [
            [_message(*fields) for fields in zip(*row, strict=True) if fields[0] != PADDING_ROLE]
            for row in zip(*columns, strict=True)
        ]

    def _rows_of(self, name: str) -> list[list[Any]]:
        """The column `name` as plain rows of Python values."""
        shape = (1, *self.batch_size) if self.ndim == 1 else tuple(self.batch_size)
        column = getattr(self, name)
        if column is None:
            return [[None] * shape[1] for _ in range(shape[0])]
        if isinstance(column, torch.Tensor):
            return column.reshape(shape).tolist()
        if not isinstance(column, list):  # one value for every message
            return [[column] * shape[1] for _ in range(shape[0])]
        return [column] if self.ndim == 1 else column

    def append(self, message: History) -> History:
        """A new history with one more message at the end: `message` is () for (M,), (B,) for (B, M)."""
        return self.extend(message.unsqueeze(-1))

    def extend(self, messages: History) -> History:
        """A new history with `messages`, of as many dimensions, at the end of each row.

        Raises ValueError when the numbers of rows differ.
        """
        if self.batch_size[:-1] != messages.batch_size[:-1]:
            raise ValueError(
                f"cannot extend a history of batch size {tuple(self.batch_size)} by one of "
                f"{tuple(messages.batch_size)}: all but the last must be equal"
            )
        pairs = zip(self.to_chats(), messages.to_chats(), strict=True)
        longer = History.from_chats([old + new for old, new in pairs])
        return longer if self.ndim == 2 else cast(History, longer[0])

    def apply_chat_template(
        self,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        chat_template: str | None = None,
    ) -> Any:
        """The chats as the tokenizer's template (or `chat_template`) writes them.

        One str a row, or one list of token ids a row if `tokenize`; for a history of one dimension
        the row itself.
        """
        texts = [
            tokenizer.apply_chat_template(
                chat, add_generation_prompt=add_generation_prompt, tokenize=False, chat_template=chat_template
            )
            for chat in self.to_chats()
        ]
        rendered = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] if tokenize else texts
        return rendered if self.ndim == 2 else rendered[0]


def _message(role: str, content: Any, is_complete: bool, tool_calls: Any, tool_responses: Any) -> dict[str, Any]:
    """A message as a chat template reads it, without the entries that say nothing."""
    message: dict[str, Any] = {"role": role, "content": content}
    if not is_complete:
        message["is_complete"] = False
    if tool_calls:
        message["tool_calls"] = tool_calls
    if tool_responses:
        message["tool_responses"] = tool_responses
    return message
