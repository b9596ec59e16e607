"""What `env.sources` takes, and what is said of what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose, environments_of, sources_of
from rlpost.errors import ConfigError, DataError, RlpostError
from rlpost.settings import CountdownSettings, DatasetSettings, MixSettings


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "my rows.jsonl"
    file.write_text(json.dumps({"prompt": "Say 1.", "answer": "1"}))
    return file


def mix(*sources: str, command: Command[Any] = TRAIN_GRPO, words: tuple[str, ...] = ()) -> MixSettings:
    settings = compose(command, ["env=mix", f"env.sources={json.dumps(sources)}", *words]).settings.env
    assert isinstance(settings, MixSettings)
    return settings


def test_a_source_is_an_environment_with_settings_of_its_own_and_a_share(rows: Path) -> None:
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


def test_the_mix_has_room_for_its_longest_source_where_nothing_is_said() -> None:
    settings = mix("countdown max_completion_tokens=31 max_prompt_tokens=900", "text_game id=FrozenLake-v1 max_turns=4")
    assert (settings.max_prompt_tokens, settings.max_completion_tokens, settings.max_turns) == (900, 64, 4)
    said = mix("countdown", "gsm8k", words=("env.max_completion_tokens=20",))
    assert [env.max_completion_tokens for env in environments_of(said)] == [20, 20]


MISTAKES = {
    "countdown max_numbr=9": 'env.sources "countdown max_numbr=9": env.max_numbr is not a setting of rlpost '
    "train grpo; did you mean env.max_number?",
    "contdown": 'env.sources "contdown": env=contdown is unknown; did you mean countdown?',
    "countdown max_number=many": "env.max_number=many",
    "countdown weight=heavy": "weight=heavy is not a share; give a number above 0",
    "countdown weight=0": "weight=0 is not a share",
    "countdown weight": "'weight' is not a setting; write key=value",
    "countdown env.max_number=9": "env.env.max_number is not a setting",
    "countdown 'max_number=9": "a quote is not closed",
    "": "it is empty",
    "max_number=9": "env=max_number=9 is unknown",
    "dataset reward=exact": "env.path has no value",
    "dataset path=rows.jsonl": "env.reward has no value",
    "dataset path=./rows.jsonl reward=exact": "env.path=./rows.jsonl does not exist",
    "dataset path=a/b reward=exat": "env.reward=exat is not a reward; did you mean exact?",
    "countdown split=test": "the split test is what the mix is measured on",
    "countdown limit=5": "the whole mix has one limit on prompts: give env.limit",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_source_is_told_as_it_is_elsewhere_and_where(text: str) -> None:
    with pytest.raises(RlpostError) as caught:
        compose(TRAIN_GRPO, ["env=mix", f"env.sources={json.dumps(['gsm8k', text])}"])
    assert isinstance(caught.value, ConfigError | DataError)
    assert str(caught.value).startswith(f'env.sources "{text}": ')
    assert MISTAKES[text] in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "env.sources has no value: give env.sources=..."),
        (['env.sources=["gsm8k name=a","countdown name=a"]'], "env.sources has two sources named a"),
        (
            ["env.sources=[gsm8k]", "env.prompt_template={question}"],
            "env.prompt_template is each source's own in a mix",
        ),
        (
            ["env.sources=[gsm8k]", "env.max_number=9"],
            "env.max_number is not a setting of env=mix",
        ),
        (["env.sources=[gsm8k]", "tools.use=[python]", "env.max_turns=2"], 'env.sources "gsm8k": tools.use=[python]'),
    ],
)
def test_a_mistake_in_a_mix_is_told(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(TRAIN_GRPO, ["env=mix", *words])
    assert said in str(caught.value)


def test_weights_mean_nothing_where_every_row_is_trained_on_once() -> None:
    with pytest.raises(ConfigError, match=r'env.sources "countdown weight=2": rlpost train sft trains once on every'):
        mix("gsm8k", "countdown weight=2", command=TRAIN_SFT)
    assert sources_of(mix("gsm8k", "countdown weight=2", command=EVAL))[1].weight == 2


def test_a_mistake_in_a_recipes_source_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("command: train grpo\nenv: mix\nenv.sources: [gsm8k, countdown max_numbr=9]\n")
    with pytest.raises(ConfigError, match=r"r.yaml, line 3.*did you mean env.max_number"):
        compose(TRAIN_GRPO, ["recipe=r.yaml"])
