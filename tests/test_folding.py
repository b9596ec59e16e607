"""Text cut and folded to columns."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from rlpost.text import cut, fold, one_line


def test_a_cut_line_says_how_much_is_missing() -> None:
    assert one_line("a  b\nc", 10, counted=True) == "a b c"
    assert one_line("abcdefghijklmnop", 10, counted=True) == "abcde… +11"
    assert one_line("a\x1b[31m", 20, counted=True) == "a\\x1b[31m"


def test_wide_characters_count_as_two_columns() -> None:
    assert one_line("漢字漢字", 8, counted=True) == "漢字漢字"
    assert one_line("漢字漢字", 7, counted=True) == "漢… +3"


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
