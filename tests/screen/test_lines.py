"""Plain lines: exact, and safe whatever the model says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.cells import cell_len

from rlpost.screen.lines import clock, cut, fold, one_line, sample_lines, step_line
from rlpost.screen.shown import Shown

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]hi[/] \u202e\x9b31m\r0"
INERT = "\\x1b[2J\\x1b]0;owned\\x07[bold red]hi[/] \\u202e\\x9b31m\\r0"
FIGURES = {
    "reward/mean": 0.5449,
    "accuracy/lenient": 0.875,
    "completion/tokens_mean": 11.6,
    "sampler/logprob_gap": 0.01234,
    "grad_norm": 1.239,
    "tokens/generated": 744.0,
    "time/rollout": 4.0,
    "time/train": 6.25,
    "time/sync": 0.55,
}
SAMPLE = Shown(1, "What is 1 + 1?", "two\nlines", 0.25, {"answer": 0.25}, "length", 0.0, 1.0)


def test_a_step_is_one_line_of_these_figures() -> None:
    assert step_line(7, 60, FIGURES, "3:05") == (
        "step  7/60  reward 0.54  accuracy  88%  tokens 12  gap 0.012  grad 1.24  186 tok/s  "
        "rollout 4.0s train 6.2s  left 3:05"
    )


def test_figures_that_are_missing_or_no_number_are_left_out() -> None:
    figures = FIGURES | {"accuracy/lenient": math.nan, "sampler/logprob_gap": math.nan, "time/rollout": 0.0}
    del figures["grad_norm"]
    figures["tokens/generated"] = 0.0
    assert step_line(1, 5, figures, "0:00") == (
        "step 1/5  reward 0.54  tokens 12  0 tok/s  rollout 0.0s train 6.2s  left 0:00"
    )
    assert step_line(1, 5, {}, "-") == "step 1/5  left -"


def test_a_step_keeps_what_says_most_where_there_is_little_room() -> None:
    assert step_line(7, 60, FIGURES, "3:05", width=80) == (
        "step  7/60  reward 0.54  accuracy  88%  tokens 12  gap 0.012  left 3:05"
    )
    assert step_line(7, 60, FIGURES, "3:05", width=10) == "step  7/60  reward 0.54  accuracy  88%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.6, "0:01"), (59.4, "0:59"), (59.6, "1:00"), (65, "1:05"), (3599.6, "1:00:00"), (3700, "1:01:40")],
)
def test_time_is_told_in_minutes_and_hours(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_sample_says_what_was_asked_answered_and_earned() -> None:
    assert sample_lines(SAMPLE) == [
        "    What is 1 + 1?",
        "    | two",
        "    | lines",
        "    reward 0.25 (answer 0.25), length",
    ]
    assert sample_lines(replace(SAMPLE, reward=None))[-1] == "    reward failed, length"


def test_a_sample_is_inert_in_prompt_and_reply() -> None:
    prompt, reply, _ = sample_lines(replace(SAMPLE, prompt=HOSTILE, completion=HOSTILE))
    assert (prompt, reply) == (f"    {INERT}", f"    | {INERT}")


def test_a_long_or_empty_sample_has_at_most_eight_lines_and_at_least_one() -> None:
    body = [line for line in sample_lines(replace(SAMPLE, completion="\n".join(map(str, range(20))))) if "|" in line]
    assert body == [*(f"    | {i}" for i in range(7)), "    | 7…"]
    assert sample_lines(replace(SAMPLE, completion=""))[1] == "    | "


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
