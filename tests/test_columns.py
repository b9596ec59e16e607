"""Text fitted to columns."""

from __future__ import annotations

import os

import pytest
from rich.cells import cell_len

from rlpost import columns
from rlpost.columns import WordWrap, curve, cut, fitted_table, fold, one_line, paragraph


def test_a_cut_line_says_how_much_is_missing() -> None:
    assert one_line("a  b\nc", 10, counted=True) == "a b c"
    assert one_line("abcdefghijklmnop", 10, counted=True) == "abcde… +11"
    assert one_line("a\x1b[31m", 20, counted=True) == "a\\x1b[31m"


def test_wide_characters_count_as_two_columns() -> None:
    assert one_line("漢字漢字", 8, counted=True) == "漢字漢字"
    assert one_line("漢字漢字", 7, counted=True) == "漢… +3"
    assert paragraph("漢字漢", 5) == ["漢字", "漢"]


def test_a_paragraph_breaks_between_words_and_keeps_its_lines() -> None:
    assert paragraph("one two three\n  four", 8) == ["one two", "three", "  four"]
    assert paragraph("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert paragraph("", 4) == [""]


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


def test_a_curve_runs_from_the_least_to_the_greatest() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert curve([0, 0, 7, 7, 14, 14], 3) == "▁▅█"  # the middle one, 3.5 of 7, rounds to even
    assert curve([3.0, 3.0], 8) == "▁▁"
    assert curve([], 8) == ""
    assert curve([1.0, float("nan"), 2.0], 8) == "▁█"


@pytest.fixture
def ten_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "output_width", lambda piped: 10)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one ", "two th", "ree four"], "one two \nthree four"),
        (["abcdefghij", " kl"], "abcdefghij\nkl"),
        (["a\n", "\nb"], "a\n\nb"),
        (["abcdefghijklm"], "abcdefghij\nklm"),
        (["漢字漢字漢字"], "漢字漢字漢\n字"),
        (["\x1b", "[2J"], "\\x1b[2J"),
    ],
)
def test_streamed_text_breaks_between_words(ten_columns: None, pieces: list[str], shown: str) -> None:
    wrap = WordWrap()
    assert "".join(wrap.add(piece) for piece in pieces) + wrap.rest() == shown


def test_streamed_text_is_not_broken_where_nobody_looks() -> None:
    assert not os.isatty(1) or columns.output_width(0) > 0
    wrap = WordWrap()
    text = "many words " * 40
    assert wrap.add(text) + wrap.rest() == text


def test_words_stay_whole_where_they_fit() -> None:
    assert fold("one two three", 7, 9) == ["one two", "three"]
    assert fold("a bcdefghij k", 4, 9) == ["a", "bcde", "fghi", "j k"]
    assert fold("  indented", 20, 9) == ["  indented"]


def test_empty_lines_are_one_and_carriage_returns_before_a_line_break_none() -> None:
    assert fold("\n\na\r\n\n \n\nb\n", 9, 9) == ["a", "", "b"]


def test_what_is_cut_ends_in_an_ellipsis() -> None:
    assert fold("one two three", 7, 1) == ["one tw…"]
    assert fold("one\ntwo", 7, 1) == ["one…"]
    assert fold("one", 7, 1) == ["one"]


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        "日本語" * 30_000,
        "word " * 20_000,
        " " * 100_000 + "x",
        "\n" * 100_000,
        "e" + "\u0301" * 100_000,
        "👩\u200d👩\u200d👧 🇩🇪 ❤️ " * 1000,
        "\t" * 1000 + "\x1b[31m" * 1000,
        "שלום\u202e" * 1000,
        "\x00" * 5000,
    ],
)
@pytest.mark.parametrize(("width", "most"), [(76, 4), (20, 3), (1, 1), (0, 1), (-3, 1), (2, 2)])
def test_any_text_folds_into_its_place(text: str, width: int, most: int) -> None:
    lines = fold(text, width, most)
    assert 1 <= len(lines) <= most
    assert all(line.isprintable() for line in lines)
    if width >= 2:  # one cell takes no wide character
        assert max(cell_len(line) for line in lines) <= width
    assert max(len(line) for line in lines) <= 5 * max(1, width)  # marks do not pile up


def test_one_line_has_no_breaks_and_as_much_as_fits() -> None:
    assert one_line("a\nb\t\x1b  c", 20) == "a b \\x1b c"
    assert one_line("careful: 日本語日本語", 14) == "careful: 日本…"
    assert one_line("x" * 41, 10) == "x" * 9 + "…"
    assert one_line("", 10) == ""


def test_a_cut_counts_cells() -> None:
    assert [cut("日本語", width) for width in (0, 1, 2, 5, 6, 9)] == ["", "", "日", "日本", "日本語", "日本語"]
