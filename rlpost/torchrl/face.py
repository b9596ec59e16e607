"""TensorDicts of text, ids and conversations: read and written by policies, shown and taken by environments.

`call` lets a policy answer a TensorDict, one conversation or one sequence of ids a row; `observation` and
`add_replies` are an environment's side. A turn of the model has these keys (N rows; "ragged" is a jagged nested
tensor (N, *)):

    text.prompt, text.response, text.full        str; the response without the end-of-turn token
    history.prompt, .response, .full             History, in the mode history alone; a `history` that was a whole
                                                 History becomes the one with the reply
    tokens.prompt, tokens.response, tokens.full  int64, ragged; full = prompt + response always
    masks.all_attention_mask                     bool, ragged over full: False on padding
    masks.all_assistant_mask                     bool, ragged over full: True on every sampled id
    log_probs.prompt, .response, .full           float32, ragged: the sampler's, 0 where not sampled
    policy_version                               int64 (N,), or a str a row: the version that sampled it
    finish_reason                                str
    conversation                                 if there was one: its ids carried forward, without the reply

Padded, prompts have their pads on the left and responses on the right, so that full is prompt and response side
by side: (N, P), (N, R) and (N, P + R). Padding is the tokenizer's pad token (else its end of turn, else 0), False in
masks and 0.0 in log-probs.

`flat_batch` writes completions of plain text in the dense layout of `LLMData` (B rows, P the longest prompt, R the
longest response):

    text, text_response              str: the first prompt, and everything the model said after it
    tokens                           int64 (B, P + R): prompts, padded on the left, and responses, on the right
    tokens_response                  int64 (B, R): the latter half of `tokens`
    attention_mask                   int64 (B, P + R): 1 on ids, 0 on pads
    log_probs                        float32 (B, R): the sampler's, 0 on pads
    policy_version, policy_version_max, group_id, sample, valid, finish_reason and `next`
                                     as in `rlpost.data.batch`
    done, terminated, truncated      bool (B, 1): False, since no turn is taken in a conversation that is over
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from rlpost.data.batch import batch_from_conversations, select_rows
from rlpost.data.chat import ChatMask, Continuation, text_ids
from rlpost.data.conversation import Completion, Conversation, InputMode, strip_end_of_turn
from rlpost.data.history import History
from rlpost.data.ragged import (
    ATTENTION,
    Key,
    column,
    one_each,
    padded,
    padding_id,
    ragged,
    strings,
    token_fields,
    versions,
)
from rlpost.envs.base import EnvBase
from rlpost.errors import DataError, PolicyError
from rlpost.policies.base import Policy, Request
from rlpost.settings import SamplingSettings

MAX_NEW_TOKENS = 256  # default, if neither the conversation nor generate_kwargs has a limit
FLAT_AS_NESTED = ("policy_version", "policy_version_max", "group_id", "sample", "valid", "finish_reason", "next")
PAD = 0  # of `flat_batch`; the attention mask tells pads from ids


# A policy called on a TensorDict


def call(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    """`policy(tensordict)`: the model's turn in each row, or the log-probs of each row.

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
    if samples is not None:  # each with a number, and so a randomness, of its own
        asked = [replace(c.copy(), sample=c.sample * samples + i) for c in asked for i in range(samples)]
    silent = Completion([], [], "", "context", policy.version)  # where no room was left for a turn
    completions = policy.completions(asked)
    turns = [_Turn(c, completion or silent) for c, completion in zip(asked, completions, strict=True)]
    written = _turns_written(policy, turns)
    if "conversation" in tensordict.keys():  # noqa: SIM118  a TensorDict iterates over its rows
        written.set("conversation", strings([turn.conversation for turn in turns]))
    shape = (*tensordict.batch_size, *(() if samples is None else (samples,)))
    return _delivered(policy, tensordict, _shaped(written, shape))


