"""Pairs of replies to one prompt, a chosen and a rejected one: read from rows, and encoded as token ids.

A row has `prompt`, `chosen` and `rejected`. The prompt is a text or messages, a reply a text or messages; or both
replies are whole conversations that begin alike, with or without a `prompt` beside them (TRL's implicit prompts,
UltraFeedback). Rows of `rlpost data pairs` also hold the ids that a model sampled, which are trained as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from rlpost.data.demonstrations import ChatMessage, Demonstration, Fault, Sample
from rlpost.data.encoding import Encoder
from rlpost.data.formats import PREFERENCE_COLUMNS, PROMPT_COLUMNS, FormatError, read_messages, read_tools
from rlpost.data.habits import reply_text
from rlpost.data.rows import Complaint, Row, kind_of, missing, no_object
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings

CHOSEN, REJECTED = PREFERENCE_COLUMNS
RENDERED = "rendered_prompt"  # column: the prompt as text, behind the chat template
# chosen_ids: the ids behind the prompt; chosen_mask: which of them were sampled; chosen_restarts: where among them a
# whole new prompt begins, which takes the place of all ids before it
IDS, MASK, RESTARTS = "_ids", "_mask", "_restarts"


@dataclass(frozen=True, slots=True)
class Preference:
    """A row to learn from: messages of a prompt, and of a chosen and a rejected reply to it, unless it is `wrong`.

    `sampled` are the row's own ids, if it has any; a row without messages has nothing else.
    """

    where: str
    prompt: list[ChatMessage] = field(default_factory=list)
    chosen: list[ChatMessage] = field(default_factory=list)
    rejected: list[ChatMessage] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    sampled: SampledPair | None = None
    wrong: str = ""  # the fault of a malformed row


@dataclass(frozen=True, slots=True)
class SampledPair:
    """The rendered prompt, and the two replies to it."""

    prompt: str
    replies: tuple[SampledReply, SampledReply]


@dataclass(frozen=True, slots=True)
class SampledReply:
    """The ids behind the prompt, which of them were sampled, where a new prompt begins, and the last turn's text."""

    ids: list[int]
    mask: list[bool]
    restarts: list[int]
    text: str


@dataclass(frozen=True)
class Pair:
    """Two samples that begin with one prompt; nothing is trained of a pair with a `fault`."""

    where: str
    chosen: Sample
    rejected: Sample
    fault: Fault | None = None
    reason: str = ""

    @property
    def num_trained(self) -> int:
        """Number of trained tokens of both replies."""
        return 0 if self.fault else self.chosen.num_trained + self.rejected.num_trained

    @property
    def num_read(self) -> int:
        """Number of tokens, the prompt counted once."""
        return len(self.chosen.ids) + len(self.rejected.ids) - self.prompt_length

    @cached_property
    def prompt_length(self) -> int:
        """Number of ids that both samples begin with and neither trains, up to a restart of one of them alone."""
        most = min(self.chosen.prompt_length, self.rejected.prompt_length)
        alike = zip(self.chosen.ids[:most], self.rejected.ids[:most], strict=True)
        only_one = set(self.chosen.restarts) ^ set(self.rejected.restarts)
        return min(sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], alike)), *only_one, most)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The chosen and the rejected sample."""
        return self.chosen, self.rejected

    @property
    def content(self) -> Any:
        """Everything that is trained on; equal for equal pairs."""
        return self.chosen.content, self.rejected.content


class PairRows:
    """Preferences from a user's own rows; complaints name the column and its fault."""

    def __init__(self, settings: DatasetSettings, user_role: str = "user") -> None:
        self.settings = settings
        self.user_role = user_role

    def complaint(self, row: Row) -> Complaint | None:
        """No pair in the row. Raises ConfigError for a setting that does not fit the rows."""
        if not isinstance(row, Mapping):
            return no_object(row, CHOSEN)
        try:
            found = self.demonstration("", row)
        except FormatError as error:
            return error.complaint
        if found.sampled and self.settings.system_prompt is not None:
            raise ConfigError("env.system_prompt: these rows hold sampled ids, prompts included: leave it out")
        return None

    def demonstration(self, where: str, row: Row) -> Preference:
        """The pair in a row, without `system_prompt`. Raises FormatError for a malformed one."""
        for column in PREFERENCE_COLUMNS:
            if column not in row:
                raise FormatError(column, f"{missing(column, row)}; a pair has prompt, chosen and rejected")
        if row[CHOSEN] == row[REJECTED]:
            raise FormatError(CHOSEN, "is the same as rejected")
        prompt, chosen, rejected = self._messages(row)
        return Preference(where, prompt, chosen, rejected, read_tools(row), _sampled(row))

    def identity(self, row: Row) -> str:
        """The prompt as text; equal prompts have equal texts, and are on one side of what is held out."""
        column = self._prompt_column(row)
        if RENDERED in row and column not in row:
            return row[RENDERED]
        if isinstance(row.get(column), str):
            return row[column]
        prompt, _, _ = self._messages(row)
        return json.dumps([{"role": message["role"], "content": message["content"]} for message in prompt])

    def _prompt_column(self, row: Row) -> str:
        return self.settings.prompt_column or next((n for n in PROMPT_COLUMNS if n in row), PROMPT_COLUMNS[0])

    def _messages(self, row: Row) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
        """Prompt, chosen and rejected reply; no messages for a row of ids whose prompt is rendered only."""
        column = self._prompt_column(row)
        if RENDERED in row and column not in row:
            return [], [], []
        chosen, rejected = (_reply(row, name) for name in PREFERENCE_COLUMNS)
        if "assistant" not in (chosen[0]["role"], rejected[0]["role"]):
            return _parted(chosen, rejected)
        if column not in row:
            raise FormatError(column, f"{missing(column, row)}, and chosen and rejected do not begin with it")
        prompt = row[column]
        if isinstance(prompt, str):
            if not prompt.strip():
                raise FormatError(column, "is empty")
            return [{"role": self.user_role, "content": prompt}], chosen, rejected
        return _untrained(read_messages(prompt, column)), chosen, rejected


