"""`rlpost data report`: what a file of rows holds, in the forms in which users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.envs.build import build_env
from rlpost.errors import DataError


def reported(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert run(["data", "report", *words, "model=tiny", "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_alpaca_is_known_by_its_columns_in_every_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"instruction": f"Add {n}.", "input": "to 1" if n % 2 else "", "output": str(n + 1)} for n in range(40)]
    Path("alpaca.json").write_text(json.dumps(rows))
    found = reported(capsys, "alpaca.json")
    assert reported(capsys, "env.path=alpaca.json") == found  # as the other verbs are told
    assert found["form"] == "demonstrations, Alpaca (instruction, input, output): for rlpost train sft"
    assert sum(split["rows"] for split in found["splits"].values()) == 40
    settings = compose(TRAIN_GRPO, ["env=dataset", "env.path=alpaca.json", "env.reward=number"]).settings
    env = build_env(settings.env, num_prompts=40, group_size=1, seed=0)
    asked = {c.query: c.task for c in env.draw(40)}
    assert asked["Add 3.\n\nto 1"]["output"] == "4"
    assert "Add 2." in asked
    env.close()


def test_sharegpt_and_its_speakers_under_role_are_read_alike(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"conversations": [{"role": "human", "content": "Hey"}, {"role": "gpt", "content": "Ho"}]},
    ]
    lines = [*map(json.dumps, chats), '{"conversations": [', json.dumps({"conversations": []})]
    Path("chats.jsonl").write_text("\n".join(lines))
    found = reported(capsys, "chats.jsonl", "env.held_out=0")
    assert found["form"] == "demonstrations, messages in conversations: for rlpost train sft"
    assert found["splits"]["train"]["rows"] == 2
    assert found["bad"] == {
        "rows": 4,
        "bad": 2,
        "first": [
            {"row": "chats.jsonl, row 3", "reason": "is not JSON (Expecting value, character 20)"},
            {"row": "chats.jsonl, row 4", "reason": "field 'conversations': has no messages"},
        ],
    }
    words = ["env=dataset", "env.path=chats.jsonl", "env.reward=contains", "env.limit=2", "env.held_out=0"]
    Path("chats.jsonl").write_text("\n".join(json.dumps(chat | {"answer": "Ho"}) for chat in chats))
    env = build_env(compose(TRAIN_GRPO, words).settings.env, num_prompts=2, group_size=1, seed=0)
    assert {c.query for c in env.draw(2)} == {"Hi", "Hey"}
    env.close()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("list.jsonl", '[{"question": "1 + 1?", "answer": "2"}]', "the row is not an object of named fields but"),
        ("pretty.jsonl", '[\n {\n  "question": "1 + 1?"\n }\n]', "is not JSON"),
    ],
)
def test_a_file_without_a_good_row_is_reported_and_exits_with_3(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, reason: str
) -> None:
    Path(name).write_text(text)
    found = reported(capsys, name, code=3)
    assert found["bad"]["bad"] == found["bad"]["rows"] > 0
    assert reason in found["bad"]["first"][0]["reason"]
    assert all(split["lengths"] == {} for split in found["splits"].values())
    assert run(["data", "report", name, "model=tiny"]) == 3
    assert "tokens:" not in capsys.readouterr().out


def test_all_of_a_report_is_said_in_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def chat(prompt: str, *answer: str) -> str:
        said = [{"role": "assistant", "content": text} for text in answer]
        return json.dumps({"messages": [{"role": "user", "content": prompt}, *said]})

    Path("rows").mkdir()
    lines = [chat("a", "1"), "", chat("b", "12"), chat("a", "1"), '{"messages":', chat("c"), '{"messages": []}']
    Path("rows/train.jsonl").write_text("\n".join(lines))
    Path("rows/test.jsonl").write_text("\n".join([chat("b", "1"), chat("d", "1")]))
    assert run(["data", "report", "rows", "model=tiny"]) == 0
    # a token a byte and a marker: <|im_start|>user\n, the prompt, <|im_end|>\n: 6 + 1 + 2; <|im_start|>assistant\n, the
    # answer, <|im_end|>\n: 11 + 1 or 2 + 2
    assert capsys.readouterr().out.splitlines() == [
        "form       demonstrations, messages in messages: for rlpost train sft",
        "template   the chat template of tiny-v1",
        "train      4 rows, 1 repeats a prompt",
        "             rows/train.jsonl, row 4 repeats row 1",
        "             tokens: median 23, 95% up to 24, longest 24",
        "             nothing to train on: rows/train.jsonl, row 6: no message of the assistant is trained; it ends "
        "with the user's: a prompt, for rlpost train grpo",
        "test       2 rows, 0 repeat a prompt",
        "             tokens: median 23, 95% up to 23, longest 23",
        "overlap    1 prompt of test is in train too",
        "bad rows   2 of 8",
        "             rows/train.jsonl, row 5 is not JSON (Expecting value, character 13)",
        "             rows/train.jsonl, row 7, field 'messages': has no messages",
    ]
    assert reported(capsys, "rows")["template"] == "the chat template of tiny-v1"


def test_repeated_prompts_and_those_of_both_splits_are_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows").mkdir()
    train = [{"prompt": prompt, "answer": "1"} for prompt in ("a", "b", "a", "c")]
    Path("rows/train.jsonl").write_text("\n".join(map(json.dumps, train)))
    Path("rows/test.csv").write_text("prompt;answer\nb;1\nd;2\n")
    found = reported(capsys, "rows")
    assert found["form"] == (
        "demonstrations, prompt and answer: for rlpost train sft, or with env.reward for rlpost train grpo"
    )
    assert found["shared"] == 1
    assert found["splits"]["train"]["repeated"] == 1
    assert found["splits"]["train"]["examples"] == ["rows/train.jsonl, row 3 repeats row 1"]
    # <|im_start|>user\n, one letter, <|im_end|>\n: 6 + 1 + 2 tokens of one byte each or special, and 11 + 1 + 2
    assert found["splits"]["test"]["lengths"] == {"median": 23, "95% up to": 23, "longest": 23}


def test_conversations_that_end_with_the_user_are_prompts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [[{"role": role, "content": str(n)} for role in ("user", "assistant", "user")] for n in range(20)]
    Path("asks.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    assert reported(capsys, "asks.jsonl")["form"] == "prompts of messages in messages: for rlpost train grpo"
    words = ["env=dataset", "env.path=asks.jsonl", "env.reward=contains", "env.held_out=0", "env.shuffle=false"]
    with pytest.raises(DataError, match="missing"):  # a built-in reward compares with an answer
        build_env(compose(TRAIN_GRPO, words).settings.env, num_prompts=1, group_size=1, seed=0).draw()
    Path("asks.jsonl").write_text("\n".join(json.dumps({"messages": chat, "answer": "1"}) for chat in chats))
    env = build_env(compose(TRAIN_GRPO, words).settings.env, num_prompts=1, group_size=1, seed=0)
    assert env.draw()[0].messages == chats[0]
    env.close()


def test_preferences_are_reported_by_that_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = {name: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": name}] for name in ("a", "b")}
    rows = [{"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, {"chosen": chats["a"], "rejected": chats["b"]}]
    for row, setting in zip(rows, ("completion_column", "prompt_column"), strict=True):
        Path("pairs.jsonl").write_text(json.dumps(row))
        found = reported(capsys, "pairs.jsonl", "env.held_out=0")
        assert found["form"] == (
            f"preferences (chosen, rejected): for rlpost train dpo, or rlpost train sft env.{setting}=chosen"
        )
        assert (found["splits"]["train"]["rows"], found["bad"]["bad"]) == (1, 0)


def test_what_the_template_refuses_is_told_with_the_way_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    Path("tools.jsonl").write_text(
        json.dumps({"messages": [*chat, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]})
    )
    assert run(["data", "report", "tools.jsonl", "model=tiny", "env.held_out=0"]) == 0
    assert (
        "leaves out the call of add in message 2: add model.chat_template=qwen, take a model" in capsys.readouterr().out
    )
    assert run(["data", "report", "tools.jsonl", "model=tiny", "model.chat_template=qwen", "env.held_out=0"]) == 0
    assert "leaves out" not in capsys.readouterr().out


def test_what_nothing_reads_is_named_wherever_rows_are_looked_at(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user, answer = {"role": "user", "mood": "calm"}, {"role": "assistant", "content": "Ho"}
    rows = [{"messages": [user | {"content": f"Hi {n}"}, answer], "id": n} for n in range(30)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = "not used: id (30 rows), mood of messages (30 rows)"
    found = reported(capsys, "chats.jsonl")
    assert found["not_used"] == {"id": 30, "mood of messages": 30}
    words = ["env=dataset", "env.path=chats.jsonl", "model=tiny"]
    assert run(["data", "report", "chats.jsonl", "model=tiny"]) == 0
    assert run(["data", "preview", *words]) == 0
    assert run(["train", "sft", *words, "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.replace("not used id", "not used: id").count(told) == 3
    assert run(["train", "sft", *words, "steps=1", "eval.enabled=false", "--out", "run"]) == 0
    assert told in capsys.readouterr().out


def test_rows_without_a_prompt_are_refused_with_their_columns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"text_a": "x", "label": 1}\n{"text_a": "y", "label": 0}\n')
    assert run(["data", "report", "rows.jsonl", "model=tiny"]) == 3
    message = capsys.readouterr().out
    assert "the row has text_a, label; name one of them with env.prompt_column" in message
