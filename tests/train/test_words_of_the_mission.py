"""`rlpost train grpo model=qwen env=gsm8k` and `train sft` with the same words, on a folder and rows of one's own."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpost.cli.main import run
from rlpost.model.conversion import tiny_tokenizer
from tests.says import Says
from tests.trainings import metrics

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
    sizes: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1, "vocab_size": 300}
    heads: dict[str, Any] = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ids: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(max_position_embeddings=4096, **sizes, **heads, **ids))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(verb: str, qwen: Path, rows: str, name: str, *more: str) -> list[dict]:
    """The recorded steps of two, begun with the words of the mission."""
    small = GRPO if verb == "grpo" else SFT
    words = ["model=qwen", "env=gsm8k", f"model.path={qwen}", f"env.path={rows}", "steps=2", *SHORT, *small, *more]
    assert run(["train", verb, *words, "--name", name]) == 0
    return [row for row in metrics(Path("runs", name)) if row["step"] > 0]


def test_two_steps_on_a_folder_and_on_one_file_are_evaluated(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    for file, rows in {"data/train": ROWS[:20], "data/test": ROWS[20:], "rows": ROWS}.items():
        Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["sampler/logprob_gap"] < 0.05 for row in train("grpo", qwen, "data", "g")] == [True, True]
    losses = [row["loss/sft"] for row in train("sft", qwen, "rows.jsonl", "s")]
    assert losses[1] < losses[0]  # of random weights, which one step makes better
    for trained in ("g", "s"):
        capsys.readouterr()
        words = [f"model=runs/{trained}", "env=gsm8k", "env.path=rows.jsonl", "env.limit=2", "env.held_out=0.4", *SHORT]
        assert run(["eval", *words, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["result"]["num_prompts"] == 2
        assert record["model"] == str(Path(f"runs/{trained}/checkpoints/step-000002/model").resolve())


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="RLPOST_TEST_DATA has no gsm8k")
def test_two_steps_of_each_on_the_real_rows(qwen: Path) -> None:
    assert len(train("grpo", qwen, str(REAL), "g", "env.limit=50")) == 2
    assert len(train("sft", qwen, str(REAL), "s", "env.limit=50")) == 2


@pytest.fixture
def hosts_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that are asked for, of which there are none here: without a network, and with an empty cache."""
    for name, value in (("HF_HOME", "hf"), ("HF_HUB_CACHE", "hf/hub")):
        monkeypatch.setattr(constants, name, str(tmp_path / value))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hosts: list[str] = []

    def unknown(host: str, *rest: object, **more: object) -> None:
        hosts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    return hosts


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_offline_plan_shows_what_is_unknown_and_training_ends(
    verb: str, hosts_asked: list[str], capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    words = ["train", verb, "model.path=Some/Model", "env=gsm8k", "policy=transformers"]
    assert run([*words, "--dry-run"]) == 0
    plan = capsys.readouterr().out.splitlines()
    says("train", "\n".join(line for line in plan if line.startswith(("downloads", "memory", "disk"))))
    assert run(words) == 3
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "model.path=Some/Model" in error
    assert "HF_HUB_OFFLINE" in error
    assert hosts_asked == []
