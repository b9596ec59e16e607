"""Statistics of a sample of prompts: shares with their intervals, pass@k, maj@k, paired differences.

The unit that is drawn at random is the prompt. Several completions of one prompt are not
independent of each other, so every interval is computed from one value a prompt, and says where the
mean over prompts like these lies, at 95% confidence.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from rlpost.text import counted

CONFIDENCE = 0.95
POWER = 0.8
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # 1.96
Z_POWER = NormalDist().inv_cdf(POWER)  # 0.84
PRIOR_EVENTS = 1 / 3  # prior on how completions of a prompt agree, before any data
CONTINUITY = 1 / 4  # of an event: a half of Yates' correction
LEAST_SKEWNESS = 1e-6  # below it the transformation is the identity but for rounding
FEWEST_PROMPTS = 32  # the coverage of intervals is measured from here on: scripts/dev/coverage.py
FEWEST_DIFFERING = 6  # of five differences all may point one way by chance: 2 / 2**5 > 1 - CONFIDENCE
KEYS = {"is_significant": "is_told", "detectable": "told"}  # fields of a `Difference` with other names in JSON

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Share:
    """A mean over prompts of values in [0, 1], with its 95% interval."""

    value: float
    low: float
    high: float
    prompts: int

    @classmethod
    def of(cls, values: Sequence[float], samples: int | None = None) -> Share:
        """The mean of one value a prompt; `samples` is how many completions they rest on (None: one each)."""
        value, low, high = share_interval(np.asarray(values, float), len(values) if samples is None else samples)
        return cls(float(value), float(low), float(high), len(values))

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


def few(count: int, unit: str) -> str:
    """The warning about figures of so few held-out prompts, or rows; empty for enough of them."""
    return f"held-out figures will rest on {counted(count, unit)}, which is few" if count < FEWEST_PROMPTS else ""


def share_interval(values: Array, samples: int) -> tuple[Array, Array, Array]:
    """Mean and 95% interval of `values` (..., N) in [0, 1], one a prompt, that rest on `samples` completions.

    Wilson's score interval (1927) with an effective sample size instead of the number of trials, as
    for clustered samples (Korn and Graubard 1998; Franco, Little, Louis and Slud 2019), after half of Yates'
    correction for continuity. The size is N / r, where r is var(values) / (m (1 - m)), between
    N / samples (completions that are independent) and 1 (those of a prompt always agree). Few events say
    little of r, so it is drawn towards 1 with the weight of a third of an event: as many events as r gives,
    N m (1 - m) / r, have the rest. `scripts/dev/coverage.py` simulates the coverage.
    """
    count = values.shape[-1]
    mean = values.mean(-1)
    between = mean * (1 - mean)
    deviation = values.var(-1) * count / max(count - 1, 1)
    ratio = np.divide(deviation, between, out=np.ones_like(mean), where=between > 0)
    ratio = np.clip(ratio, min(1.0, count / samples), 1.0)
    events = count * between / ratio
    effective = count * (events + PRIOR_EVENTS) / (events * ratio + PRIOR_EVENTS)
    shift = CONTINUITY / effective
    low, high = np.maximum(0.0, mean - shift), np.minimum(1.0, mean + shift)
    return mean, np.maximum(0.0, _wilson(low, effective, -Z)), np.minimum(1.0, _wilson(high, effective, Z))


def _wilson(share: Array, trials: Array, z: float) -> Array:
    """The end of Wilson's score interval on the side of the sign of `z`."""
    spread = z**2 / trials
    half = z / (1 + spread) * np.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return (share + spread / 2) / (1 + spread) + half


def mean_interval(values: Array) -> tuple[Array, Array, Array]:
    """Mean and 95% interval of `values` (..., N), one a prompt, N >= 2, which may be skewed.

    Student's t with N - 1 degrees of freedom, transformed by the cubic of Hall (1992, "On the removal of
    skewness by transformation", g1 in section 2): where values are not skewed it is Student's own interval.
    """
    count = values.shape[-1]
    mean = values.mean(-1)
    away = values - mean[..., None]
    deviation = np.sqrt((away**2).sum(-1) / (count - 1))
    cubes = (away**3).mean(-1) / np.where(deviation > 0, (away**2).mean(-1) ** 1.5, 1.0)
    skewness = np.where(np.abs(cubes) < LEAST_SKEWNESS, LEAST_SKEWNESS, cubes)
    quantile = t_quantile(count - 1) / math.sqrt(count)
    ends = [
        mean - deviation * 3 / skewness * (np.cbrt(1 + skewness * (q - skewness / (6 * count))) - 1)
        for q in (quantile, -quantile)
    ]
    return mean, ends[0], ends[1]


