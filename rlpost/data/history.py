"""Conversations as batches of messages: rendered with a chat template, and read back from its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict

from rlpost.data.chat import ChatMask
from rlpost.data.conversation import PADDING_ROLE, Message
from rlpost.data.ragged import fields_of, grid, own, padded, padding_id, ragged, settle
from rlpost.data.rendering import render, template_messages
from rlpost.errors import DataError

_OPTIONAL = ("tool_calls", "tool_responses", "more")
_COLUMNS = ("role", "content", *_OPTIONAL)  # of Python values
_FIELDS = frozenset((*_COLUMNS, "is_complete"))


class History(TensorClass["nocast"]):
    """Messages of batch size (*B, M), the last dimension counting messages; () is a single message.

    Rows shorter than the longest end in messages of role "<none>", which `to_chats` and
    `apply_chat_template` leave out. `is_complete` is False for a message cut off before its end of
    turn. `content` is a text, or a list of `ContentBase` or of parts as dicts. `tool_calls` are
    those of an assistant's message, `tool_responses` results that follow a message as further ones
    of role "tool"; `more` holds a message's other entries, such as `tool_call_id`. All are None where
    a message has none.

    >>> from rlpost.data import History
    >>> from rlpost.models import load_tokenizer, locate_model
    >>> tokenizer = load_tokenizer(locate_model("builtin:tiny"))
    >>> chats = History.from_chats([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]])
    >>> [text] = chats.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)
    >>> History.from_text([text]).to_chats()
    [[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]]
    """

    role: Any
    content: Any
    is_complete: Any = True
    tool_calls: Any = None
    tool_responses: Any = None
    more: Any = None

    def __post_init__(self) -> None:
        """Store one value a message, whether lists were given as they are or stacked (`set_list_to_stack`)."""
        fields = fields_of(self)
        if isinstance(fields, LazyStackedTensorDict):  # of settled histories, perhaps of uneven lengths
            return
        settle(fields, _COLUMNS)
        for name in _OPTIONAL:
            if fields.get(name, None) is None:  # a column all the same, so that histories stack with any others
                setattr(self, name, NonTensorData(None, batch_size=self.batch_size))
        complete = fields.get("is_complete")
        if not isinstance(complete, torch.Tensor):
            given = complete.tolist() if isinstance(complete, NonTensorStack) else complete.data
            self.is_complete = torch.as_tensor(given, dtype=torch.bool).expand(self.batch_size).clone()

    @classmethod
    def from_chats(cls, chats: Sequence[Sequence[Mapping[str, Any]]] | Sequence[Mapping[str, Any]]) -> History:
        """History (B, M) of B chats, M the length of the longest, and at least 1; History (M,) of a single chat.

        A message has `role` and `content`, and may have `is_complete`, `tool_calls`,
        `tool_responses` and whatever else its template reads. Raises DataError for a message without role or
        content.
        """
        if isinstance(chats[0], Mapping):
            return cast(History, cls.from_chats([cast(Sequence[Mapping[str, Any]], chats)])[0])
        chats = cast(Sequence[Sequence[Mapping[str, Any]]], chats)
        width = max(1, *(len(chat) for chat in chats))
        bare = True  # whether all have role and content alone, as most do: then no other entry is looked for
        for row, chat in enumerate(chats):
            for place, message in enumerate(chat):
                if "role" not in message or "content" not in message:
                    raise DataError(f"message {place} of chat {row} lacks role or content: {dict(message)!r:.100}")
                bare = bare and len(message) == 2
        padding = {"role": PADDING_ROLE, "content": ""}
        rows = [[*chat, *[padding] * (width - len(chat))] for chat in chats]
        shape = torch.Size([len(rows), width])

        def optional(value: Callable[[Mapping[str, Any]], Any]) -> NonTensorStack | NonTensorData:
            values = [] if bare else [[value(message) for message in row] for row in rows]
            used = any(v is not None for row in values for v in row)
            return grid(values, shape) if used else NonTensorData(None, batch_size=shape)

        complete = [] if bare else [[bool(m.get("is_complete", True)) for m in row] for row in rows]
        return cls(
            role=grid([[message["role"] for message in row] for row in rows], shape),
            content=grid([[own(message["content"]) for message in row] for row in rows], shape),
            is_complete=torch.tensor(complete) if complete else torch.ones(shape, dtype=torch.bool),  # (B, M)
            tool_calls=optional(lambda message: own(message.get("tool_calls")) or None),
            tool_responses=optional(lambda message: own(message.get("tool_responses")) or None),
            more=optional(_more),
            batch_size=shape,
        )

    @classmethod
    def from_text(
        cls, text: str | Sequence[str], *, chat_template_name: str | None = None, tokenizer: Any = None
    ) -> History:
        """Read rendered text back: History (M,) of a text, (B, M) of a list of them.

        Read as the format named `chat_template_name`, else as the one that `tokenizer` writes, else as
        ChatML. Rendering with that template, and no generation prompt, gives the same text again.
        Three things are not kept apart: a text that leaves out the token it begins with, or the line
        break behind its last end of turn, gets it back; the padding around a text is left out; and
        what ends a text (`<|endoftext|>`) in place of an end of turn becomes one.

        A message without its end of turn has `is_complete` False, as has the empty one that a
        generation prompt at the end begins. Tool calls become `tool_calls`, where the format has them
        and the template would write them in the same place; a call whose JSON is bad stays in the
        content. Content that holds a control token of the format, or is a call to the letter, cannot
        be told from one.

        Raises UnparsedTextError (a RuntimeError) for a text that is not a conversation in the format,
        UnknownTemplateError (a NotImplementedError) for a name without a format or parser.
        """
        from rlpost.data.chat_templates import parse_chat, template_to_read

        known = template_to_read(tokenizer, chat_template_name)
        if isinstance(text, str):
            return cast(History, cls.from_chats([parse_chat(text, known)])[0])
        return cls.from_chats([parse_chat(each, known) for each in text])

    def to_chats(self) -> list[list[Message]]:
        """One list of messages a row, padding left out; a history of one dimension is one row.

        A message has `role` and `content`, `is_complete` only where it is False, and its other
        entries only if it has some.
        """
        fields = fields_of(self)
        if self.ndim == 2 and isinstance(fields, LazyStackedTensorDict) and fields.stack_dim == 0:
            return [chat for row in self.unbind(0) for chat in row.to_chats()]  # whose lengths may differ
        columns = [self._rows_of(name) for name in ("role", "content", "is_complete", *_OPTIONAL)]
        return [
            [_message(*fields) for fields in zip(*row, strict=True) if fields[0] != PADDING_ROLE]
            for row in zip(*columns, strict=True)
        ]

    def _rows_of(self, name: str) -> list[list[Any]]:
        """The column `name` as plain rows of Python values."""
        shape = (1, *self.batch_size) if self.ndim == 1 else tuple(self.batch_size)
        column = fields_of(self).get(name)
        if isinstance(column, torch.Tensor):
            return column.reshape(shape).tolist()
        if not isinstance(column, NonTensorStack):  # one value for every message
            return [[column.data] * shape[1] for _ in range(shape[0])]
        values = column.tolist()
        return [values] if self.ndim == 1 else values

    def append(self, message: History, *, inplace: bool = False) -> History:
        """The history with one more message at the end: `message` is () for (M,), (B,) for (B, M).

        A new one, unless `inplace`.
        """
        return self.extend(cast(History, message.unsqueeze(-1)), inplace=inplace)

    def extend(self, messages: History, *, inplace: bool = False) -> History:
        """The history with `messages`, of as many dimensions, behind the last message of each row.

        A new one, unless `inplace`: this one is then changed and returned.
        """
        pairs = zip(self.to_chats(), messages.to_chats(), strict=True)
        longer = History.from_chats([old + new for old, new in pairs])
        longer = longer if self.ndim == 2 else cast(History, longer[0])
        return self._become(longer) if inplace else longer

    def _become(self, other: History) -> History:
        self.batch_size = self.batch_size[:-1]
        for name in (*_COLUMNS, "is_complete"):
            fields_of(self).set(name, fields_of(other).get(name))
        self.batch_size = other.batch_size
        return self

    def apply_chat_template(
        self,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        tokenize: bool = False,
        padding: bool = False,
        return_dict: bool = False,
        return_assistant_tokens_mask: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The chats as a chat template writes them.

        The template is, in this order, `chat_template` (jinja), the one named `chat_template_name`, the
        tokenizer's own, one with a keyword in the tokenizer's name, ChatML. It reads `tools`, JSON schemas of
        functions, and further variables, `template_kwargs`. A message with `is_complete` False ends with its
        content; if it is the last one, the model continues it, and no generation prompt follows.

        Returns one str a row; if `tokenize`, one list of token ids a row, or with `padding` a tensor
        (B, T), padded on the left; if `return_dict`, a TensorDict (B,) of `input_ids` and
        `attention_mask` (int64) and, if `return_assistant_tokens_mask`, `assistant_masks` (bool),
        ragged (B, *), or (B, T) with `padding`. That mask is True on what the assistant says and on
        the end of its turn, which an unfinished message lacks. For a history of one dimension the
        result is the row itself.

        `tokenizer` may be the processor of a model that reads images, sound or video, for text.

        Raises DataError for a chat that the template refuses or has no form for, MaskError (a DataError)
        if the assistant's tokens cannot be found, and UnknownTemplateError for an unknown name.
        """
        from rlpost.data.chat_templates import template_to_write

        template = template_to_write(tokenizer, chat_template, chat_template_name)
        options: dict[str, Any] = {"template": template, "tools": tools, "variables": template_kwargs}
        chats = self.to_chats()
        prompts = [add_generation_prompt and not (c and not c[-1].get("is_complete", True)) for c in chats]
        pairs = list(zip(chats, prompts, strict=True))
        rendered: Any
        if return_assistant_tokens_mask:
            mask = ChatMask(tokenizer, template, template_kwargs)
            rows = [mask.encode(chat, tools, add_generation_prompt=prompt) for chat, prompt in pairs]
            rendered = _fields(tokenizer, padding, *zip(*rows, strict=True))
        else:
            rendered = [
                render(tokenizer, template_messages(chat, tokenizer), add_generation_prompt=prompt, **options)
                for chat, prompt in pairs
            ]
            if tokenize or return_dict:
                rendered = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
            if return_dict:
                rendered = _fields(tokenizer, padding, rendered)
            elif padding:
                rendered = _fields(tokenizer, padding, rendered)["input_ids"]
        return rendered if self.ndim == 2 else rendered[0]


