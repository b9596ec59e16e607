"""Words of a command line, read and refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.config.overrides import Override, merge, parse_value, parse_words
from rlpost.config.schema import Key, as_text
from rlpost.errors import ConfigError
from rlpost.settings import Operation, Schedule

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


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (NUMBER, "fast", "optim.lr=fast is of the wrong type: it takes a number"),
        (NUMBER, "true", "wrong type"),
        (NUMBER, "", "wrong type"),
        (NUMBER, "null", "optim.lr=null is refused: it takes a number"),
        (NUMBER, "[1]", "is of the wrong type"),
        (NUMBER, "1,2", "run the command once for each"),
        (NUMBER, "[1", "cannot be read"),
        (WHOLE, "3.5", "it takes a whole number or null"),
        (FLAG, "1", "it takes true or false"),
        (FLAG, "yes", "it takes true or false"),
        (CHOICE, "linaer", r"one of constant, linear, cosine; did you mean linear\?"),
        (CHOICE, "1", "is unknown"),
        (CHOICES, "add,multiply", r"write 'env.operations=\[add,multiply\]'"),
        (CHOICES, "[add,multply]", r"did you mean multiply\?"),
        (CHOICES, "ad", r"did you mean add\?"),
        (CHOICES, "[add", "cannot be read"),
        (TEXTS, "a.py:f,b.py:g", r"is several values; write 'policy.replies=\[a.py:f,b.py:g\]'"),
        (PATH, "null", "takes text"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key: Key, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_value(key, text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lr=1"], r"without -, \+ and ~; write optim.lr=1"),
        (["++steps=1"], "write steps=1"),
        (["optim.lr", "=", "1"], "without spaces, as in steps=20"),
        (["optim.lr = 1"], "without spaces, as in steps=20"),
        (["qwen"], r"did you mean model=qwen\?"),
        (["gsm8k-smollm2-cpu"], r"did you mean recipe=gsm8k-smollm2-cpu\?"),
        (["bananas"], "as in steps=20"),
    ],
)
def test_a_word_that_is_no_setting_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_words(words)


def test_the_last_of_two_equal_keys_counts() -> None:
    assert parse_words(["steps=1", "seed=2", "steps=3"]) == [Override("steps", "3"), Override("seed", "2")]


def test_a_users_setting_replaces_the_recipes() -> None:
    recipe = [Override("steps", "1"), Override("seed", "1")]
    assert merge(recipe, [Override("steps", "9")]) == [Override("seed", "1"), Override("steps", "9")]


def test_another_option_leaves_behind_what_the_recipe_says_about_its_own() -> None:
    recipe = [Override("env", "gsm8k"), Override("env.path", "x"), Override("steps", "1")]
    other, same = Override("env", "arithmetic"), Override("env", "gsm8k")
    assert merge(recipe, [other]) == [Override("steps", "1"), other]
    assert merge(recipe, [same]) == [Override("env.path", "x"), Override("steps", "1"), same]


def test_a_users_model_replaces_the_path_in_a_recipe() -> None:
    recipe = [Override("model.path", "runs/x"), Override("model.device", "cpu")]
    assert merge(recipe, [Override("model", "qwen")]) == [Override("model.device", "cpu"), Override("model", "qwen")]
