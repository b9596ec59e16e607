"""`--dry-run`: what is learned and measured, and the question about a rate that nobody uses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.main import run
from rlpost.model.tokenizer import load_tokenizer
from tests.model.test_models import write_gguf


def planned(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The lines of a plan by their first word."""
    assert run(["train", *line.split(), "--dry-run"]) == 0
    lines = [line.partition(" ") for line in capsys.readouterr().out.splitlines()]
    return {label: text.strip() for label, _, text in lines}


def test_a_plan_of_grpo_says_loss_estimator_rate_evaluation_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("grpo", capsys)
    assert plan["loss"] == "grpo, advantage.estimator=grpo"
    assert plan["lr"] == "2e-05, linear"
    assert plan["eval"] == "up to 500 held-out prompts, greedy; before and after training"
    assert plan["memory"].startswith("about ")
    assert "note" not in plan


def test_a_plan_says_what_was_changed_of_loss_rate_adapter_and_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "loss=dapo loss.kl_coef=0.01 advantage.estimator=rloo optim.lr=2e-4 optim.schedule=linear optim.warmup_steps=5 "
        "lora.enabled=true lora.rank=8 eval.k=[1,8] eval.every=10 eval.limit=50"
    )
    plan = planned(f"grpo {words}", capsys)
    assert plan["loss"] == "dapo, advantage.estimator=rloo, KL penalty 0.01"
    assert plan["lr"] == "0.0002, linear after 5 steps of warm-up"
    assert plan["lora"] == "rank 8, alpha 32, on all linear layers"
    assert plan["eval"] == (
        "up to 50 held-out prompts, 8 completions each, k=[1, 8]; before and after training, and every 10 steps"
    )
    assert "note" not in plan


def test_a_plan_of_the_other_loops_says_loss_rate_and_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("sft eval.accuracy=true loss.kl_coef=0.1", capsys)
    assert (plan["loss"], plan["lr"]) == ("sft, KL penalty 0.1", "2e-05, linear")
    assert plan["eval"].startswith("loss on up to 500 held-out rows and accuracy of greedy replies; before and after")
    plan = planned("expert-iteration eval.enabled=false", capsys)
    assert (plan["loss"], plan["lr"], plan["eval"]) == ("sft", "2e-05, linear", "none, by eval.enabled=false")


