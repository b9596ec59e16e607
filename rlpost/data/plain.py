"""Batches as JSON-compatible values and back, exactly: how a checkpoint keeps a buffer's rows."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from rlpost.data.content import ContentBase
from rlpost.data.conversation import Message
from rlpost.data.history import History
from rlpost.data.ragged import ragged, strings

_KIND, _VALUES, _DTYPE, _PART = "kind", "values", "dtype", "ContentBase"


def to_plain(batch: TensorDictBase) -> dict[str, Any]:
    """Nested dicts and lists that hold everything of `batch` (B,), or of a stack of such; floats keep every bit."""
    if isinstance(batch, LazyStackedTensorDict):
        return {_KIND: "stack", "dim": batch.stack_dim, _VALUES: [to_plain(each) for each in batch.tensordicts]}
    return {
        _KIND: "batch",
        "size": batch.batch_size[0],
        _VALUES: {key: _plain_value(value) for key, value in batch.items()},
    }


def from_plain(plain: dict[str, Any]) -> TensorDictBase:
    """The batch that `to_plain` was given."""
    if plain[_KIND] == "stack":
        return LazyStackedTensorDict.lazy_stack([from_plain(each) for each in plain[_VALUES]], plain["dim"])
    values = {key: _value(value) for key, value in plain[_VALUES].items()}
    return TensorDict(values, batch_size=[plain["size"]])


def _plain_value(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        kind = "ragged" if value.is_nested else "tensor"
        values = [row.tolist() for row in value.unbind()] if value.is_nested else value.tolist()
        return {_KIND: kind, _DTYPE: str(value.dtype).removeprefix("torch."), _VALUES: values}
    if isinstance(value, History):
        return {_KIND: "history", _VALUES: [[_plain_message(m) for m in chat] for chat in value.to_chats()]}
    if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
        return to_plain(value)
    return {_KIND: "strings", _VALUES: list(value.tolist())}


def _value(plain: dict[str, Any]) -> Any:
    kind, values = plain[_KIND], plain[_VALUES]
    if kind == "batch":
        return from_plain(plain)
    if kind == "history":
        return History.from_chats([[_message(m) for m in chat] for chat in values])
    if kind == "strings":
        return strings(values)
    dtype = getattr(torch, plain[_DTYPE])
    if kind == "ragged":
        return ragged([torch.tensor(row, dtype=dtype) for row in values])
    return torch.tensor(values, dtype=dtype)


def _plain_message(message: Message) -> Message:
    """A message whose parts are dicts, told apart from those that were dicts already."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": [{_PART: p.to_part()} if isinstance(p, ContentBase) else p for p in content]}


def _message(plain: Message) -> Message:
    content = plain["content"]
    if not isinstance(content, list):
        return plain
    return {**plain, "content": [ContentBase.from_part(p[_PART]) if _PART in p else p for p in content]}
