"""The TensorDict that leaves a collector: one row a conversation, ragged fields as values and offsets.

Keys (B rows; "ragged" is a jagged nested tensor of shape (B, *)):

    query, text.prompt                           str: what the user asks, and the rendered first prompt
    text.response                                str: the model's last turn
    history                                      History (B, M): all messages, replies included
    tokens.prompt, tokens.response, tokens.full  int64, ragged; full = prompt + response always
    masks.all_attention_mask                     bool, ragged over full, all True
    masks.all_assistant_mask                     bool, ragged over full: True on every sampled id
    log_probs.response, log_probs.full           float32, ragged: the sampler's, 0 where not sampled
    policy_version                               int64 (B,): the oldest the row was sampled under
                                                 (str per row where versions are uuids)
    policy_version_max                           the newest, likewise
    token_versions                               int64, ragged over response: the version that each id was sampled
                                                 under, -1 where not sampled (none where versions are uuids)
    group_id, sample                             int64 (B,)
    source                                       str: its source's name in a mix of environments, else ""
    turns                                        int64 (B,): the model's in this conversation
    tools.calls, tools.errors                    int64 (B,): calls that were run, and that were not or failed
    valid                                        bool (B,)
    finish_reason                                str
    next.reward                                  float32 (B, 1); NaN where there is none (yet)
    next.reward_parts.<name>                     float32 (B, 1); NaN where a row has no such part
    next.accuracy_strict, next.accuracy_lenient  float32 (B, 1); NaN where the task has no measure
    next.done, next.terminated, next.truncated   bool (B, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from rlpost.data.conversation import Conversation
from rlpost.data.history import History
from rlpost.data.ragged import ATTENTION, joined, one_each, ragged, ragged_rows, strings, token_fields, versions


def batch_from_conversations(conversations: Sequence[Conversation]) -> TensorDict:
    """The batch described at the top of this module, of batch size (B,)."""
    size = len(conversations)
    prompts = [c.prompt_ids for c in conversations]
    tokens = token_fields(prompts, [c.response_ids for c in conversations], torch.int64)
    unsampled = [[0.0] * len(ids) for ids in prompts]
    log_probs = token_fields(unsampled, [c.log_probs for c in conversations], torch.float32)

    token_versions = [c.token_versions() for c in conversations]
    told: dict[str, Any] = {}
    if all(isinstance(version, int) for row in token_versions for version in row):
        told["token_versions"] = ragged([torch.tensor(row, dtype=torch.int64) for row in token_versions])
    part_names = sorted({name for c in conversations for name in c.reward_parts})
    return TensorDict(
        {
            "query": strings([c.query for c in conversations]),
            "history": History.from_chats([c.messages for c in conversations]),
            "text": {
                "prompt": strings([c.prompt_text for c in conversations]),
                "response": strings([c.response_text for c in conversations]),
            },
            "tokens": tokens,
            "masks": {
                "all_attention_mask": torch.ones_like(tokens["full"], dtype=torch.bool),
                "all_assistant_mask": token_fields(unsampled, [c.mask for c in conversations], torch.bool)["full"],
            },
            "log_probs": {"response": log_probs["response"], "full": log_probs["full"]},
            # -1 where the model has not spoken yet
            "policy_version": versions([(c.policy_versions or [-1])[0] for c in conversations]),
            "policy_version_max": versions([c.newest_version for c in conversations]),
            **told,
            "group_id": torch.tensor([c.group_id for c in conversations]),
            "sample": torch.tensor([c.sample for c in conversations]),
            "source": strings([c.source for c in conversations]),
            "turns": torch.tensor([c.turns for c in conversations]),
            "tools": {
                "calls": torch.tensor([c.tool_calls for c in conversations]),
                "errors": torch.tensor([c.tool_errors for c in conversations]),
            },
            "valid": torch.tensor([c.valid for c in conversations]),
            "finish_reason": strings([c.finish_reason for c in conversations]),
            "next": {
                "reward": one_each([c.reward for c in conversations]),
                "reward_parts": {
                    name: one_each([c.reward_parts.get(name) for c in conversations]) for name in part_names
                },
                "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
                "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
                "done": one_each([c.done for c in conversations], torch.bool),
                "terminated": one_each([c.terminated for c in conversations], torch.bool),
                "truncated": one_each([c.truncated for c in conversations], torch.bool),
            },
        },
        batch_size=[size],
    )


def select_rows(batch: TensorDictBase, indices: Sequence[int]) -> TensorDict:
    """The rows at `indices`, in that order; ragged fields included."""

    def pick(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                rows = ragged_rows(value)
                return ragged([rows[i] for i in indices])
            return value[list(indices)]
        if isinstance(value, History):
            chats = value.to_chats()
            return History.from_chats([chats[i] for i in indices])
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            return TensorDict({key: pick(field) for key, field in value.items()}, batch_size=[len(indices)])
        return strings([row_of(value, i) for i in indices])

    return pick(batch)


def concat_rows(batches: Sequence[TensorDictBase]) -> TensorDict:
    """All rows of `batches`, one after the other; a reward part that a batch lacks is NaN there.

    A ragged entry that a batch lacks is left out. Entries of different widths are padded with zeros on the right
    where an attention mask says that there are pads, and become ragged elsewhere.
    """
    pads = any(_has_pads(batch) for batch in batches)
    size = sum(b.batch_size[0] for b in batches)

    def join(parts: list[Any], sizes: list[int]) -> Any:
        first = next(p for p in parts if p is not None)
        if isinstance(first, torch.Tensor):
            there = [
                p if p is not None else first.new_full((n, *first.shape[1:]), float("nan"))
                for p, n in zip(parts, sizes, strict=True)
            ]
            return joined(there, pads=pads)
        if isinstance(first, History):
            return History.from_chats([chat for p in parts for chat in p.to_chats()])
        if isinstance(first, TensorDictBase) and not isinstance(first, NonTensorStack):
            names = dict.fromkeys(k for p in parts if p is not None for k in p.keys())  # noqa: SIM118
            columns = {k: [None if p is None else p.get(k, None) for p in parts] for k in names}
            fields = {k: join(column, sizes) for k, column in columns.items() if not _ragged_in_some(column)}
            return TensorDict(fields, batch_size=[size])
        return strings([row_of(p, i) for p, n in zip(parts, sizes, strict=True) for i in range(n)])

    return join(list(batches), [b.batch_size[0] for b in batches])


def _ragged_in_some(parts: Sequence[Any]) -> bool:
    """Whether it is ragged in some batch and missing in another."""
    return any(p is None for p in parts) and any(isinstance(p, torch.Tensor) and p.is_nested for p in parts)


def _has_pads(batch: TensorDictBase) -> bool:
    masks = [batch.get(key, None) for key in (ATTENTION, "attention_mask")]
    return any(mask is not None and not mask.is_nested and not mask.all() for mask in masks)


def rows_in_line(batch: TensorDictBase) -> TensorDictBase:
    """`batch` (B,) as it is, and one (B, T) as (B * T,): the T of the first row, then those of the next."""
    if batch.ndim < 2:
        return batch
    steps = batch.unbind(1)
    size = batch.batch_size[0]
    return select_rows(concat_rows(steps), [t * size + row for row in range(size) for t in range(len(steps))])


def row_of(value: Any, index: int) -> Any:
    """One row of an entry, a Python value where it holds those."""
    item = value[index]
    return getattr(item, "data", item)
