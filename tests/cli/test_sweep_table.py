"""The table that a sweep ends in: what differs, the figures with intervals and numbers, seconds and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.sweep import Outcome, Sweep, SweepJob, expand, summary
from rlpost.config.compose import compose


def test_the_table_of_an_evaluation_has_its_accuracy_with_the_interval() -> None:
    jobs = []
    accuracy = {"value": 0.25, "low": 0.1, "high": 0.5, "prompts": 8}
    for job, share in zip(expand(["seed=0,1"]), (accuracy, None), strict=True):
        reward = {"reward_mean": 0.5, "reward_low": 0.4, "reward_high": 0.6, "num_prompts": 8}
        result = {"result": {**reward, "accuracy_lenient": share}}
        jobs.append(SweepJob(job, compose(EVAL, job.words), Path(job.name), Outcome(0, 2.0, None, result)))
    assert summary(Sweep(EVAL, [], Path(), jobs, named=True)) == [
        ["seed", "reward", "accuracy", "seconds", "exit"],
        ["0", "0.500 [0.400, 0.600] of 8 prompts", "25.0% [10.0%, 50.0%] of 8 prompts", "2.0", "0"],
        ["1", "0.500 [0.400, 0.600] of 8 prompts", "-", "2.0", "0"],
    ]


@pytest.mark.parametrize(
    ("command", "of_steps", "key", "rows", "cells"),
    [
        (
            TRAIN_GRPO,
            "reward/mean",
            "eval/accuracy_lenient",
            "eval/prompts",
            ["0.50", "25.0% [12.5%, 50.0%] of 8 prompts", "50.0% [25.0%, 100.0%] of 8 prompts"],
        ),
        (
            TRAIN_GRPO,
            "reward/mean",
            "eval/reward",
            "eval/prompts",
            ["0.50", "0.250 [0.125, 0.500] of 8 prompts", "0.500 [0.250, 1.000] of 8 prompts"],
        ),
        (
            TRAIN_SFT,
            "loss/sft",
            "eval/loss",
            "eval/rows",
            ["0.500", "0.250 [0.125, 0.500] of 8 rows", "0.500 [0.250, 1.000] of 8 rows"],
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
        ["seed", of_steps.partition("/")[0], "held-out before", "held-out after", "seconds", "exit"],
        ["0", *cells, "2.0", "0"],
        ["1", cells[0], "-", "-", "2.0", "0"],
    ]


def test_the_table_shows_what_was_not_run_and_no_control_character() -> None:
    words = ['env.system_prompt="a\x1bc","b"']
    jobs = [SweepJob(job, compose(TRAIN_GRPO, job.words), Path(job.name)) for job in expand(words)]
    assert summary(Sweep(TRAIN_GRPO, [], Path(), jobs, named=True))[1] == [
        '"a\\x1bc"', "-", "-", "-", "0.0", "not run",
    ]  # fmt: skip
