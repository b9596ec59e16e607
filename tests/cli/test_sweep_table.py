"""The table that a sweep ends in: what differs, the figures with intervals and numbers, seconds and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.sweep import Outcome, Sweep, SweepJob, best_of, expand, summary
from rlpost.config.compose import compose
from tests.evaluation_folders import keep_held_out


def test_the_table_of_an_evaluation_has_its_accuracy_with_the_interval() -> None:
    jobs = []
    accuracy = {"value": 0.25, "low": 0.1, "high": 0.5, "prompts": 8}
    for job, share in zip(expand(["seed=0,1"]), (accuracy, None), strict=True):
        reward = {"reward_mean": 0.5, "reward_low": 0.4, "reward_high": 0.6, "num_prompts": 8}
        result = {"result": {**reward, "accuracy_lenient": share}}
        jobs.append(SweepJob(job, compose(EVAL, job.words), Path(job.name), Outcome(0, 2.0, None, result)))
    assert summary(Sweep(EVAL, [], Path(), jobs, named=True)) == [
        ["seed", "reward", "accuracy", "seconds", "exit"],
        ["0", "0.500 [0.400, 0.600]", "25.0% [10.0%, 50.0%]", "2.0", "0"],
        ["1", "0.500 [0.400, 0.600]", "-", "2.0", "0"],
    ]


@pytest.mark.parametrize(
    ("command", "of_steps", "key", "rows", "cells"),
    [
        (
            TRAIN_GRPO,
            "reward/mean",
            "eval/accuracy_lenient",
            "eval/prompts",
            ["0.50", "25.0% [12.5%, 50.0%]", "50.0% [25.0%, 100.0%]"],
        ),
        (
            TRAIN_GRPO,
            "reward/mean",
            "eval/reward",
            "eval/prompts",
            ["0.50", "0.250 [0.125, 0.500]", "0.500 [0.250, 1.000]"],
        ),
        (
            TRAIN_SFT,
            "loss/sft",
            "eval/loss",
            "eval/rows",
            ["0.500", "0.250 [0.125, 0.500]", "0.500 [0.250, 1.000]"],
        ),
    ],
    ids=["accuracy", "reward", "loss"],
)
def test_the_table_of_trainings_has_the_held_out_figure_before_and_after(
    command: Command[Any], of_steps: str, key: str, rows: str, cells: list[str]
) -> None:
    before, after = ({rows: 8.0, key: x, f"{key}_low": x / 2, f"{key}_high": 2 * x} for x in (0.25, 0.5))
    metrics = {of_steps: 0.5}
    jobs = []
    for job, evaluated in zip(expand(["seed=0,1"]), ((before, after), (None, None)), strict=True):
        result = {"metrics": metrics, "evaluation_before": evaluated[0], "evaluation_after": evaluated[1]}
        jobs.append(SweepJob(job, compose(command, job.words), Path(job.name), Outcome(0, 2.0, None, result)))
    assert summary(Sweep(command, [], Path(), jobs, named=True)) == [
        ["seed", f"late {of_steps.partition('/')[0]}", "held-out before", "held-out after", "seconds", "exit"],
        ["0", *cells, "2.0", "0"],
        ["1", cells[0], "-", "-", "2.0", "0"],
    ]


def sweep_of(command: Command[Any], folder: Path, words: list[str], after: list[dict[str, float] | None]) -> Sweep:
    """A sweep of trainings that have ended with these held-out figures."""
    jobs = []
    for job, figures in zip(expand(words), after, strict=True):
        result = {"metrics": {}, "evaluation_before": None, "evaluation_after": figures}
        jobs.append(SweepJob(job, compose(command, job.words), folder / job.name, Outcome(0, 2.0, None, result)))
    return Sweep(command, [], folder, jobs, named=True)


def held_out(key: str, value: float, half: float) -> dict[str, float]:
    return {"eval/prompts": 100.0, key: value, f"{key}_low": value - half, f"{key}_high": value + half}


def test_the_best_job_is_named_by_its_held_out_figure_and_those_within_noise_of_it() -> None:
    after = [held_out("eval/accuracy_lenient", value, 0.1) for value in (0.3, 0.5, 0.4)]
    ended = sweep_of(TRAIN_GRPO, Path(), ["seed=0,1,2"], [*after])
    assert [row[0] for row in summary(ended)] == ["seed", "1", "2", "0"]
    best = best_of(ended)
    # 0.1 apart is within sqrt(0.1² + 0.1²) = 0.141, 0.2 apart is not
    assert best is not None
    assert (best["name"], best["by"], best["value"]) == ("seed-1", "held-out accuracy", 0.5)
    assert best["within_noise_of"] == ["seed-2"]


def test_trainings_are_told_apart_prompt_by_prompt(tmp_path: Path) -> None:
    """The intervals of 0.5 and 0.4 overlap, but one answers the others' prompts and 10 of 100 more."""
    after = [held_out("eval/accuracy_lenient", value, 0.1) for value in (0.4, 0.5)]
    ended = sweep_of(TRAIN_GRPO, tmp_path, ["seed=0,1"], [*after])
    for job, right in zip(ended.jobs, (40, 50), strict=True):
        keep_held_out(job.folder, 3, ["r"] * right + ["w"] * (100 - right))
    best = best_of(ended)
    assert best is not None
    assert (best["name"], best["within_noise_of"]) == ("seed-1", [])


def test_of_held_out_losses_the_smallest_is_the_best() -> None:
    best = best_of(sweep_of(TRAIN_SFT, Path(), ["seed=0,1"], [held_out("eval/loss", x, 0.01) for x in (2.0, 1.0)]))
    assert best is not None
    assert (best["name"], best["by"], best["within_noise_of"]) == ("seed-1", "held-out loss", [])


def test_without_held_out_figures_the_last_quarter_of_the_steps_decides(tmp_path: Path) -> None:
    ended = sweep_of(TRAIN_GRPO, tmp_path, ["seed=0,1"], [None, None])
    for job, rewards in zip(
        ended.jobs, ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.5, 0.3], [0.0] * 6 + [0.6, 0.5]), strict=True
    ):
        job.folder.mkdir()
        lines = [json.dumps({"step": step, "reward/mean": reward}) for step, reward in enumerate(rewards, 1)]
        (job.folder / "metrics.jsonl").write_text("\n".join(lines))
    assert [row[:2] for row in summary(ended)[1:]] == [["1", "0.55"], ["0", "0.40"]]
    best = best_of(ended)
    assert best is not None
    assert (best["name"], best["by"], best["within_noise_of"]) == ("seed-1", "late reward", None)


def test_the_table_shows_what_was_not_run_and_no_control_character() -> None:
    words = ['env.system_prompt="a\x1bc","b"']
    jobs = [SweepJob(job, compose(TRAIN_GRPO, job.words), Path(job.name)) for job in expand(words)]
    assert summary(Sweep(TRAIN_GRPO, [], Path(), jobs, named=True))[1] == [
        '"a\\x1bc"', "-", "-", "-", "0.0", "not run",
    ]  # fmt: skip
