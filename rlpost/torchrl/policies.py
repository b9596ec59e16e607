"""Policies that are called on TensorDicts: they read prompts or sequences, and write turns or log-probs.

A policy that is called on a TensorDict answers it, one conversation or one sequence of ids a row. A turn of the model
has these keys (N rows; "ragged" is a jagged nested tensor (N, *)):

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
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch.distributions import Categorical

from rlpost.data.chat import ChatMask
from rlpost.data.chat_templates import chat_template
from rlpost.data.conversation import Completion, Conversation, InputMode, Message
from rlpost.data.history import History
from rlpost.data.ragged import (
    ASSISTANT,
    Key,
    column,
    padded,
    padding_id,
    ragged,
    ragged_rows,
    strings,
    token_fields,
    versions,
)
from rlpost.data.rendering import text_ids
from rlpost.errors import ConfigError, DataError
from rlpost.policies.base import Policy
from rlpost.policies.drawing import check_whole
from rlpost.settings import SamplingSettings
from rlpost.text import did_you_mean, nearest
from rlpost.torchrl.batches import select_rows
from rlpost.torchrl.sequences import MASKS, TOKENS, Sequences, in_one_dimension, rows_of

MAX_NEW_TOKENS = 256  # default, if neither the conversation nor generate_kwargs has a limit


# How a policy is called on a TensorDict

SAMPLING = tuple(field.name for field in fields(SamplingSettings))
WORDS = ("max_new_tokens", "num_samples", "do_sample", *SAMPLING)  # of `generate_kwargs`
ALSO_CALLED = {
    "max_tokens": "max_new_tokens",
    "num_return_sequences": "num_samples",
    "n": "num_samples",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}


@dataclass(frozen=True)
class Face:
    """The TensorDict face of a policy, `policy(tensordict)`.

    With `generate` the policy takes the model's turn: it reads the prompts as `input_mode` says, and writes
    text, tokens, masks, log-probs and, in the mode history, messages, each with `prompt`,
    `response` and `full` (see the top of this file). Without, it writes the log-probs of
    whole sequences, `("log_probs", "full")`; the first token, which nothing predicts, has 0.

    If the batch holds ids, they are read in every mode: a conversation continues from the ids that were
    sampled, and its text is never tokenised a second time. `input_key` names an entry to read instead.

    `generate_kwargs`: `max_new_tokens`, `num_return_sequences` (or `num_samples` of its own),
    `do_sample`, and `temperature`, `top_p`, `top_k`, `min_p` and `stop` as in `SamplingSettings`;
    `max_tokens` and `n` are other words for the first two, `stop_strings` and `stop_sequences` for the last.
    `num_samples=n` turns a batch (B,) into (B, n). `pad_output` writes dense tensors instead of ragged ones,
    prompts padded on the left and responses on the right. `inplace=True` writes into the TensorDict and returns it,
    False into a copy, "empty" into a new one with the written entries alone; None means True if the batch keeps its
    shape, which must be one row or one dimension. Written entries go to `device`. A group whose `..._key` is None
    is not written. `chat_template_name` replaces the tokenizer's template by one of `rlpost.data.chat_templates`.

    Raises ConfigError for unknown words in `generate_kwargs`.
    """

    input_mode: Any = InputMode.history  # or its name
    input_key: Key | None = None
    generate: bool = True
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pad_output: bool = False
    inplace: bool | Literal["empty"] | None = None
    device: torch.device | str | None = None
    num_samples: int | None = None
    chat_template_name: str | None = None
    return_log_probs: bool = True
    history_key: str | None = "history"
    text_key: str | None = "text"
    tokens_key: str | None = "tokens"
    masks_key: str | None = "masks"
    log_probs_key: str | None = "log_probs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_mode", InputMode.of(self.input_mode))
        object.__setattr__(self, "generate_kwargs", _one_spelling(self.generate_kwargs))

    @property
    def samples_per_prompt(self) -> int | None:
        """n of the batch (B, n); None: the batch stays (B,)."""
        return self.num_samples if self.num_samples is not None else self.generate_kwargs.get("num_samples")

    @property
    def max_new_tokens(self) -> int | None:
        """Most new tokens of a completion, beside the limit of its conversation; None: no further limit."""
        return self.generate_kwargs.get("max_new_tokens")

    @property
    def prompt_key(self) -> Key:
        """The entry that this mode reads if the batch holds no ids."""
        if self.input_key is not None:
            return self.input_key
        group = getattr(self, f"{self.input_mode.value}_key") or self.input_mode.value
        return (group, "prompt" if self.generate else "full")

    def sampling(self, settings: SamplingSettings | None) -> SamplingSettings:
        """`settings`, or the defaults, with the values of `generate_kwargs`. Raises ConfigError."""
        given = {name: self.generate_kwargs[name] for name in SAMPLING if name in self.generate_kwargs}
        greedy = self.generate_kwargs.get("do_sample") is False
        return replace(settings or SamplingSettings(), **given, **({"temperature": 0.0} if greedy else {}))

    def call(self, policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
        """See `Policy.__call__`."""
        return _answer(policy, tensordict) if self.generate else _score(policy, tensordict)

    def dist(self, policy: Any, tensordict: TensorDictBase, counted: Counted) -> MaskedCategorical:
        """See `CategoricalSequential`; `counted` says which tokens are."""
        reader = Reader(policy, tensordict)
        ids, sampled = reader.sequences()
        if isinstance(counted, str) and counted == "own":
            has_prompt = ("tokens", "prompt") in reader.keys
            counted = "assistant" if sampled is not None else "prompt" if has_prompt else "attention"
        sequences = Sequences.of_rows([torch.tensor(row) for row in ids])
        counts = sequences.attention.clone()
        if isinstance(counted, torch.Tensor):
            counts &= counted if not counted.is_nested else padded(ragged_rows(counted))
        elif counted == "prompt":
            for row, prompt in zip(counts, reader.ids(("tokens", "prompt")), strict=True):
                row[: len(prompt)] = False
        elif counted == "assistant":
            if sampled is None:
                raise DataError(
                    "nothing says which tokens are the assistant's: give ('masks', 'all_assistant_mask'), or messages "
                    "with input_mode='history'"
                )
            counts = padded([torch.tensor(row) for row in sampled])
        counts[:, 0] = False
        check_whole(policy.sampling)
        logits = policy.token_logits(sequences.ids, sequences.attention) / (policy.sampling.temperature or 1.0)
        # the logits that follow a token are the distribution of the next; of the first there is none
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return MaskedCategorical(sequences.ids.to(logits.device), shifted, counts.to(logits.device))

    def with_template(self, tokenizer: Any) -> Any:
        """`tokenizer`, or a copy with the chat template that this face names. Raises ConfigError for an unknown one."""
        if self.chat_template_name is None:
            return tokenizer
        changed = copy.copy(tokenizer)
        changed.chat_template = chat_template(self.chat_template_name).template
        return changed


def _one_spelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """`generate_kwargs` with one name per thing. Raises ConfigError for unknown words."""
    chosen: dict[str, Any] = {}
    for word, value in given.items():
        name = ALSO_CALLED.get(word, word)
        if name not in WORDS:
            near = did_you_mean(nearest(word, WORDS), f"the words are {', '.join(WORDS)}")
            raise ConfigError(f"generate_kwargs has no {word!r}{near}")
        chosen[name] = value
    return chosen


# A policy called on a TensorDict


def _answer(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    samples = policy.face.samples_per_prompt
    conversations = Reader(policy, tensordict).conversations()
    if samples is not None:  # each with a number, and so a randomness, of its own
        conversations = [
            replace(c.copy(), sample=c.sample * samples + i) for c in conversations for i in range(samples)
        ]
    silent = Completion([], [], "", "context", policy.version)  # where no room was left for a turn
    completions = [completion or silent for completion in policy.completions(conversations)]
    written = _turns_written(policy, conversations, completions)
    if "conversation" in tensordict.keys():  # noqa: SIM118  a TensorDict iterates over its rows
        written.set("conversation", strings(conversations))
    return _delivered(policy, tensordict, written, () if samples is None else (samples,))


def _score(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    ids, sampled = Reader(policy, tensordict).sequences()
    log_probs = policy.token_log_probs(ids, policy.sampling)
    return _delivered(policy, tensordict, _sequences_written(policy, ids, sampled, log_probs))


def _delivered(
    policy: Policy, tensordict: TensorDictBase, written: TensorDictBase, samples: tuple[int, ...] = ()
) -> TensorDictBase:
    """The rows `written` (N,), in or beside `tensordict`, whose rows have `samples` each; on the face's device."""
    face, shape = policy.face, (*tensordict.batch_size, *samples)
    if face.device is not None:
        written = written.to(torch.device(face.device))
    if face.inplace == "empty":
        return _shaped(written, shape)
    if len(shape) < 2 and not samples:
        into = tensordict if face.inplace in (None, True) else tensordict.clone(recurse=False)
        return put(into, _shaped(written, shape))
    each = [row for row in range(tensordict.numel()) for _ in range(prod(samples))]
    return _shaped(put(select_rows(in_one_dimension(tensordict), each), written), shape)


