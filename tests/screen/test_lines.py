"""Plain lines: exact, and safe whatever the model says."""

from __future__ import annotations

from dataclasses import replace

from rlpost.screen.state import Shown, evaluation_line, sample_lines, step_line

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