def _more(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entries of a message that have no column of their own."""
    if message.keys() <= _FIELDS:
        return None
    return {name: own(value) for name, value in message.items() if name not in _FIELDS}


def _message(
    role: str,
    content: Any,
    is_complete: bool,
    tool_calls: Any,
    tool_responses: Any,
    more: Mapping[str, Any] | None,
) -> Message:
    """A message as a chat template reads it, without empty entries."""
    message: Message = {"role": role, "content": own(content)}
    if not is_complete:
        message["is_complete"] = False
    if tool_calls:
        message["tool_calls"] = own(tool_calls)
    if tool_responses:
        message["tool_responses"] = own(tool_responses)
    return {**message, **own(more)} if more else message


def _fields(
    tokenizer: Any, padding: bool, ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] = ()
) -> TensorDict:
    """The TensorDict (B,) of ids, attention mask and, if `masks` are given, assistant masks."""

    def together(rows: Sequence[torch.Tensor], fill: int = 0) -> torch.Tensor:
        return padded(rows, fill, left=True) if padding else ragged(rows)

    rows = [torch.tensor(row, dtype=torch.int64) for row in ids]
    fields = {
        "input_ids": together(rows, padding_id(tokenizer)),
        "attention_mask": together([torch.ones_like(row) for row in rows]),
    }
    if masks:
        fields["assistant_masks"] = together([torch.tensor(mask, dtype=torch.bool) for mask in masks])
    return TensorDict(fields, batch_size=[len(rows)])