# What the policy reads


class Reader:
    """Reads the conversations or sequences of a TensorDict, for `policy` and as its face says.

    The rows of a batch of several dimensions follow each other, the last dimension fastest.
    """

    def __init__(self, policy: Policy, tensordict: TensorDictBase) -> None:
        self.policy = policy
        self.face = policy.face
        self.rows = in_one_dimension(tensordict)
        self.keys = set(tensordict.keys(include_nested=True))

    def conversations(self) -> list[Conversation]:
        """One conversation a row for the policy to answer, its ids carried forward; copies of those in the TensorDict.

        Raises DataError for an entry that is missing, and for a prompt without room for its completion.
        """
        if self._finds("conversation"):
            return self._carried_on()
        if self.face.input_mode is InputMode.history:
            made = [self._opened(chat) for chat in self._chats()]
        else:
            made = [self._opened([{"role": "user", "content": text}], ids) for text, ids in self._texts()]
        if self._finds(("tokens", "prompt")) and self.face.input_mode is not InputMode.tokens:
            self._go_by_ids(made)
        for number, conversation in enumerate(made):
            self._limit(conversation, number)
        return made

    def sequences(self) -> tuple[list[list[int]], list[list[bool]] | None]:
        """The ids of each row: of its conversation if it has one, else as the mode says.

        And which of them are the assistant's; None if that is unknown. Raises DataError for an entry that is missing.
        """
        if self._finds(TOKENS):
            masks = rows_of(self.rows, ASSISTANT)
            return self.ids(TOKENS), None if masks is None else [mask.tolist() for mask in masks]
        if self._finds("conversation"):
            played = self.entry("conversation")
            sampled = [[False] * len(c.prompt_ids) + [bool(m) for m in c.mask] for c in played]
            return [c.prompt_ids + c.response_ids for c in played], sampled
        if self.face.input_mode is not InputMode.history:
            return [ids for _, ids in self._texts()], None
        encoded = list(map(ChatMask(self.policy.tokenizer).encode, self._chats()))
        return [ids for ids, _ in encoded], [sampled for _, sampled in encoded]

    def ids(self, key: Key) -> list[list[int]]:
        """The ids of each row without padding, where an attention mask of the same shape is False.

        Raises DataError for padded ids without a mask: a pad token may be an end of turn as well.
        """
        self._check_there(key)
        rows = rows_of(self.rows, key) or []
        pad = self.policy.tokenizer.pad_token_id
        if pad is not None and pad != self.policy.tokenizer.eos_token_id and not self.keys.intersection(MASKS):
            for number, row in enumerate(rows):
                if row.numel() and pad in (int(row[0]), int(row[-1])):
                    raise DataError(
                        f"row {number} of {key!r} looks padded: say what is padding with "
                        "('masks', 'all_attention_mask') or 'attention_mask', or give ragged ids"
                    )
        return [row.tolist() for row in rows]

    def entry(self, key: Key) -> list[Any]:
        """The entry `key`, one value a row. Raises DataError if it is missing."""
        self._check_there(key)
        found = self.rows.get(key)
        return found.to_chats() if isinstance(found, History) else column(self.rows, key)

    def _check_there(self, key: Key) -> None:
        """Raise DataError if the entry `key` is missing, naming those of the batch."""
        if key not in self.keys:
            there = ", ".join(sorted(map(str, self.keys)))
            raise DataError(f"the policy reads {key!r}, which is not in the TensorDict: it has {there or 'nothing'}")

    def _finds(self, key: Key) -> bool:
        """Whether to read the entry `key`, which the batch has, whatever the mode; no with an `input_key`."""
        return self.face.input_key is None and key in self.keys

    # Conversations

    def _carried_on(self) -> list[Conversation]:
        """The conversations of an environment: sampled ids stay, and only new messages are tokenised."""
        conversations = [conversation.copy() for conversation in self.entry("conversation")]
        if ("tokens", "prompt") in self.keys:
            for conversation, ids in zip(conversations, self.ids(("tokens", "prompt")), strict=True):
                if not conversation.prompt_ids and not conversation.turns:  # the environment has tokenised the prompt
                    conversation.prompt_ids = ids
                    conversation.prompt_text = self.policy.tokenizer.decode(ids)
        return conversations

    def _opened(self, messages: list[Message], ids: list[int] | None = None) -> Conversation:
        """A new conversation of this policy, with a number of its own; `ids` are those of its one message."""
        conversation = Conversation(task={}, messages=messages, group_id=self.policy.rows_numbered)
        self.policy.rows_numbered += 1
        if ids is None:
            self.policy.continuation.begin(conversation)
        else:
            conversation.prompt_text, conversation.prompt_ids = messages[0]["content"], ids
        return conversation

    def _go_by_ids(self, conversations: list[Conversation]) -> None:
        """Take the ids of the batch instead of those of the text. Raises DataError if they differ."""
        for number, (conversation, ids) in enumerate(zip(conversations, self.ids(("tokens", "prompt")), strict=True)):
            if self.policy.tokenizer.decode(ids) != conversation.prompt_text:
                raise DataError(
                    f"row {number}: ('tokens', 'prompt') does not say what {self.face.prompt_key!r} says: delete the "
                    "one that is not to be read, or set input_mode='tokens'"
                )
            conversation.prompt_ids = ids

    def _limit(self, conversation: Conversation, number: int) -> None:
        """Set the length limit of the completion. Raises DataError for a prompt that leaves it no room."""
        length, longest = len(conversation.prompt_ids), self.policy.max_model_len
        limit = self.face.max_new_tokens
        room = MAX_NEW_TOKENS if longest is None else longest - length
        if room < (limit or 1):
            raise DataError(
                f"the prompt of row {number} has {length} tokens, and with {limit or 1} to sample that is more than "
                f"the {longest} the model takes: shorten it"
            )
        conversation.max_completion_tokens = min(room, MAX_NEW_TOKENS) if limit is None else limit

    def _texts(self) -> list[tuple[str, list[int]]]:
        """The text and the ids of each row, in the modes text and tokens."""
        tokenizer, key = self.policy.tokenizer, self.face.prompt_key
        if self.face.input_mode is InputMode.text:
            return [(text, text_ids(tokenizer, text)) for text in self.entry(key)]
        return [(tokenizer.decode(ids), ids) for ids in self.ids(key)]

    def _chats(self) -> list[list[Message]]:
        """The messages of each row; an environment writes them as `history` itself, not as a part of it."""
        key = self.face.prompt_key
        if self.face.input_key is None and isinstance(self.rows.get(key[0], None), History):
            key = key[0]
        return self.entry(key)


