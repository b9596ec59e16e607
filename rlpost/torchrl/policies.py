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
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch.distributions import Categorical

from rlpost.data.chat import ChatMask
from rlpost.data.chat_templates import chat_template
from rlpost.data.conversation import Completion, Conversation, InputMode, Message
from rlpost.data.history import History
from rlpost.data.ragged import (
    ASSISTANT,
    ATTENTION,
    Key,
    column,
    padded,
    padding_id,
    ragged,
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
from rlpost.torchrl.batches import concat_rows, select_rows

MAX_NEW_TOKENS = 256  # default, if neither the conversation nor generate_kwargs has a limit


# How a policy is called on a TensorDict

# word of `generate_kwargs` -> the name for all spellings of that word
SPELLINGS = {
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "num_return_sequences": "num_samples",
    "n": "num_samples",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "do_sample": "do_sample",
}
SAMPLING = tuple(field.name for field in fields(SamplingSettings))


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
        rows = reader.sequences()
        if isinstance(counted, str) and counted == "own":
            has_prompt = ("tokens", "prompt") in reader.keys
            is_known = all(row.sampled is not None for row in rows)
            counted = "assistant" if is_known else "prompt" if has_prompt else "attention"
        if isinstance(counted, torch.Tensor):
            masks = [mask[: len(row.ids)].tolist() for mask, row in zip(counted.unbind(), rows, strict=True)]
        elif counted == "prompt":
            prompts = map(len, reader.ids(("tokens", "prompt")))
            masks = [[at >= length for at in range(len(row.ids))] for row, length in zip(rows, prompts, strict=True)]
        elif counted == "attention":
            masks = [[True] * len(row.ids) for row in rows]
        else:
            masks = [row.sampled for row in rows]
            if None in masks:
                raise DataError(
                    "nothing says which tokens are the assistant's: give ('masks', 'all_assistant_mask'), or messages "
                    "with input_mode='history'"
                )
        check_whole(policy.sampling)
        tokens = padded([torch.tensor(row.ids) for row in rows], padding_id(policy.tokenizer))
        there = padded([torch.ones(len(row.ids), dtype=torch.bool) for row in rows])
        counts = padded([torch.tensor(mask, dtype=torch.bool) for mask in masks])
        logits = policy.token_logits(tokens, there) / (policy.sampling.temperature or 1.0)
        # the logits that follow a token are the distribution of the next; of the first there is none
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        counts[:, 0] = False
        return MaskedCategorical(tokens.to(logits.device), shifted, counts.to(logits.device))

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
        if word not in SPELLINGS:
            near = did_you_mean(nearest(word, SPELLINGS), f"the words are {', '.join(SPELLINGS)}")
            raise ConfigError(f"generate_kwargs has no {word!r}{near}")
        chosen[SPELLINGS[word]] = value
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
    shape = (*tensordict.batch_size, *(() if samples is None else (samples,)))
    return _delivered(policy, tensordict, _shaped(written, shape))


def _score(policy: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    rows = Reader(policy, tensordict).sequences()
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
        return put(tensordict if face.inplace in (None, True) else tensordict.clone(recurse=False), written)
    return _beside(tensordict, written)


def _beside(inputs: TensorDictBase, given: TensorDictBase) -> TensorDictBase:
    """`given` with the entries of `inputs`, which may lack its last dimension."""
    if inputs.ndim == given.ndim < 2:
        return put(inputs.clone(recurse=False), given)
    each = inputs.unbind(0) if inputs.ndim else [inputs] * given.batch_size[0]
    return lazy_stack([_beside(a, g) for a, g in zip(each, given.unbind(0), strict=True)], 0)


# What the policy reads


@dataclass
class ReadRow:
    """A row of ids, with its text."""

    ids: list[int]
    text: str
    sampled: list[bool] | None = None  # which ids are the assistant's; None: unknown


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
            made = [self._opened(messages=chat) for chat in self._chats()]
        else:
            made = [self._opened(row) for row in self._plain_rows()]
        if self._finds(("tokens", "prompt")) and self.face.input_mode is not InputMode.tokens:
            self._go_by_ids(made)
        for number, conversation in enumerate(made):
            self._limit(conversation, number)
        return made

    def sequences(self) -> list[ReadRow]:
        """One sequence of ids a row: of its conversation if it has one, else as the mode says.

        Raises DataError for an entry that is missing.
        """
        if self._finds(("tokens", "full")):
            return self._marked(self._rows_of_ids(("tokens", "full")))
        if self._finds("conversation"):
            return [self._whole(conversation) for conversation in self.entry("conversation")]
        if self.face.input_mode is not InputMode.history:
            return self._plain_rows()
        encoded = map(ChatMask(self.policy.tokenizer).encode, self._chats())
        return [ReadRow(ids, self.policy.tokenizer.decode(ids), sampled) for ids, sampled in encoded]

    def ids(self, key: Key) -> list[list[int]]:
        """The ids of each row without padding, where an attention mask of the same shape is False.

        Raises DataError for padded ids without a mask: a pad token may be an end of turn as well.
        """
        rows = self.entry(key)
        if (masks := self._attention(rows)) is not None:
            return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]
        pad = self.policy.tokenizer.pad_token_id
        if pad is not None and pad != self.policy.tokenizer.eos_token_id:
            for number, row in enumerate(rows):
                if row.numel() and pad in (int(row[0]), int(row[-1])):
                    raise DataError(
                        f"row {number} of {key!r} looks padded: say what is padding with "
                        "('masks', 'all_attention_mask') or 'attention_mask', or give ragged ids"
                    )
        return [row.tolist() for row in rows]

    def entry(self, key: Key) -> list[Any]:
        """The entry `key`, one value a row. Raises DataError if it is missing, naming those of the batch."""
        if key not in self.keys:
            there = ", ".join(sorted(map(str, self.keys)))
            raise DataError(f"the policy reads {key!r}, which is not in the TensorDict: it has {there or 'nothing'}")
        found = self.rows.get(key)
        return found.to_chats() if isinstance(found, History) else column(self.rows, key)

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

    def _opened(self, row: ReadRow | None = None, messages: list[Message] | None = None) -> Conversation:
        """A new conversation of this policy, with a number of its own, of the ids of `row` or about `messages`."""
        text = "" if row is None else row.text
        conversation = Conversation(
            task={}, messages=messages or [{"role": "user", "content": text}], group_id=self.policy.rows_numbered
        )
        self.policy.rows_numbered += 1
        if row is None:
            self.policy.continuation.begin(conversation)
        else:
            conversation.prompt_text, conversation.prompt_ids = text, row.ids
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

    def _chats(self) -> list[list[Message]]:
        """The messages of each row; an environment writes them as `history` itself, not as a part of it."""
        key = self.face.prompt_key
        if self.face.input_key is None and isinstance(self.rows.get(key[0], None), History):
            key = key[0]
        return self.entry(key)

    # Sequences

    def _plain_rows(self) -> list[ReadRow]:
        """The rows of the modes text and tokens."""
        if self.face.input_mode is InputMode.tokens:
            return self._rows_of_ids(self.face.prompt_key)
        return [ReadRow(text_ids(self.policy.tokenizer, text), text) for text in self.entry(self.face.prompt_key)]

    def _rows_of_ids(self, key: Key) -> list[ReadRow]:
        return [ReadRow(ids, self.policy.tokenizer.decode(ids)) for ids in self.ids(key)]

    def _marked(self, read: list[ReadRow]) -> list[ReadRow]:
        """`read`, the assistant's ids marked if the batch has their mask."""
        if ASSISTANT in self.keys:
            masks = self.entry(ASSISTANT)
            attention = self._attention(masks) or [torch.ones_like(mask) for mask in masks]
            for row, mask, there in zip(read, masks, attention, strict=True):
                row.sampled = mask[there].tolist()
        return read

    def _whole(self, conversation: Conversation) -> ReadRow:
        ids = conversation.prompt_ids + conversation.response_ids
        sampled = [False] * len(conversation.prompt_ids) + [bool(m) for m in conversation.mask]
        return ReadRow(ids, self.policy.tokenizer.decode(ids), sampled)

    def _attention(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The attention masks of `rows`, cut to their lengths if they go on over a response; None if none fits."""
        for key in (ATTENTION, "attention_mask"):
            if key in self.keys:
                masks = [mask[: row.numel()].bool() for mask, row in zip(self.entry(key), rows, strict=True)]
                if all(mask.numel() == row.numel() for mask, row in zip(masks, rows, strict=True)):
                    return masks
        return None


def in_one_dimension(batch: TensorDictBase) -> TensorDictBase:
    """The rows of `batch`, of any shape, as a TensorDict (N,), the last dimension fastest."""
    if batch.ndim == 0:
        return batch.unsqueeze(0)
    if batch.ndim == 1 and not isinstance(batch, LazyStackedTensorDict):
        return batch
    return concat_rows([in_one_dimension(part) for part in batch.unbind(0)])


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
        asked, said = [c.messages for c in conversations], [[_message(completion)] for completion in completions]
        chats = [[*messages, *reply] for messages, reply in zip(asked, said, strict=True)]
        parts = {"prompt": asked, "response": said, "full": chats}
        written[face.history_key] = {name: History.from_chats(rows) for name, rows in parts.items()}
    written.pop(None, None)  # the groups without a key
    return TensorDict(written, batch_size=[len(conversations)])


def _message(completion: Completion) -> Message:
    message: Message = {"role": "assistant", "content": completion.text}
    return message if completion.finish_reason == "stop" else {**message, "is_complete": False}


def _sequences_written(policy: Policy, rows: Sequence[ReadRow], log_probs: Sequence[torch.Tensor]) -> TensorDict:
    """`full` of text, tokens, masks and log-probs (N,); the assistant's mask if every row's is known."""
    face, pad = policy.face, padding_id(policy.tokenizer)
    masks = {"all_attention_mask": _laid_out(policy, [[1] * len(row.ids) for row in rows], torch.bool, 0)}
    known = [row.sampled for row in rows if row.sampled is not None]
    if len(known) == len(rows):
        masks["all_assistant_mask"] = _laid_out(policy, known, torch.bool, 0)
    written: dict[Any, Any] = {
        face.text_key: {"full": strings([row.text for row in rows])},
        face.tokens_key: {"full": _laid_out(policy, [row.ids for row in rows], torch.int64, pad)},
        face.masks_key: masks,
        face.log_probs_key: {"full": _laid_out(policy, log_probs, torch.float32, 0)},
    }
    written.pop(None, None)  # the groups without a key
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


def put(into: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """Set every entry of `written` in `into`, and return that; other entries of a group stay.

    A whole History in `into` becomes the one with the reply.
    """
    for name, value in written.items():
        there = into.get(name, None)
        is_group = isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack)
        if is_group and isinstance(there, History):
            into.set(name, value["full"])
        elif is_group and isinstance(there, TensorDictBase):
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
