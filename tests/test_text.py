"""Text for people: safe to show, cut and folded to columns; suggestions for misspelt words (see test_typos.py too)."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from rlpost.text import (
    both_ends,
    counted,
    cut,
    fold,
    nearest,
    nearest_key,
    one_line,
    printable,
    without_passwords,
)
from tests.says import Says


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("100\r  0", "100\\r  0"),
        ("a\x00\x08\x7f", "a\\x00\\x08\\x7f"),
        ("\x9b31m", "\\x9b31m"),  # the one-byte form of ESC [
        ("\u202eabc\u2066\u200f", "\\u202eabc\\u2066\\u200f"),
        ("\u200b\ufeff\U000e0041", "\\u200b\\ufeff\\U000e0041"),
        ("\u2028\x85\x0c", "\\u2028\\x85\\x0c"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_could_act_is_shown(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown


def test_line_breaks_tabs_and_every_script_stay() -> None:
    text = "a\n\tb é 漢字 עברית e\u0301 🙂"
    assert printable(text) == text


def test_whatever_comes_in_can_be_encoded_and_is_inert() -> None:
    everything = "".join(map(chr, range(0x3000)))
    shown = printable(everything + "\udfff")
    shown.encode()
    assert all(c.isprintable() or c in "\n\t" for c in shown)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no route to http://me:s3cret@host:5000/x?a=b@c", "no route to http://me:***@host:5000/x?a=b@c"),
        ("mysql+pymysql://root:p:w@db/x", "mysql+pymysql://root:***@db/x"),
        ("redis://:s3cret@host", "redis://:***@host"),
        ("http://host:5000/@me and me@host, a:b@c", "http://host:5000/@me and me@host, a:b@c"),
    ],
)
def test_the_password_of_a_url_is_hidden(said: str, shown: str) -> None:
    assert without_passwords(said) == shown


def test_one_thing_is_counted_without_an_s() -> None:
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


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
    for lines in [fold(text, width, most), *([both_ends(text, width, most)] if width >= 20 else [])]:
        assert 1 <= len(lines) <= most
        assert all(line.isprintable() for line in lines)
        if width >= 2:  # one cell takes no wide character
            assert max(cell_len(line) for line in lines) <= width
        assert max(len(line) for line in lines) <= 5 * max(1, width)  # marks do not pile up


def test_a_long_text_keeps_its_beginning_and_its_end(says: Says) -> None:
    assert both_ends("two\nwords", 20, 2) == ["two", "words"]
    assert both_ends("two\nwords", 20, 1) == ["two words"]
    note = "nothing was learned in 5 steps; likely reason: every reward is 0; read some with rlpost runs rollouts"
    prompt = "Read this.\n" + "word " * 9999 + "\n\nHow many words?\nAnswer with a number.\n"
    for text, lines in ((note, 3), (note, 2), (note, 1), (prompt, 4)):
        says("info", "\n".join(both_ends(text, 40, lines)))


def test_one_line_has_no_breaks_and_as_much_as_fits() -> None:
    assert one_line("a\nb\t\x1b  c", 20) == "a b \\x1b c"
    assert one_line("careful: 日本語日本語", 14) == "careful: 日本…"
    assert one_line("x" * 41, 10) == "x" * 9 + "…"
    assert one_line("", 10) == ""


def test_a_cut_counts_cells() -> None:
    assert [cut("日本語", width) for width in (0, 1, 2, 5, 6, 9)] == ["", "", "日", "日本", "日本語", "日本語"]


def test_a_distant_word_gets_no_suggestion() -> None:
    assert nearest("bananas", ["vllm", "auto"]) is None
    assert nearest_key("hydra.run.dir", ["optim.lr", "steps"]) is None


def test_a_word_in_the_wrong_case_is_nearer_than_a_typo() -> None:
    assert nearest("QWEN-3B", ["qwen-7b", "qwen-3b"]) == "qwen-3b"
