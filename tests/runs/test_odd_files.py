"""A run folder whose files hold something else than rlpost wrote does not stop the verbs that read runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.cli.main import run

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
VERBS = [
    ["runs", "list"],
    ["runs", "show", "runs/x"],
    ["runs", "show", "runs/x", "--json"],
    ["runs", "diagnose", "runs/x"],
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/x")
    folder.mkdir(parents=True)
    (folder / "command.txt").write_text("rlpost train grpo model.path=./m\n")
    (folder / "overrides.txt").write_text("model.path=./m\n")
    (folder / "metrics.jsonl").write_text(HELD_OUT + STEP)
    (folder / "config.yaml").write_text("steps: 3\n")
    (folder / "environment.json").write_text('{"packages": ["a"]}')
    return folder


def assert_read(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert run(verb) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("way", METRICS)
def test_metrics_that_rlpost_did_not_write(way: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "metrics.jsonl").write_text(METRICS[way] + STEP.replace("1", "30", 1))
    assert_read(capsys)
    assert run(["runs", "tail", "runs/x"]) == 0
    assert "step 30" in capsys.readouterr().out


@pytest.mark.parametrize("way", CONFIGS)
def test_settings_that_rlpost_did_not_write(way: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text(CONFIGS[way])
    assert_read(capsys)


def test_a_lock_that_is_a_folder_counts_as_free(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".lock").mkdir()
    assert_read(capsys)
    assert run(["runs", "gc", "--yes"]) == 0