class PairEncoder:
    """Turns preferences into pairs with one tokenizer; a sample longer than `max_tokens` is a fault.

    Raises ConfigError for a tokenizer without character offsets.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._encoder = Encoder(tokenizer)

    def encode(self, shown: Preference) -> Pair:
        """The pair of one preference; a bad one has a `fault`, nothing is raised.

        Sampled ids are taken as they are where they are this tokenizer's, else the messages are tokenised.
        """
        where = shown.where
        if shown.wrong:
            return Pair(where, Sample(where), Sample(where), Fault.malformed, shown.wrong)
        samples = self._as_sampled(where, shown.sampled) if shown.sampled else None
        if samples is None and not shown.prompt:
            reason = "its ids are those of another tokenizer, and it has no messages"
            return Pair(where, Sample(where), Sample(where), Fault.foreign, reason)
        chosen, rejected = samples or [
            self._encoder.encode(Demonstration(where, [*shown.prompt, *reply], tools=shown.tools))
            for reply in (shown.chosen, shown.rejected)
        ]
        for name, sample in zip(PREFERENCE_COLUMNS, (chosen, rejected), strict=True):
            if sample.fault is not None:
                return Pair(where, chosen, rejected, sample.fault, f"{name}: {sample.reason}")
            if (size := sample.longest) > self.max_tokens:
                reason = f"{name} has {size:,} tokens with its prompt, more than max_tokens={self.max_tokens}"
                return Pair(where, chosen, rejected, Fault.cut, reason)
        return Pair(where, chosen, rejected)

    def _as_sampled(self, where: str, sampled: SampledPair) -> list[Sample] | None:
        """The samples with a row's own ids; None if those are another tokenizer's.

        A sampled prompt was this text, tokenised once: its ids are found the same way again.
        """
        prompt = list(self.tokenizer(sampled.prompt, add_special_tokens=False)["input_ids"])
        samples = []
        for reply in sampled.replies:
            if reply.text not in reply_text(self.tokenizer, reply.ids):
                return None
            mask = [*[False] * len(prompt), *reply.mask]
            restarts = [len(prompt) + each for each in reply.restarts]
            samples.append(Sample(where, [*prompt, *reply.ids], mask, restarts=restarts))
        return samples


def _reply(row: Row, column: str) -> list[ChatMessage]:
    """A reply as messages, or a whole conversation. Raises FormatError."""
    value = row[column]
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, list):
        return read_messages(value, column)
    raise FormatError(column, f"must be text or a list of messages, and is {kind_of(value)}")


def _parted(
    chosen: list[ChatMessage], rejected: list[ChatMessage]
) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
    """The messages with which two conversations begin, and the rest of each, which has to be the assistant's."""
    alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    for column, messages in zip(PREFERENCE_COLUMNS, (chosen, rejected), strict=True):
        if not alike or len(messages) == alike or messages[alike]["role"] != "assistant":
            wrong = (
                "begins with another message than" if not alike else f"has no reply behind the {alike} it shares with"
            )
            other = REJECTED if column == CHOSEN else CHOSEN
            raise FormatError(column, f"{wrong} {other}: a pair is two replies to one prompt")
    return _untrained(chosen[:alike]), chosen[alike:], rejected[alike:]


def _untrained(prompt: list[ChatMessage]) -> list[ChatMessage]:
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]


def _sampled(row: Row) -> SampledPair | None:
    """The sampled ids of a row that has them."""
    if RENDERED not in row or any(name + IDS not in row for name in PREFERENCE_COLUMNS):
        return None
    chosen, rejected = (
        SampledReply(
            ids := row[name + IDS],
            row.get(name + MASK) or [True] * len(ids),
            row.get(name + RESTARTS) or [],
            _last_text(row[name]),
        )
        for name in PREFERENCE_COLUMNS
    )
    return SampledPair(row[RENDERED], (chosen, rejected))


def _last_text(reply: Any) -> str:
    """The text of the model's last turn."""
    if isinstance(reply, str):
        return reply
    return next((str(message["content"]) for message in reversed(reply) if message["role"] == "assistant"), "")