# What the policy writes


def _turns_written(
    policy: Policy, conversations: Sequence[Conversation], completions: Sequence[Completion]
) -> TensorDict:
    """The TensorDict (N,) described at the top of this file, `history` in its parts."""
    face, tokenizer = policy.face, policy.tokenizer
    pad, nothing = (padding_id(tokenizer), 0) if face.pad_output else (None, None)
    prompts = [c.prompt_ids + c.response_ids for c in conversations]
    texts = [tokenizer.decode(ids) if c.turns else c.prompt_text for c, ids in zip(conversations, prompts, strict=True)]
    answers = [completion.text for completion in completions]
    full = [text + answer for text, answer in zip(texts, answers, strict=True)]
    replies = [completion.token_ids for completion in completions]
    ones = [[1] * len(reply) for reply in replies]
    masks = {
        "all_attention_mask": [[1] * len(ids) for ids in prompts],
        "all_assistant_mask": [[0] * len(c.prompt_ids) + c.mask for c in conversations],
    }
    written: dict[Any, Any] = {
        "policy_version": versions([completion.policy_version for completion in completions]),
        "finish_reason": strings([completion.finish_reason for completion in completions]),
        face.text_key: {"prompt": strings(texts), "response": strings(answers), "full": strings(full)},
        face.tokens_key: token_fields(prompts, replies, torch.int64, pad),
        face.masks_key: {
            name: token_fields(before, ones, torch.bool, nothing)["full"] for name, before in masks.items()
        },
    }
    if face.return_log_probs:
        before = [[0.0] * len(c.prompt_ids) + c.log_probs for c in conversations]
        sampled = [completion.log_probs for completion in completions]
        written[face.log_probs_key] = token_fields(before, sampled, torch.float32, nothing)
    if face.input_mode is InputMode.history:
        contexts, turns = [c.messages for c in conversations], [[_message(completion)] for completion in completions]
        chats = [[*messages, *turn] for messages, turn in zip(contexts, turns, strict=True)]
        parts = {"prompt": contexts, "response": turns, "full": chats}
        written[face.history_key] = {name: History.from_chats(rows) for name, rows in parts.items()}
    written.pop(None, None)  # the groups without a key
    return TensorDict(written, batch_size=[len(conversations)])