def _score(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    rows = Reader(policy).sequences(tensordict)
    log_probs = policy.token_log_probs([row.ids for row in rows], policy.sampling)
    return _delivered(policy, tensordict, _shaped(_sequences_written(policy, rows, log_probs), tensordict.batch_size))


def _delivered(policy: Policy, tensordict: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """`written`, in or beside `tensordict`, on the face's device."""
    face = policy.face
    if face.device is not None:
        written = written.to(torch.device(face.device))
    if face.inplace == "empty":
        return written
    same_shape = written.batch_size == tensordict.batch_size
    if same_shape and tensordict.ndim < 2:
        return _put(tensordict if face.inplace in (None, True) else tensordict.clone(recurse=False), written)
    return _beside(tensordict, written)


def _beside(asked: TensorDictBase, given: TensorDictBase) -> TensorDictBase:
    """`given` with the entries of `asked`, which may lack its last dimension."""
    if asked.ndim == given.ndim < 2:
        return _put(asked.clone(recurse=False), given)
    each = asked.unbind(0) if asked.ndim else [asked] * given.batch_size[0]
    return lazy_stack([_beside(a, g) for a, g in zip(each, given.unbind(0), strict=True)], 0)


# What the policy reads


class Reader:
    """Reads conversations and sequences out of TensorDicts, for `policy` and as its face says."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.face = policy.face

    # Prompts

    def conversations(self, tensordict: TensorDictBase) -> list[Conversation]:
        """One conversation a row for the policy to answer, its ids carried forward; copies of those in the TensorDict.

        Raises DataError for an entry that is missing or of another kind, and for a prompt without room for its
        completion.
        """
        keys = tensordict.keys(include_nested=True)
        if self.face.input_key is None and "conversation" in keys:
            return self._carried_on(tensordict)
        if self.face.mode is InputMode.tokens:
            decode = self.policy.tokenizer.decode
            made = [self._opened(text=decode(ids), ids=ids) for ids in self.ids(tensordict, self.face.prompt_key)]
        elif self.face.mode is InputMode.text:
            texts = _entry(tensordict, self.face.prompt_key, str)
            made = [self._opened(text=text, ids=text_ids(self.policy.tokenizer, text)) for text in texts]
        else:
            made = [self._opened(messages=chat) for chat in self._chats(tensordict)]
        if self.face.input_key is None and self.face.mode is not InputMode.tokens and ("tokens", "prompt") in keys:
            self._go_by_ids(made, self.ids(tensordict, ("tokens", "prompt")))
        for row, conversation in enumerate(made):
            self._limit(conversation, row)
        return made

    def _go_by_ids(self, conversations: list[Conversation], ids: list[list[int]]) -> None:
        """Take the `ids` instead of those of the text. Raises DataError if they differ."""
        for row, (conversation, given) in enumerate(zip(conversations, ids, strict=True)):
            if self.policy.tokenizer.decode(given) != conversation.prompt_text:
                raise DataError(
                    f"row {row}: ('tokens', 'prompt') does not say what {self.face.prompt_key!r} says: delete the one "
                    "that is not to be read, or set input_mode='tokens'"
                )
            conversation.prompt_ids = given

    def _carried_on(self, tensordict: TensorDictBase) -> list[Conversation]:
        """The conversations of an environment: sampled ids stay, and only new messages are tokenised."""
        conversations = [c.copy() for c in _entry(tensordict, "conversation", Conversation)]
        if ("tokens", "prompt") in tensordict.keys(include_nested=True):
            for conversation, ids in zip(conversations, self.ids(tensordict, ("tokens", "prompt")), strict=True):
                if not conversation.prompt_ids and not conversation.turns:  # the environment has tokenised the prompt
                    conversation.prompt_ids = ids
                    conversation.prompt_text = self.policy.tokenizer.decode(ids)
        return conversations

    def _chats(self, tensordict: TensorDictBase) -> list[list[dict[str, Any]]]:
        """The messages of each row; an environment writes them as `history` itself, not as a part of it."""
        key = self.face.prompt_key
        outer = key[0] if isinstance(key, tuple) and len(key) == 2 else key
        whole = tensordict.get(outer, None) if self.face.input_key is None else None
        chats = _entry(tensordict, outer if isinstance(whole, History) else key)
        for chat in chats:
            if not isinstance(chat, list) or not all(isinstance(m, dict) for m in chat):
                raise DataError(f"{key!r} holds a {type(chat).__name__} and no History: set input_mode to what it is")
        return chats

    def _opened(
        self, *, messages: list[dict[str, Any]] | None = None, text: str = "", ids: list[int] | None = None
    ) -> Conversation:
        """A new conversation of this policy, with a number of its own."""
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
        """Set the length limit of the completion. Raises DataError for a prompt that leaves it no room."""
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
        """One sequence of ids a row: of its conversation if it has one, else as the mode says.

        Raises DataError for an entry that is missing or of another kind, and for a row without ids.
        """
        keys = tensordict.keys(include_nested=True)
        read: list[ScoredRow]
        if self.face.input_key is None and ("tokens", "full") in keys:
            read = self._from_ids(tensordict, ("tokens", "full"))
            self._mark_sampled(tensordict, read)
        elif self.face.input_key is None and "conversation" in keys:
            read = [self._whole(c) for c in _entry(tensordict, "conversation", Conversation)]
        elif self.face.mode is InputMode.tokens:
            read = self._from_ids(tensordict, self.face.prompt_key)
        elif self.face.mode is InputMode.text:
            texts = _entry(tensordict, self.face.prompt_key, str)
            read = [ScoredRow(text_ids(self.policy.tokenizer, text), text) for text in texts]
        else:
            encoded = map(ChatMask(self.policy.tokenizer).encode, self._chats(tensordict))
            read = [ScoredRow(ids, self.policy.tokenizer.decode(ids), sampled) for ids, sampled in encoded]
        empty = next((row for row, sequence in enumerate(read) if not sequence.ids), None)
        if empty is not None:
            raise DataError(f"row {empty} is empty: give it at least one token")
        return read

    def _from_ids(self, tensordict: TensorDictBase, key: Key) -> list[ScoredRow]:
        return [ScoredRow(ids, self.policy.tokenizer.decode(ids)) for ids in self.ids(tensordict, key)]

    def _mark_sampled(self, tensordict: TensorDictBase, read: list[ScoredRow]) -> None:
        """Mark the assistant's ids of `("tokens", "full")`, if the batch has their mask."""
        key = ("masks", "all_assistant_mask")
        if key not in tensordict.keys(include_nested=True):
            return
        rows, masks = _entry(tensordict, ("tokens", "full")), _entry(tensordict, key)
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

    # Ids

    def ids(self, tensordict: TensorDictBase, key: Key) -> list[list[int]]:
        """The ids of each row without padding, where an attention mask of the same shape is False.

        Raises DataError for padded ids without a mask: a pad token may be an end of turn as well.
        """
        rows = _entry(tensordict, key)
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
        """The attention masks of `rows`, cut to their lengths if they go on over a response; None if none fits."""
        for key in (("masks", "all_attention_mask"), "attention_mask"):
            if key in tensordict.keys(include_nested=True):
                masks = _entry(tensordict, key)
                if all(mask.numel() >= row.numel() for mask, row in zip(masks, rows, strict=True)):
                    return [mask[: row.numel()] for mask, row in zip(masks, rows, strict=True)]
        return None


@dataclass
class ScoredRow:
    """A row to compute log-probs of."""

    ids: list[int]
    text: str
    sampled: list[bool] | None = None  # which ids are the assistant's; None: unknown


def _entry(tensordict: TensorDictBase, key: Key, kind: type = object) -> list[Any]:
    """The entry `key`, one value a row: a str, a number, a list of messages, a 1-D tensor or an object.

    The rows of a batch of several dimensions follow each other, the last dimension fastest. Raises DataError for a
    missing entry, naming those of the batch, and for a value that is not a `kind`.
    """
    if key not in tensordict.keys(include_nested=True):
        there = ", ".join(sorted(str(name) for name in tensordict.keys(include_nested=True)))
        raise DataError(f"the policy reads {key!r}, which is not in the TensorDict: it has {there or 'nothing'}")
    if tensordict.ndim > 1 or (tensordict.ndim and isinstance(tensordict, LazyStackedTensorDict)):
        return [value for part in tensordict.unbind(0) for value in _entry(part, key, kind)]
    found = tensordict.get(key)
    if isinstance(found, History):
        values = found.to_chats()
    elif isinstance(found, NonTensorStack) or (tensordict.ndim and isinstance(found, torch.Tensor)):
        values = column(tensordict, key)
    else:  # one value for every row
        plain = found.data if isinstance(found, NonTensorData) else found
        values = [plain] * (tensordict.batch_size[0] if tensordict.ndim else 1)
    wrong = next((value for value in values if not isinstance(value, kind)), None)
    if wrong is not None:
        raise DataError(f"{key!r} holds a {type(wrong).__name__} and no {kind.__name__}: set input_mode to what it is")
    return values


# What the policy writes


@dataclass
class _Turn:
    """A turn of the model: the conversation with the ids that it read, and its completion."""

    conversation: Conversation
    completion: Completion

    @property
    def prompt_ids(self) -> list[int]:
        """All ids that the model read."""
        return self.conversation.prompt_ids + self.conversation.response_ids

    @property
    def reply(self) -> dict[str, Any]:
        """The turn as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.completion.text}
        return message if self.completion.finish_reason == "stop" else {**message, "is_complete": False}


def _turns_written(policy: Policy, turns: Sequence[_Turn]) -> TensorDict:
    """The TensorDict (N,) described at the top of this file, `history` in its parts."""
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


def _sequences_written(policy: Policy, rows: Sequence[ScoredRow], log_probs: Sequence[torch.Tensor]) -> TensorDict:
    """`full` of text, tokens, masks and log-probs (N,); the assistant's mask if every row's is known."""
    face = policy.face
    written: dict[str, Any] = {}
    if face.text_key is not None:
        written[face.text_key] = {"full": strings([row.text for row in rows])}
    if face.tokens_key is not None:
        pad = padding_id(policy.tokenizer)
        written[face.tokens_key] = {"full": _laid_out(policy, [row.ids for row in rows], torch.int64, pad)}
    if face.masks_key is not None:
        masks = {"all_attention_mask": _laid_out(policy, [[1] * len(row.ids) for row in rows], torch.bool, 0)}
        known = [row.sampled for row in rows if row.sampled is not None]
        if len(known) == len(rows):
            masks["all_assistant_mask"] = _laid_out(policy, known, torch.bool, 0)
        written[face.masks_key] = masks
    if face.log_probs_key is not None:
        written[face.log_probs_key] = {"full": _laid_out(policy, log_probs, torch.float32, 0)}
    return TensorDict(written, batch_size=[len(rows)])


def _laid_out(policy: Policy, rows: Sequence[Any], dtype: torch.dtype, fill: float) -> torch.Tensor:
    """All rows, padded on the right if the face says so, else ragged."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return padded(tensors, fill) if policy.face.pad_output else ragged(tensors)


def _shaped(rows: TensorDictBase, shape: Sequence[int]) -> TensorDictBase:
    """The rows (N,) of `rows` as a batch of `shape`: one row itself for (), stacked lazily beyond one dimension."""
    if not shape:
        return rows[0]
    if len(shape) == 1:
        return rows
    size = rows.batch_size[0] // shape[0]
    parts = [select_rows(rows, range(start, start + size)) for start in range(0, rows.batch_size[0], size)]
    return lazy_stack([_shaped(part, shape[1:]) for part in parts], 0)


def _put(into: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """Set every entry of `written` in `into`, and return that; other entries of a group stay.

    A whole History in `into` becomes the one with the reply.
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


def _group(value: Any) -> TensorDictBase | None:
    """`value` if it is a TensorDict of entries, and not a stack of Python values."""
    return value if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack) else None


# What an environment shows, and the turn that it takes


def observation(
    conversations: Sequence[Conversation], mode: InputMode, continuation: Continuation | None
) -> dict[str, Any]:
    """The entries of `conversations` that a policy sees, in the form of `mode`.

    In the mode history, a `continuation` adds the text and the ids of the messages. Raises DataError if the chat
    template refuses a conversation, or renders earlier messages differently once more follow.
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
    """The ids that a policy reads next: those carried forward, and those of new messages unless it is over."""
    asked = conversation.copy()
    if continuation is not None:  # without which prompts that began as ids go on
        if not asked.prompt_ids:
            continuation.begin(asked)
        if asked.turns and not asked.done:
            asked.add_observation(continuation.observation_ids(asked))
    return asked.prompt_ids + asked.response_ids


def _text(conversation: Conversation, read: list[int], continuation: Continuation | None) -> str:
    """The text of the ids that a policy `read`s next, or of the messages if the ids are not those of all messages."""
    if continuation is None:  # the text of plain prompts
        return "".join(message["content"] for message in conversation.messages)
    if conversation.turns and (conversation.ends_sampled or not conversation.done):
        return continuation.tokenizer.decode(read)
    return continuation.text(conversation)


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
    """The conversations that a reset or step put into `tensordict`. Raises DataError if there are none."""
    if "conversation" not in tensordict:
        raise DataError("this TensorDict holds no conversation: call reset, and give step what it returned")
    return column(tensordict, "conversation")


def scores(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Rewards and accuracies after a step, (B, 1) each."""
    names = sorted({name for c in conversations for name in c.reward_parts})
    return {
        "reward": one_each([(c.reward or 0.0) if c.valid else None for c in conversations]),
        "reward_parts": {name: one_each([c.reward_parts.get(name) for c in conversations]) for name in names},
        "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
        "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
    }


def add_replies(
    conversations: Sequence[Conversation],
    tensordict: TensorDictBase,
    tokenizer: Any,
    mode: InputMode = InputMode.history,
) -> None:
    """Append to each conversation, in place, the policy's turn that `tensordict` holds.

    In the mode tokens the turn is the ids, with their decoded text; in the mode text it is the text; in the mode
    history it is the text, else the decoded ids, else the last message. Ids that the policy read and that are not
    carried forward yet are the environment's. Raises DataError if there is no turn in that form, and if the policy
    read other ids than those carried forward.
    """
    written = _Written(tensordict, len(conversations))
    ids = written.ids()
    texts = written.texts(conversations, ids, tokenizer, mode)
    log_probs = written.part("log_probs", "response")
    reasons, versions = written.entries("finish_reason", "stop"), written.entries("policy_version", -1)
    prompts, prompt_texts = written.part("tokens", "prompt"), written.entries(("text", "prompt"), "")
    for i, conversation in enumerate(conversations):
        _add_prompt(conversation, prompts[i], prompt_texts[i])
        if reasons[i] == "context":  # no room was left for a turn, and none was taken
            conversation.finish_reason = "context"
            continue
        sampled = ids[i] or []
        known = log_probs[i]
        version = int(versions[i]) if isinstance(versions[i], torch.Tensor) else versions[i]
        unknown = [float("nan")] * len(sampled)
        completion = Completion(sampled, unknown if known is None else known, texts[i], reasons[i], version)
        conversation.add_completion(completion)


def _add_prompt(conversation: Conversation, read: list[int] | None, text: str) -> None:
    """Add the ids that the policy read to those the conversation carries."""
    if not conversation.turns:
        conversation.prompt_text = conversation.prompt_text or text
    if read is None:
        return
    if not conversation.prompt_ids and not conversation.response_ids:
        conversation.prompt_ids, conversation.tokenised = read, len(conversation.messages)
    carried = conversation.prompt_ids + conversation.response_ids
    if not conversation.prompt_ids or read == carried[: len(read)]:
        return  # an earlier turn came without the ids of its prompt, or the prompt is still that of an earlier turn
    if read[: len(carried)] != carried:
        raise DataError(
            f"the policy read other ids in turn {conversation.turns + 1} than those of the turns before: give it the "
            "('tokens', 'prompt') of the environment, or let it go on from what it sampled"
        )
    conversation.add_observation(read[len(carried) :])


class _Written:
    """The turns that a policy wrote into a TensorDict, row by row."""

    def __init__(self, tensordict: TensorDictBase, size: int) -> None:
        self._tensordict = tensordict
        self._keys = set(tensordict.keys(include_nested=True))
        self._size = size

    def entries(self, key: Key, missing: Any) -> list[Any]:
        """The entry `key`, or `missing` for each row."""
        return column(self._tensordict, key) if key in self._keys else [missing] * self._size

    def part(self, group: str, name: str) -> list[Any]:
        """`prompt` or `response` of a group, as a list a row without pads; None if it was not written."""
        rows = self.entries((group, name), None)
        return self._unpadded(rows, ATTENTION, first=name == "prompt")

    def _unpadded(self, rows: Sequence[torch.Tensor | None], key: Key, *, first: bool) -> list[Any]:
        """The rows as lists without pads; the mask `key`, if padded, covers prompts with its `first` places and
        responses with its last.
        """
        if key not in self._keys or rows[0] is None or self._tensordict.get(key).is_nested:
            return [None if row is None else row.tolist() for row in rows]
        width = rows[0].numel()
        masks = [mask.bool() for mask in column(self._tensordict, key)]
        if masks[0].numel() < width:
            raise DataError(f"a row has {width} places and {key!r} {masks[0].numel()}: it is for the whole sequence")
        kept = [mask[:width] if first else mask[mask.numel() - width :] for mask in masks]
        return [None if row is None else row[mask].tolist() for row, mask in zip(rows, kept, strict=True)]

    def ids(self) -> list[list[int] | None]:
        """The sampled ids of each row: the response, or the part of `full` behind the prompt."""
        if "tokens_response" in self._keys:
            return self._unpadded(column(self._tensordict, "tokens_response"), "attention_mask", first=False)
        if ("tokens", "response") in self._keys or ("tokens", "full") not in self._keys:
            return self.part("tokens", "response")
        prompts = self.part("tokens", "prompt")
        rows = self._unpadded(column(self._tensordict, ("tokens", "full")), ATTENTION, first=True)
        return [self._behind(full, prompt, ("tokens", "full")) for full, prompt in zip(rows, prompts, strict=True)]

    def texts(
        self,
        conversations: Sequence[Conversation],
        ids: Sequence[list[int] | None],
        tokenizer: Any,
        mode: InputMode,
    ) -> list[str]:
        """The reply of each row as text, without its end of turn."""
        if mode is InputMode.tokens:
            if any(row is None for row in ids):
                raise DataError(
                    "step found no ids: with input_mode='tokens' the reply is ('tokens', 'response'), "
                    "'tokens_response' or ('tokens', 'full')"
                )
            if tokenizer is None:  # of prompts that began as ids, whose text nobody asks for
                return [""] * self._size
            return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        for key in ("text_response", ("text", "response")):
            if key in self._keys:
                return [strip_end_of_turn(text, tokenizer) for text in column(self._tensordict, key)]
        if mode is InputMode.text:
            return self._texts_in_full(tokenizer)
        if tokenizer is not None and all(ids):
            return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        return self._last_messages(conversations)

    def _texts_in_full(self, tokenizer: Any) -> list[str]:
        if ("text", "full") not in self._keys:
            raise DataError(
                "step found no text: with input_mode='text' the reply is 'text_response', ('text', 'response') or "
                "('text', 'full')"
            )
        pairs = zip(self.entries(("text", "full"), ""), self.entries(("text", "prompt"), None), strict=True)
        return [strip_end_of_turn(self._behind(full, prompt, ("text", "full")), tokenizer) for full, prompt in pairs]

    def _last_messages(self, conversations: Sequence[Conversation]) -> list[str]:
        """The messages that the policy appended to the histories."""
        history = self._tensordict.get("history", None)
        chats = history.to_chats() if isinstance(history, History) else [[]] * self._size
        for conversation, chat in zip(conversations, chats, strict=True):
            if len(chat) != len(conversation.messages) + 1 or chat[-1]["role"] != "assistant":
                raise DataError(
                    "step found no reply: set 'text_response', or let the policy write ('text', 'response'); "
                    "('tokens', 'response') alone needs an environment with a tokenizer"
                )
        return [chat[-1]["content"] for chat in chats]

    def _behind(self, full: Any, prompt: Any, key: Key) -> Any:
        """The part of a sequence behind its prompt. Raises DataError if it does not begin with it."""
        if prompt is None or full[: len(prompt)] != prompt:
            raise DataError(f"{key} does not begin with the prompt it is to continue: write the response instead")
        return full[len(prompt) :]


# A callable as a policy, and the batches of `LLMData`


class CalledPolicy(Policy):
    """Gives `called` what `env.reset` and `env.step` return, and takes the turn it writes as `env.step` does.

    `called` is any callable that takes a TensorDict (B,) and returns it with a turn in it, such as a
    TensorDictModule. A module is the policy's `model`, so that a push reaches its weights. It samples in its own way:
    without ids a turn is text alone, and missing log-probs are NaN. Raises TypeError if it is not callable.
    """

    def __init__(self, called: Callable[[TensorDictBase], TensorDictBase], env: EnvBase) -> None:
        if not callable(called):
            raise TypeError(
                f"a policy is an rlpost.policies.Policy, a TensorDictModule or a callable on TensorDicts, and "
                f"{type(called).__name__} is none of them"
            )
        super().__init__(sampling=SamplingSettings())
        self.called = called
        self.env = env
        self.tokenizer: Any = env.tokenizer
        self.model = called if isinstance(called, torch.nn.Module) else None

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """See `Policy.reply`. Raises PolicyError for sampling settings, TypeError if `called` returns no TensorDict."""
        if sampling is not None:
            raise PolicyError("a callable policy samples as it likes: sampling settings need an rlpost.policies.Policy")
        if not conversations:
            return
        shown = self.env.observe(conversations)
        written = self.called(shown)
        if not isinstance(written, TensorDictBase):
            raise TypeError(
                f"the policy returned {type(written).__name__}: a callable policy returns the TensorDict it was given, "
                "with its turn in it"
            )
        if "policy_version" not in written.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            written.set("policy_version", versions([self.version] * len(conversations)))
        if written is not shown:
            written = _put(shown, written)
        add_replies(conversations, written, self.tokenizer, self.env.input_mode)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Raises PolicyError: `called` reads TensorDicts, not ids."""
        raise PolicyError("a callable policy answers whole conversations: give an rlpost.policies.Policy to sample ids")


def flat_batch(conversations: Sequence[Conversation]) -> TensorDict:
    """Completions in the layout of `LLMData`, (B,), as described at the top of this file."""
    prompts, responses = [c.prompt_ids for c in conversations], [c.response_ids for c in conversations]
    tokens = token_fields(prompts, responses, torch.int64, PAD)
    before, after = ([[1] * len(ids) for ids in rows] for rows in (prompts, responses))
    log_probs = [torch.tensor(c.log_probs, dtype=torch.float32) for c in conversations]
    said = ["".join(m["content"] for m in c.messages if m["role"] == "assistant") for c in conversations]
    over = torch.zeros(len(conversations), 1, dtype=torch.bool)
    whole = batch_from_conversations(conversations)
    return TensorDict(
        {
            "text": strings([c.prompt_text for c in conversations]),
            "text_response": strings(said),
            "tokens": tokens["full"],
            "tokens_response": tokens["response"],
            "attention_mask": token_fields(before, after, torch.int64, PAD)["full"],
            "log_probs": padded(log_probs, PAD),
            "done": over,
            "terminated": over.clone(),
            "truncated": over.clone(),
            **{name: whole.get(name) for name in FLAT_AS_NESTED},
        },
        batch_size=[len(conversations)],
    )
