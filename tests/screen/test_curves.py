"""Curves worked out by hand."""

from __future__ import annotations

import math

import pytest

from rlpost.screen.picture import area, means, round_up, scale_of

NAN = math.nan


def test_neighbouring_steps_are_averaged_where_columns_are_fewer() -> None:
    assert means([1, 2, 3, 4], 4) == [1, 2, 3, 4]
    assert means([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert means([1, 2, 3, 4], 3) == [1, 2, 3.5]


def test_a_value_that_is_not_finite_counts_in_no_mean() -> None:
    values = [1, NAN, 3, math.inf]
    assert means(values, 1) == [2]
    first, second, third, fourth = means(values, 4)
    assert (first, third) == (1, 3)
    assert math.isnan(second)
    assert math.isnan(fourth)


def test_an_area_has_eight_levels_a_line() -> None:
    assert area([0.0, 0.5, 1.0], 2, 0.0, 1.0) == ["  █", "▁██"]
    assert area([0.25, 0.75, NAN], 1, 0.0, 1.0) == ["▂▆ "]
    assert area([-1.0, 1.0], 1, -1.0, 1.0) == ["▁█"]


@pytest.mark.parametrize(
    ("value", "round_number"),
    [(0.0, 0), (-3.0, 0), (1.0, 1), (1.01, 1.2), (0.39, 0.4), (0.07, 0.08), (88, 100), (2.5, 2.5), (900, 1000)],
)
def test_round_numbers_above_a_value(value: float, round_number: float) -> None:
    assert round_up(value) == pytest.approx(round_number)


def test_scales_begin_at_zero_or_close_to_the_values() -> None:
    assert scale_of([0.3, 0.39, NAN], from_zero=True) == (0.0, 0.4)
    assert scale_of([-0.3, 0.5], from_zero=True) == pytest.approx((-0.3, 0.5))
    assert scale_of([], from_zero=True) == (0.0, 1.0)
    assert scale_of([0.0], from_zero=True) == (0.0, 1.0)
    assert scale_of([15.0, 19.0], from_zero=False) == (15.0, 19.0)
    assert scale_of([15.5, 17.3], from_zero=False) == (15.5, 17.5)  # in units of 1.8 / 4 rounded up: 0.5
    assert scale_of([2.0, 2.0], from_zero=False) == (1.5, 2.5)
    assert scale_of([0.0], from_zero=False) == (0.0, 1.0)
    assert scale_of([], from_zero=False) == (0.0, 1.0)
