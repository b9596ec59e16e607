"""What a chat template is told holds in training, in its checkpoints, in evaluation and in fine-tuning alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlpost.assemble import evaluate_command
from rlpost.assemble_sft import assemble_sft
from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT
from rlpost.chat import Chat
from rlpost.config.compose import compose
from rlpost.model.load import load_model, load_tokenizer, locate_model, tiny_tokenizer
from rlpost.policies import TransformersWrapper
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings import ModelSettings, SamplingSettings
from rlpost.settings.run import RunRequest
from rlpost.train.grpo import train

TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking | default(true) %}{{- '<think></think>' }}{%- endif %}{%- endif %}"""
OPENING = "<|im_start|>assistant\n<think></think>"


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
    assert train(composed.settings, request) == 0
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
