"""A prompt that is too long ends a training before its first step, or is left out where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.cli.main import run

SHORT = [{"prompt": f"short {number}", "answer": "1"} for number in range(40)]
LONG = {"prompt": "word " * 5000, "answer": "1"}
# byte-level: <|im_start|>user, line break, the text, <|im_end|>, line break, <|im_start|>assistant, line break
TOKENS = 25_000 + len("user\n") + 2 + len("\n") + 1 + len("assistant\n")
TOLD = "1 of 41 prompts of the split train have more tokens than env.max_prompt_tokens=1024: "


def trained(*words: str) -> int:
    """The exit code of a step of GRPO with the tiny model on 40 short rows and, last, one of 5,000 words."""
    Path("long.jsonl").write_text("\n".join(map(json.dumps, [*SHORT, LONG])))
    data = ["env=dataset", "env.path=long.jsonl", "env.reward=exact", "env.held_out=0", "env.max_completion_tokens=4"]
    small = ["model=tiny", "policy=transformers", "eval.enabled=false", "prompts_per_step=2", "group_size=2", "steps=1"]
    return run(["train", "grpo", *data, *small, *words, "--name", "long", "--plain"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_row_of_five_thousand_words_ends_the_run_with_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained() == 3
    captured = capsys.readouterr()
    told = f"error: {TOLD}raise the limit, shorten the rows, or add env.long_prompts=skip\n"
    assert f"{told}  long.jsonl, row 41: {TOKENS:,} tokens\n" in captured.err
    assert "step 1" not in captured.out
    assert not Path("runs/long/metrics.jsonl").exists()
    assert not Path("runs/long/checkpoints").exists()
