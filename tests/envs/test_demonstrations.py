"""What environments show a model that is to learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.data.demonstrations import Demonstration
from rlpost.envs import ArithmeticEnv, ChatEnv, GSM8KEnv
from rlpost.envs.gsm8k import SYSTEM_PROMPT
from rlpost.errors import ConfigError, DataError
from rlpost.rewards import gsm8k, numbers
from tests.envs.own_rows import env_of
from tests.says import Says

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def shown(tmp_path: Path, rows: Sequence[Any], **settings: Any) -> list[Demonstration]:
    """The demonstrations of a file with `rows`, none of which is held out; no reward is named."""
    return list(env_of(tmp_path, rows, **{"reward": [], **settings}).demonstrations())


def asked(demonstrations: Sequence[Demonstration]) -> list[str]:
    return [each.messages[0]["content"] for each in demonstrations if each.messages]


def test_gsm8k_shows_the_solution_as_its_reward_wants_it() -> None:
    solution = "Ann has 2*3 = <<2*3=6>>6 pears.\nShe eats one, so 6-1 = <<6-1=5>>5 are left."
    reply = "<think>Ann has 2*3 = 6 pears.\nShe eats one, so 6-1 = 5 are left.</think><answer>5</answer>"
    (demonstration,) = GSM8KEnv([{"question": "Pears?", "answer": f"{solution}\n#### 5"}]).demonstrations()
    assert demonstration.messages == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "Pears?"},
        {"role": "assistant", "content": reply},
    ]
    score = gsm8k.score(reply, "5")
    assert (score.reward, score.accuracy_strict) == (1.0, 1.0)


def test_arithmetic_shows_each_sum_of_its_split_once() -> None:
    train, test = (list(ArithmeticEnv(digits=1, split=split).demonstrations()) for split in ("train", "test"))
    assert len({*asked(train), *asked(test)}) == len(train) + len(test) == 100
    for demonstration in train:
        assert demonstration.messages is not None
        a, b = (int(number) for number in demonstration.where.split(" + "))
        assert demonstration.messages[-1] == {"role": "assistant", "content": str(a + b)}
        assert numbers.score(str(a + b), str(a + b)).reward == 1.0


def test_an_environment_without_answers_is_refused() -> None:
    with pytest.raises(DataError, match="ChatEnv"):
        list(ChatEnv().demonstrations())


def test_rows_of_messages_are_shown_as_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    first, second = shown(tmp_path, [{"messages": CHAT}, {"messages": CHAT, "tools": tools}])
    assert (first.messages, first.tools, first.where) == (CHAT, None, f"{tmp_path}/rows.jsonl, row 1")
    assert second.tools == tools


ALPACA = {"instruction": "Hi", "output": "Ho"}


@pytest.mark.parametrize(
    ("row", "settings", "question"),
    [
        ({"prompt": "Hi", "completion": "Ho"}, {}, "Hi"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {}, "Hi"),
        ({"question": "Hi", "answer": "Ho"}, {"completion_column": "answer"}, "Hi"),
        ({"a": "H", "b": "i", "c": "Ho"}, {"prompt_template": "{a}{b}", "completion_column": "c"}, "Hi"),
        (ALPACA | {"input": "i"}, {}, "Hi\n\ni"),
        (ALPACA | {"input": None}, {}, "Hi"),
        (ALPACA, {}, "Hi"),
    ],
)
def test_prompt_and_completion_become_one_turn(tmp_path: Path, row: Any, settings: Any, question: str) -> None:
    [demonstration] = shown(tmp_path, [row], **settings)
    assert demonstration.messages == [{"role": "user", "content": question}, CHAT[1]]


def test_text_is_shown_as_text(tmp_path: Path) -> None:
    (demonstration,) = shown(tmp_path, [{"text": "Once upon"}])
    assert (demonstration.text, demonstration.messages) == ("Once upon", None)


MALFORMED: list[tuple[list[Any], dict[str, str]]] = [
    ([{"messages": CHAT}, {"message": CHAT}], {}),
    ([{"prompt": "Hi", "completion": 4}], {}),
    ([{"text": 4}], {}),
    ([["Hi"]], {}),
    ([{"q": "Hi", "completion": "Ho"}], {"prompt_template": "{w}"}),
]


def test_a_row_that_is_no_demonstration_is_named(tmp_path: Path, says: Says) -> None:
    told = []
    for rows, settings in MALFORMED:
        [bad] = [each for each in shown(tmp_path, rows, **settings) if each.wrong]
        told.append(f"{rows[-1]}\n  {bad.where}, {bad.wrong}")
    says("data", "\n".join(told))


@pytest.mark.parametrize(
    ("row", "key"),
    [({"messages": CHAT}, "prompt_template"), ({"text": "x"}, "prompt_template"), ({"text": "x"}, "system_prompt")],
)
def test_a_setting_that_rows_have_no_place_for_is_refused(tmp_path: Path, row: Any, key: str, says: Says) -> None:
    with says.refused("data", ConfigError, f"env.{key}"):
        shown(tmp_path, [row], **{key: "{x}"})


QUESTIONS = [f"{number}?" for number in range(40)]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": question, "completion": "Ho", "answer": "Ho"} for question in QUESTIONS],
        [{"messages": [{"role": "user", "content": each}, CHAT[1]], "answer": "Ho"} for each in QUESTIONS],
    ],
    ids=["prompt", "messages"],
)
def test_the_rows_held_out_are_those_of_training_on_rewards(tmp_path: Path, rows: list[Any]) -> None:
    train, test = (env_of(tmp_path, rows, held_out=0.3, split=split) for split in ("train", "test"))
    held_out = asked(list(test.demonstrations()))
    assert held_out == [test.opening_messages(task)[0]["content"] for task in test.rows]
    assert 0 < len(held_out) < 40
    assert sorted(held_out + asked(list(train.demonstrations()))) == sorted(QUESTIONS)
