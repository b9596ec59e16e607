"""Pairs of replies to one prompt, a chosen and a rejected one: read from rows, and encoded as token ids.

A row has `prompt`, `chosen` and `rejected`. The prompt is a text or messages, a reply a text or messages; or both
replies are whole conversations that begin alike, with or without a `prompt` beside them (TRL's implicit prompts,
UltraFeedback). Rows of `rlpost data pairs` also hold the ids that a model sampled, which are trained as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from rlpost.data.demonstrations import Demonstration, Fault, Sample
from rlpost.data.encoding import Encoder
from rlpost.data.formats import IDS, MASK, PAIR_COLUMNS, RENDERED, RESTARTS, RowReader
from rlpost.data.habits import reply_text
from rlpost.data.messages import ChatMessage, messages_in
from rlpost.data.rows import Row


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
    variables: dict[str, Any] | None = None
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


def preference(where: str, row: Row, reader: RowReader) -> Preference:
    """The pair in a row. Raises FormatError for a malformed one."""
    shown = reader.read(row)
    chosen, rejected = shown.replies or ([], [])
    return Preference(where, shown.prompt, chosen, rejected, shown.tools, shown.variables, _sampled(row))


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
            self._encoder.encode(Demonstration(where, [*shown.prompt, *reply], None, shown.tools, shown.variables))
            for reply in (shown.chosen, shown.rejected)
        ]
        for name, sample in zip(PAIR_COLUMNS, (chosen, rejected), strict=True):
            if sample.fault is not None:
                return Pair(where, chosen, rejected, sample.fault, f"{name}: {sample.reason}")
            if (size := sample.longest) > self.max_tokens:
                reason = f"{name} has {size:,} tokens with its prompt, more than max_tokens={self.max_tokens}"
                return Pair(where, chosen, rejected, Fault.cut, reason)
        if chosen.content == rejected.content:
            reason = "chosen and rejected are the same tokens, as the chat template writes them"
            return Pair(where, chosen, rejected, Fault.equal, reason)
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


def _sampled(row: Row) -> SampledPair | None:
    """The sampled ids of a row that has them."""
    if RENDERED not in row or any(name + IDS not in row for name in PAIR_COLUMNS):
        return None
    chosen, rejected = (
        SampledReply(
            ids := row[name + IDS],
            row.get(name + MASK) or [True] * len(ids),
            row.get(name + RESTARTS) or [],
            _last_text(row[name]),
        )
        for name in PAIR_COLUMNS
    )
    return SampledPair(row[RENDERED], (chosen, rejected))


def _last_text(reply: Any) -> str:
    """The text of the model's last turn."""
    said = messages_in(reply) or [{"role": "assistant", "content": reply}]
    return next((str(message["content"]) for message in reversed(said) if message["role"] == "assistant"), "")
