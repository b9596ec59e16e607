"""Prompts that are too long are found before a model is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.envs import checks
from rlpost.envs.build import build_env
from rlpost.envs.checks import look_at_lengths
from rlpost.envs.dataset import DatasetEnv
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.settings import ArithmeticSettings, DatasetSettings, LongPrompts, ToolsSettings

SHORT = [{"prompt": f"short {number}", "answer": "1"} for number in range(40)]
LONG = {"prompt": "word " * 5000, "answer": "1"}


def opened(folder: Path, rows: list[Any], **settings: Any) -> tuple[DatasetEnv, DatasetSettings]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = DatasetSettings(path=str(path), reward=["exact"], held_out=0.0, **settings)
    env = DatasetEnv(made, max_prompt_tokens=made.max_prompt_tokens, max_completion_tokens=made.max_completion_tokens)
    env.start()
    return env, made


def test_a_long_prompt_is_an_error_with_file_row_and_length_before_training(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, [*SHORT, LONG, LONG | {"prompt": "y" * 2000}])
    with pytest.raises(DataError) as raised:
        look_at_lengths(env, settings, tiny_tokenizer(), None)
    # byte-level: <|im_start|>user, line break, the text, <|im_end|>, line break, <|im_start|>assistant, line break
    around = len("user\n") + 2 + len("\n") + 1 + len("assistant\n")
    assert str(raised.value).split("\n") == [
        "2 of 42 prompts of the split train have more tokens than env.max_prompt_tokens=1024: raise the limit, shorten "
        "the rows, or add env.long_prompts=skip",
        f"  {settings.path}, row 41: {25_000 + around:,} tokens",
        f"  {settings.path}, row 42: {2000 + around:,} tokens",
    ]


def test_long_prompts_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, [LONG, *SHORT], long_prompts=LongPrompts.skip)
    told = look_at_lengths(env, settings, tiny_tokenizer(), None)
    assert told == "1 of 41 prompts of the split train have more tokens than env.max_prompt_tokens=1024: left out"
    assert env.num_tasks == 40
    assert {c.query for c in env.draw(40)} == {row["prompt"] for row in SHORT}


def test_the_order_of_the_other_rows_is_that_without_the_long_one(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, [*SHORT[:7], LONG, *SHORT[7:]], long_prompts=LongPrompts.skip)
    look_at_lengths(env, settings, tiny_tokenizer(), None)
    drawn = [c.query for c in env.draw(60)]
    without, _ = opened(tmp_path, SHORT)
    assert drawn == [c.query for c in without.draw(60)]


def test_what_the_context_has_no_room_for_is_too_long(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, [*SHORT, {"prompt": "x" * 600, "answer": "1"}], max_completion_tokens=500)
    assert look_at_lengths(env, settings, tiny_tokenizer(), None) is None
    room = r"than the 500 that the model's context of 1000 leaves beside env.max_completion_tokens=500: type "
    with pytest.raises(DataError, match=room + r"env.max_completion_tokens=\d\d\d or less, shorten the rows"):
        look_at_lengths(env, settings, tiny_tokenizer(), 1000)


def test_a_completion_longer_than_the_context_is_told_what_fits(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, SHORT, max_completion_tokens=5000)
    with pytest.raises(DataError) as refused:
        look_at_lengths(env, settings, tiny_tokenizer(), 1000)
    assert "the 0 that the model's context of 1000 leaves beside env.max_completion_tokens=5000" in str(refused.value)
    fits = re.search(r"type env.max_completion_tokens=(\d+) or less", str(refused.value))
    assert fits
    assert look_at_lengths(env, replace(settings, max_completion_tokens=int(fits[1])), tiny_tokenizer(), 1000) is None


def test_no_prompt_left_is_an_error(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, [LONG], long_prompts=LongPrompts.skip)
    with pytest.raises(
        DataError,
        match=r"1 of 1 prompt of the split train have more tokens than env.max_prompt_tokens=1024: none is left",
    ):
        look_at_lengths(env, settings, tiny_tokenizer(), None)


def test_of_many_rows_only_a_sample_is_tokenised_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_counts_as_many_rows_is_what_the_documents_say() -> None:
    assert (checks.ALL_UP_TO, checks.SAMPLE) == (100_000, 20_000)
    said = " ".join((Path(__file__).parents[2] / "docs" / "own-data.md").read_text().split())
    assert "Of more than 100,000 rows `rlpost train sft` tokenises 20,000 before it starts" in said


def test_a_prompt_that_is_too_long_when_it_is_drawn_is_named_by_file_and_row(tmp_path: Path) -> None:
    env, settings = opened(tmp_path, [LONG])
    policy = ScriptedPolicy(["1"], tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match=rf"the prompt of {settings.path}, row 1 \('word word .* has \d+ tokens, more"):
        policy.reply(env.draw(1))


def test_the_descriptions_of_tools_count_where_prompts_are_made() -> None:
    """The bare prompt fits, and not with the description of the interpreter."""
    settings = ArithmeticSettings(max_prompt_tokens=150, max_turns=2)
    bare = build_env(replace(settings, max_turns=1), num_prompts=1, group_size=1, seed=0)
    tooled = build_env(settings, num_prompts=1, group_size=1, seed=0, tools=ToolsSettings(use=["python"]))
    for env in (bare, tooled):
        env.start()

    assert look_at_lengths(bare, settings, tiny_tokenizer(), None) is None
    assert look_at_lengths(tooled, replace(settings, max_prompt_tokens=2000), tiny_tokenizer(), None) is None
    with pytest.raises(
        DataError, match=r"first prompt has .* with the descriptions of its tools, more than env.max_prompt_tokens=150"
    ):
        look_at_lengths(tooled, settings, tiny_tokenizer(), None)
