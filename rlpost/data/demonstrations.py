"""Demonstrations, which supervised fine-tuning learns from, as rows, as samples, and the bad ones among them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from rlpost.data.messages import ChatMessage
from rlpost.data.rows import SHOWN, Causes
from rlpost.errors import DataError
from rlpost.text import counted


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A row to learn from: a conversation (`messages`) or plain `text`, one of the two, unless it is `wrong`.

    `where` names the row ("train.jsonl, row 3"). Every assistant's message is trained, unless it
    carries `weight: 0`. `tools` are the functions the model may call, as JSON schemas; `variables` are passed to the
    chat template.
    """

    where: str
    messages: list[ChatMessage] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    wrong: str = ""  # the fault of a malformed row


@dataclass(frozen=True, slots=True)
class Sample:
    """A demonstration as token `ids` and a `mask`, True on the trained ones.

    From an index of `ids` in `restarts` on, the model reads nothing of what lies before. The first id, and that
    at a restart, is never trained, since nothing predicts it. `fault` says why the row is bad, with the `reason`
    in words; a `cut` one is still trained on, if `num_trained` is above 0. `notes` say what else is worth counting.
    """

    where: str
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    fault: Fault | None = None
    reason: str = ""
    restarts: list[int] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return sum(self.mask)

    @property
    def num_read(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that are read together: this one."""
        return (self,)

    @property
    def content(self) -> Any:
        """Everything that is trained on; equal for equal samples."""
        return (self.ids, self.mask, self.restarts) if self.restarts else (self.ids, self.mask)

    @property
    def longest(self) -> int:
        """Number of ids of the longest piece that the model reads on its own."""
        return max(end - start for start, end in pairwise((0, *self.restarts, len(self.ids))))

    @property
    def prompt_length(self) -> int:
        """Number of ids before the first trained one; all if none is trained."""
        return self.mask.index(True) if self.num_trained else len(self.ids)


class Fault(Enum):
    """Why a row cannot be trained on as it is; the value is its name in a summary."""

    cut = "cut"  # longer than max_tokens: the end of an answer is missing, the rest is trained on
    malformed = "malformed"
    empty = "nothing to train on"
    template = "refused by the chat template"
    nesting = "rendered differently once more follows"
    endless = "no end-of-turn token"
    foreign = "ids of another tokenizer"
    equal = "nothing to choose between"


class Encoded(Protocol):
    """A row as it is trained on: a `Sample`, or a pair of them."""

    @property
    def where(self) -> str:
        """The place of the row."""
        ...

    @property
    def fault(self) -> Fault | None:
        """Why it is bad; None for a good one."""
        ...

    @property
    def reason(self) -> str:
        """The fault in words."""
        ...

    @property
    def num_trained(self) -> int:
        """Number of trained tokens; 0: nothing is trained."""
        ...

    @property
    def num_read(self) -> int:
        """Number of tokens."""
        ...

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that are read together: one, or a pair."""
        ...

    @property
    def content(self) -> Any:
        """Everything that is trained on; equal for equal ones."""
        ...


E = TypeVar("E", bound=Encoded)


@dataclass
class BadRows:
    """The bad ones of `total` rows, counted by fault and cause, with the first few."""

    total: int = 0
    causes: dict[Fault, Causes] = field(default_factory=dict)
    first: list[Encoded] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)  # of all rows -> how many have it

    @property
    def counts(self) -> Counter[Fault]:
        """Bad rows by fault."""
        return Counter({fault: causes.count for fault, causes in self.causes.items()})

    @property
    def count(self) -> int:
        """All bad rows."""
        return self.counts.total()

    def add(self, sample: Encoded) -> None:
        """Count one row, good or bad."""
        self.total += 1
        self.notes.update({note for each in sample.samples for note in each.notes})
        if sample.fault is not None:
            self.causes.setdefault(sample.fault, Causes()).add(sample.where, sample.reason)
            if len(self.first) < SHOWN:
                self.first.append(sample)

    @property
    def share(self) -> float:
        """Share of the rows that are bad."""
        return self.count / self.total if self.total else 0.0

    def lines(self) -> list[str]:
        """A line for each cause: the fault, and how many rows, or which, with the reason."""
        return [
            f"{fault.value}: {line}"
            for fault, _ in self.counts.most_common()
            for line in self.causes[fault].lines(self.total)
        ]

    def noted(self) -> list[str]:
        """A line for each note: how many rows it is about."""
        return [f"{count:,} of {counted(self.total, 'row')}: {note}" for note, count in self.notes.most_common()]

    def error(self, allowed: str, otherwise: str = "") -> DataError:
        """The error for all bad rows: a line for each cause; `otherwise` follows the advice."""
        advice = "raise max_tokens, or remove them" if set(self.counts) == {Fault.cut} else "correct or remove them"
        heading = f"{self.count:,} of {counted(self.total, 'row')} are bad ({allowed}): {advice}{otherwise}"
        return DataError("\n".join([heading, *(f"  {line}" for line in self.lines())]))
