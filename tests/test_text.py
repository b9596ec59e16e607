"""Text that is safe to show."""

from __future__ import annotations

import pytest

from rlpost.text import counted, first_line, printable, readable, without_passwords


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 bytes"), (2_726_000, "2.73 MB"), (15.243e9, "15.2 GB"), (1.221e11, "122 GB"), (5e12, "5000 GB")],
)
def test_sizes_are_told_in_three_digits(size: float, text: str) -> None:
    assert readable(size) == text


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("\n it is cut.\nmore"), "it is cut"), (RuntimeError(), "RuntimeError"), (KeyError("a"), "'a'")],
)
def test_an_error_is_told_by_its_first_line_or_its_type(error: Exception, line: str) -> None:
    assert first_line(error) == line
