"""Plays an environment greedily and scores it: used by eval and during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.envs.base import EnvBase
from rlpost.errors import RewardError
from rlpost.policies.base import Policy
from rlpost.settings import SamplingSettings

AT_ONCE = 256  # conversations between two reports of progress
Z_95 = 1.959964


@dataclass(frozen=True)
class Proportion:
    """A share of `trials` with its 95% Wilson score interval (Wilson 1927)."""

    value: float
    low: float
    high: float
    trials: int

    @classmethod
    def of(cls, successes: float, trials: int) -> Proportion:
        """Share and interval of `successes` in `trials`, one independent trial a prompt."""
        share, spread = successes / trials, Z_95**2 / trials
        centre = (share + spread / 2) / (1 + spread)
        half = Z_95 / (1 + spread) * sqrt(share * (1 - share) / trials + spread / (4 * trials))
        return cls(share, max(0.0, centre - half), min(1.0, centre + half), trials)

    def __str__(self) -> str:
        return f"{self.value:6.1%}  [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found; a measure that the task does not have is None.

    Samples whose reward failed are counted in `num_failed` and left out of everything else.
    """

    num_prompts: int
    num_failed: int
    accuracy_lenient: Proportion | None
    accuracy_strict: Proportion | None
    truncated: Proportion
    reward_mean: float
    reward_parts: dict[str, float]
    tokens_mean: float

    def lines(self) -> list[str]:
        """A small table for people."""
        rows = [
            ("accuracy, lenient", self.accuracy_lenient),
            ("accuracy, strict", self.accuracy_strict),
            ("truncated", self.truncated),
        ]
        lines = [f"{self.num_prompts} prompts, 95% intervals"]
        lines += [f"  {name:<20}{share}{self.extent(share)}" for name, share in rows if share is not None]
        parts = ", ".join(f"{name} {value:.3f}" for name, value in self.reward_parts.items())
        lines.append(f"  {'reward':<20}{self.reward_mean:6.3f}" + (f"   ({parts})" if parts else ""))
        lines.append(f"  {'tokens per answer':<20}{self.tokens_mean:6.1f}")
        if self.num_failed:
            lines.append(f"  {'reward failed':<20}{self.num_failed:6d}   (left out above)")
        return lines

    def extent(self, share: Proportion) -> str:
        """What to say of a share that only some prompts have, as where a reward of accuracy returned None."""
        return "" if share.trials == self.num_prompts else f" of {share.trials} prompts"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The figures under the names of metrics.jsonl."""
        values = {
            "eval/prompts": float(self.num_prompts),
            "eval/failed": float(self.num_failed),
            "eval/reward": self.reward_mean,
            "eval/truncated": self.truncated.value,
            "eval/tokens_mean": self.tokens_mean,
        }
        for name in ("accuracy_lenient", "accuracy_strict"):
            share: Proportion | None = getattr(self, name)
            if share is not None:
                values |= {f"eval/{name}": share.value, f"eval/{name}_low": share.low, f"eval/{name}_high": share.high}
                if share.trials != self.num_prompts:
                    values[f"eval/{name}_prompts"] = float(share.trials)
        return values


def evaluate(
    env: EnvBase,
    policy: Policy,
    *,
    num_prompts: int,
    sampling: SamplingSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvalResult:
    """Play the first `num_prompts` tasks of `env`, one completion each, from the same first task every time.

    `progress` is told how many are played, of how many.

    Raises RewardError if every reward failed.
    """
    env.load_state_dict(env.initial_state())
    played: list[Conversation] = []
    progress(0, num_prompts)
    while len(played) < num_prompts:
        under_way = env.draw(min(AT_ONCE, num_prompts - len(played)))
        played += under_way
        while under_way:
            policy.reply(under_way, sampling)
            env.advance(under_way)
            under_way = [c for c in under_way if not c.done]
        progress(len(played), num_prompts)
    return summarise(played)


def summarise(played: Sequence[Conversation]) -> EvalResult:
    """The result of finished conversations, one a prompt."""
    scored = [c for c in played if c.valid]
    if not scored:
        raise RewardError(f"all {len(played)} rewards of the evaluation failed; the first: {played[0].error}")
    names = sorted({name for c in scored for name in c.reward_parts})
    return EvalResult(
        num_prompts=len(scored),
        num_failed=len(played) - len(scored),
        accuracy_lenient=_share([c.accuracy_lenient for c in scored]),
        accuracy_strict=_share([c.accuracy_strict for c in scored]),
        truncated=Proportion.of(sum(c.finish_reason == "length" for c in scored), len(scored)),
        reward_mean=fmean(c.reward or 0.0 for c in scored),
        reward_parts={n: fmean(c.reward_parts[n] for c in scored if n in c.reward_parts) for n in names},
        tokens_mean=fmean(sum(c.mask) for c in scored),
    )


def _share(values: Sequence[float | None]) -> Proportion | None:
    measured = [value for value in values if value is not None]
    return Proportion.of(sum(measured), len(measured)) if measured else None
