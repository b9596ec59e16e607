"""Curves worked out by hand."""

from __future__ import annotations

import math

from rlpost.screen.picture import area, means

NAN = math.nan


def test_neighbouring_steps_are_averaged_where_columns_are_fewer() -> None:
    assert means([1, 2, 3, 4], 4) == [1, 2, 3, 4]
    assert means([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert means([1, 2, 3, 4], 3) == [1, 2, 3.5]


def test_an_area_has_eight_levels_a_line() -> None:
    assert area([0.0, 0.5, 1.0], 2, 0.0, 1.0) == ["  █", "▁██"]
    assert area([0.25, 0.75, NAN], 1, 0.0, 1.0) == ["▂▆ "]
    assert area([-1.0, 1.0], 1, -1.0, 1.0) == ["▁█"]
