"""Plain lines: exact, and safe whatever the model says."""

from __future__ import annotations

from dataclasses import replace

from rlpost.screen.state import Shown, evaluation_line, sample_lines, step_line
from tests.says import Says

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


def test_a_step_is_one_line_that_fits(says: Says) -> None:
    asynchronous = FIGURES | {
        "time/wait": 1.25,
        "time/idle": 0.5,
        "time/step": 8.0,
        "policy/lag_mean": 0.75,
        "sampler/ess": 0.984,
    }
    shown = ((FIGURES, None), (FIGURES, 80), (FIGURES, 10), (asynchronous, None), (asynchronous, 60))
    says("train", "\n".join(step_line(7, 60, figures, "3:05", width=width) for figures, width in shown))


def test_an_evaluation_is_one_line_of_figures_with_intervals(says: Says) -> None:
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
    says("train", evaluation_line(figures, "after step 3"))
    says("train", evaluation_line({"eval/loss": 1.25, "eval/rows": 9.0}, "before training"))


def test_a_sample_shows_its_prompt_reply_and_reward(says: Says) -> None:
    says("train", "\n".join([*sample_lines(SAMPLE), sample_lines(replace(SAMPLE, reward=None))[-1]]))


def test_a_sample_is_inert_in_prompt_and_reply() -> None:
    prompt, reply, _ = sample_lines(replace(SAMPLE, prompt=HOSTILE, completion=HOSTILE))
    assert (prompt, reply) == (f"    {INERT}", f"    | {INERT}")


def test_a_long_or_empty_sample_has_at_most_eight_lines_and_at_least_one() -> None:
    body = [line for line in sample_lines(replace(SAMPLE, completion="\n".join(map(str, range(20))))) if "|" in line]
    assert body == [*(f"    | {i}" for i in range(7)), "    | 7…"]
    assert sample_lines(replace(SAMPLE, completion=""))[1] == "    | "
