"""Evaluation: play an environment with a policy and summarise the scores, for `rlpost eval` and during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from statistics import fmean
from typing import Any

import numpy as np

from rlpost.collectors.sync import Player
from rlpost.data.conversation import Conversation
from rlpost.envs.base import EnvBase
from rlpost.errors import RewardError
from rlpost.evaluation.saved import metrics_of
from rlpost.evaluation.statistics import Share, maj_at_k, pass_at_k, ratio_interval, reward_interval
from rlpost.policies.base import Policy
from rlpost.record import ACCURACY, DECIDING, MEANS_STRICT, REWARD, Interval, says_more
from rlpost.settings import SamplingSettings
from rlpost.text import counted

AT_ONCE = 256  # conversations in flight
EXTRACTIONS = ("lenient", "strict")  # how an answer is read out of a reply


def play(
    env: EnvBase,
    policy: Policy,
    *,
    num_prompts: int,
    samples: int,
    sampling: SamplingSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Conversation]:
    """Finished conversations about the first `num_prompts` tasks of `env`, `samples` of each beside each other.

    They begin from the same first task every time. `progress` is called with the number played so far and the total.
    """
    env.load_state_dict(env.initial_state())
    player = Player(env, policy)
    total = num_prompts * samples
    played: list[Conversation] = []
    waiting: list[Conversation] = []
    drawn = over = 0
    one_turn = getattr(env, "max_steps", None) == 1  # a completion that ends is then the conversation's last

    def sampled(ended: int, of: int, tokens: int) -> None:
        progress(over + (ended if one_turn else 0), total)

    player.on_sampled = sampled
    progress(0, total)
    while len(played) < total:
        while len(waiting) < AT_ONCE and drawn < num_prompts:
            fresh = env.draw(min(-(-(AT_ONCE - len(waiting)) // samples), num_prompts - drawn))
            drawn += len(fresh)
            waiting += [replace(c.copy(), sample=i) for c in fresh for i in range(samples)]
        together, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        in_flight, over = together, len(played)
        while in_flight:
            player.turn(in_flight, sampling)
            in_flight = [c for c in in_flight if not c.done]
            over = len(played) + len(together) - len(in_flight)
            progress(over, total)
        played += together
    return played


def summarise(played: Sequence[Conversation], *, k: Sequence[int] = (1,), temperature: float = 0.0) -> EvalResult:
    """The result of finished conversations, those of one prompt beside each other, sampled at `temperature`.

    A source of a mix has a result unless all its rewards failed. Raises RewardError if every reward failed.
    """
    prompts = [list(group) for _, group in groupby(played, key=lambda c: c.group_id)]
    scored = [kept for prompt in prompts if (kept := [c for c in prompt if c.valid])]
    if not scored:
        raise RewardError(f"all {len(played)} rewards of the evaluation failed; the first: {played[0].error}")
    each = [c for prompt in scored for c in prompt]
    rewards = [[c.reward or 0.0 for c in prompt] for prompt in scored]
    low, high = reward_interval(rewards) or (None, None)
    names = sorted({name for c in each for name in c.reward_parts})
    own_parts = {n: [[c.reward_parts[n] for c in prompt if n in c.reward_parts] for prompt in scored] for n in names}
    parts = {name: [row for row in rows if row] for name, rows in own_parts.items()}
    sources = {
        name: summarise([replace(c, source="") for c in played if c.source == name], k=k, temperature=temperature)
        for name in sorted({c.source for c in each if c.source})
    }
    return EvalResult(
        num_prompts=len(scored),
        num_samples=max(map(len, prompts)),
        num_failed=len(played) - len(each),
        temperature=temperature,
        accuracy_lenient=_accuracy(scored, "lenient"),
        accuracy_strict=_accuracy(scored, "strict"),
        truncated=_share([[float(c.finish_reason == "length") for c in prompt] for prompt in scored]),
        reward_mean=fmean(map(fmean, rewards)),
        reward_low=low,
        reward_high=high,
        reward_parts={name: fmean(map(fmean, rows)) for name, rows in parts.items()},
        reward_part_intervals={name: ends for name, rows in parts.items() if (ends := reward_interval(rows))},
        tokens_mean=fmean(sum(c.mask) for c in each),
        attempts=_attempts(scored, k),
        instructions={r: found for r in ("strict", "loose") if (found := _instructions(scored, r)) is not None},
        sources=sources,
    )


def held_out_metrics(
    played: Sequence[Conversation], *, k: Sequence[int], temperature: float, some_decide: bool
) -> dict[str, float]:
    """The metrics of an evaluation during training.

    With `some_decide`, every second prompt decides when training ends: the metrics of these prompts have names of
    their own and serve nothing else. Raises RewardError if every reward of one half failed.
    """
    if not some_decide:
        return summarise(played, k=k, temperature=temperature).metrics()
    reported, deciding = (summarise(half, k=k, temperature=temperature).metrics() for half in halves(played))
    measured = ("eval/prompts", ACCURACY, REWARD)
    return reported | {
        name.replace("eval/", DECIDING, 1): value for name, value in deciding.items() if name.startswith(measured)
    }


def halves(played: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """The conversations of every second prompt, beginning with the first, and those of the others."""
    prompts = [list(group) for _, group in groupby(played, key=lambda c: c.group_id)]
    first, second = ([c for prompt in prompts[begin::2] for c in prompt] for begin in (0, 1))
    return first, second


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's result, and its conversations, or the rows of the demonstrations whose loss it measured."""

    result: Any  # an `EvalResult`, or the measures of demonstrations
    played: list[Conversation]
    precision: dict[str, str] | None = None  # the precisions that it was computed in, if a command chose them
    demonstrated: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EvalResult:
    """The measures of one evaluation; a measure that the task does not have is None, or missing in `attempts`.

    `accuracy_*` is avg@k for every k, and pass@1: the share of a prompt's completions that are right, averaged over
    prompts. `attempts` holds the other measures by name, such as `pass_at_8_lenient` and `maj_at_8_strict`.
    `instructions` has the share of all instructions that are followed, strict and loose: IFEval's instruction-level
    accuracy. Every interval is clustered by prompt. Completions whose reward failed are counted in `num_failed` and
    left out of everything else; a prompt with no other completion is left out too, and not in `num_prompts`.
    """

    num_prompts: int
    num_samples: int  # a prompt
    num_failed: int
    temperature: float
    accuracy_lenient: Share | None
    accuracy_strict: Share | None
    truncated: Share
    reward_mean: float
    reward_low: float | None  # None: all prompts earned the same, so their spread is unknown
    reward_high: float | None
    reward_parts: dict[str, float]
    tokens_mean: float
    reward_part_intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    attempts: dict[str, Share] = field(default_factory=dict)
    instructions: dict[str, Share] = field(default_factory=dict)
    sources: dict[str, EvalResult] = field(default_factory=dict)  # of a mix of environments: each source's own

    def lines(self) -> list[str]:
        """A small table for people, at most 80 columns wide except for long names of the reward's parts."""
        each = f" x {self.num_samples} completions" if self.num_samples > 1 else ""
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        found = self._shares()
        lenient = [first.value if first else None for _, first, _ in found]
        strict = [second.value if second else None for _, _, second in found]
        has_strict = bool(self.instructions) or says_more(strict, lenient)
        reward = Interval(self.reward_mean, self.reward_low, self.reward_high, is_share=False)
        parts = self.reward_part_intervals
        rows = [("", "loose" if self.instructions else "lenient", "strict")] if has_strict else []
        rows += [(name, self._text(first), self._text(second) if has_strict else "") for name, first, second in found]
        rows += [("truncated", self._text(self.truncated), ""), ("reward", f"{reward}", "")]
        for name, value in self.reward_parts.items():
            rows.append((f"  {name}", f"{Interval(value, *parts.get(name, (None, None)), is_share=False)}", ""))
        rows.append(("tokens per answer", f"{self.tokens_mean:.1f}", ""))
        if self.num_failed:
            rows.append(("reward failed", f"{self.num_failed} (left out above)", ""))
        width = max(len(first) for _, first, _ in rows) + 2
        lines = [f"{counted(self.num_prompts, 'prompt')}{each}, {how}, 95% intervals"]
        lines += [f"  {name:<19}{first:<{width}}{second}".rstrip() for name, first, second in rows]
        if self.num_samples > 1 and self.accuracy_lenient is None:
            lines.append("  this environment measures no accuracy, so there is no pass@k")
        if self.instructions:
            lines.append("  the reward's parts are weighted: they are not accuracies")
        elif has_strict:
            lines.append(f"  {MEANS_STRICT}")
        for name, own in self.sources.items():
            first, *others = own.lines()
            lines += [f"{name}: {first}", *others]
        return lines

    def _shares(self) -> list[tuple[str, Share | None, Share | None]]:
        """Accuracy, instruction-level accuracy, pass@k and maj@k that were measured: name, lenient, strict."""
        name = "accuracy" if self.num_samples == 1 else f"avg@{self.num_samples}, pass@1"
        found = [(name, self.accuracy_lenient, self.accuracy_strict)]
        if self.instructions:
            name = "prompt level" if self.num_samples == 1 else f"prompts, avg@{self.num_samples}"
            found = [(name, self.accuracy_lenient, self.accuracy_strict)]
            found.append(("instruction level", self.instructions["loose"], self.instructions["strict"]))
        for name in dict.fromkeys(key.rpartition("_")[0] for key in self.attempts):
            lenient, strict = (self.attempts.get(f"{name}_{extraction}") for extraction in EXTRACTIONS)
            found.append((name.replace("_at_", "@"), lenient, strict))
        return [row for row in found if any(row[1:])]

    def _text(self, share: Share | None) -> str:
        """A share, and how many prompts have it if others have none: a reward returned no accuracy for them."""
        if share is None:
            return ""
        few = share.prompts != self.num_prompts and share not in self.instructions.values()
        return f"{share}" + (f" of {counted(share.prompts, 'prompt')}" if few else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The measures under the names of metrics.jsonl: `eval/accuracy_lenient`, `eval/pass_at_8_lenient`, ..."""
        values = metrics_of(self.as_dict()) | {
            "eval/failed": float(self.num_failed),
            "eval/truncated": self.truncated.value,
            "eval/tokens_mean": self.tokens_mean,
        }
        for source, own in self.sources.items():
            values |= {key.replace("eval/", f"eval/source/{source}/", 1): v for key, v in own.metrics().items()}
        return values


def _accuracy(prompts: Sequence[Sequence[Conversation]], extraction: str) -> Share | None:
    marks = [row for prompt in prompts if (row := _marks(prompt, extraction))]
    return _share(marks) if marks else None


def _attempts(prompts: Sequence[Sequence[Conversation]], k: Sequence[int]) -> dict[str, Share]:
    """pass@k, then maj@k, for each k above 1, over the prompts that have k scored completions."""
    several = sorted(n for n in k if n > 1)
    found: dict[str, Share] = {}
    for attempts, extraction in product(several, EXTRACTIONS):
        rows = [row for prompt in prompts if len(row := _marks(prompt, extraction)) >= attempts]
        if rows:
            values = [float(pass_at_k(len(row), np.array(row.count(1.0)), attempts)) for row in rows]
            found[f"pass_at_{attempts}_{extraction}"] = Share.of(values, sum(map(len, rows)))
    for attempts, extraction in product(several, EXTRACTIONS):
        votes = [pairs for prompt in prompts if len(pairs := _votes(prompt, extraction)) >= attempts]
        if votes:
            values = [maj_at_k([a for a, _ in pairs], [mark for _, mark in pairs], attempts) for pairs in votes]
            found[f"maj_at_{attempts}_{extraction}"] = Share.of(values, sum(map(len, votes)))
    return found


def _instructions(prompts: Sequence[Sequence[Conversation]], reading: str) -> Share | None:
    """The share of all instructions that are followed in a `reading`, strict or loose; None without instructions."""
    rows = [[verdict for c in prompt if c.instructions for verdict in c.instructions[reading]] for prompt in prompts]
    followed, counts = [sum(row) for row in rows if row], [len(row) for row in rows if row]
    if not counts:
        return None
    value = sum(followed) / sum(counts)
    varied = ratio_interval(followed, counts) if 0 < value < 1 else None
    if varied is None:
        return Share.of([value] * len(counts))
    return Share(value, max(varied[0], 0.0), min(varied[1], 1.0), len(counts))


def _share(prompts: Sequence[Sequence[float]]) -> Share:
    """The mean over prompts of the mean over a prompt's completions."""
    return Share.of([fmean(row) for row in prompts], sum(map(len, prompts)))


def _marks(prompt: Sequence[Conversation], extraction: str) -> list[float]:
    """The accuracies of a prompt's completions that have one."""
    values = [getattr(c, f"accuracy_{extraction}") for c in prompt]
    return [value for value in values if value is not None]


def _votes(prompt: Sequence[Conversation], extraction: str) -> list[tuple[str, float]]:
    """Answer and accuracy of the completions that have both."""
    both = [(c.answer, getattr(c, f"accuracy_{extraction}")) for c in prompt]
    return [(answer, mark) for answer, mark in both if answer is not None and mark is not None]