def test_a_plan_of_a_mix_has_a_line_a_source_with_its_share_of_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = ["arithmetic weight=3 max_completion_tokens=16", "dataset path=rows.jsonl reward=[exact,number]"]
    assert run(["train", "grpo", "env=mix", f"env.sources={json.dumps(sources)}", "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("data ", "source "))]
    assert lines == [
        "data    mix of arithmetic, dataset, train split",
        "source  arithmetic, 75.0% of the prompts: arithmetic weight=3 max_completion_tokens=16, "
        "at most 16 tokens each",
        "source  dataset, 25.0% of the prompts: dataset path=rows.jsonl reward=[exact,number], reward exact + number, "
        "at most 256 tokens each",
    ]


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ("grpo optim.lr=1e-3", "optim.lr=0.001 is unusually high: GRPO of all weights is done with 1e-08 to 0.0001"),
        ("grpo optim.lr=1e-9", "optim.lr=1e-09 is unusually low: GRPO of all weights is done with 1e-08 to 0.0001"),
        (
            "grpo optim.lr=5e-7 lora.enabled=true",
            "optim.lr=5e-07 is unusually low: GRPO of an adapter is done with 1e-06 to 0.001",
        ),
        ("sft optim.lr=0.1", "optim.lr=0.1 is unusually high: fine-tuning of all weights is done with 1e-07 to 0.001"),
    ],
)
def test_a_rate_that_nobody_uses_is_questioned_in_one_line(
    line: str, question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(line, capsys)["note"] == question
    assert run(["train", *line.split(), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [question]


# What the files of a model say before it is loaded


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Path:
    """A copy of the tiny model in ./m whose weights are NaN: loading them would be an error."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "m")
    file = tmp_path / "m" / "model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:begin] + b"\xff" * (len(content) - begin))
    return Path("m")


@pytest.mark.parametrize("verb", ["train grpo", "train sft", "eval", "doctor"])
def test_model_without_a_template_is_refused_before_it_is_loaded(
    verb: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chat_template.jinja").unlink()
    dry = ["--dry-run"] if verb.startswith("train") else []
    assert run([*verb.split(), "model=./m", *dry]) == 2
    assert "has no chat template, so rlpost cannot talk to it" in capsys.readouterr().err
    assert run(["train", "grpo", "model=./m", "model.chat_template=chatml", "--dry-run"]) == 0


def test_template_whose_end_the_tokenizer_lacks_is_refused_before_the_model_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "grpo", "model=./m", "model.chat_template=llama3", "--dry-run"]) == 2
    assert "ends a turn with no special token that the tokenizer has" in capsys.readouterr().err


def test_plan_says_where_a_turn_ends_if_texts_end_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "note" not in planned("grpo model=./m", capsys)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|endoftext|>"}))
    note = "turns end with <|im_end|>, and texts with <|endoftext|>: sampling stops at both"
    assert planned("grpo model=./m", capsys)["note"] == note


def test_layers_of_an_adapter_are_looked_up_in_the_weights_headers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ["train", "grpo", "model=./m", "lora.enabled=true", "--dry-run"]
    assert run([*lora, "lora.target_modules=[qproj]"]) == 2
    assert "lora.target_modules names qproj, which is not a linear layer of the model; did you mean q_proj?" in (
        capsys.readouterr().err
    )
    for fine in ("all-linear", "[q_proj,self_attn.v_proj]"):
        assert run([*lora, f"lora.target_modules={fine}"]) == 0


def test_gguf_without_a_template_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    write_gguf(Path("folder/base.gguf"))
    for model in ("folder/base.gguf", "./folder"):
        assert run(["train", "grpo", f"model={model}", "--dry-run"]) == 2
        assert "the tokenizer of folder/base.gguf has no chat template" in capsys.readouterr().err
    Path("cut.gguf").write_bytes(Path("folder/base.gguf").read_bytes()[:3000])
    assert run(["train", "grpo", "model=./cut.gguf", "--dry-run"]) == 2
    assert "cut.gguf cannot be read as GGUF" in capsys.readouterr().err
    assert planned("grpo model=./folder model.chat_template=chatml", capsys)["memory"] == (
        "unknown until ./folder is converted"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "falcon_mamba"}, "a falcon_mamba: vLLM has no state-space kernel for a CPU"),
        ({"head_dim": 48}, "a llama: its heads have 48 numbers, and vLLM's attention on a CPU takes 32, 64, 80"),
        ({"model_type": "no_such_model"}, "has model_type no_such_model, which is not a causal language model"),
    ],
)
def test_limits_of_vllm_and_transformers_are_told_from_the_configuration(
    config: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert run(["train", "grpo", "model=./m", "policy=vllm", "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    expected = 2 if config["model_type" if "model_type" in config else "head_dim"] == "no_such_model" else 0
    assert run(["train", "grpo", "model=./m", "policy=transformers", "--dry-run"]) == expected


def test_a_plan_says_which_rows_it_has_read(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of one length, one of them longer: how many are trained on and held out, and what the longest takes."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n:02}.", "answer": str(n)} for n in range(50)] + [{"prompt": "x" * 90, "answer": "x"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model={tiny_folder}", "env=dataset", "env.path=rows.jsonl", "env.reward=exact", "env.held_out=0.2"]
    longest = load_tokenizer(tiny_folder)("x" * 90, add_special_tokens=False)["input_ids"]

    assert run(["train", "grpo", *words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert run(["train", "grpo", *words, "--dry-run"]) == 0
    lines = capsys.readouterr().out

    few = next(note for note in plan["notes"] if "few" in note)
    held_out = int(few.partition(" rest on ")[2].partition(" ")[0])
    assert f"{51 - held_out} prompts, {held_out} held out" in lines
    assert f"eval    {held_out} held-out prompts" in lines
    assert f"the longest has {len(longest)} tokens, without the chat template's and any tools'; at most 1,024" in lines
    assert few in lines


def test_a_plan_counts_the_bad_rows_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(40)] + [{"prompt": "Say it."}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert run(["train", "sft", "model=tiny", "env=dataset", "env.path=rows.jsonl", "--dry-run"]) == 0
    assert "1 bad one left out" in capsys.readouterr().out
