"""Metrics without a number where most have one do not stop the verbs that read runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.run_folders import make_run

STEP = '{"step": 1, "reward/mean": 0.5}\n'
HELD_OUT = '{"step": 0, "eval/accuracy_lenient": 0.5, "eval/prompts": 8}\n'
METRICS = {
    "no number of prompts": '{"step": 0, "eval/accuracy_lenient": 0.5, "eval/prompts": NaN}\n',
    "no interval": HELD_OUT.replace("}", ', "eval/accuracy_lenient_low": NaN, "eval/accuracy_lenient_high": NaN}'),
    "no time": '{"step": 1, "time/step": NaN}\n{"step": 2, "time/step": NaN}\n',
}
VERBS = ["runs list", "runs show runs/x", "runs show runs/x --json"]


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    folder = make_run(here / "runs/x", overrides=["model.path=./m"])
    (folder / "metrics.jsonl").write_text(HELD_OUT + STEP)
    return folder


@pytest.mark.parametrize("way", METRICS)
def test_metrics_without_a_number_are_read(way: str, folder: Path, rlpost: CommandLine) -> None:
    (folder / "metrics.jsonl").write_text(METRICS[way] + STEP.replace("1", "30", 1))
    for verb in VERBS:
        assert rlpost(verb).strip()
    shown = rlpost("runs show runs/x --lines 9")
    assert "step 30" in shown
