"""Demonstrations and pairs of replies, which a training on rows learns from, as messages and as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from rlpost.data.conversation import Message
from rlpost.data.faults import Fault

Replies = tuple[list[Message], ...]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A row as it is read: a conversation (`messages`) or plain `text`, one of the two, unless it is `wrong`.

    `where` names the row ("train.jsonl, row 3"). Every assistant's message is trained, unless it
    carries `weight: 0`. `tools` are the functions the model may call, as JSON schemas; `variables` are passed to the
    chat template. A pair has a chosen and a rejected one of `replies` to its messages; `sampled` is its row, if that
    holds the ids of replies that a model sampled. A prompt that the reply has to begin with has that `prefill`.
    """

    where: str
    messages: list[Message] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    replies: Replies = ()
    sampled: Mapping[str, Any] | None = None
    prefill: str = ""
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


Encoded = Sample | Pair
E = TypeVar("E", bound=Encoded)
