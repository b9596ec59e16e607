"""Text fitted to columns."""

from __future__ import annotations

from rlpost.cli.terminal import fitted_table, paragraph


def test_a_paragraph_breaks_between_words_and_keeps_its_lines() -> None:
    assert paragraph("one two three\n  four", 8) == ["one two", "three", "  four"]
    assert paragraph("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert paragraph("", 4) == [""]
    assert paragraph("漢字漢", 5) == ["漢字", "漢"]


def test_a_long_paragraph_is_cut_with_a_count() -> None:
    text = "aa\nbbb\ncccc\nddddd"
    assert paragraph(text, 10, 2) == ["aa", "bbb", "… 10 more characters"]
    assert paragraph(text, 10, 2, keep_end=True) == ["… 7 more characters", "cccc", "ddddd"]
    assert paragraph(text, 10, 3) == ["aa", "bbb", "cccc", "ddddd"]  # the count would take the fourth line as well


def test_a_table_aligns_narrows_its_gaps_and_then_cuts() -> None:
    rows = [("name", "n"), ("abcdefgh", "10")]
    assert fitted_table(rows, None, right=[1]) == ["name       n", "abcdefgh  10"]
    assert fitted_table(rows, 11, right=[1]) == ["name      n", "abcdefgh 10"]
    assert fitted_table(rows, 9, right=[1], cuttable=[0]) == ["name    n", "abcde… 10"]
