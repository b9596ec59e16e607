"""What environments show a model that is to learn from them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.data.demonstrations import Demonstration
from rlpost.data.encoding import Encoder, LazySamples, encode_all
from rlpost.envs import ArithmeticEnv, ChatEnv, GSM8KEnv
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.gsm8k import SYSTEM_PROMPT
from rlpost.errors import ConfigError, DataError
from rlpost.rewards import gsm8k, numbers
from rlpost.settings import DatasetSettings

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def shown(tmp_path: Path, rows: Sequence[Any], **settings: Any) -> list[Demonstration]:
    """The demonstrations of a file with `rows`, none of which is held out; no reward is named."""
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    chat = {name: settings.pop(name) for name in ("system_prompt", "prompt_template") if name in settings}
    return list(
        DatasetEnv(DatasetSettings(path=str(file), reward=[], held_out=0.0, **settings), **chat).demonstrations()
    )


def messages(tmp_path: Path, row: dict[str, Any], **settings: Any) -> Any:
    return shown(tmp_path, [row], **settings)[0].messages


def test_gsm8k_shows_the_solution_as_its_reward_wants_it() -> None:
    solution = "Ann has 2*3 = <<2*3=6>>6 pears.\nShe eats one, so 6-1 = <<6-1=5>>5 are left."
    env = GSM8KEnv([{"question": "How many pears?", "answer": f"{solution}\n#### 5"}])
    (demonstration,) = env.demonstrations()
    assert demonstration.messages is not None
    assert demonstration.messages == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "How many pears?"},
        {
            "role": "assistant",
            "content": "<think>Ann has 2*3 = 6 pears.\nShe eats one, so 6-1 = 5 are left.</think><answer>5</answer>",
        },
    ]
    score = gsm8k.score(demonstration.messages[-1]["content"], "5")
    assert (score.reward, score.accuracy_strict) == (1.0, 1.0)


def test_arithmetic_shows_each_sum_of_its_split_once() -> None:
    train, test = (list(ArithmeticEnv(digits=1, split=split).demonstrations()) for split in ("train", "test"))
    asked = [[d.messages[0]["content"] for d in split if d.messages] for split in (train, test)]
    assert len({*asked[0], *asked[1]}) == len(asked[0]) + len(asked[1]) == 100
    for demonstration in train:
        assert demonstration.messages is not None
        a, b = (int(number) for number in demonstration.where.split(" + "))
        assert demonstration.messages[-1] == {"role": "assistant", "content": str(a + b)}
        assert numbers.score(str(a + b), str(a + b)).reward == 1.0


def test_an_environment_without_answers_says_so() -> None:
    with pytest.raises(DataError, match="ChatEnv has no answers to learn from"):
        list(ChatEnv().demonstrations())


def test_rows_of_messages_are_shown_as_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    first, second = shown(tmp_path, [{"messages": CHAT}, {"messages": CHAT, "tools": tools}])
    assert (first.messages, first.tools, first.where) == (CHAT, None, f"{tmp_path}/rows.jsonl, row 1")
    assert second.tools == tools


def test_prompt_and_completion_become_one_turn(tmp_path: Path) -> None:
    assert messages(tmp_path, {"prompt": "Hi", "completion": "Ho"}) == CHAT
    assert messages(tmp_path, {"prompt": CHAT[:1], "completion": CHAT[1:]}) == CHAT
    assert messages(tmp_path, {"question": "Hi", "answer": "Ho"}, completion_column="answer") == CHAT
    alpaca = {"instruction": "H", "input": "i", "output": "Ho"}
    assert messages(tmp_path, alpaca, prompt_template="{instruction}{input}", completion_column="output") == CHAT


@pytest.mark.parametrize(
    ("given", "asked"), [({"input": "i"}, "H\n\ni"), ({"input": ""}, "H"), ({"input": None}, "H"), ({}, "H")]
)
def test_an_alpaca_row_needs_no_setting(tmp_path: Path, given: dict[str, Any], asked: str) -> None:
    row = {"instruction": "H", **given, "output": "Ho"}
    assert messages(tmp_path, row) == [{"role": "user", "content": asked}, {"role": "assistant", "content": "Ho"}]


def test_half_a_character_in_json_of_a_csv_cell_is_a_bad_row_among_few_rows_and_among_many(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.csv"
    good = json.dumps(CHAT)
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], [good], [good.replace("Ho", "\\ud800")], [good]])
    shown = DatasetEnv(DatasetSettings(path=str(file), reward=[], held_out=0.0)).demonstrated()
    encoder = Encoder(tiny_tokenizer)
    samples, bad = encode_all(shown.in_turn(), encoder)
    wrong = f"{good[:40]!r} holds half of a character (a lone surrogate): remove it"
    line = f"{file}, row 3, field 'messages': {wrong}"
    assert bad.lines() == [line]
    monkeypatch.setattr("rlpost.data.faults.SAMPLE", 1)
    lazy = LazySamples(shown, encoder)  # as of more than 100,000 rows
    assert [*lazy] == samples
    assert lazy.malformed.lines() == [line]


def test_text_is_shown_as_text(tmp_path: Path) -> None:
    (demonstration,) = shown(tmp_path, [{"text": "Once upon"}])
    assert (demonstration.text, demonstration.messages) == ("Once upon", None)


@pytest.mark.parametrize(
    ("rows", "settings", "wrong"),
    [
        ([{"messages": CHAT}, {"message": CHAT}], {}, "rows.jsonl, row 2, field 'messages': missing; did you mean"),
        ([{"messages": CHAT}, {"messages": [{"role": "x"}]}], {}, "row 2, field 'messages': message 1 has the role"),
        ([{"prompt": "Hi", "completion": 4}], {}, "row 1, field 'completion': must be text or a list of messages"),
        ([{"prompt": " ", "completion": "Ho"}], {}, "row 1, field 'prompt': is empty"),
        ([{"text": 4}], {}, "row 1, field 'text': must be text, and is int"),
        ([["Hi"]], {}, "row 1, field 'messages': the row is not an object of named fields but a list"),
        ([{"q": "Hi", "completion": "Ho"}], {"prompt_template": "{w}"}, "row 1, field 'w': missing"),
    ],
)
def test_a_row_that_is_no_demonstration_is_named(tmp_path: Path, rows: Any, settings: Any, wrong: str) -> None:
    [bad] = [each for each in shown(tmp_path, rows, **settings) if each.wrong]
    assert wrong in f"{bad.where.rpartition('/')[2]}, {bad.wrong}"


@pytest.mark.parametrize(
    ("row", "settings", "wrong"),
    [
        ({"messages": CHAT}, {"prompt_template": "{x}"}, "messages holds messages"),
        ({"text": "x"}, {"prompt_template": "{x}"}, "text holds whole texts"),
        ({"text": "x"}, {"system_prompt": "S"}, "env.system_prompt is for conversations"),
    ],
)
def test_a_setting_that_the_rows_have_no_place_for_is_refused(
    tmp_path: Path, row: Any, settings: Any, wrong: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        shown(tmp_path, [row], **settings)
    assert wrong in str(raised.value)


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_the_rows_held_out_are_those_that_training_on_rewards_holds_out(tmp_path: Path, kind: str) -> None:
    questions = [f"What is {number}?" for number in range(40)]
    chats = [[{"role": "user", "content": question}, CHAT[1]] for question in questions]
    pairs = [{"prompt": question, "completion": "Ho", "answer": "Ho"} for question in questions]
    rows = pairs if kind == "prompt" else [{"messages": chat, "answer": "Ho"} for chat in chats]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = DatasetSettings(path=str(file), reward=["exact"], held_out=0.3)
    held_out = [d.messages[0]["content"] for d in DatasetEnv(settings, split="test").demonstrations() if d.messages]
    env = DatasetEnv(settings, split="test")
    env.start()
    assert held_out == [env.opening_messages(task)[0]["content"] for task in env.rows]
    assert 0 < len(held_out) < 40
    trained = [d.messages[0]["content"] for d in DatasetEnv(settings).demonstrations() if d.messages]
    assert sorted(held_out + trained) == sorted(questions)
