"""Words of other tools and mistakes of a shell: each is answered with what leads to the right word."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.says import Says

pytestmark = pytest.mark.thorough

LONG = "a" * 300

# what a user types, by the exit code
HINTS = {
    2: f"""
        train grpo model=Qwen3-0.6B
        train grpo model=llama3
        train grpo model=gemma
        train grpo model=qwen2.5
        train grpo model=qwen2.5-7b
        train grpo loss=dpo
        train sft loss=orpo
        train grpo loss=ppo
        train grpo policy=hf
        train grpo tracking=tb
        train grpo optim=adamw_torch
        train grpo env=openai/gsm8k
        train grpo lora.r=16
        train grpo wandb=true
        train grpo report_to=wandb
        train grpo per_device_train_batch_size=4
        train sft per_device_train_batch_size=4
        train grpo gradient_accumulation_steps=8
        train grpo data.train_files=rows.jsonl
        train grpo --learning_rate 1e-5
        train grpo --lr 1e-5
        train grpo --temperature 0.7
        train grpo --report_to wandb
        train sft --warmup_ratio 0.1
        train grpo --lora_dropout 0.1
        train grpo --output_dir out
        train simpo
        train ipo
        train dpo loss.label_smooth=0.1
        train ppo
        train dapo
        train rft
        train grpo env=dataset env.reward=number env.path=my rows.jsonl
        train grpo env=dataset env.reward=number env.path=my own rows.jsonl
        train grpo env.system_prompt=Be brief. steps=3
        train grpo recipe=./plan2.yaml
        train grpo env=dataset env.path=rows.jsonl env.reward=./row.py:f
        train grpo model=./noted
        train grpo model=tiny qwen
        train grpo model=nope.gguf
        train grpo short.gguf
        train grpo model=owner/Some-Model-GGUF
        train grpo model.path=x/{LONG}
        train grpo --name {LONG}
        train grpo model.path={LONG}
        train grpo env=dataset env.path=rows.jsonl env.reward={LONG}.py:score
        train grpo --out {LONG}
        eval eval.limit=50
        eval list2
        eval sweep/lr-1
        eval compare {LONG} b
        config show --recipe {LONG}.yaml
        resume first
        resume tuned
        resume
        merge first
        serve first
        serve elsewhere/first
        generate first
        evaluate first
        finetune
    """,
    3: """
        train grpo env=dataset env.reward=number env.path=rowz.jsonl
        train grpo env=dataset env.reward=number env.path=rows.jsnl
        train grpo env=dataset env.reward=number env.path=./notes.jsonl
    """,
}


@pytest.fixture
def placed() -> None:
    """What the words above point at."""
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(4)]
    for name in ("rows.jsonl", "my rows.jsonl", "my own rows.jsonl"):
        Path(name).write_text("\n".join(rows))
    Path("short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    for name in ("notes.txt", "plan.yaml", "roww.py"):
        Path(name).touch()
    for name in ("mine", "list2", "sweep/lr-1", "tuned"):
        Path("runs", name, "checkpoints").mkdir(parents=True)
    Path("runs/tuned/command.txt").write_text("rlpost train sft --name tuned\n")


@pytest.mark.parametrize("code", HINTS)
def test_a_word_of_another_tool_is_answered_with_the_right_one(
    code: int, placed: None, rlpost: CommandLine, says: Says
) -> None:
    shown = rlpost.refusals(HINTS[code], code).replace(LONG, "aaa")
    assert max(map(len, shown.splitlines())) < 400
    says("train", shown)


@pytest.mark.parametrize("verb", ["train grpo", "eval"])
def test_a_name_of_two_lines_is_refused_in_one(verb: str, rlpost: CommandLine) -> None:
    assert r"--name 'a\nb'" in rlpost.refused([*verb.split(), "--name", "a\nb"])


@pytest.mark.parametrize(
    "line",
    [
        "grpo actor.optim.lr=1e-6 rollout.n=4 lora_dropout=0.1 stesp=3 bananas=1 model=phi4 use_peft=false",
        "sft --num_train_epochs 3 --lora-r=8 --steps 5 --resum auto lora_alpha=16 --save_path out --plain",
    ],
    ids=["settings", "flags"],
)
def test_all_unknown_words_are_answered_at_once(line: str, rlpost: CommandLine, says: Says) -> None:
    assert rlpost(f"train {line}", 2) == ""
    says("train", rlpost.err)


AXOLOTL = """\
base_model: Qwen/Qwen2.5-0.5B-Instruct
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
val_set_size: 0.05
output_dir: ./out
wandb_project:
lora_target_linear: true
special_tokens:
  pad_token: "<|end|>"
"""


def test_all_lines_of_another_tools_file_are_answered_at_once(rlpost: CommandLine, says: Says) -> None:
    for above in ("", "command: train sft\n"):
        Path("axolotl.yaml").write_text(above + AXOLOTL)
        out = rlpost("train sft recipe=axolotl.yaml", 2)
        assert out == ""
        numbers = [int(number) for number in re.findall(r"(?m)^ +line (\d+)", rlpost.err)]
        assert numbers == [number + bool(above) for number in (1, 2, 5, 6, 7, 8, 10)]
        says("train", rlpost.err)