def crossed_interval(values: Array) -> tuple[float, float, float] | None:
    """Mean and 95% interval of `values` (seeds, prompts) over both: other seeds, and other prompts like these.

    The interval of the seeds' means (Student's t) and that of the prompts' means (`mean_interval`), joined by squares
    as those of independent effects (Zou and Donner 2008). Trainings share their held-out prompts, so an interval over
    seeds alone would be about these prompts, and one over prompts alone about these seeds. With one seed, or one
    column, it is the interval of the other. None if nothing varies.
    """
    mean = float(values.mean())
    away: list[tuple[float, float]] = []  # of the ends of both intervals from the mean
    if len(seeds := values.mean(1)) > 1:
        away.append((half := t_quantile(len(seeds) - 1) * float(seeds.std(ddof=1)) / math.sqrt(len(seeds)), half))
    if len(prompts := values.mean(0)) > 1:
        _, low, high = mean_interval(prompts)
        away.append((mean - float(low), float(high) - mean))
    below, above = (math.hypot(*ends) for ends in zip(*away, strict=True)) if away else (0.0, 0.0)
    return None if math.isclose(below + above, 0.0, abs_tol=1e-9) else (mean, mean - below, mean + above)


def reward_interval(rewards: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The 95% interval of the mean over prompts of the mean of `rewards`, those of a prompt beside each other.

    Rewards of two values, or all of 0 or of 1, are a share of the higher one; else `mean_interval`. None for one
    prompt, and where all earned the same, which says nothing of how they vary.
    """
    if len(rewards) < 2:
        return None
    levels = sorted({reward for row in rewards for reward in row})
    levels = [0.0, 1.0] if set(levels) <= {0.0, 1.0} else levels
    means = np.array([fmean(row) for row in rewards])
    if len(levels) == 2:
        least, most = levels
        _, low, high = share_interval((means - least) / (most - least), sum(map(len, rewards)))
        return least + float(low) * (most - least), least + float(high) * (most - least)
    if math.isclose(means.min(), means.max(), rel_tol=1e-9):  # the mean of equal numbers is rounded
        return None
    _, low, high = mean_interval(means)
    return float(low), float(high)


def ratio_interval(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float] | None:
    """The 95% interval of sum(sums) / sum(counts), as of a loss per token of rows; None for one row.

    That of the mean of the values that the ratio, linear in the rows, is the mean of (Cochran 1977, 6.4).
    """
    if len(sums) < 2:
        return None
    above, below = np.asarray(sums, float), np.asarray(counts, float)
    ratio = above.sum() / below.sum()
    _, low, high = mean_interval(ratio + (above - ratio * below) / below.mean())
    return float(low), float(high)


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t: exact for 1 and 2 degrees, else within 0.2%.

    Abramowitz and Stegun (1964), 26.7.5.
    """
    if degrees == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if degrees == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z = Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def pass_at_k(samples: int, right: np.ndarray[Any, Any], k: int) -> Array:
    """The chance that at least one of k completions is right, from `right` (...) of `samples` >= k that were.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. (2021), equation 1, as a product:
    the binomials themselves overflow.
    """
    misses = np.cumprod(1 - k / np.arange(samples, 0, -1))  # after 1, 2, ... right ones
    table = 1 - np.concatenate([[1.0], misses])
    return table[right.astype(int)]


def maj_at_k(answers: Sequence[str], right: Sequence[float], k: int) -> float:
    """The chance that the commonest answer of k completions is right: the mean over all k-subsets of these.

    `answers` are what the completions of one prompt say, "" for one that says nothing and has no
    vote. Answers that are equally common share the win; where nobody votes nothing is right. An
    answer counts as right as its completions are on average. Subsets are counted, not listed: for
    each answer the ways in which it has m votes, and of the others none more than m and t as many.
    """
    votes = Counter(answer for answer in answers if answer)
    silent = sum(not answer for answer in answers)
    marks: dict[str, list[float]] = defaultdict(list)
    for answer, mark in zip(answers, right, strict=True):
        marks[answer].append(mark)
    won = 0.0
    for answer, count in votes.items():
        worth = sum(marks[answer]) / count
        if worth:
            others = [c for other, c in votes.items() if other != answer]
            for m in range(1, min(count, k) + 1):
                won += worth * math.comb(count, m) * _ways(others, silent, m, k - m)
    return won / math.comb(len(answers), k)


def _ways(others: Sequence[int], silent: int, most: int, draws: int) -> float:
    """Ways to draw `draws` votes of `others`, at most `most` each, each over 1 + the number of others with `most`."""
    ways = np.zeros((draws + 1, draws // most + 1))  # (votes drawn, answers with `most` of them)
    ways[: silent + 1, 0] = [math.comb(silent, i) for i in range(min(silent, draws) + 1)]
    for count in others:
        grown = ways.copy()
        for j in range(1, min(count, most - 1, draws) + 1):
            grown[j:] += math.comb(count, j) * ways[:-j]
        if most <= min(count, draws):
            grown[most:, 1:] += math.comb(count, most) * ways[:-most, :-1]
        ways = grown
    return float(ways[draws] @ (1 / np.arange(1, ways.shape[1] + 1)))


@dataclass(frozen=True)
class Difference:
    """A mean difference over prompts, with its 95% interval; None if prompts do not vary or there is only one.

    `differing` counts the prompts where there is any. `needed` is how many prompts would tell a
    difference of this size from none in 80% of all evaluations; None where nothing differs.
    `detectable` is how large a difference as many prompts as these would so tell.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int
    differing: int
    is_significant: bool
    within_noise: bool
    needed: int | None
    detectable: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, under the keys that scripts read."""
        return {KEYS.get(name, name): value for name, value in asdict(self).items()}


def is_significant(differences: Array) -> Array:
    """Whether the mean of `differences` (..., N >= 2) differs from 0.

    Its 95% interval leaves 0 out, and at least six differ: with fewer, even if all point one way,
    chance does so more often than once in twenty.
    """
    _, low, high = mean_interval(differences)
    return ((low > 0) | (high < 0)) & ((differences != 0).sum(-1) >= FEWEST_DIFFERING)


def difference(differences: Sequence[float]) -> Difference:
    """The verdict on paired `differences`, one a prompt.

    One smaller than its standard error is within noise: chance alone gives as large a one in one
    evaluation of three.
    """
    values = np.asarray(differences, float)
    count, differing, mean = len(values), int((values != 0).sum()), float(values.mean())
    if count < 2:
        return Difference(mean, None, None, count, differing, False, False, None, None)
    deviation = float(values.std(ddof=1))
    error = deviation / math.sqrt(count)
    detectable = (Z + Z_POWER) * error
    fewest = math.ceil(count * FEWEST_DIFFERING / max(differing, 1))
    _, low, high = mean_interval(values)
    return Difference(
        mean,
        float(low) if deviation else None,
        float(high) if deviation else None,
        count,
        differing,
        is_significant=bool(is_significant(values)),
        within_noise=abs(mean) < error or mean == 0,
        needed=max(math.ceil(count * (detectable / mean) ** 2), fewest) if mean else None,
        detectable=detectable if deviation else None,
    )


def shown(value: float, *, is_share: bool, sign: str = "") -> str:
    """A figure, in percent if it is a share; with the `sign` "+" a difference."""
    return f"{value:{sign}.1%}" if is_share else f"{value:{sign}.3f}"


def signed(value: float, low: float | None, high: float | None, *, is_share: bool) -> str:
    """A difference with its 95% interval, if it has one."""
    size, *ends = (shown(each, is_share=is_share, sign="+") for each in (value, low, high) if each is not None)
    return f"{size} [{', '.join(ends)}]" if ends else size
