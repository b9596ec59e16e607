"""Words of a command line, read and refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rlpost.config.overrides import Override, merge, parse_value, parse_words
from rlpost.config.schema import Key, as_text
from rlpost.errors import ConfigError
from rlpost.settings import Operation, Schedule
from tests.says import Says

NUMBER = Key("optim.lr", float, False, 1e-5)
WHOLE = Key("env.limit", int, True, None)
FLAG = Key("deterministic", bool, False, False)
TEXT = Key("env.system_prompt", str, True, None)
PATH = Key("model.path", str, False, "")
CHOICE = Key("optim.schedule", Schedule, False, Schedule.constant)
CHOICES = Key("env.operations", list[Operation], False, [])
TEXTS = Key("policy.replies", list[str], False, [])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        (NUMBER, "1e-6", 1e-6),
        (NUMBER, "3", 3.0),
        (WHOLE, "64", 64),
        (WHOLE, "null", None),
        (FLAG, "true", True),
        (TEXT, "Add, then say: [x] {question} = ?", "Add, then say: [x] {question} = ?"),
        (TEXT, "'quoted'", "quoted"),
        (TEXT, '"two\\nlines"', "two\nlines"),
        (TEXT, '"C:\\dir"', "C:\\dir"),  # no JSON, so only the quotes go
        (TEXT, "", ""),
        (TEXT, "1e-6", "1e-6"),
        (TEXT, "null", None),
        (TEXT, '"null"', "null"),
        (CHOICE, "cosine", Schedule.cosine),
        (CHOICES, "[add,multiply]", [Operation.add, Operation.multiply]),
        (CHOICES, "add", [Operation.add]),
        (TEXTS, "[one two,three]", ["one two", "three"]),
        (TEXTS, "./my reward (1).py:score", ["./my reward (1).py:score"]),  # one text is taken as it stands
        (TEXTS, "1e-6", ["1e-6"]),
        (TEXTS, '"a, b"', ["a, b"]),
        (TEXTS, '["a, b","c\\nd"]', ["a, b", "c\nd"]),
    ],
)
def test_a_value_is_read_as_its_key_wants_it(key: Key, text: str, value: Any) -> None:
    parsed = parse_value(key, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (NUMBER, 1e-6),
        (WHOLE, None),
        (FLAG, True),
        (TEXT, "two\nlines and a \x1b"),
        (TEXT, "null"),
        (TEXT, " spaces "),
        (TEXT, '"quoted"'),
        (TEXT, "plain, with {question}"),
        (CHOICE, Schedule.linear),
        (CHOICES, [Operation.add, Operation.subtract]),
        (TEXTS, ["a, b", 'c "d"', "e\nf"]),
        (TEXTS, ["a.py:f"]),
        (TEXTS, ["a, b"]),
        (TEXTS, ["[a]"]),
        (TEXTS, [" null\n"]),
        (TEXTS, ["null"]),
        (TEXTS, [""]),
    ],
)
def test_a_value_survives_being_written_on_one_line(key: Key, value: Any) -> None:
    text = as_text(value)
    assert "\n" not in text
    assert parse_value(key, text) == value


def test_a_value_of_the_wrong_type_is_refused(says: Says) -> None:
    wrong = [
        (NUMBER, ["fast", "true", "", "null", "[1]", "1,2", "[1"]),
        (WHOLE, ["3.5"]),
        (FLAG, ["1", "yes"]),
        (CHOICE, ["linaer", "1"]),
        (CHOICES, ["add,multiply", "[add,multply]", "ad", "[add"]),
        (TEXTS, ["a.py:f,b.py:g"]),
        (PATH, ["null"]),
    ]
    for key, texts in wrong:
        says.refusals("config", ConfigError, partial(parse_value, key), texts)


def test_a_word_that_is_no_setting_is_refused(says: Says) -> None:
    words = ["--optim.lr=1", "++steps=1", "optim.lr = 1", "qwen", "gsm8k-smollm2-cpu", "bananas"]
    cases = [*([word] for word in words), ["optim.lr", "=", "1"]]
    says.refusals("config", ConfigError, parse_words, cases)


def test_the_last_of_two_equal_keys_counts() -> None:
    assert parse_words(["steps=1", "seed=2", "steps=3"]) == [Override("steps", "3"), Override("seed", "2")]


@pytest.mark.parametrize(
    ("recipe", "typed", "merged"),
    [
        ("steps=1 seed=1", "steps=9", "seed=1 steps=9"),
        # another option drops what the recipe says about its own, and a model its path
        ("env=gsm8k env.path=x steps=1", "env=arithmetic", "steps=1 env=arithmetic"),
        ("env=gsm8k env.path=x steps=1", "env=gsm8k", "env.path=x steps=1 env=gsm8k"),
        ("model.path=runs/x model.device=cpu", "model=qwen", "model.device=cpu model=qwen"),
    ],
)
def test_what_a_user_types_replaces_the_recipes_settings(recipe: str, typed: str, merged: str) -> None:
    words = [parse_words(words.split()) for words in (recipe, typed, merged)]
    assert merge(*words[:2]) == words[2]
