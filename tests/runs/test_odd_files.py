"""A run folder whose files hold something else than rlpost wrote does not stop the verbs that read runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.run_folders import make_run

STEP = '{"step": 1, "reward/mean": 0.5}\n'
HELD_OUT = '{"step": 0, "eval/accuracy_lenient": 0.5, "eval/prompts": 8}\n'
METRICS = {
    "deep": '{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "a number of 400 digits": '{"step": 1, "reward/mean": 1' + "0" * 400 + "}\n",
    "no number of prompts": '{"step": 0, "eval/accuracy_lenient": 0.5, "eval/prompts": NaN}\n',
    "no interval": HELD_OUT.replace("}", ', "eval/accuracy_lenient_low": NaN, "eval/accuracy_lenient_high": NaN}'),
    "text in an evaluation": HELD_OUT.replace("8}", '"x", "eval/truncated": "x", "eval/failed": [1]}'),
    "no time": '{"step": 1, "time/step": 1e999}\n{"step": 2, "time/step": NaN}\n',
    "text and a time": '{"step": 1, "time/step": 4.0, "reward/mean": "x", "tokens/generated": [1], "entropy": {}}\n',
    "text": "".join(f'{{"step": {n}, "reward/mean": "x"}}\n' for n in range(1, 11)),
}
CONFIGS = {
    "model is text": "model: foo\neval: foo\n",
    "model is nothing": "model: null\neval: {k: [8]}\n",
    "a list": "model: [a]\neval: [b]\n",
    "no date": "started: 2024-13-45\n",
    "5000 digits": f"seed: {'9' * 5000}\n",
    "a date": "started: 2024-01-01\nmarks: !!set {a, b}\n",
}
VERBS = ["runs list", "runs show runs/x", "runs show runs/x --json"]


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    folder = make_run(here / "runs/x", overrides=["model.path=./m"])
    (folder / "metrics.jsonl").write_text(HELD_OUT + STEP)
    (folder / "environment.json").write_text('{"packages": ["a"]}')
    return folder


def assert_read(rlpost: CommandLine) -> None:
    for verb in VERBS:
        assert rlpost(verb).strip()


@pytest.mark.parametrize("way", METRICS)
def test_metrics_that_rlpost_did_not_write(way: str, folder: Path, rlpost: CommandLine) -> None:
    (folder / "metrics.jsonl").write_text(METRICS[way] + STEP.replace("1", "30", 1))
    assert_read(rlpost)
    shown = rlpost("runs show runs/x --lines 9")
    assert "step 30" in shown


@pytest.mark.parametrize("way", CONFIGS)
def test_settings_that_rlpost_did_not_write(way: str, folder: Path, rlpost: CommandLine) -> None:
    (folder / "config.yaml").write_text(CONFIGS[way])
    assert_read(rlpost)
