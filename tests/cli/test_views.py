"""Tables on the terminal."""

from __future__ import annotations

from rlpost.cli.views import table


def test_a_table_aligns_its_columns_and_cuts_where_there_is_no_room() -> None:
    rows = [("name", "n"), ("abcdefgh", "10")]
    assert table(rows, right=[1]) == ["name       n", "abcdefgh  10"]
    assert table(rows, 9, right=[1], cuttable=[0]) == ["name    n", "abcde… 10"]
    assert table([("漢字", "b"), ("a", "[red]")], indent=2) == ["  漢字  b", "  a     [red]"]
