"""Sampled ids are carried forward as they are, and only what the environment said is tokenised."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from rlpost.data.chat import Continuation
from rlpost.data.conversation import Completion, Conversation
from rlpost.errors import DataError
from tests.chat_templates import FAMILIES, bytes_tokenizer, merging_tokenizer
from tests.says import Says

WORD = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "lookup", "description": "Look a word up.", "parameters": WORD}}
WITH_TOOLS = """\
{%- if tools -%}{{- '<|im_start|>system\nTools: ' + (tools | map(attribute='function') | list | tojson) -}}
{{- '<|im_end|>\n' -}}{%- endif -%}
"""


def sampled(tokenizer: Any, text: str, stop: int | None = None) -> Completion:
    """A reply sampled a letter at a time, which no tokenizer with merges would write so."""
    ids = [token for letter in text for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    ids.append(Continuation(tokenizer).end_of_turn if stop is None else stop)
    return Completion(ids, [-0.5] * len(ids), text, "stop", 0)


def begun(tokenizer: Any, *messages: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> Conversation:
    said = [{"role": role, "content": content} for role, content in messages]
    conversation = Conversation(task={}, messages=said, tools=tools or [])
    Continuation(tokenizer).begin(conversation)
    return conversation


def gone_on(tokenizer: Any, conversation: Conversation, role: str, content: str) -> None:
    conversation.messages.append({"role": role, "content": content})
    conversation.add_observation(Continuation(tokenizer).observation_ids(conversation))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("made", [bytes_tokenizer, merging_tokenizer], ids=["bytes", "merges"])
def test_the_ids_say_what_the_template_writes_and_keep_what_was_sampled(family: str, made: Any) -> None:
    tokenizer = made(FAMILIES[family])
    conversation = begun(tokenizer, ("user", "What is Four?"))
    space = " " if family == "mistral" else ""  # which its template writes before each answer, and its models sample
    replies = [sampled(tokenizer, space + text) for text in ("I think: Six.", "Four. Four.", "Six")]
    for reply, answer in zip(replies, ("Be brief.", "What?", None), strict=True):
        conversation.add_completion(reply)
        if answer:
            gone_on(tokenizer, conversation, "user", answer)

    whole = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    text = tokenizer.decode(conversation.prompt_ids + conversation.response_ids)
    assert whole.startswith(text)
    assert not whole[len(text) :].strip()  # the template may put a line break behind the last turn
    trained = [token for token, own in zip(conversation.response_ids, conversation.mask, strict=True) if own]
    assert trained == [token for reply in replies for token in reply.token_ids]
    assert [lp for lp, own in zip(conversation.log_probs, conversation.mask, strict=True) if not own] == [0.0] * (
        conversation.mask.count(0)
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma", "mistral")])
def test_a_template_that_nests_passes_the_check_for_users_and_tools(family: str) -> None:
    continuation = Continuation(bytes_tokenizer(FAMILIES[family]))
    continuation.check("user")
    continuation.check("tool", [TOOL])


def test_the_check_names_the_template_and_what_it_refuses(says: Says) -> None:
    tokenizer = copy(bytes_tokenizer(FAMILIES["gemma"]))
    tokenizer.name_or_path = "gemma"
    Continuation(tokenizer).check("user")
    with says.refused("data", DataError, "gemma"):
        Continuation(tokenizer).check("tool")
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with says.refused("data", DataError, "gemma"):
        Continuation(tokenizer).check("user")
    silent = copy(bytes_tokenizer(FAMILIES["chatml"]))
    silent.chat_template = silent.chat_template.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    with says.refused("data", DataError, "tool_role"):
        Continuation(silent).check("tool")


def test_tools_are_described_by_the_template_or_a_system_message(says: Says) -> None:
    knowing = copy(bytes_tokenizer(FAMILIES["chatml"]))
    knowing.chat_template = WITH_TOOLS + knowing.chat_template
    assert begun(knowing, ("user", "Hi"), tools=[TOOL]).prompt_text.startswith('<|im_start|>system\nTools: [{"name": ')

    ignorant = bytes_tokenizer(FAMILIES["chatml"])
    says("tools", begun(ignorant, ("system", "Be brief."), ("user", "Hi"), tools=[TOOL]).prompt_text)
    assert begun(ignorant, ("user", "Hi"), tools=[TOOL]).prompt_text.count("<|im_start|>system") == 1
    assert "lookup" not in begun(ignorant, ("user", "Hi")).prompt_text


def test_plain_text_is_tokenised_as_the_tokenizer_does_and_goes_on_without_a_template() -> None:
    tokenizer = bytes_tokenizer(FAMILIES["llama3"])
    conversation = Conversation(task={}, messages=[{"role": "user", "content": "Once"}], chat=False)
    Continuation(tokenizer).begin(conversation)
    assert tokenizer.decode(conversation.prompt_ids) == "<|begin_of_text|>Once"
    conversation.add_completion(sampled(tokenizer, " upon", stop=tokenizer.eos_token_id))
    gone_on(tokenizer, conversation, "user", " a time")
    assert tokenizer.decode(conversation.response_ids) == " upon<|eot_id|> a time"