def _message(completion: Completion) -> Message:
    message: Message = {"role": "assistant", "content": completion.text}
    return message if completion.finish_reason == "stop" else {**message, "is_complete": False}


def _sequences_written(
    policy: Policy, ids: list[list[int]], sampled: list[list[bool]] | None, log_probs: Sequence[torch.Tensor]
) -> TensorDict:
    """`full` of text, tokens, masks and log-probs (N,); the assistant's mask if it is known."""
    face, pad = policy.face, padding_id(policy.tokenizer)

    def laid_out(rows: Sequence[Any], dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return padded(tensors, fill) if face.pad_output else ragged(tensors)

    masks = {"all_attention_mask": laid_out([[1] * len(row) for row in ids], torch.bool)}
    if sampled is not None:
        masks["all_assistant_mask"] = laid_out(sampled, torch.bool)
    written: dict[Any, Any] = {
        face.text_key: {"full": strings([policy.tokenizer.decode(row) for row in ids])},
        face.tokens_key: {"full": laid_out(ids, torch.int64, pad)},
        face.masks_key: masks,
        face.log_probs_key: {"full": laid_out(log_probs, torch.float32)},
    }
    written.pop(None, None)  # the groups without a key
    return TensorDict(written, batch_size=[len(ids)])


def _shaped(rows: TensorDictBase, shape: Sequence[int]) -> TensorDictBase:
    """The rows (N,) of `rows` as a batch of `shape`: one row itself for (), stacked lazily beyond one dimension."""
    if not shape:
        return rows[0]
    if len(shape) == 1:
        return rows
    size = rows.batch_size[0] // shape[0]
    parts = [select_rows(rows, range(start, start + size)) for start in range(0, rows.batch_size[0], size)]
    return lazy_stack([_shaped(part, shape[1:]) for part in parts], 0)


def put(into: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """Set every entry of `written` in `into`, and return that; other entries of a group stay.

    A whole History in `into` becomes the one with the reply.
    """
    for name, value in written.items():
        there = into.get(name, None)
        if not isinstance(value, TensorDictBase) or isinstance(value, NonTensorStack):
            into.set(name, value)
        elif isinstance(there, History):
            into.set(name, value["full"])
        elif isinstance(there, TensorDictBase):
            for part, leaf in value.items():
                there.set(part, leaf)
        else:
            into.set(name, value)
    return into


# Distributions over tokens


class MaskedCategorical(Categorical):
    """One categorical distribution a token, (B, T); where `mask` is False, log-probs and entropies are 0.

    `tokens` (B, T) are the ids that were read.
    """

    def __init__(self, tokens: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)
        self.tokens = tokens
        self.mask = mask

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """log π of the tokens `value` (B, T)."""
        return super().log_prob(value).masked_fill(~self.mask, 0.0)

    def entropy(self) -> torch.Tensor:
        """(B, T), in nats."""
        return super().entropy().masked_fill(~self.mask, 0.0)


Counted = Literal["own", "prompt", "assistant", "attention"] | torch.Tensor
