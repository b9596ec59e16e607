"""How often the intervals of held-out figures hold the truth, by simulation; exits 1 where a cell misses.

    python scripts/dev/coverage.py [--draws 10000] [--all]

Shares, and means of rewards that are 0 or 1: N prompts of k completions whose successes within a prompt are
beta-binomial with mean p and correlation rho. An interval has to hold p in 93% of all draws where
N p (1 - p) >= 5 and in 92% elsewhere, and to be at most 1.15 times as wide as the wider of Wilson's interval with the
plain effective sample size and of Student's interval over prompts; 1.4 times where N min(p, 1 - p) < 5.
Means of skewed rewards: 92% from N = 64 on.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpost.evaluation.statistics import Z, mean_interval, share_interval, t_quantile

PROMPTS = (32, 64, 128, 250, 500)
COMPLETIONS = (1, 2, 4, 8)
CORRELATIONS = (0.0, 0.3, 0.7)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98)
SKEWED = ("exponential", "mostly zeros")
SEED = 13

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Cell:
    """One line of the table; `width` is that of the interval in widths of the one that it is compared with."""

    what: str
    prompts: int
    covers: float
    at_least: float
    width: float
    at_most: float

    @property
    def misses(self) -> bool:
        """Whether it covers too little, or is too wide."""
        return self.covers < self.at_least or self.width > self.at_most

    def __str__(self) -> str:
        return (
            f"{self.what:<38} {self.prompts:>4} {self.covers:>7.1%} of {self.at_least:.0%}  width {self.width:.2f} "
            f"of {self.at_most:.2f}{'  MISSES' if self.misses else ''}"
        )


def beta_binomial(completions: int, share: float, correlation: float) -> Array:
    """The chances of 0 to k successes (k + 1,) of a prompt."""
    size = 1 / max(correlation, 1e-9) - 1
    a, b = share * size, (1 - share) * size
    ways = [math.comb(completions, j) for j in range(completions + 1)]
    rising = [  # the products that B(a + j, b + k - j) / B(a, b) is made of
        math.prod([a + i for i in range(j)] + [b + i for i in range(completions - j)]) for j in range(completions + 1)
    ]
    return np.array(ways) * rising / math.prod(a + b + i for i in range(completions))


def drawn_shares(draws: int, prompts: int, chances: Array, rng: np.random.Generator) -> Array:
    """(draws, prompts) shares of right completions, those that are equal beside each other."""
    counts = rng.multinomial(prompts, chances / chances.sum(), size=draws)  # (draws, k + 1)
    levels = np.arange(len(chances)) / (len(chances) - 1)
    return np.repeat(np.tile(levels, draws), counts.ravel()).reshape(draws, prompts)


def share_cell(draws: int, prompts: int, completions: int, share: float, correlation: float) -> Cell:
    """How an interval of a share, or of the mean of a reward that is 0 or 1, does."""
    rng = np.random.default_rng([SEED, prompts, completions, round(1000 * share), round(10 * correlation)])
    values = drawn_shares(draws, prompts, beta_binomial(completions, share, correlation), rng)
    _, low, high = share_interval(values, prompts * completions)
    plain = max(_wilson_width(values, completions), _student_width(values))
    return Cell(
        f"share {share:.2f}, {completions} x, correlation {correlation:.1f}",
        prompts,
        float(((low <= share) & (share <= high)).mean()),
        0.93 if prompts * share * (1 - share) >= 5 else 0.92,
        float((high - low).mean()) / plain,
        1.15 if prompts * min(share, 1 - share) >= 5 else 1.4,
    )


def _wilson_width(values: Array, completions: int) -> float:
    """The mean width of Wilson's interval with the effective size m (1 - m) / var(m), N to kN; N without events."""
    count, mean = values.shape[-1], values.mean(-1)
    between, variance = mean * (1 - mean), values.var(-1) / count
    effective = np.divide(between, variance, out=np.full_like(mean, count * completions), where=variance > 0)
    effective = np.where(between > 0, np.clip(effective, count, count * completions), count)
    half = Z / (1 + Z**2 / effective) * np.sqrt(between / effective + Z**2 / (4 * effective**2))
    centre = (mean + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    return float((np.minimum(1.0, centre + half) - np.maximum(0.0, centre - half)).mean())


def _student_width(values: Array) -> float:
    count = values.shape[-1]
    return float((2 * t_quantile(count - 1) * values.std(-1, ddof=1) / math.sqrt(count)).mean())


def skewed_cell(draws: int, prompts: int, kind: str) -> Cell:
    """How an interval of the mean of rewards does that are exponential, or 0 nine times in ten and else uniform."""
    rng = np.random.default_rng([SEED, prompts, SKEWED.index(kind)])
    values, mean = rng.exponential(size=(draws, prompts)), 1.0
    if kind == "mostly zeros":
        values, mean = np.where(rng.random((draws, prompts)) < 0.9, 0.0, rng.random((draws, prompts))), 0.05
    _, low, high = mean_interval(values)
    covers = float(((low <= mean) & (mean <= high)).mean())
    return Cell(f"mean, {kind}", prompts, covers, 0.92, float((high - low).mean()) / _student_width(values), math.inf)


def cells(draws: int) -> Iterator[Cell]:
    """Every cell of the table."""
    for prompts, completions, correlation in itertools.product(PROMPTS, COMPLETIONS, CORRELATIONS):
        if completions > 1 or correlation == 0:
            for share in SHARES:
                yield share_cell(draws, prompts, completions, share, correlation)
    for prompts, kind in itertools.product(PROMPTS[1:], SKEWED):
        yield skewed_cell(draws, prompts, kind)


def main() -> int:
    """Print the cells that miss, or with --all every one; 1 where any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="of each cell")
    parser.add_argument("--all", action="store_true", help="print every cell")
    asked = parser.parse_args()
    done = list(cells(asked.draws))
    for cell in done:
        if asked.all or cell.misses:
            print(cell)
    missed = sum(cell.misses for cell in done)
    print(f"{len(done)} cells, {missed} miss; the least: {min(done, key=lambda cell: cell.covers - cell.at_least)}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
