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
from rlpost.settings.commands import RunRequest
from rlpost.train.assemble import evaluate_command
from rlpost.train.sft import assemble as assemble_sft
from tests.trainings import train_in

TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}{%- endif %}"""
OPENING = "<|im_start|>assistant\n<think></think>"
# to a model that thinks unless it is told not to, under a limit that seldom holds a thought and an answer
CUT_SHORT = (
    "the model thinks before it answers, and {key}={limit} will often cut it off in its thoughts: "
    "add model.chat_template_kwargs={{enable_thinking:false}}, or give {key} 1024 or more"
)
WITHOUT_THINKING = "model.chat_template_kwargs={enable_thinking:false}"


def test_a_base_model_is_trained_evaluated_and_tuned_with_the_template_it_is_given(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = shutil.copytree(tiny_folder, tmp_path / "base")
    bare = tiny_tokenizer()
    bare.chat_template = None
    for file in base.glob("*.jinja"):
        file.unlink()
    bare.save_pretrained(base)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    (tmp_path / "recipe.yaml").write_text(
        "command: train grpo\nmodel.chat_template: ./mine.jinja\n"
        "model.chat_template_kwargs: {enable_thinking: false}\nmodel.path: ./base\npolicy: scripted\n"
        "model.autocast: none\nprompts_per_step: 1\ngroup_size: 2\neval.enabled: false\nsteps: 1\n"
    )
    composed = compose(TRAIN_GRPO, ["recipe=./recipe.yaml"])
    request = RunRequest(tmp_path / "r", None, composed.overrides, ["rlpost"], composed.yaml, True)
    assert TRAIN_GRPO.train(composed.settings, request) == 0
    assert read_rollouts(tmp_path / "r", 1)[0]["prompt"].endswith(OPENING)

    asked = ["policy=scripted", "env.limit=1", f"model={tmp_path}/r"]
    told: list[str] = []
    evaluated = evaluate_command(compose(EVAL, asked).settings, note=told.append)
    assert evaluated.played[0].prompt_text.endswith(OPENING)
    assert told == []  # thinking is off
    thinking = [*asked, "model.chat_template_kwargs={enable_thinking: true}"]
    evaluated = evaluate_command(compose(EVAL, thinking).settings, note=told.append)
    assert evaluated.played[0].prompt_text.endswith("<|im_start|>assistant\n")
    assert "add model.chat_template_kwargs={enable_thinking:false}" in told[0]

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


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (["env.max_completion_tokens=16"], True),
        (["env.max_completion_tokens=16", WITHOUT_THINKING], False),
        (["env.max_completion_tokens=1024"], False),
    ],
    ids=["cut short", "without thinking", "with room"],
)
def test_a_training_says_first_that_its_limit_cuts_thoughts_short(
    words: list[str], is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text(TEMPLATE)
    small = ["model=tiny", "policy=scripted", "steps=1", "eval.enabled=false", "prompts_per_step=1", "group_size=2"]
    assert train_in(TRAIN_GRPO, Path("r"), [*small, "model.chat_template=./mine.jinja", *words]) == 0
    before_its_step, _, _ = capsys.readouterr().out.partition("\nstep 1/1 ")
    said = [line for line in before_its_step.splitlines() if "thoughts" in line]
    told = CUT_SHORT.format(key="env.max_completion_tokens", limit=16)
    assert len(said) == is_said
    assert all(line.startswith("with the chat template of ") and line.endswith(f" {told}") for line in said)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (["--max-tokens", "3"], True),
        (["--max-tokens", "3", WITHOUT_THINKING], False),
        (["--max-tokens", "1024"], False),
    ],
    ids=["cut short", "without thinking", "with room"],
)
def test_a_conversation_begins_with_the_note_that_its_limit_cuts_thoughts_short(
    words: list[str], is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"2 + 2?")))
    assert run(["chat", "tiny", "model.chat_template=./mine.jinja", *words]) == 0
    captured = capfd.readouterr()
    assert "thoughts" not in captured.out  # which is the reply alone
    said = [line for line in captured.err.splitlines() if "thoughts" in line]
    told = CUT_SHORT.format(key="--max-tokens", limit=3)
    assert len(said) == is_said
    assert all(line.startswith("note: with the chat template of ") and line.endswith(f" {told}") for line in said)
