"""Curves worked out by hand."""

from __future__ import annotations

import math

import pytest

from rlpost.screen.layout import Series, area, line, range_around, range_from_zero, round_up

NAN = math.nan


def series(*values: float, most: int = 2048) -> Series:
    made = Series(most)
    for value in values:
        made.add(value)
    return made


def test_neighbouring_steps_are_averaged_where_columns_are_fewer() -> None:
    made = series(1, 2, 3, 4)
    assert len(made) == 4
    assert made.means(4) == [1, 2, 3, 4]
    assert made.means(2) == [1.5, 3.5]
    assert made.means(3) == [1, 2, 3.5]


def test_means_are_repeated_where_columns_are_more() -> None:
    assert series(1, 2).means(4) == [1, 1, 2, 2]


def test_a_value_that_is_not_finite_counts_in_no_mean() -> None:
    made = series(1, NAN, 3, math.inf)
    assert made.means(1) == [2]
    first, second, third, fourth = made.means(4)
    assert (first, third) == (1, 3)
    assert math.isnan(second)
    assert math.isnan(fourth)
    assert not series(NAN, NAN).has_numbers
    assert made.has_numbers


def test_memory_is_bounded_and_the_means_stay_true() -> None:
    made = series(*range(1, 9), most=4)
    assert made.means(4) == [1.5, 3.5, 5.5, 7.5]
    made.add(9)  # bins of four steps now, the last of one
    assert len(made) == 3
    assert made.means(3) == [2.5, 6.5, 9]


def test_an_area_has_eight_levels_a_line() -> None:
    assert area([0.0, 0.5, 1.0], 2, 0.0, 1.0) == ["  █", "▁██"]
    assert area([0.25, 0.75, NAN], 1, 0.0, 1.0) == ["▂▆ "]
    assert area([-1.0, 1.0], 1, -1.0, 1.0) == ["▁█"]


def test_a_line_is_drawn_in_braille_and_has_no_gaps() -> None:
    # up from the lowest dot on the left (bit 0x40) to the highest on the right (0x08, and 0x10, 0x20 on the way)
    assert line([0.0, 1.0], 1, 0.0, 1.0) == [chr(0x2800 + 0x40 + 0x38)]
    assert line([1.0, 1.0, NAN, 1.0], 2, 0.0, 1.0) == [chr(0x2809) + chr(0x2808), "  "]
    # three values are two columns; the middle is 4 dots above the lowest of 8: the last row of the first line
    assert line([0.5, 0.5, 0.5], 2, 0.0, 1.0) == [chr(0x2840 + 0x80) + chr(0x2840), "  "]


@pytest.mark.parametrize(
    ("value", "round_number"),
    [(0.0, 0), (-3.0, 0), (1.0, 1), (1.01, 1.2), (0.39, 0.4), (0.07, 0.08), (88, 100), (2.5, 2.5), (900, 1000)],
)
def test_round_numbers_above_a_value(value: float, round_number: float) -> None:
    assert round_up(value) == pytest.approx(round_number)


def test_scales_begin_at_zero_or_close_to_the_values() -> None:
    assert range_from_zero([0.3, 0.39, NAN]) == (0.0, 0.4)
    assert range_from_zero([-0.3, 0.5]) == pytest.approx((-0.3, 0.5))
    assert range_from_zero([]) == (0.0, 1.0)
    assert range_from_zero([0.0]) == (0.0, 1.0)
    assert range_around([15.0, 19.0]) == (15.0, 19.0)
    assert range_around([15.5, 17.3]) == (15.5, 17.5)  # in units of 1.8 / 4 rounded up: 0.5
    assert range_around([2.0, 2.0]) == (1.5, 2.5)
    assert range_around([0.0]) == (0.0, 1.0)
    assert range_around([]) == (0.0, 1.0)
