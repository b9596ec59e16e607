"""The findings of `rlpost env test`, and their lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from rlpost.data.faults import BadRows


@dataclass(slots=True)
class Proof:
    """The findings of `rlpost.envs.proof.prove`: tasks and replies tried, and one line for each reply scored wrongly.

    If the reward of a perfect reply is unknown, `gold` and `corrupted` are the rewards of the replies.
    """

    checked: int = 0
    replies: int = 0
    failures: list[str] = field(default_factory=list)
    gold: list[float] = field(default_factory=list)
    corrupted: list[float] = field(default_factory=list)
    gold_name: str = "gold answers"

    @property
    def holds(self) -> bool:
        """Whether something was checked and nothing failed."""
        return self.checked > 0 and not self.failures and self.tells_apart

    @property
    def tells_apart(self) -> bool:
        """Whether gold replies earn more than the others on average, if that is not known anyway."""
        return not (self.gold and self.corrupted) or fmean(self.gold) > fmean(self.corrupted)

    def lines(self) -> list[str]:
        """The findings for a person: the verdict, and failures of one cause in a line."""
        details = self._causes("wrong score")
        rightly = "no corrupted one earns more than its gold answer" if self.gold else "all scored rightly"
        verdict = rightly if self.holds else f"{len(self.failures)} scored wrongly"
        if not self.failures and not self.tells_apart:
            verdict = "the reward does not tell them apart"
        if not self.checked:
            verdict = "there is no gold answer to check"
        if self.gold and self.corrupted:
            details.append(
                f"  on average the gold answers earn {fmean(self.gold):g}, the others {fmean(self.corrupted):g}"
            )
        return [
            f"{self.checked} {self.gold_name} and {self.replies - self.checked} corrupted ones: {verdict}",
            *details,
        ]

    def _causes(self, unit: str) -> list[str]:
        """The failures, those of one cause in a line."""
        causes = BadRows()
        for failure in self.failures:
            where, _, reason = failure.partition(": ")
            causes.add(where, reason)
        return [f"  {line}" for line in causes.lines(unit=unit)]


@dataclass(slots=True)
class EpisodeProof(Proof):
    """The findings about an environment without gold replies: whether its episodes begin alike and can be scored.

    `untouched` are the rewards of episodes in which nothing was done.
    """

    tools: list[str] = field(default_factory=list)
    untouched: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        """See `Proof.lines`."""
        verdict = f"{len(self.failures)} failed" if self.failures else "each began twice alike"
        details = [f"  its tools are {', '.join(self.tools)}" if self.tools else "  it has no tools"]
        if self.untouched:
            details.append(f"  without a call an episode earns {fmean(self.untouched):g} on average")
        return [f"{self.checked} episodes: {verdict}", *details, *self._causes("failure")]
