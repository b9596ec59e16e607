"""Intervals hold what they promise on synthetic policies; pass@k and maj@k equal a count over every subset."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.evaluation.statistics import (
    Share,
    difference,
    is_significant,
    maj_at_k,
    mean_interval,
    pass_at_k,
    t_quantile,
)

TRIALS, PROMPTS = 2000, 200

# Shares


def wilson(successes: float, trials: float, sign: int) -> float:
    """The root of (p - s / n)^2 = z^2 p (1 - p) / n on one side."""
    z = 1.959964
    roots = np.roots([1 + z**2 / trials, -(2 * successes / trials + z**2 / trials), (successes / trials) ** 2])
    return float(max(roots) if sign > 0 else min(roots))


@pytest.mark.parametrize(("successes", "trials"), [(10, 40), (0, 20), (20, 20), (1, 1), (250, 500)])
def test_one_completion_a_prompt_has_a_corrected_wilson_interval(successes: int, trials: int) -> None:
    share = Share.of([1.0] * successes + [0.0] * (trials - successes))
    low = wilson(successes - 0.25, trials, -1) if successes else 0.0
    high = wilson(successes + 0.25, trials, 1) if successes < trials else 1.0
    assert (share.value, share.low, share.high) == pytest.approx((successes / trials, low, high), abs=1e-6)
    assert share.prompts == trials


def test_no_interval_is_narrower_than_of_independent_completions() -> None:
    alike, coins = Share.of([0.5] * 50, samples=100), Share.of([1.0, 0.0] * 50)
    assert (alike.low, alike.high) == pytest.approx((coins.low, coins.high), abs=1e-3)
    assert coins.low > alike.low


def test_a_share_reads_as_percent_with_its_interval() -> None:
    assert str(Share.of([1.0] * 10 + [0.0] * 30)) == "25.0% [13.7%, 40.9%]"


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_equal_policies_rarely_differ(p: float, samples: int) -> None:
    """Two completions of a prompt correlate by a half."""
    rng = np.random.default_rng(7)
    chances = rng.beta(p, 1 - p, (TRIALS, PROMPTS))
    a, b = (rng.binomial(samples, chances) / samples for _ in range(2))
    assert is_significant(b - a).mean() <= 0.065


# Attempts


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    assert float(pass_at_k(len(right), np.array(sum(right)), k)) == pytest.approx(
        sum(map(any, subsets)) / len(subsets), abs=1e-12
    )


def test_pass_at_k_is_stable_where_the_binomials_overflow() -> None:
    exact = 1 - Fraction(math.comb(2000 - 3, 500), math.comb(2000, 500))
    assert float(pass_at_k(2000, np.array(3), 500)) == pytest.approx(float(exact), rel=1e-12)
    assert pass_at_k(2000, np.array([0, 1501, 2000]), 500).tolist() == [0.0, 1.0, 1.0]


def majority(answers: tuple[str, ...], worth: dict[str, float]) -> float:
    """What a vote of these completions is worth: ties share it."""
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return fmean(worth[answer] for answer in winners) if winners else 0.0


@given(st.lists(st.sampled_from(["5", "6", "7", ""]), min_size=1, max_size=8), st.data())
def test_maj_at_k_is_the_mean_over_every_subset(answers: list[str], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    worth = {"5": 1.0, "6": 0.0, "7": 0.0}
    right = [worth.get(answer, 0.0) for answer in answers]
    expected = fmean(majority(subset, worth) for subset in combinations(answers, k))
    assert maj_at_k(answers, right, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["5", "5", "6"], 1.0),
        (["5", "6"], 0.5),  # a tie is shared
        (["5", "6", "7"], 1 / 3),
        (["5", "", ""], 1.0),  # who says nothing has no vote
        (["", ""], 0.0),
        (["6", "6", "5"], 0.0),
    ],
)
def test_a_vote_of_all(answers: list[str], expected: float) -> None:
    assert maj_at_k(answers, [float(a == "5") for a in answers], len(answers)) == pytest.approx(expected)


def test_an_answer_is_as_right_as_its_completions_are() -> None:
    """Both say 5, one of them in the form that strict extraction asks for."""
    assert maj_at_k(["5", "5", "6"], [1.0, 0.0, 0.0], 3) == 0.5


# Differences


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (30, 2.0423), (199, 1.9720)]
)
def test_quantiles_of_students_t(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, rel=2e-3)


def test_a_mean_with_its_interval_worked_out_by_hand() -> None:
    """1, 2, 3, 4, 5: mean 3, deviation sqrt(2.5), standard error sqrt(0.5), t(4) = 2.776."""
    mean, low, high = mean_interval(np.array([1.0, 2, 3, 4, 5]))
    assert (float(mean), float(low), float(high)) == pytest.approx((3, 3 - 1.963, 3 + 1.963), abs=2e-3)


def test_the_interval_of_a_skewed_mean_is_longer_on_that_side() -> None:
    """Five 0 and one 6: deviation sqrt(6), skewness (5 (-1)^3 + 5^3) / 6 / 5^1.5 = 4 / sqrt(5), t(5) = 2.571.

    Ends where g(t) = t + g t^2 / 3 + g^2 t^3 / 27 + g / 36 is -+2.571 / sqrt(6), t = (1 - end) / sqrt(6).
    """
    mean, low, high = mean_interval(np.array([0.0, 0, 0, 0, 0, 6]))
    skewness = 4 / math.sqrt(5)
    for end, wanted in ((float(low), 2.571), (float(high), -2.571)):
        t = (1 - end) / math.sqrt(6)
        cubic = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 36
        assert cubic == pytest.approx(wanted / math.sqrt(6), abs=2e-3)
    assert mean == 1
    assert high - 1 > 2 * (1 - low)


def test_a_difference_that_chance_does_not_make_is_told() -> None:
    """20 of 100 prompts gained, none lost: deviation 0.402, skewness 1.5, t(99) = 1.984.

    0.2 - 0.402 * 2 * (cbrt(1 + 1.5 * (+-0.1984 - 1.5 / 600)) - 1).
    """
    found = difference([1.0] * 20 + [0.0] * 80)
    assert found.is_significant
    assert not found.within_noise
    assert (found.value, found.differing, found.prompts) == (0.2, 20, 100)
    assert (found.low, found.high) == pytest.approx((0.1279, 0.2906), abs=1e-3)


def test_fewer_than_six_prompts_that_differ_tell_nothing() -> None:
    """Five of five one way happens by chance once in sixteen; six of six once in 32."""
    assert not difference([1.0] * 5 + [0.0] * 5).is_significant
    assert difference([1.0] * 6 + [0.0] * 5).is_significant


def test_how_many_prompts_would_tell() -> None:
    """Mean 0.1, variance (0.3 - 0.01) * 100 / 99: (1.960 + 0.842)^2 * 0.2929 / 0.01 = 229.9."""
    found = difference([1.0] * 20 + [-1.0] * 10 + [0.0] * 70)
    assert not found.is_significant
    assert not found.within_noise
    assert found.needed == 230
    assert found.detectable == pytest.approx(2.8016 * 0.05412, abs=1e-4)


def test_as_many_prompts_as_needed_tell_four_times_in_five() -> None:
    rng = np.random.default_rng(5)
    wanted = difference([1.0] * 20 + [-1.0] * 10 + [0.0] * 70).needed
    assert wanted is not None
    drawn = rng.choice([1.0, -1.0, 0.0], p=[0.2, 0.1, 0.7], size=(TRIALS, wanted))
    assert is_significant(drawn).mean() == pytest.approx(0.8, abs=0.03)


def test_less_than_a_standard_error_is_noise() -> None:
    found = difference([1.0] * 11 + [-1.0] * 10 + [0.0] * 79)
    assert found.within_noise
    assert not found.is_significant


def test_equal_on_every_prompt_bounds_how_many_may_differ() -> None:
    found = difference([0.0] * 59)
    assert (found.value, found.low, found.high, found.needed, found.within_noise) == (0.0, None, None, None, True)


def test_a_difference_keeps_its_keys_in_json() -> None:
    shown = difference([1.0] * 20 + [0.0] * 80).as_dict()
    assert list(shown) == ["value", "low", "high", "prompts", "differing", "is_told", "within_noise", "needed", "told"]
    assert shown["is_told"] is True


def test_one_prompt_tells_nothing() -> None:
    found = difference([1.0])
    assert (found.is_significant, found.within_noise, found.low, found.needed) == (False, False, None, None)
