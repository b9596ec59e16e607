"""Several environments as one: whose turn it is, whose limits hold, and where drawing goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.envs.build import build_env
from rlpost.envs.checks import look_at_lengths
from rlpost.envs.mix import MixEnv
from rlpost.errors import ConfigError, DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.settings import DatasetSettings, MixSettings
from tests.envs.own_rows import answer, write_rows
from tests.says import Says

ROWS = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(6)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), ROWS)


def mix(*sources: str, **settings: Any) -> MixEnv:
    room = {"max_prompt_tokens": 4000, "max_completion_tokens": 1000, "max_turns": 9}
    made = MixSettings(sources=list(sources), **{**room, **settings})
    env = build_env(made, seed=3)
    assert isinstance(env, MixEnv)
    env.start()
    return env


def own_rows(file: Path, more: str = "") -> str:
    return f"dataset path={file} reward=exact held_out=0 {more}"


def drawn(env: MixEnv, count: int) -> list[tuple[str, str]]:
    return [(conversation.source, conversation.query) for conversation in env.draw(count)]


def test_three_to_one_is_three_to_one_in_every_four_draws(rows: Path) -> None:
    # places (k + 1/2) / w: a at 1/6, 1/2, 5/6, b at 1/2; equal places in the order of the sources
    weighed, equal = mix("countdown weight=3", own_rows(rows)), mix("countdown", own_rows(rows), "arithmetic")
    assert "".join(source[0] for source, _ in drawn(weighed, 8)) == "ccdcccdc"
    assert "".join(source[0] for source, _ in drawn(equal, 6)) == "cdacda"


def test_a_mix_draws_what_its_sources_draw_each_in_its_own_order(rows: Path) -> None:
    env = mix("countdown weight=2", own_rows(rows))
    alone = DatasetSettings(path=str(rows), reward=["exact"], held_out=0.0)
    rows_alone = build_env(alone, seed=3)
    found = drawn(env, 15)
    assert Counter(source for source, _ in found) == {"countdown": 10, "dataset": 5}
    assert [query for source, query in found if source == "dataset"] == [c.query for c in rows_alone.draw(5)]


def test_each_source_scores_its_own_replies_within_its_limits(rows: Path) -> None:
    env = mix("arithmetic digits=1 max_completion_tokens=7", own_rows(rows, "max_completion_tokens=9"))
    sum_, _ = conversations = env.draw(2)
    assert [c.max_completion_tokens for c in conversations] == [7, 9]
    answer(env, conversations, sum_.task["answer"], "no")
    assert [c.reward for c in conversations] == [1.0, 0.0]
    batch = env.build_batch(conversations)
    assert list(batch["source"]) == ["arithmetic", "dataset"]
    assert set(batch["next", "reward_parts"].keys()) == {"answer", "exact"}


def test_drawing_goes_on_where_it_was_saved_in_every_source(rows: Path) -> None:
    sources = ["countdown weight=2", own_rows(rows)]
    whole = drawn(mix(*sources), 30)
    for served in (0, 1, 11, 20):
        env = mix(*sources)
        drawn(env, served)
        state = json.loads(json.dumps(env.state_dict()))
        again = mix(*sources)
        again.load_state_dict(state)
        assert drawn(again, 30 - served) == whole[served:]


def test_other_weights_or_other_rows_are_no_place_to_go_on(rows: Path, tmp_path: Path) -> None:
    env = mix("countdown weight=2", own_rows(rows))
    drawn(env, 9)
    state = env.state_dict()
    with pytest.raises(DataError, match=r"countdown \(weight 2\).*countdown \(weight 3\)"):
        mix("countdown weight=3", own_rows(rows)).load_state_dict(state)
    others = write_rows(tmp_path, [row | {"prompt": row["prompt"] + "!"} for row in ROWS])
    with pytest.raises(DataError, match=r"resume .* rows"):
        mix("countdown weight=2", own_rows(others)).load_state_dict(state)


def test_rows_that_were_not_drawn_yet_may_go(rows: Path, tmp_path: Path) -> None:
    env = mix("countdown weight=2", own_rows(rows))
    before = [query for source, query in drawn(env, 9) if source == "dataset"]
    state = json.loads(json.dumps(env.state_dict()))
    rest = drawn(env, 9)
    gone = next(query for source, query in rest if source == "dataset")
    fewer = write_rows(tmp_path, [row for row in ROWS if row["prompt"] != gone])
    again = mix("countdown weight=2", own_rows(fewer))
    again.load_state_dict(state)
    found = drawn(again, 6)
    own = [query for source, query in found if source == "dataset"]
    assert own == [query for source, query in rest if source == "dataset" and query != gone]
    countdown = [[query for source, query in part if source == "countdown"] for part in (found, rest)]
    assert countdown[0] == countdown[1][:4]
    assert len({gone, *before, *own}) == len(ROWS)


def test_a_limit_is_of_the_whole_mix_and_repeats_its_prompts(rows: Path) -> None:
    found = drawn(mix("countdown", own_rows(rows), limit=3), 7)
    assert found[3:6] == found[:3]
    assert found[6] == found[0]


def test_long_prompts_are_the_business_of_their_source(tmp_path: Path, rows: Path, says: Says) -> None:
    long = write_rows(tmp_path, [*ROWS, {"prompt": "word " * 500, "answer": "1"}])
    env = mix(own_rows(rows), own_rows(long))
    settings = compose(TRAIN_GRPO).settings.env
    with says.refused("env", DataError, "dataset-2"):
        look_at_lengths(env, settings, tiny_tokenizer(), None)
    env = mix(own_rows(rows), own_rows(long, "long_prompts=skip"))
    says("env", look_at_lengths(env, settings, tiny_tokenizer(), None))
    assert all(len(query) < 100 for _, query in drawn(env, 40))


def test_what_is_trained_on_and_held_out_is_counted_a_source(rows: Path) -> None:
    train, again = (mix(own_rows(rows), "countdown held_out=0") for _ in range(2))
    assert [part.prompts_shared_with(train) for part in again.parts] == [6, 10_000]
    assert again.prompts_shared_with(train) == 6


def test_every_demonstration_of_every_source_comes_once_in_turn(rows: Path) -> None:
    env = mix("countdown", own_rows(rows, "completion_column=answer"))
    shown = [demonstration.messages[0]["content"] for demonstration in env.demonstrations() if demonstration.messages]
    assert [text.startswith("Say") for text in shown[:13]] == [False, True] * 6 + [False]
    assert sum(text.startswith("Say") for text in shown) == 6


def test_a_row_from_outside_is_of_no_source(rows: Path, says: Says) -> None:
    with says.refused("env", DataError, "mix"):
        mix(own_rows(rows)).begin([{"query": "Who?"}])
    with says.refused("env", DataError, "mix"):
        mix(own_rows(rows)).all_tasks()


def test_the_split_of_the_mix_is_that_of_every_source(rows: Path) -> None:
    sources = ["countdown", f"dataset path={rows} reward=exact held_out=0.5"]
    assert [part.split for part in mix(*sources).parts] == ["train", "train"]
    assert [part.split for part in mix(*sources, split="test").parts] == ["test", "test"]


def test_turns_that_nothing_answers_are_told() -> None:
    with pytest.raises(ConfigError, match=r"env\.max_turns=2"):
        mix("gsm8k", "countdown max_turns=2")
