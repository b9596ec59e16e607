"""How often a model answers each prompt right: measured, kept, and used to choose what is trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlpost.envs.dataset import DatasetEnv
from rlpost.errors import ConfigError, DataError
from rlpost.evaluation.pass_rates import (
    choose_by_pass_rate,
    prompt_digest,
    rates_of,
    read_rates,
    write_rates,
)
from rlpost.settings import DatasetSettings
from tests.command_line import CommandLine
from tests.says import Says

ROWS = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(4)]
MEASURE = "data measure env=dataset env.path=rows.jsonl env.reward=number model=tiny policy=scripted env.held_out=0"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


@pytest.fixture
def rlpost(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def started(**settings: Any) -> tuple[DatasetEnv, DatasetSettings]:
    made = DatasetSettings(path="rows.jsonl", reward=["number"], held_out=0.0, **settings)
    env = DatasetEnv(made)
    env.start()
    return env, made


def test_measured_rates_are_saved_and_choose_prompts(here: Path, rlpost: CommandLine, says: Says) -> None:
    # the scripted policy says 0, 1, 0, 1, ... so that the prompts 0 and 1 are right half of the time
    says("data", rlpost([*MEASURE.split(), "policy.replies=['0','1']", "eval.samples=4", "--out", "rates.jsonl"]))
    rates = read_rates("rates.jsonl")
    asked = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    assert [rates[prompt_digest(messages)] for messages in asked] == [0.5, 0.5, 0.0, 0.0]
    env, settings = started(pass_rates="rates.jsonl", min_pass_rate=0.1)
    says("data", choose_by_pass_rate(env, settings))
    assert {c.query for c in env.draw(6)} == {"Say 0.", "Say 1."}
    words = "train grpo env=dataset env.path=rows.jsonl env.reward=number env.held_out=0 eval.enabled=false model=tiny"
    more = "policy=scripted steps=1 prompts_per_step=1 group_size=2 env.pass_rates=rates.jsonl env.max_pass_rate=0.4"
    assert re.search(r"2 of 4 .* \[0, 0\.4\]", rlpost(f"{words} {more} --out run"))


def test_rates_already_measured_are_not_written_over(here: Path, rlpost: CommandLine) -> None:
    Path("rates.jsonl").write_text("")
    refused = rlpost.refused([*MEASURE.split(), "--out", "rates.jsonl"])
    assert "--out" in refused
    assert Path("rates.jsonl").read_text() == ""


def test_prompts_that_were_not_measured_are_named(here: Path) -> None:
    env, settings = started(pass_rates="rates.jsonl")
    env.draw(1)
    played = env.draw(1)
    for conversation in played:
        conversation.messages.append({"role": "assistant", "content": "0"})
        conversation.reward = 1.0
    write_rates(Path("rates.jsonl"), rates_of(played), {})
    with pytest.raises(DataError, match=r"3 of 4 .*rows\.jsonl, row \d: "):
        choose_by_pass_rate(env, settings)


def test_a_failed_reward_is_in_no_rate(here: Path) -> None:
    env, _ = started()
    [one] = env.draw(1)
    one.messages.append({"role": "assistant", "content": "0"})
    right, failed = one.copy(), one.copy()
    right.reward, failed.reward, failed.valid = 1.0, 0.0, False
    [rate] = rates_of([right, failed])
    assert (rate["pass_rate"], rate["samples"], rate["where"]) == (1.0, 1, one.where)
    assert rates_of([failed]) == []


def test_a_file_without_rates_is_refused(here: Path) -> None:
    with pytest.raises(DataError, match=r"env\.pass_rates=rows\.jsonl .*'pass_rate'"):
        read_rates("rows.jsonl")
    with pytest.raises(DataError, match=r"env\.pass_rates=nope"):
        read_rates("nope")


def test_bounds_without_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.pass_rates"):
        DatasetSettings(path="x", reward=["number"], min_pass_rate=0.1)


def test_no_prompt_within_the_bounds_is_an_error(here: Path) -> None:
    env, settings = started(pass_rates="rates.jsonl", min_pass_rate=0.5)
    every = [{"prompt": prompt_digest(env.opening_messages(row)), "pass_rate": 0.25} for row in ROWS]
    write_rates(Path("rates.jsonl"), every, {})
    with pytest.raises(DataError, match=r"0 of 4 .*\[0\.5, 1\]"):
        choose_by_pass_rate(env, settings)
