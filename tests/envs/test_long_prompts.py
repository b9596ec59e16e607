"""Prompts that are too long are found before a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.envs import checks
from rlpost.envs.build import build_env
from rlpost.envs.checks import look_at_lengths
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.settings import ArithmeticSettings, LongPrompts, ToolsSettings
from tests.envs.own_rows import env_of
from tests.says import Says

SHORT = [{"prompt": f"short {number}", "answer": "1"} for number in range(40)]
LONG = {"prompt": "word " * 5000, "answer": "1"}


def opened(folder: Path, rows: list[Any], **settings: Any) -> tuple[Any, Any]:
    """The environment of `rows` and its settings: prompts of 1,024 tokens and completions of 256 at most."""
    env = env_of(folder, rows, shuffle=True, **settings)
    env.start()
    return env, env.settings


def test_a_long_prompt_is_an_error_with_file_row_and_length(tmp_path: Path, says: Says) -> None:
    env, settings = opened(tmp_path, [*SHORT, LONG, LONG | {"prompt": "y" * 2000}])
    with pytest.raises(DataError) as raised:
        look_at_lengths(env, settings, tiny_tokenizer(), None)
    says("train", raised.value)
    # byte-level: <|im_start|>user, line break, the text, <|im_end|>, line break, <|im_start|>assistant, line break
    around = len("user\n") + 2 + len("\n") + 1 + len("assistant\n")
    lengths = [line.rpartition("/rows.jsonl, ")[2] for line in str(raised.value).splitlines()[1:]]
    assert lengths == [f"row 41: {25_000 + around:,} tokens", f"row 42: {2000 + around:,} tokens"]


def test_long_prompts_are_left_out_where_that_is_asked_for(tmp_path: Path, says: Says) -> None:
    env, settings = opened(tmp_path, [*SHORT[:7], LONG, *SHORT[7:]], long_prompts=LongPrompts.skip)
    says("train", look_at_lengths(env, settings, tiny_tokenizer(), None))
    assert env.num_tasks == 40
    drawn = [c.query for c in env.draw(60)]
    without, _ = opened(tmp_path, SHORT)
    assert drawn == [c.query for c in without.draw(60)]  # in the same order


def test_what_the_context_has_no_room_for_is_too_long(tmp_path: Path, says: Says) -> None:
    rows = [*SHORT, {"prompt": "x" * 600, "answer": "1"}]
    env, settings = opened(tmp_path, rows, max_completion_tokens=500)
    assert look_at_lengths(env, settings, tiny_tokenizer(), None) is None
    with says.refused("train", DataError, "the model's context of 1000"):
        look_at_lengths(env, settings, tiny_tokenizer(), 1000)


def test_no_prompt_left_is_an_error(tmp_path: Path, says: Says) -> None:
    env, settings = opened(tmp_path, [LONG], long_prompts=LongPrompts.skip)
    with says.refused("train", DataError, "env.max_prompt_tokens=1024"):
        look_at_lengths(env, settings, tiny_tokenizer(), None)


def test_of_many_rows_only_a_sample_is_tokenised_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "own-data.md").read_text().split())
    assert f"{checks.ALL_UP_TO:,} rows" in page
    assert f"tokenises {checks.SAMPLE:,} before" in page
    monkeypatch.setattr(checks, "ALL_UP_TO", 10)
    monkeypatch.setattr(checks, "SAMPLE", 2)
    context = 1100  # the longest prompt then has 1,000 tokens
    suspect, found = {"prompt": "x" * 970, "answer": "1"}, []  # fits, which only its tokens show
    for number in range(9):
        env, settings = opened(tmp_path, [*SHORT, *[suspect] * number, LONG, *[suspect] * (8 - number)])
        try:
            look_at_lengths(env, replace(settings, max_completion_tokens=100), tiny_tokenizer(), context)
        except DataError:
            found.append(number)
    assert found == [0, 5]


def test_a_prompt_too_long_when_it_is_drawn_is_named_by_row(tmp_path: Path, says: Says) -> None:
    env, _ = opened(tmp_path, [LONG])
    policy = ScriptedPolicy(["1"], tokenizer=tiny_tokenizer())
    with says.refused("train", DataError, "rows.jsonl, row 1"):
        policy.reply(env.draw(1))


def test_the_descriptions_of_tools_count_where_prompts_are_made() -> None:
    """The bare prompt fits, and not with the description of the interpreter."""
    settings = ArithmeticSettings(max_prompt_tokens=150, max_turns=2)
    bare = build_env(replace(settings, max_turns=1))
    tooled = build_env(settings, tools=ToolsSettings(use=["python"]))
    assert look_at_lengths(bare, settings, tiny_tokenizer(), None) is None
    assert look_at_lengths(tooled, replace(settings, max_prompt_tokens=2000), tiny_tokenizer(), None) is None
    with pytest.raises(DataError, match=r"env\.max_prompt_tokens=150:"):
        look_at_lengths(tooled, settings, tiny_tokenizer(), None)
