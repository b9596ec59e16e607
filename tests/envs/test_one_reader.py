"""One row is one prompt: GRPO, fine-tuning and pairs read the same ids of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.data.encoding import Encoder, PairEncoder
from rlpost.data.rendering import template_name
from rlpost.envs.checks import check_template
from rlpost.policies.scripted import ScriptedPolicy
from tests.chat_templates import FAMILIES, Family, bytes_tokenizer
from tests.envs.own_rows import answered, env_of
from tests.says import Says

QWEN = bytes_tokenizer(FAMILIES["qwen"])
THINKS = bytes_tokenizer(
    Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>\n' if deep else '') }}{% endif %}",
        FAMILIES["qwen"].special,
        "<|im_end|>",
    )
)
USER = {"role": "user", "content": "2 and 3?"}
SAID = {"role": "assistant", "content": "Hm."}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "5", "name": "add"}
PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "2 and 3?"},
    "messages": {"prompt": [USER, SAID, USER]},
    "parts": {"prompt": [USER | {"content": [{"type": "text", "text": text} for text in ("2 and", " 3?")]}]},
    "JSON": {"prompt": json.dumps([USER])},
    "a system message": {"prompt": "2 and 3?", "system": "Be brief."},
    "tools": {"prompt": "2 and 3?", "tools": [ADD]},
    "an earlier call": {"prompt": [USER, CALL, RESULT, USER], "tools": json.dumps([ADD])},
    "a variable": {"prompt": "2 and 3?", "chat_template_kwargs": {"deep": True}},
    "a beginning of the reply": {"prompt": [USER, {"role": "assistant", "content": "So "}]},
    "a question": {"question": "2 and 3?"},
}


@pytest.mark.parametrize("settings", [{}, {"system_prompt": "Add."}, {"prompt_template": "Say: {x}"}])
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("tokenizer", [QWEN, THINKS], ids=["qwen", "thinks"])
def test_a_row_is_one_prompt_for_every_training(
    tokenizer: Any, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    row = PROMPTS[name] | {"x": "?"}
    if ("prompt_template" in settings and not isinstance(row.get("prompt", ""), str)) or "JSON" in name:
        settings = {}
    [conversation] = env_of(tmp_path, [row | {"answer": "5"}], **settings).draw()
    [request] = ScriptedPolicy([], tokenizer).requests([conversation])
    assert request is not None
    shown = env_of(tmp_path, [row | {"completion": "five", "answer": "5"}], **settings).demonstrated()
    sample = Encoder(tokenizer).encode(shown[0])
    assert sample.reason == ""
    assert sample.ids[: sample.prompt_length] == request.prompt_ids
    paired = env_of(tmp_path, [row | {"chosen": "five", "rejected": "six"}], **settings).paired()
    pair = PairEncoder(tokenizer, 10_000).encode(paired[0])
    assert pair.reason == ""
    assert pair.chosen.prompt_length == (length := len(request.prompt_ids))
    assert pair.chosen.ids[:length] == pair.rejected.ids[:length] == request.prompt_ids


def test_a_variable_that_the_template_does_not_read_is_named(tmp_path: Path) -> None:
    row = PROMPTS["a variable"]
    env = env_of(tmp_path, [row | {"answer": "5"}])
    env.start()
    [note] = check_template(env, QWEN)
    assert "deep" in note
    assert template_name(QWEN) in note
    assert check_template(env, THINKS) == []
    [shown] = env_of(tmp_path, [row | {"completion": "five", "answer": "5"}]).demonstrated()
    [pair] = env_of(tmp_path, [row | {"chosen": "five", "rejected": "six"}]).paired()
    for tokenizer, told in ((QWEN, [note]), (THINKS, [])):
        for sample in (Encoder(tokenizer).encode(shown), PairEncoder(tokenizer, 1000).encode(pair).chosen):
            assert [each for each in sample.notes if each.startswith("not used")] == told


def test_the_reply_is_judged_with_its_given_beginning(tmp_path: Path) -> None:
    row = {"prompt": [USER, {"role": "assistant", "content": "So "}], "answer": "So five"}
    env = env_of(tmp_path, [row])
    [conversation] = env.draw()
    ScriptedPolicy(["five"], QWEN).reply([conversation])
    env.advance([conversation])
    assert (conversation.reply, conversation.reward) == ("So five", 1.0)
    assert conversation.messages == [USER, {"role": "assistant", "content": "So five"}]


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "a", "reward_model": {"ground_truth": "5"}}, {"answer_column": "reward_model.ground_truth"}),
        ({"prompt": "a", "answer": ["five", "5"]}, {}),
        ({"prompt": "a", "answer": [6, 5]}, {}),
    ],
)
def test_an_answer_may_stand_in_an_object_and_may_be_several(
    row: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    env = env_of(tmp_path, [row], **settings)
    for reply, reward in (("5", 1.0), ("7", 0.0)):
        [conversation] = answered(env, reply)
        assert (conversation.reward, conversation.accuracy_lenient) == (reward, reward)


def test_what_neither_prompt_nor_reward_reads_is_said(tmp_path: Path, says: Says) -> None:
    row = {"prompt": [USER | {"mood": "calm"}], "answer": "5", "source": "sums", "level": 3, "notes": ""}
    (tmp_path / "r.py").write_text("def score(completions, level):\n    return [1.0 for _ in completions]\n")
    env = env_of(tmp_path, [row], reward=[f"{tmp_path}/r.py:score"])
    says("data", env.not_used)
    env.close()
