"""A reward function under attack: the rows it is attacked with, and what is said of a reply to each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean
from typing import Any

from rlpost.rewards.apart import WorkerReward, call_apart
from rlpost.rewards.calls import RowValues
from rlpost.rewards.functions import Finished, offered
from rlpost.text import cause_of


class Verdict(Enum):
    """Of a check: all is well, it can be lived with, or do not train on this."""

    ok = "ok"
    weak = "weak"
    fault = "fault"


@dataclass(frozen=True)
class Check:
    """One attack: its verdict, the reason in one line, and the reply that shows it, if one does."""

    name: str
    verdict: Verdict
    reason: str
    reply: str | None = None


def failing_alike(checks: Sequence[Check]) -> list[Check]:
    """The checks, with all checks that end in the same error merged into the first, which names the others."""
    alike: dict[tuple[Verdict, str], list[Check]] = {}
    for check in checks:
        paid = check.verdict is Verdict.ok or check.reason.startswith(
            "earns "
        )  # each such reply shows another weakness
        cause = check.name if paid else cause_of(check.reason)
        alike.setdefault((check.verdict, cause), []).append(check)
    return [
        first if not others else replace(first, reason=f"{first.reason} (and {', '.join(c.name for c in others)})")
        for first, *others in alike.values()
    ]


@dataclass(frozen=True)
class Case:
    """A row to attack with: `gold` ought to earn more than any of the `corrupted`.

    `where` it stands, `columns` and `answer` are as `rlpost.rewards.functions.Finished` has them.
    """

    where: str
    prompt: str | list[dict[str, str]]
    gold: str
    corrupted: Sequence[str]
    columns: Mapping[str, Any]
    answer: str | None

    @property
    def asked(self) -> str:
        """The prompt as text."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(m["content"] for m in self.prompt)

    @property
    def wrong(self) -> str:
        """A wrong reply that says something, "" where there is none."""
        return next((reply for reply in self.corrupted if reply.strip()), "")


STAND_IN = ("Yes.", ["", "No. It depends on what you would like to do, and on how much time there is."])
"""Two replies for a case without a right one: as its `gold` and its `corrupted`."""


@dataclass
class Attack:
    """The attacks on one reward with some cases; each call may take `seconds`.

    Without `has_gold` no reply is right or wrong, and the `gold` of a case is any reply.
    """

    reward: WorkerReward
    cases: Sequence[Case]
    columns: Sequence[str]
    built_in: bool
    seconds: float
    has_gold: bool = True
    gold: list[float] = field(default_factory=list)  # what each case's gold reply earns, once it is scored

    def score_gold(self) -> Check | None:
        """Score the gold replies, which every check compares with; the check that says why, where that fails."""
        self.gold = []
        said = self.values([case.gold for case in self.cases])
        for case, value, error in zip(self.cases, said.values, said.errors, strict=True):
            if error or value is None or not math.isfinite(value):
                return Check("gold", Verdict.fault, error or f"returned {value} for it", case.gold)
            self.gold.append(value)
        return None

    # What checks are made of

    def values(self, replies: Sequence[str], cases: Sequence[Case] | None = None) -> RowValues:
        """What the function says of a reply to each case, in one call if that does not fail."""
        return call_apart([self.reward], self._offer(replies, cases), len(replies), self.seconds)[0]

    def request(self, probe: str = "") -> dict[str, Any]:
        """One call about the gold reply to each case, as the process takes it."""
        offer = self._offer([case.gold for case in self.cases], None)
        _, request, _ = self.reward.request(offer, [range(len(self.cases))], self.seconds)
        return request | {"probe": probe}

    def _offer(
        self, replies: Sequence[str], cases: Sequence[Case] | None
    ) -> Callable[[Any, Sequence[int]], dict[str, Any]]:
        given = self.cases if cases is None else cases

        def offer(_: Any, rows: Sequence[int]) -> dict[str, Any]:
            batch = [_finished(given[i], replies[i]) for i in rows]
            return offered(batch, self.columns, built_in=self.built_in)

        return offer

    def paid(self, name: str, write: Callable[[Case], str], *, least: Verdict = Verdict.fault, less: str = "") -> Check:
        """A reply that deserves less than the gold one: is it paid as much? `least` is what is said if so."""
        replies = [write(case) for case in self.cases]
        said = self.values(replies)
        worst: tuple[float, int] | None = None
        for place, (value, error) in enumerate(zip(said.values, said.errors, strict=True)):
            if error:
                return Check(name, Verdict.fault, error, replies[place])
            if value is None:
                continue
            if not math.isfinite(value):
                return Check(name, Verdict.fault, f"returned {value} for it", replies[place])
            lead = value - self.gold[place]
            if (
                self.has_gold
                and lead >= 0
                and replies[place] != self.cases[place].gold
                and (worst is None or lead > worst[0])
            ):
                worst = lead, place
        if worst is None:
            earned = [value for value in said.values if value is not None]
            mean = f"earns {fmean(earned):.3g} on average" if earned else "is not scored"
            return Check(name, Verdict.ok, f"{mean}, less than the gold reply{less}" if self.has_gold else mean)
        lead, place = worst
        than = "as much as the gold reply" if lead == 0 else f"more than the gold reply's {self.gold[place]:.3g}"
        return Check(name, least, f"earns {said.values[place]:.3g}, {than} ({self.cases[place].where})", replies[place])


def _finished(case: Case, reply: str) -> Finished:
    """The case, answered; its token ids are the bytes, since nobody sampled it."""
    return Finished(case.prompt, reply, list(reply.encode(errors="surrogatepass")), case.columns, case.answer)
