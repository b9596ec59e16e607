"""`rlpost train grpo model=qwen env=gsm8k` and `train sft` with the same words, on a folder and rows of one's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpost.cli.main import run
from rlpost.model.load import tiny_tokenizer

ROWS = [
    {"question": f"Ann has {n} apples and buys {n} more. How many?", "answer": f"{n} + {n} = {2 * n}.\n#### {2 * n}"}
    for n in range(2, 30)
]
REAL = Path(os.environ.get("RLPOST_TEST_DATA", "/nowhere")) / "gsm8k"
SHORT = ["policy=transformers", "env.max_completion_tokens=8"]
GRPO = ["prompts_per_step=1", "group_size=2", "eval.limit=1"]
SFT = ["minibatch_size=2", "max_tokens=4096", "eval.limit=1"]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in Qwen2.5-0.5B's shape, but for one layer and few words."""
    folder = tmp_path_factory.mktemp("qwen")
    tokenizer = tiny_tokenizer(300)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(file: str, rows: list[dict]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(verb: str, qwen: Path, rows: str, name: str, *more: str) -> list[dict]:
    """The recorded steps of two, begun with the words of the mission."""
    small = GRPO if verb == "grpo" else SFT
    words = ["model=qwen", "env=gsm8k", f"model.path={qwen}", f"env.path={rows}", "steps=2", *SHORT, *small, *more]
    assert run(["train", verb, *words, "--name", name]) == 0
    lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def test_two_steps_of_each_on_a_folder_and_on_one_file_then_an_evaluation(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("data/train.jsonl", ROWS[:20])
    write("data/test.jsonl", ROWS[20:])
    write("rows.jsonl", ROWS)
    assert [row["sampler/logprob_gap"] < 0.05 for row in train("grpo", qwen, "data", "g")] == [True, True]
    losses = [row["loss/sft"] for row in train("sft", qwen, "rows.jsonl", "s")]
    assert losses[1] < losses[0]  # of random weights, which one step makes better
    capsys.readouterr()
    words = ["model=runs/s", "env=gsm8k", "env.path=rows.jsonl", "env.limit=2", *SHORT]
    assert run(["eval", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["num_prompts"] == 2


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="RLPOST_TEST_DATA has no gsm8k")
def test_two_steps_of_each_on_the_real_rows(qwen: Path) -> None:
    assert len(train("grpo", qwen, str(REAL), "g", "env.limit=50")) == 2
    assert len(train("sft", qwen, str(REAL), "s", "env.limit=50")) == 2
