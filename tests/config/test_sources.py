"""What `env.sources` takes, and what is said of what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose, environments_of, sources_of
from rlpost.errors import ConfigError, RlpostError
from rlpost.settings import CountdownSettings, DatasetSettings, MixSettings
from tests.says import Says

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("here")]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "my rows.jsonl"
    file.write_text(json.dumps({"prompt": "Say 1.", "answer": "1"}))
    return file


def mix(*sources: str, command: Command[Any] = TRAIN_GRPO, words: tuple[str, ...] = ()) -> MixSettings:
    settings = compose(command, ["env=mix", f"env.sources={json.dumps(sources)}", *words]).settings.env
    assert isinstance(settings, MixSettings)
    return settings


def test_a_source_is_an_environment_with_settings_and_a_share(rows: Path) -> None:
    settings = mix("countdown max_number=9 weight=2.5", f"dataset 'path={rows}' reward=[exact,number] name=mine")
    one, two = sources_of(settings)
    assert (one.name, one.weight, one.settings.max_number) == ("countdown", 2.5, 9)  # type: ignore[attr-defined]
    assert isinstance(two.settings, DatasetSettings)
    assert (two.name, two.weight, two.settings.path) == ("mine", 1.0, str(rows))
    assert two.settings.reward == ["exact", "number"]
    assert [type(env) for env in environments_of(settings)] == [CountdownSettings, DatasetSettings]


def test_names_alone_are_enough() -> None:
    assert compose(TRAIN_GRPO, ["env=mix", "env.sources=[gsm8k,countdown]"]).settings.env == mix("gsm8k", "countdown")


def test_sources_of_one_kind_are_numbered() -> None:
    settings = mix("gsm8k", "countdown", "gsm8k")
    assert [source.name for source in sources_of(settings)] == ["gsm8k", "countdown", "gsm8k-2"]


def test_a_mix_has_room_for_its_longest_source_by_default() -> None:
    settings = mix("countdown max_completion_tokens=31 max_prompt_tokens=900", "text_game id=FrozenLake-v1 max_turns=4")
    assert (settings.max_prompt_tokens, settings.max_completion_tokens, settings.max_turns) == (900, 64, 4)
    said = mix("countdown", "gsm8k", words=("env.max_completion_tokens=20",))
    assert [env.max_completion_tokens for env in environments_of(said)] == [20, 20]


def test_a_mistake_in_a_source_is_named_with_the_source(says: Says) -> None:
    wrong = [
        "countdown max_numbr=9",
        "contdown",
        "countdown max_number=many",
        "countdown weight=heavy",
        "countdown weight=0",
        "countdown weight",
        "countdown env.max_number=9",
        "countdown 'max_number=9",
        "",
        "max_number=9",
        "dataset reward=exact",
        "dataset path=rows.jsonl",
        "dataset path=./rows.jsonl reward=exact",
        "dataset path=a/b reward=exat",
        "countdown split=test",
        "countdown limit=5",
    ]
    says.refusals("config", RlpostError, lambda text: mix("gsm8k", text), wrong)


def test_a_mistake_in_a_mix_is_named(says: Says) -> None:
    wrong = [
        [],
        ['env.sources=["gsm8k name=a","countdown name=a"]'],
        ["env.sources=[gsm8k]", "env.prompt_template={question}"],
        ["env.sources=[gsm8k]", "env.max_number=9"],
        ["env.sources=[gsm8k]", "tools.use=[python]", "env.max_turns=2"],
    ]
    says.refusals("config", ConfigError, lambda words: compose(TRAIN_GRPO, ["env=mix", *words]), wrong)


def test_weights_mean_nothing_where_every_row_is_trained_on_once() -> None:
    with pytest.raises(ConfigError, match='"countdown weight=2"'):
        mix("gsm8k", "countdown weight=2", command=TRAIN_SFT)
    assert sources_of(mix("gsm8k", "countdown weight=2", command=EVAL))[1].weight == 2


def test_a_mistake_in_a_recipes_source_names_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("command: train grpo\nenv: mix\nenv.sources: [gsm8k, countdown max_numbr=9]\n")
    with pytest.raises(ConfigError, match=r"r\.yaml, line 3.* env\.max_number\?"):
        compose(TRAIN_GRPO, [f"recipe={recipe}"])
