"""`--dry-run`: what is learned and measured, and the question about a rate that nobody uses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import CommandLine
from tests.model.test_models import write_gguf
from tests.says import Says

pytestmark = pytest.mark.thorough

Planned = Callable[[str], dict[str, str]]


@pytest.fixture
def planned(rlpost: CommandLine) -> Planned:
    """The lines of a plan by their first word, but for memory and disk, which differ between machines."""

    def plan(line: str) -> dict[str, str]:
        lines = [line.partition(" ") for line in rlpost.lines(f"train {line} --dry-run")]
        return {label: text.strip() for label, _, text in lines if label not in ("memory", "disk")}

    return plan


@pytest.mark.parametrize(
    "line",
    [
        "grpo",
        "grpo loss=dapo loss.kl_coef=0.01 advantage.estimator=rloo optim.lr=2e-4 optim.schedule=linear "
        "optim.warmup_steps=5 lora.enabled=true lora.rank=8 eval.k=[1,8] eval.every=10 eval.limit=50",
        "expert-iteration eval.enabled=false",
        "sft eval.accuracy=true loss.kl_coef=0.1",
    ],
    ids=["plain", "changed", "rounds", "sft"],
)
def test_a_plan_says_loss_rate_adapter_and_evaluation(line: str, planned: Planned, says: Says) -> None:
    plan = planned(line)
    says(
        "train",
        "\n".join(f"{label:8}{plan[label]}" for label in ("loss", "lr", "lora", "eval", "note") if label in plan),
    )


def test_a_plan_of_a_mix_has_a_line_a_source_with_its_share(rlpost: CommandLine, says: Says) -> None:
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = ["arithmetic weight=3 max_completion_tokens=16", "dataset path=rows.jsonl reward=[exact,number]"]
    plan = rlpost.lines(["train", "grpo", "env=mix", f"env.sources={json.dumps(sources)}", "--dry-run"])
    lines = [line for line in plan if line.startswith(("data ", "source "))]
    assert [re.findall(r"[\d.]+%", line) for line in lines] == [[], ["75.0%"], ["25.0%"]]
    says("train", "\n".join(lines))


@pytest.mark.parametrize(
    ("line", "bounds"),
    [
        ("grpo optim.lr=1e-3", "1e-08 to 0.0001"),
        ("grpo optim.lr=1e-9", "1e-08 to 0.0001"),
        ("grpo optim.lr=5e-7 lora.enabled=true", "1e-06 to 0.001"),
        ("sft optim.lr=0.1", "1e-07 to 0.001"),
    ],
    ids=["high", "low", "low for an adapter", "high for sft"],
)
def test_a_rate_that_nobody_uses_is_questioned_in_one_line(
    line: str, bounds: str, planned: Planned, rlpost: CommandLine, says: Says
) -> None:
    question = planned(line)["note"]
    assert question.endswith(bounds)
    says("train", question)
    assert rlpost.json(f"train {line} --dry-run")["notes"] == [question]


# What the files of a model say before it is loaded


@pytest.fixture
def folder(here: Path, tiny_folder: Path) -> Path:
    """A copy of the tiny model in ./m whose weights are NaN: loading them would be an error."""
    shutil.copytree(tiny_folder, "m")
    file = here / "m" / "model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:begin] + b"\xff" * (len(content) - begin))
    return Path("m")


@pytest.mark.parametrize("verb", ["train grpo", "train sft", "eval", "doctor"])
def test_model_without_a_template_is_refused_before_it_is_loaded(
    verb: str, folder: Path, rlpost: CommandLine, says: Says
) -> None:
    (folder / "chat_template.jinja").unlink()
    dry = "--dry-run" if verb.startswith("train") else ""
    says("train", rlpost.refused(f"{verb} model=./m {dry}"))
    rlpost("train grpo model=./m model.chat_template=chatml --dry-run")


def test_template_whose_end_the_tokenizer_lacks_is_refused(folder: Path, rlpost: CommandLine, says: Says) -> None:
    says("train", rlpost.refused("train grpo model=./m model.chat_template=llama3 --dry-run"))


def test_plan_says_where_a_turn_ends_if_texts_end_elsewhere(folder: Path, planned: Planned, says: Says) -> None:
    assert "note" not in planned("grpo model=./m")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|endoftext|>"}))
    says("train", planned("grpo model=./m")["note"])


def test_gguf_without_a_template_is_refused_before_it_is_converted(rlpost: CommandLine, says: Says) -> None:
    Path("folder").mkdir()
    write_gguf(Path("folder/base.gguf"))
    refused = [rlpost.refused(f"train grpo model={m} --dry-run") for m in ("folder/base.gguf", "./folder")]
    says("train", "".join(refused))
    Path("cut.gguf").write_bytes(Path("folder/base.gguf").read_bytes()[:3000])
    refused = rlpost.refused("train grpo model=./cut.gguf --dry-run")
    assert "cut.gguf" in refused
    plan = rlpost.lines("train grpo model=./folder model.chat_template=chatml --dry-run")
    assert any(line.startswith("memory  unknown") for line in plan)


@pytest.mark.parametrize(
    ("config", "reason", "code"),
    [
        ({"model_type": "lfm2"}, "other log-probs", 0),
        ({"model_type": "no_such_model"}, "no_such_model", 2),
    ],
)
def test_limits_of_vllm_and_transformers_are_told_beforehand(
    config: dict[str, Any], reason: str, code: int, folder: Path, rlpost: CommandLine
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert reason in rlpost.refused("train grpo model=./m policy=vllm --dry-run")
    rlpost("train grpo model=./m policy=transformers --dry-run", code)


def test_a_plan_says_which_rows_it_has_read(tiny_folder: Path, rlpost: CommandLine) -> None:
    rows = [{"prompt": f"Say {n:02}.", "answer": str(n)} for n in range(51)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"model={tiny_folder} env=dataset env.path=rows.jsonl env.reward=exact env.held_out=0.2"

    plan = rlpost.json(f"train grpo {words} --dry-run")
    lines = rlpost(f"train grpo {words} --dry-run")

    few = next(note for note in plan["notes"] if "few" in note)
    held_out = int(few.partition(" rest on ")[2].partition(" ")[0])
    assert f"{51 - held_out} prompts, {held_out} held out" in lines
    assert f"eval    {held_out} held-out" in lines
    assert few in lines


def test_a_plan_counts_the_bad_rows_that_are_left_out(rlpost: CommandLine) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(40)] + [{"prompt": "Say it."}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = rlpost("train sft model=tiny env=dataset env.path=rows.jsonl --dry-run")
    assert ", 1 bad " in plan
