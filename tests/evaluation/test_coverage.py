"""Intervals hold the truth as often as promised: cells of scripts/dev/coverage.py, and all outcomes of 64 prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dev import coverage

from rlpost.evaluation.statistics import reward_interval, share_interval

DRAWS = 6000  # a cell: three standard errors are 1%


@pytest.mark.parametrize(
    ("prompts", "completions", "share", "correlation"),
    [
        (64, 8, 0.02, 0.7),  # what covers least
        (64, 8, 0.02, 0.3),
        (32, 4, 0.95, 0.7),
        (32, 8, 0.02, 0.0),  # what is widest
        (32, 1, 0.2, 0.0),
        (128, 2, 0.98, 0.7),
        (500, 8, 0.5, 0.3),
    ],
)
def test_the_interval_of_a_share_covers_and_is_not_wide(
    prompts: int, completions: int, share: float, correlation: float
) -> None:
    cell = coverage.share_cell(DRAWS, prompts, completions, share, correlation)
    assert not cell.misses, str(cell)


@pytest.mark.parametrize("kind", ["exponential", "mostly zeros"])
@pytest.mark.parametrize("prompts", [64, 250])
def test_the_interval_of_a_skewed_mean_covers(prompts: int, kind: str) -> None:
    cell = coverage.skewed_cell(DRAWS, prompts, kind)
    assert not cell.misses, str(cell)


def test_a_cell_that_covers_too_little_or_is_too_wide_misses() -> None:
    assert coverage.Cell("a", 32, 0.929, 0.93, 1.0, 1.15).misses
    assert coverage.Cell("a", 32, 0.95, 0.93, 1.16, 1.15).misses
    assert not coverage.Cell("a", 32, 0.93, 0.93, 1.15, 1.15).misses


def test_simulated_draws_have_their_mean_and_correlation() -> None:
    """Of 2 completions both are right with p^2 + rho p (1 - p): 0.04 + 0.3 * 0.16."""
    chances = coverage.beta_binomial(2, 0.2, 0.3)
    assert chances.tolist() == pytest.approx([1 - 2 * 0.2 + 0.088, 2 * (0.2 - 0.088), 0.088])
    assert coverage.beta_binomial(4, 0.5, 0.0).tolist() == pytest.approx([1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16])


@pytest.mark.parametrize("share", [0.02, 0.05, 0.95, 0.98])
def test_the_interval_of_a_reward_of_0_and_1_covers_near_ends(share: float) -> None:
    """Each of the 65 outcomes of 64 prompts, by its chance: no simulation. Student's interval covers 72% at 0.02."""
    covered = 0.0
    for right in range(65):
        found = reward_interval([[1.0]] * right + [[0.0]] * (64 - right))
        assert found is not None
        if found[0] <= share <= found[1]:
            covered += math.comb(64, right) * share**right * (1 - share) ** (64 - right)
    assert covered >= 0.94


def test_a_reward_of_two_values_has_the_interval_of_a_share() -> None:
    share = [0.0, 0.5, 1.0, 0.0, 0.0]
    _, low, high = share_interval(np.array(share), 10)
    found = reward_interval([[-1, -1], [-1, 3], [3, 3], [-1, -1], [-1, -1]])
    assert found == pytest.approx((-1 + 4 * float(low), -1 + 4 * float(high)))


def test_a_constant_reward_has_no_interval_unless_it_is_0_or_1() -> None:
    assert reward_interval([[0.1], [0.1], [0.1]]) is None  # whose mean is not quite 0.1
    assert reward_interval([[0.3, 0.7]]) is None
    found = reward_interval([[0.0]] * 20)
    assert found is not None
    assert found == (0.0, pytest.approx(0.181, abs=1e-3))
