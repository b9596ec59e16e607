"""What a policy writes into a TensorDict, as ragged or as padded tensors.

A turn of the model (N rows; "ragged" is a jagged nested tensor (N, *)):

    text.prompt, text.response, text.full        str; the response without the end-of-turn token
    history.prompt, .response, .full             History, in the mode history alone; where `history` was a
                                                 History itself, it becomes the one with the reply
    tokens.prompt, tokens.response, tokens.full  int64, ragged; full = prompt + response always
    masks.all_attention_mask                     bool, ragged over full: False on padding
    masks.all_assistant_mask                     bool, ragged over full: True on every sampled id
    log_probs.prompt, .response, .full           float32, ragged: the sampler's, 0 where not sampled
    policy_version                               int64 (N,), or a str a row: what it was sampled under
    finish_reason                                str
    conversation                                 where it was there: its ids carried forward, without the reply

Padded, prompts are left of what stands in them and responses right of it, so that full is prompt
and response side by side: (N, P), (N, R) and (N, P + R). Padding is the tokenizer's pad token (its
end of turn, else 0, where it has none), False in masks and 0.0 in log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from rlpost.data.batch import select_rows
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.history import History
from rlpost.data.input_mode import InputMode
from rlpost.data.ragged import padded, padding_id, ragged, strings, token_fields, versions

if TYPE_CHECKING:
    from rlpost.policies.base import Policy
    from rlpost.torchrl.reading import ScoredRow


@dataclass
class Turn:
    """One turn of the model: the conversation it answers, whose ids are those the model read, and what it said."""

    conversation: Conversation
    completion: Completion

    @property
    def prompt_ids(self) -> list[int]:
        """Everything the model read."""
        return self.conversation.prompt_ids + self.conversation.response_ids

    @property
    def reply(self) -> dict[str, Any]:
        """The turn as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.completion.text}
        return message if self.completion.finish_reason == "stop" else {**message, "is_complete": False}


def turns_written(policy: Policy, turns: Sequence[Turn]) -> TensorDict:
    """The TensorDict (N,) described at the top of this module; `history` in its parts."""
    face, tokenizer = policy.face, policy.tokenizer
    pad, nothing = (padding_id(tokenizer), 0) if face.pad_output else (None, None)
    conversations = [turn.conversation for turn in turns]
    completions = [turn.completion for turn in turns]
    prompts = [turn.prompt_ids for turn in turns]
    replies = [completion.token_ids for completion in completions]
    said = [[0] * len(c.prompt_ids) + c.mask for c in conversations]
    given = [[0.0] * len(c.prompt_ids) + c.log_probs for c in conversations]
    texts = [
        c.prompt_text if not c.turns else tokenizer.decode(ids) for c, ids in zip(conversations, prompts, strict=True)
    ]
    answers = [completion.text for completion in completions]

    written: dict[str, Any] = {
        "policy_version": versions([completion.policy_version for completion in completions]),
        "finish_reason": strings([completion.finish_reason for completion in completions]),
    }
    if face.text_key is not None:
        full = [text + answer for text, answer in zip(texts, answers, strict=True)]
        written[face.text_key] = {"prompt": strings(texts), "response": strings(answers), "full": strings(full)}
    if face.tokens_key is not None:
        written[face.tokens_key] = token_fields(prompts, replies, torch.int64, pad)
    if face.masks_key is not None:
        sampled = [[1] * len(reply) for reply in replies]
        masks = {"all_attention_mask": [[1] * len(ids) for ids in prompts], "all_assistant_mask": said}
        written[face.masks_key] = {
            name: token_fields(before, sampled, torch.bool, nothing)["full"] for name, before in masks.items()
        }
    if face.log_probs_key is not None and face.return_log_probs:
        written[face.log_probs_key] = token_fields(
            given, [completion.log_probs for completion in completions], torch.float32, nothing
        )
    if face.history_key is not None and face.mode is InputMode.history:
        before, after = [c.messages for c in conversations], [[turn.reply] for turn in turns]
        chats = [[*b, *a] for b, a in zip(before, after, strict=True)]
        parts = {"prompt": before, "response": after, "full": chats}
        written[face.history_key] = {name: History.from_chats(rows) for name, rows in parts.items()}
    return TensorDict(written, batch_size=[len(turns)])


def sequences_written(policy: Policy, rows: Sequence[ScoredRow], log_probs: Sequence[torch.Tensor]) -> TensorDict:
    """`full` of text, tokens, masks and log-probs (N,); the assistant's mask where every row's is known."""
    face = policy.face
    written: dict[str, Any] = {}
    if face.text_key is not None:
        written[face.text_key] = {"full": strings([row.text for row in rows])}
    if face.tokens_key is not None:
        pad = padding_id(policy.tokenizer)
        written[face.tokens_key] = {"full": _whole(policy, [row.ids for row in rows], torch.int64, pad)}
    if face.masks_key is not None:
        masks = {"all_attention_mask": _whole(policy, [[1] * len(row.ids) for row in rows], torch.bool, 0)}
        known = [row.sampled for row in rows if row.sampled is not None]
        if len(known) == len(rows):
            masks["all_assistant_mask"] = _whole(policy, known, torch.bool, 0)
        written[face.masks_key] = masks
    if face.log_probs_key is not None:
        written[face.log_probs_key] = {"full": _whole(policy, log_probs, torch.float32, 0)}
    return TensorDict(written, batch_size=[len(rows)])


def shaped(rows: TensorDictBase, shape: Sequence[int]) -> TensorDictBase:
    """The rows (N,) of `rows` as a batch of `shape`: one row itself for (), stacked lazily beyond one dimension."""
    if not shape:
        return rows[0]
    if len(shape) == 1:
        return rows
    size = rows.batch_size[0] // shape[0]
    parts = [select_rows(rows, range(start, start + size)) for start in range(0, rows.batch_size[0], size)]
    return lazy_stack([shaped(part, shape[1:]) for part in parts], 0)


def put(into: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """Set every entry of `written` in `into`, and return that; entries beside them in a group stay.

    Where `into` has a whole History, it becomes the History with the reply.
    """
    for name, value in written.items():
        there = into.get(name, None)
        group = _group(value)
        if isinstance(there, History) and group is not None:
            into.set(name, group["full"])
        elif (kept := _group(there)) is not None and group is not None:
            for part, leaf in group.items():
                kept.set(part, leaf)
        else:
            into.set(name, value)
    return into


def _whole(policy: Policy, rows: Sequence[Any], dtype: torch.dtype, fill: float) -> torch.Tensor:
    """Every row, padded on the right where the face says so."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return padded(tensors, fill) if policy.face.pad_output else ragged(tensors)


def _group(value: Any) -> TensorDictBase | None:
    """An entry that is a TensorDict of entries; a stack of Python values, which is one too, is not meant."""
    return value if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack) else None
