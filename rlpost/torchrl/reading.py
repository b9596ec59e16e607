"""What a policy is asked, read out of a TensorDict: one conversation, or one sequence of ids, a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase

from rlpost.data.chat_mask import ChatMask
from rlpost.data.conversation import Conversation
from rlpost.data.history import History
from rlpost.data.input_mode import InputMode
from rlpost.data.ragged import ragged_rows
from rlpost.data.rendering import text_ids
from rlpost.errors import DataError
from rlpost.policies.face import Key

if TYPE_CHECKING:
    from rlpost.policies.base import Policy

MAX_NEW_TOKENS = 256  # of a completion, where neither a conversation nor generate_kwargs says how many


@dataclass
class ScoredRow:
    """One row whose log-probs are asked for."""

    ids: list[int]
    text: str
    sampled: list[bool] | None = None  # which ids are the assistant's; None: unknown


def column(tensordict: TensorDictBase, key: Key) -> list[Any]:
    """The entry `key`, one value a row: a str, a number, a list of messages, a 1-D tensor or an object.

    The rows of a batch of several dimensions follow each other, the last dimension fastest. Raises
    DataError without that entry, with the nearest the batch has.
    """
    if key not in tensordict.keys(include_nested=True):
        there = ", ".join(sorted(str(name) for name in tensordict.keys(include_nested=True)))
        raise DataError(f"the policy reads {key!r}, which is not in the TensorDict: it has {there or 'nothing'}")
    if tensordict.ndim > 1 or (tensordict.ndim and isinstance(tensordict, LazyStackedTensorDict)):
        return [value for part in tensordict.unbind(0) for value in column(part, key)]
    return rows_in(tensordict.get(key), tensordict.batch_size)


def rows_in(value: Any, shape: Sequence[int]) -> list[Any]:
    """An entry of a TensorDict of no or one dimension, a value a row."""
    if isinstance(value, History):
        return value.to_chats()
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if isinstance(value, torch.Tensor):
        return [value] if not shape else ragged_rows(value) if value.is_nested else list(value.unbind(0))
    plain = value.data if isinstance(value, NonTensorData) else value
    return [plain] * (shape[0] if shape else 1)  # one value that stands for every row


class Reader:
    """Reads what `policy` is asked in TensorDicts, as its face says."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.face = policy.face

    # Prompts

    def conversations(self, tensordict: TensorDictBase) -> list[Conversation]:
        """One conversation a row, its ids carried forward, to be answered; the TensorDict keeps its own.

        Raises DataError for an entry that is missing, or of another kind, or a prompt without room
        for its completion.
        """
        keys = tensordict.keys(include_nested=True)
        if self.face.input_key is None and "conversation" in keys:
            return self._carried_on(tensordict)
        if self.face.mode is InputMode.tokens:
            decode = self.policy.tokenizer.decode
            made = [self._opened(text=decode(ids), ids=ids) for ids in self.ids(tensordict, self.face.prompt_key)]
        elif self.face.mode is InputMode.text:
            texts = _of_kind(column(tensordict, self.face.prompt_key), str, self.face.prompt_key)
            made = [self._opened(text=text, ids=self._text_ids(text)) for text in texts]
        else:
            made = [self._opened(messages=chat) for chat in self._chats(tensordict)]
        if self.face.input_key is None and self.face.mode is not InputMode.tokens and ("tokens", "prompt") in keys:
            self._go_by_ids(made, self.ids(tensordict, ("tokens", "prompt")))
        for row, conversation in enumerate(made):
            self._limit(conversation, row)
        return made

    def _go_by_ids(self, conversations: list[Conversation], ids: list[list[int]]) -> None:
        """Ask with the ids that are there rather than with those of the text. Raises DataError where they differ."""
        for row, (conversation, given) in enumerate(zip(conversations, ids, strict=True)):
            if self.policy.tokenizer.decode(given) != conversation.prompt_text:
                raise DataError(
                    f"row {row}: ('tokens', 'prompt') does not say what {self.face.prompt_key!r} says: delete the one "
                    "that is not to be read, or set input_mode='tokens'"
                )
            conversation.prompt_ids = given

    def _carried_on(self, tensordict: TensorDictBase) -> list[Conversation]:
        """The conversations of an environment: what was sampled stays, and only what is new is tokenised."""
        conversations = [c.copy() for c in _of_kind(column(tensordict, "conversation"), Conversation, "conversation")]
        if ("tokens", "prompt") in tensordict.keys(include_nested=True):
            for conversation, ids in zip(conversations, self.ids(tensordict, ("tokens", "prompt")), strict=True):
                if not conversation.prompt_ids and not conversation.turns:  # the environment has tokenised the prompt
                    conversation.prompt_ids = ids
                    conversation.prompt_text = self.policy.tokenizer.decode(ids)
        return conversations

    def _chats(self, tensordict: TensorDictBase) -> list[list[dict[str, Any]]]:
        """The messages of each row; an environment has them in `history` itself, and not in a part of it."""
        key = self.face.prompt_key
        outer = key[0] if isinstance(key, tuple) and len(key) == 2 else key
        whole = tensordict.get(outer, None) if self.face.input_key is None else None
        chats = column(tensordict, outer if isinstance(whole, History) else key)
        for chat in chats:
            if not isinstance(chat, list) or not all(isinstance(m, dict) for m in chat):
                raise DataError(f"{key!r} holds a {type(chat).__name__} and no History: set input_mode to what it is")
        return chats

    def _opened(
        self, *, messages: list[dict[str, Any]] | None = None, text: str = "", ids: list[int] | None = None
    ) -> Conversation:
        """A conversation of this policy's own, with a number that no other of it has."""
        conversation = Conversation(
            task={}, messages=messages or [{"role": "user", "content": text}], group_id=self.policy.rows_asked
        )
        self.policy.rows_asked += 1
        if messages is not None and messages[-1]["role"] == "assistant":
            raise DataError(
                "the last message is the assistant's own, which leaves it nothing to answer: append another"
            )
        if ids is None:
            self.policy.continuation.begin(conversation)
        else:
            conversation.prompt_text, conversation.prompt_ids = text, ids
        return conversation

    def _limit(self, conversation: Conversation, row: int) -> None:
        """Set how long the completion may be. Raises DataError for a prompt that leaves it no room."""
        length, longest = len(conversation.prompt_ids), self.policy.max_model_len
        if not length:
            raise DataError(f"the prompt of row {row} is empty: give it at least one token")
        asked = self.face.max_new_tokens
        room = MAX_NEW_TOKENS if longest is None else longest - length
        if room < (asked or 1):
            raise DataError(
                f"the prompt of row {row} has {length} tokens, and with {asked or 1} to sample that is more than the "
                f"{longest} the model takes: shorten it"
            )
        conversation.max_completion_tokens = min(room, MAX_NEW_TOKENS) if asked is None else asked

    # Whole sequences

    def sequences(self, tensordict: TensorDictBase) -> list[ScoredRow]:
        """One sequence of ids a row: of the conversation where there is one, else as the mode says.

        Raises DataError for an entry that is missing, or of another kind, or a row without ids.
        """
        keys = tensordict.keys(include_nested=True)
        read: list[ScoredRow]
        if self.face.input_key is None and ("tokens", "full") in keys:
            read = self._from_ids(tensordict, ("tokens", "full"))
            self._mark_sampled(tensordict, read)
        elif self.face.input_key is None and "conversation" in keys:
            read = [self._whole(c) for c in _of_kind(column(tensordict, "conversation"), Conversation, "conversation")]
        elif self.face.mode is InputMode.tokens:
            read = self._from_ids(tensordict, self.face.prompt_key)
        elif self.face.mode is InputMode.text:
            texts = _of_kind(column(tensordict, self.face.prompt_key), str, self.face.prompt_key)
            read = [ScoredRow(self._text_ids(text), text) for text in texts]
        else:
            read = [self._rendered(chat) for chat in self._chats(tensordict)]
        empty = next((row for row, sequence in enumerate(read) if not sequence.ids), None)
        if empty is not None:
            raise DataError(f"row {empty} is empty: give it at least one token")
        return read

    def _from_ids(self, tensordict: TensorDictBase, key: Key) -> list[ScoredRow]:
        return [ScoredRow(ids, self.policy.tokenizer.decode(ids)) for ids in self.ids(tensordict, key)]

    def _mark_sampled(self, tensordict: TensorDictBase, read: list[ScoredRow]) -> None:
        """Take over which ids of `("tokens", "full")` are the assistant's, where the batch says."""
        key = ("masks", "all_assistant_mask")
        if key not in tensordict.keys(include_nested=True):
            return
        rows, masks = column(tensordict, ("tokens", "full")), column(tensordict, key)
        there = self._masks(tensordict, rows)
        for number, (row, mask) in enumerate(zip(read, masks, strict=True)):
            known = mask if there is None else mask[there[number].bool()]
            if known.numel() != len(row.ids):
                raise DataError(
                    f"row {number} has {len(row.ids)} ids, and {key!r} speaks of {known.numel()}: give one each"
                )
            row.sampled = known.tolist()

    def _whole(self, conversation: Conversation) -> ScoredRow:
        ids = conversation.prompt_ids + conversation.response_ids
        sampled = [False] * len(conversation.prompt_ids) + [bool(m) for m in conversation.mask]
        return ScoredRow(ids, self.policy.tokenizer.decode(ids), sampled)

    def _rendered(self, chat: list[dict[str, Any]]) -> ScoredRow:
        ids, sampled = ChatMask(self.policy.tokenizer).encode(chat)
        return ScoredRow(ids, self.policy.tokenizer.decode(ids), sampled)

    # Ids

    def _text_ids(self, text: str) -> list[int]:
        return text_ids(self.policy.tokenizer, text)

    def ids(self, tensordict: TensorDictBase, key: Key) -> list[list[int]]:
        """The ids of each row without padding, which is what an attention mask of the same shape leaves out.

        Raises DataError for padded ids without a mask: a pad token may be an end of turn as well.
        """
        rows = column(tensordict, key)
        if any(not isinstance(row, torch.Tensor) or row.is_floating_point() for row in rows):
            raise DataError(f"{key!r} holds a {type(rows[0]).__name__} and no token ids: set input_mode to what it is")
        masks = self._masks(tensordict, rows)
        if masks is not None:
            return [row[mask.bool()].tolist() for row, mask in zip(rows, masks, strict=True)]
        pad = self.policy.tokenizer.pad_token_id
        if pad is not None and pad != self.policy.tokenizer.eos_token_id:
            for number, row in enumerate(rows):
                if row.numel() and pad in (int(row[0]), int(row[-1])):
                    raise DataError(
                        f"row {number} of {key!r} looks padded: say what is padding with "
                        "('masks', 'all_attention_mask') or 'attention_mask', or give ragged ids"
                    )
        return [row.tolist() for row in rows]

    def _masks(self, tensordict: TensorDictBase, rows: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The attention masks that fit `rows`, or their beginnings where the mask goes on over a response."""
        for key in (("masks", "all_attention_mask"), "attention_mask"):
            if key in tensordict.keys(include_nested=True):
                masks = column(tensordict, key)
                if all(mask.numel() >= row.numel() for mask, row in zip(masks, rows, strict=True)):
                    return [mask[: row.numel()] for mask, row in zip(masks, rows, strict=True)]
        return None


def _of_kind(values: list[Any], kind: type, key: Key) -> list[Any]:
    wrong = next((value for value in values if not isinstance(value, kind)), None)
    if wrong is not None:
        raise DataError(f"{key!r} holds a {type(wrong).__name__} and no {kind.__name__}: set input_mode to what it is")
    return values
