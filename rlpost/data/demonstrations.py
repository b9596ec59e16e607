"""What supervised fine-tuning learns from: demonstrations, and the token ids and mask they become."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlpost.text import counted

EXAMPLES_KEPT = 3  # bad rows of each kind that a summary can show

ChatMessage = dict[str, Any]  # role, content, tool_calls, ... as chat templates read them


class Fault(Enum):
    """Why a row cannot be trained on as it is; the value is what a summary calls it."""

    cut = "cut"  # longer than max_tokens: the end of an answer is missing; the rest is trained on
    empty = "nothing to train on"
    template = "refused by the chat template"
    nesting = "rendered differently once more follows"
    endless = "no end-of-turn token"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What one row shows: a conversation (`messages`) or plain `text`, exactly one of the two.

    `where` names the row ("train.jsonl, row 3"). Every assistant's message is trained, unless it
    carries `weight: 0`. `tools` are the functions the model may call, as JSON schemas.
    """

    where: str
    messages: list[ChatMessage] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A demonstration as training reads it: `ids` and, one each, whether it is trained.

    The first id is never trained, since nothing predicts it. `fault` says why the row is bad, with
    the `reason` in words; a bad one is still trained on where `num_trained` is above 0 (`cut`).
    """

    where: str
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    fault: Fault | None = None
    reason: str = ""

    @property
    def num_trained(self) -> int:
        """How many of its tokens are trained."""
        return sum(self.mask)

    @property
    def prompt_length(self) -> int:
        """Ids before the first trained one; all of them where there is none."""
        return self.mask.index(True) if self.num_trained else len(self.ids)


@dataclass
class BadRows:
    """How many of `total` rows are bad, by fault, with the first few of each."""

    total: int = 0
    counts: dict[Fault, int] = field(default_factory=dict)
    examples: dict[Fault, list[Sample]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """All bad rows."""
        return sum(self.counts.values())

    def add(self, sample: Sample) -> None:
        """Count one row, good or bad."""
        self.total += 1
        if sample.fault is not None:
            self.counts[sample.fault] = self.counts.get(sample.fault, 0) + 1
            kept = self.examples.setdefault(sample.fault, [])
            if len(kept) < EXAMPLES_KEPT:
                kept.append(sample)

    def lines(self) -> list[str]:
        """A line for each fault: how many rows, and the first of them with the reason."""
        lines = []
        for fault, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            first = self.examples[fault][0]
            lines.append(
                f"{fault.value}: {count} of {counted(self.total, 'row')}, such as {first.where}: {first.reason}"
            )
        return lines
