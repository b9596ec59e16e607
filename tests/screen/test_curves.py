"""Curves worked out by hand."""

from __future__ import annotations

import math

import pytest

from rlpost.screen.picture import area, means, scale_of

NAN = math.nan


def test_neighbouring_steps_are_averaged_where_columns_are_fewer() -> None:
    assert means([1, 2, 3, 4], 4) == [1, 2, 3, 4]
    assert means([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert means([1, 2, 3, 4], 3) == [1, 2, 3.5]


def test_an_area_has_eight_levels_a_line() -> None:
    assert area([0.0, 0.5, 1.0], 2, 0.0, 1.0) == ["  █", "▁██"]
    assert area([0.25, 0.75, NAN], 1, 0.0, 1.0) == ["▂▆ "]
    assert area([-1.0, 1.0], 1, -1.0, 1.0) == ["▁█"]


def test_noise_does_not_fill_the_range() -> None:
    # second differences are 0.04 in size, so the standard deviation is 0.04 / sqrt(6); eight of them are 0.131
    assert scale_of([0.02, 0.04] * 10, from_zero=True) == pytest.approx((0, 0.15))
    low, high = scale_of([6.0, 7.0] * 10, from_zero=False)  # eight are 6.53
    assert low <= 3.3
    assert high >= 9.7
    assert scale_of([0.1 * step for step in range(11)], from_zero=True) == (0, 1)  # a course without noise
