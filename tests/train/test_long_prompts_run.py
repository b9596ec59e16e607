"""A prompt that is too long ends a training before its first step, or is left out where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.cli.main import run

ROWS = [
    *({"prompt": f"short {number}", "answer": "1"} for number in range(40)),
    {"prompt": "word " * 5000, "answer": "1"},
]


def test_row_of_five_thousand_words_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    data = ["env=dataset", "env.path=long.jsonl", "env.reward=exact", "env.held_out=0", "eval.enabled=false"]
    assert run(["train", "grpo", "model=tiny", "policy=transformers", *data, "steps=1", "--name", "long"]) == 3
    assert "row 41" in capsys.readouterr().err
    assert not Path("runs/long/metrics.jsonl").exists()
    assert not Path("runs/long/checkpoints").exists()
