"""What a chat template is told holds in training, in its checkpoints, in evaluation and in fine-tuning alike."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT
from rlpost.chat import Chat
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.load import load_model
from rlpost.model.locate import locate_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import TransformersWrapper
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings import ModelSettings, SamplingSettings
from rlpost.train.assemble import evaluate_command
from rlpost.train.sft import assemble as assemble_sft
from tests.says import Says
from tests.trainings import train_in

TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}{%- endif %}"""
OPENING = "<|im_start|>assistant\n<think></think>"
WITHOUT_THINKING = "model.chat_template_kwargs={enable_thinking:false}"
LIMITS = {"cut short": (3, []), "without thinking": (3, [WITHOUT_THINKING]), "with room": (1024, [])}


@pytest.fixture(autouse=True)
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text(TEMPLATE)


def test_base_model_keeps_its_template_everywhere(tmp_path: Path, tiny_folder: Path) -> None:
    base = shutil.copytree(tiny_folder, tmp_path / "base")
    bare = tiny_tokenizer()
    bare.chat_template = None
    for file in base.glob("*.jinja"):
        file.unlink()
    bare.save_pretrained(base)
    (tmp_path / "recipe.yaml").write_text(
        "command: train grpo\nmodel.chat_template: ./mine.jinja\n"
        "model.chat_template_kwargs: {enable_thinking: false}\nmodel.path: ./base\npolicy: scripted\n"
        "model.autocast: none\nprompts_per_step: 1\ngroup_size: 2\neval.enabled: false\nsteps: 1\n"
    )
    assert train_in(TRAIN_GRPO, tmp_path / "r", ["recipe=./recipe.yaml"]) == 0
    assert read_rollouts(tmp_path / "r", 1)[0]["prompt"].endswith(OPENING)

    asked = ["policy=scripted", "env.limit=1", f"model={tmp_path}/r"]
    told: list[str] = []
    evaluated = evaluate_command(compose(EVAL, asked).settings, note=told.append)
    assert evaluated.played[0].prompt_text.endswith(OPENING)
    assert told == []  # thinking is off
    thinking = [*asked, "model.chat_template_kwargs={enable_thinking: true}"]
    evaluated = evaluate_command(compose(EVAL, thinking).settings, note=told.append)
    assert evaluated.played[0].prompt_text.endswith("<|im_start|>assistant\n")
    assert WITHOUT_THINKING in told[0]

    composed = compose(TRAIN_GRPO, ["recipe=./recipe.yaml"])
    words = [word for word in composed.overrides if word.startswith("model.")]
    sample = assemble_sft(compose(TRAIN_SFT, [*words, "eval.enabled=false"]).settings).samples.rows[0]
    text = bare.decode(sample.ids)
    assert OPENING in text
    trained = bare.decode([i for i, is_trained in zip(sample.ids, sample.mask, strict=True) if is_trained])
    assert trained == text[text.index(OPENING) + len(OPENING) :].rstrip("\n")

    tokenizer = load_tokenizer(locate_model(str(tmp_path / "r")))
    model = load_model(locate_model(str(tmp_path / "r")), ModelSettings(path=str(tmp_path / "r")))
    chat = Chat(TransformersWrapper(model, tokenizer), sampling=SamplingSettings(), max_tokens=4)
    assert tokenizer.decode(chat._render([{"role": "user", "content": "2 + 2?"}])).endswith(OPENING)


@pytest.mark.parametrize("case", LIMITS)
def test_training_notes_a_limit_too_short_for_thinking(
    case: str, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    limit, words = LIMITS[case]
    small = ["model=tiny", "policy=scripted", "steps=1", "eval.enabled=false", "prompts_per_step=1", "group_size=2"]
    words = [*small, "model.chat_template=./mine.jinja", f"env.max_completion_tokens={limit}", *words]
    assert train_in(TRAIN_GRPO, Path("r"), words) == 0
    before_its_step, _, _ = capsys.readouterr().out.partition("\nstep 1/1 ")
    notes = [line for line in before_its_step.splitlines() if WITHOUT_THINKING in line]
    assert len(notes) == (case == "cut short")
    if notes:
        says("train", notes[0])


@pytest.mark.parametrize("case", LIMITS)
def test_chat_notes_a_limit_too_short_for_thinking(
    case: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], says: Says
) -> None:
    limit, words = LIMITS[case]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"2 + 2?")))
    assert run(["chat", "tiny", "model.chat_template=./mine.jinja", "--max-tokens", str(limit), *words]) == 0
    captured = capfd.readouterr()
    assert WITHOUT_THINKING not in captured.out  # which is the reply alone
    notes = [line for line in captured.err.splitlines() if WITHOUT_THINKING in line]
    assert len(notes) == (case == "cut short")
    if notes:
        says("chat", notes[0])
