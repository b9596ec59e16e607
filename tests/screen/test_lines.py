"""Plain lines: exact, and safe whatever the model says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlpost.screen.state import Shown, clock, evaluation_line, sample_lines, step_line

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
SAMPLE = Shown(1, "What is 1 + 1?", "two\nlines", 0.25, {"answer": 0.25}, "length")


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


def test_an_asynchronous_step_shows_lag_ess_and_waiting() -> None:
    beside = {"time/wait": 1.25, "time/idle": 0.5, "time/step": 8.0, "policy/lag_mean": 0.75, "sampler/ess": 0.984}
    assert step_line(7, 60, FIGURES | beside, "3:05") == (
        "step  7/60  reward 0.54  accuracy  88%  tokens 12  lag 0.8  ess 0.98  gap 0.012  grad 1.24  93 tok/s  "
        "wait 1.2s train 6.2s idle 0.5s  left 3:05"
    )
    assert step_line(7, 60, FIGURES | beside, "3:05", width=60) == (
        "step  7/60  reward 0.54  accuracy  88%  lag 0.8  left 3:05"
    )


def test_a_narrow_step_line_keeps_the_main_metrics() -> None:
    assert step_line(7, 60, FIGURES, "3:05", width=80) == (
        "step  7/60  reward 0.54  accuracy  88%  tokens 12  gap 0.012  left 3:05"
    )
    assert step_line(7, 60, FIGURES, "3:05", width=10) == "step  7/60  reward 0.54  accuracy  88%"


def test_an_evaluation_is_one_line_of_figures_with_intervals() -> None:
    figures = {
        "eval/prompts": 40.0,
        "eval/accuracy_lenient": 0.5,
        "eval/accuracy_lenient_low": 0.35,
        "eval/accuracy_lenient_high": 0.65,
        "eval/reward": 0.75,
        "eval/reward_low": 0.6,
        "eval/reward_high": 0.9,
        "eval/tokens_mean": 11.6,
        "eval/truncated": 0.25,
        "eval/failed": 2.0,
    }
    assert evaluation_line(figures, "after step 3") == (
        "held-out after step 3, 40 prompts:  accuracy 50.0% [35.0%, 65.0%]  reward 0.750 [0.600, 0.900]  tokens 12  "
        "truncated 25%  2 rewards failed"
    )
    assert evaluation_line({"eval/loss": 1.25, "eval/rows": 9.0}, "before training") == (
        "held-out before training:  loss 1.250 (no interval) of 9 rows"
    )


@pytest.mark.parametrize(
    ("name", "deciding"),
    [("accuracy_lenient", "25.0% [10.0%, 45.0%] of 30 prompts"), ("reward", "0.250 [0.100, 0.450] of 30 prompts")],
)
def test_an_evaluation_shows_the_deciding_and_the_reported_accuracy(name: str, deciding: str) -> None:
    reported = {"eval/prompts": 40.0, "eval/reward": 0.75, "eval/reward_low": 0.6, "eval/reward_high": 0.9}
    decides = {f"eval/deciding_{name}{end}": value for end, value in (("", 0.25), ("_low", 0.1), ("_high", 0.45))}
    assert evaluation_line(reported | decides | {"eval/deciding_prompts": 30.0}, "after step 3") == (
        f"held-out after step 3, 40 prompts:  reward 0.750 [0.600, 0.900]  deciding {deciding}"
    )


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
