"""The chat template that a model is used with, and what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.data.chat import ChatMask, Continuation, stop_ids
from rlpost.data.conversation import Conversation
from rlpost.data.history import History
from rlpost.data.template_choice import named_template, with_choice, with_defaults
from rlpost.errors import ConfigError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.tokenizer import load_tokenizer
from rlpost.settings import ModelSettings
from rlpost.settings.model import template_variables
from tests.says import Says

ASKED = [{"role": "user", "content": "2 + 2?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "4"}]
OFF = {"enable_thinking": False}
# how Qwen3 leaves thinking out, how SmolLM3 sets its default
QWEN3 = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
SMOLLM3 = (
    """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- macro mode() %}{{ '/think' if enable_thinking else '/no_think' }}{% endmacro -%}
{{- '<|im_start|>system\\n' + mode() + '<|im_end|>\\n' }}"""
    + QWEN3.partition("{%- if add_generation_prompt")[0]
    + """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)


def having(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = template, "models/Small-1B"
    return tokenizer


def rendered(tokenizer: Any, **variables: Any) -> str:
    return tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False, **variables)


@pytest.mark.parametrize("template", [QWEN3, SMOLLM3], ids=["qwen3", "smollm3"])
def test_what_a_template_is_told_is_as_if_each_rendering_said_it(template: str) -> None:
    plain, told = having(template), with_choice(having(template), None, OFF)
    expected = rendered(plain, **OFF)
    assert expected != rendered(plain)
    conversation = Conversation(task={}, messages=list(ASKED))
    Continuation(told).begin(conversation)
    assert conversation.prompt_text == expected
    assert History.from_chats([ASKED]).apply_chat_template(told) == [expected]
    ids, mask = ChatMask(told).encode(ANSWERED)
    prompt = plain(expected, add_special_tokens=False)["input_ids"]
    if template is QWEN3:  # the empty thought is the template's, so it is not trained
        assert ids[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True, True, False]  # 4, the end of the turn, a line break
    assert rendered(told, enable_thinking=True) == rendered(plain, enable_thinking=True)  # who renders can still say
    assert rendered(with_choice(told, None, {"enable_thinking": True})) == rendered(plain, enable_thinking=True)
    assert with_choice(told, None, OFF).chat_template == told.chat_template
    assert plain.chat_template == template


def test_a_variable_that_the_template_does_not_read_is_refused(says: Says) -> None:
    with says.refused("data", ConfigError, "enable_thinking"):
        with_choice(having(QWEN3), None, {"enable_thinkin": False})


@pytest.mark.parametrize("value", ['a"\n%}{{ x }}é\u2028\U0001f600\\n', [None, True, -1.5e3, {"a": []}], 3, False, ""])
def test_any_plain_value_arrives_as_it_is_and_runs_nothing(value: object) -> None:
    template = having(with_defaults("{{ value == given }}{{ value }}", {"value": value}))
    assert rendered(template, given=value) == f"True{value}"


def test_a_template_begins_as_it_did() -> None:
    for begins in ("\n\n{{ x }}", "  {% if true %}a{% endif %}", "\n{%- if true %}a{% endif %}", "b\n"):
        assert rendered(having(with_defaults(begins, {"y": 1}))) == rendered(having(begins))


def test_a_mapping_is_written_with_or_without_quotes() -> None:
    for text in ("{enable_thinking: false}", "{enable_thinking:False}"):
        assert template_variables("k", text) == OFF
    assert template_variables("k", '{"a": [1, "x: {y}"], "b": null}') == {"a": [1, "x: {y}"], "b": None}
    assert template_variables("k", None) == {}
    for bad in ("x", "[1]", "{messages: 1}"):
        with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs"):
            ModelSettings(chat_template_kwargs=bad)


def test_a_base_model_is_given_a_template_that_is_saved_with_it(tmp_path: Path) -> None:
    having(None).save_pretrained(tmp_path / "base")
    given = load_tokenizer(tmp_path / "base", ModelSettings(path="", chat_template="chatml"))
    assert rendered(given) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    given.save_pretrained(tmp_path / "trained")
    assert rendered(load_tokenizer(tmp_path / "trained")) == rendered(given)
    (tmp_path / "mine.jinja").write_text(QWEN3)
    own = ModelSettings(chat_template=f"{tmp_path}/mine.jinja", chat_template_kwargs="{enable_thinking: false}")
    load_tokenizer(tmp_path / "base", own).save_pretrained(tmp_path / "trained")
    assert rendered(load_tokenizer(tmp_path / "trained")) == rendered(having(QWEN3), **OFF)


def test_plain_ends_a_turn_with_the_end_of_a_text() -> None:
    tokenizer = having(None)
    tokenizer.eos_token = "<|endoftext|>"
    plain = with_choice(tokenizer, "plain", {})
    text = plain.apply_chat_template(ANSWERED, tokenize=False)
    assert text == "### User:\n2 + 2?\n\n### Assistant:\n4<|endoftext|>\n\n"
    ids, mask = ChatMask(plain).encode(ANSWERED)
    assert plain.decode([i for i, trained in zip(ids, mask, strict=True) if trained]) == "4<|endoftext|>"
    chatml = with_choice(tokenizer, "chatml", {})
    assert chatml.convert_ids_to_tokens(stop_ids(chatml)) == ["<|im_end|>", "<|endoftext|>"]  # where sampling stops
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.chat_template is None
    with pytest.raises(ConfigError, match=r"chat_template=gemma .*=plain"):
        with_choice(tokenizer, "gemma", {})


def test_a_template_that_is_none_is_refused_by_name_or_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{{ messages }}\n{% if %}")
    for name, message in {
        "chatlm": r"chatlm .*did you mean chatml\?",
        f"{tmp_path}/no.jinja": r"no\.jinja",
        "a\0b/c.jinja": r"a.b/c\.jinja",
        "a\ud800b/c.jinja": r"a.b/c\.jinja",
        f"{tmp_path}/bad.jinja": r"bad\.jinja, line 2: ",
    }.items():
        with pytest.raises(ConfigError, match=rf"model\.chat_template=.*{message}"):
            named_template(name)
