"""A policy called on a TensorDict: read what is asked, answer all rows together, write what was said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase, lazy_stack

from rlpost.data.conversation import Completion, Conversation
from rlpost.data.ragged import strings
from rlpost.errors import DataError
from rlpost.torchrl.reading import Reader
from rlpost.torchrl.writing import Turn, put, sequences_written, shaped, turns_written

if TYPE_CHECKING:
    from rlpost.policies.base import Policy


def call(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    """What `policy(tensordict)` gives: the model's turn in each row, or the log-probs of each row.

    Raises DataError for a batch without rows, or of a shape that cannot be written in place.
    """
    shape = tensordict.batch_size
    if not shape.numel():
        raise DataError(f"the TensorDict of batch size {tuple(shape)} has no rows to answer: give at least one")
    if policy.face.inplace is True and len(shape) > 1:
        raise DataError(f"a batch of {tuple(shape)} is not written in place: leave inplace=True out")
    if not policy.face.generate:
        return _score(policy, tensordict)
    return _answer(policy, tensordict)


def _answer(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    samples = policy.face.samples_per_prompt
    asked = Reader(policy).conversations(tensordict)
    turns = _taken(policy, asked if samples is None else _several(asked, samples))
    written = turns_written(policy, turns)
    if "conversation" in tensordict.keys():  # noqa: SIM118  a TensorDict iterates over its rows
        written.set("conversation", strings([turn.conversation for turn in turns]))
    shape = (*tensordict.batch_size, *(() if samples is None else (samples,)))
    return _delivered(policy, tensordict, shaped(written, shape))


def _several(conversations: list[Conversation], samples: int) -> list[Conversation]:
    """Each conversation `samples` times, with the numbers that give each its own randomness."""
    copies = [(c.copy(), c.sample * samples + i) for c in conversations for i in range(samples)]
    return [replace(conversation, sample=number) for conversation, number in copies]


def _taken(policy: Policy, conversations: list[Conversation]) -> list[Turn]:
    """The model's turn in each conversation, which gains what the model read and not what it said."""
    silent = Completion([], [], "", "context", policy.version)
    completions = policy.completions(conversations)
    return [Turn(c, completion or silent) for c, completion in zip(conversations, completions, strict=True)]


def _score(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    rows = Reader(policy).sequences(tensordict)
    log_probs = policy.token_log_probs([row.ids for row in rows], policy.sampling)
    return _delivered(policy, tensordict, shaped(sequences_written(policy, rows, log_probs), tensordict.batch_size))


def _delivered(policy: Policy, tensordict: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """`written`, in or beside what was asked, on the face's device."""
    face = policy.face
    if face.device is not None:
        written = written.to(torch.device(face.device))
    if face.inplace == "empty":
        return written
    same_shape = written.batch_size == tensordict.batch_size
    if same_shape and tensordict.ndim < 2:
        return put(tensordict if face.inplace in (None, True) else tensordict.clone(recurse=False), written)
    return _beside(tensordict, written)


def _beside(asked: TensorDictBase, given: TensorDictBase) -> TensorDictBase:
    """`given` with the entries of `asked`, which may lack its last dimension."""
    if asked.ndim == given.ndim < 2:
        return put(asked.clone(recurse=False), given)
    each = asked.unbind(0) if asked.ndim else [asked] * given.batch_size[0]
    return lazy_stack([_beside(a, g) for a, g in zip(each, given.unbind(0), strict=True)], 0)
