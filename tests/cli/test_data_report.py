"""`rlpost data report`: what a file of rows holds, in the forms in which users have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.envs.build import build_env
from rlpost.errors import DataError
from tests.command_line import CommandLine
from tests.says import Says

Reported = Callable[..., Any]


@pytest.fixture
def reported(rlpost: CommandLine) -> Reported:
    """What a report says, as JSON."""
    return lambda words, code=0: rlpost.json(f"data report {words} model=tiny", code)


def test_alpaca_is_known_by_its_columns_in_every_training(reported: Reported) -> None:
    rows = [{"instruction": f"Add {n}.", "input": "to 1" if n % 2 else "", "output": str(n + 1)} for n in range(40)]
    Path("alpaca.json").write_text(json.dumps(rows))
    found = reported("alpaca.json")
    assert reported("env.path=alpaca.json") == found  # the form in which other verbs take the file
    assert "Alpaca" in found["form"]
    assert sum(split["rows"] for split in found["splits"].values()) == 40
    settings = compose(TRAIN_GRPO, ["env=dataset", "env.path=alpaca.json", "env.reward=number"]).settings
    env = build_env(settings.env, num_prompts=40, group_size=1, seed=0)
    asked = {c.query: c.task for c in env.draw(40)}
    assert asked["Add 3.\n\nto 1"]["output"] == "4"
    assert "Add 2." in asked
    env.close()


def test_sharegpt_and_its_speakers_under_role_are_read_alike(reported: Reported) -> None:
    chats = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"conversations": [{"role": "human", "content": "Hey"}, {"role": "gpt", "content": "Ho"}]},
    ]
    lines = [*map(json.dumps, chats), '{"conversations": [', json.dumps({"conversations": []})]
    Path("chats.jsonl").write_text("\n".join(lines))
    found = reported("chats.jsonl env.held_out=0")
    assert "conversations" in found["form"]
    assert found["splits"]["train"]["rows"] == 2
    assert found["bad"] == {
        "rows": 4,
        "bad": 2,
        "first": [{"row": f"chats.jsonl, row {number}", "reason": ANY} for number in (3, 4)],
    }
    words = ["env=dataset", "env.path=chats.jsonl", "env.reward=contains", "env.limit=2", "env.held_out=0"]
    Path("chats.jsonl").write_text("\n".join(json.dumps(chat | {"answer": "Ho"}) for chat in chats))
    env = build_env(compose(TRAIN_GRPO, words).settings.env, num_prompts=2, group_size=1, seed=0)
    assert {c.query for c in env.draw(2)} == {"Hi", "Hey"}
    env.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.jsonl", '[{"question": "1 + 1?", "answer": "2"}]'),
        ("pretty.jsonl", '[\n {\n  "question": "1 + 1?"\n }\n]'),
    ],
    ids=["a list in a line", "a list over lines"],
)
def test_a_file_without_a_good_row_is_reported_and_exits_with_3(
    reported: Reported, rlpost: CommandLine, name: str, text: str, says: Says
) -> None:
    Path(name).write_text(text)
    found = reported(name, 3)
    assert found["bad"]["bad"] == found["bad"]["rows"] > 0
    says("data", found["bad"]["first"][0]["reason"])
    assert all(split["lengths"] == {} for split in found["splits"].values())
    assert "tokens:" not in rlpost(f"data report {name} model=tiny", 3)


def test_all_of_a_report_is_said_in_words(reported: Reported, rlpost: CommandLine, says: Says) -> None:
    def chat(prompt: str, *answer: str) -> str:
        said = [{"role": "assistant", "content": text} for text in answer]
        return json.dumps({"messages": [{"role": "user", "content": prompt}, *said]})

    Path("rows").mkdir()
    lines = [chat("a", "1"), "", chat("b", "12"), chat("a", "1"), '{"messages":', chat("c"), '{"messages": []}']
    Path("rows/train.jsonl").write_text("\n".join(lines))
    Path("rows/test.jsonl").write_text("\n".join([chat("b", "1"), chat("d", "1")]))
    # a token a byte and a marker: <|im_start|>user\n, the prompt, <|im_end|>\n: 6 + 1 + 2; <|im_start|>assistant\n, the
    # answer, <|im_end|>\n: 11 + 1 or 2 + 2
    shown = rlpost("data report rows model=tiny")
    assert re.findall(r"tokens: .* (\d+), 95% .* (\d+), .* (\d+)", shown) == [("23", "24", "24"), ("23", "23", "23")]
    says("data", shown)
    found = reported("rows")
    assert found["template"] in shown
    assert (found["shared"], found["splits"]["train"]["repeated"]) == (1, 1)
    assert found["splits"]["test"]["lengths"] == {"median": 23, "95% up to": 23, "longest": 23}


def test_conversations_that_end_with_the_user_are_prompts(reported: Reported) -> None:
    chats = [[{"role": role, "content": str(n)} for role in ("user", "assistant", "user")] for n in range(20)]
    Path("asks.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    assert reported("asks.jsonl")["form"].startswith("prompts ")
    words = ["env=dataset", "env.path=asks.jsonl", "env.reward=contains", "env.held_out=0", "env.shuffle=false"]
    with pytest.raises(DataError, match="missing"):  # a built-in reward compares with an answer
        build_env(compose(TRAIN_GRPO, words).settings.env, num_prompts=1, group_size=1, seed=0).draw()
    Path("asks.jsonl").write_text("\n".join(json.dumps({"messages": chat, "answer": "1"}) for chat in chats))
    env = build_env(compose(TRAIN_GRPO, words).settings.env, num_prompts=1, group_size=1, seed=0)
    assert env.draw()[0].messages == chats[0]
    env.close()


def test_preferences_are_reported_by_that_name(reported: Reported) -> None:
    chats = {name: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": name}] for name in ("a", "b")}
    rows = [{"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, {"chosen": chats["a"], "rejected": chats["b"]}]
    for row, setting in zip(rows, ("completion_column", "prompt_column"), strict=True):
        Path("pairs.jsonl").write_text(json.dumps(row))
        found = reported("pairs.jsonl env.held_out=0")
        assert found["form"].startswith("preferences ")
        assert f"env.{setting}=chosen" in found["form"]
        assert (found["splits"]["train"]["rows"], found["bad"]["bad"]) == (1, 0)


def test_what_the_template_refuses_is_told_with_the_way_out(rlpost: CommandLine, says: Says) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    Path("tools.jsonl").write_text(
        json.dumps({"messages": [*chat, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]})
    )
    says("data", rlpost("data report tools.jsonl model=tiny env.held_out=0"))
    said = rlpost("data report tools.jsonl model=tiny model.chat_template=qwen env.held_out=0")
    assert "chat_template=" not in said


def test_what_nothing_reads_is_named_wherever_rows_are_looked_at(reported: Reported, rlpost: CommandLine) -> None:
    user, answer = {"role": "user", "mood": "calm"}, {"role": "assistant", "content": "Ho"}
    rows = [{"messages": [user | {"content": f"Hi {n}"}, answer], "id": n} for n in range(30)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    unused = reported("chats.jsonl")["not_used"]
    assert [(name.split()[0], count) for name, count in unused.items()] == [("id", 30), ("mood", 30)]
    told = ", ".join(f"{name} (30 rows)" for name in unused)
    words = "env=dataset env.path=chats.jsonl model=tiny"
    for line in (
        "data report chats.jsonl model=tiny",
        f"data preview {words}",
        f"train sft {words} --dry-run",
        f"train sft {words} steps=1 eval.enabled=false --out run",
    ):
        assert told in " ".join(rlpost(line).split())


def test_rows_without_a_prompt_are_refused_with_their_columns(rlpost: CommandLine) -> None:
    Path("rows.jsonl").write_text('{"text_a": "x", "label": 1}\n{"text_a": "y", "label": 0}\n')
    message = rlpost("data report rows.jsonl model=tiny", 3)
    assert "text_a, label; " in message
    assert "env.prompt_column" in message
