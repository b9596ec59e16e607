"""How completions are drawn: at what temperature, from which ids, and what ends them."""

from __future__ import annotations

import pytest

from rlpost.catalog import EVAL, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, Command
from rlpost.config.compose import compose
from rlpost.errors import ConfigError
from rlpost.policies.drawing import evaluation_sampling, training_sampling
from rlpost.settings import ArithmeticSettings, SamplingSettings
from rlpost.train.facts import Seen, facts_of

FILTERS = ["sampling.top_p=0.9", "sampling.top_k=20", "sampling.min_p=0.05"]
STOP = 'sampling.stop=["</answer>","\\n\\n"]'


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_EXPERT_ITERATION], ids=lambda command: command.name)
@pytest.mark.parametrize(
    ("words", "temperature"),
    [
        (["env=arithmetic"], 1.0),
        (["env=countdown"], 1.0),
        (["env=arithmetic", "sampling.temperature=0.7"], 0.7),
    ],
)
def test_a_training_samples_at_the_environments_temperature_unless_told(
    command: Command, words: list[str], temperature: float
) -> None:
    settings = compose(command, [*words, STOP]).settings
    drawn = training_sampling(settings.sampling, settings.env)
    assert drawn == SamplingSettings(temperature, stop=["</answer>", "\n\n"])


def test_an_evaluation_does_not() -> None:
    assert compose(EVAL, ["env=arithmetic", "model=tiny"]).settings.sampling.temperature is None


@pytest.mark.parametrize("word", FILTERS)
def test_grpo_refuses_to_draw_from_a_part_of_the_distribution_that_it_trains(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(TRAIN_GRPO, [word])
    assert str(caught.value) == (
        f"{word} draws from a part of the distribution, and the gradient is that of the whole: tokens would be weighed "
        "by probabilities they were not drawn with; leave it out, or lower sampling.temperature (rlpost eval, rlpost "
        "chat and train expert-iteration take it)"
    )


def test_an_environment_may_be_trained_at_a_temperature_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArithmeticSettings, "train_temperature", 1.2, raising=False)
    asked = [["model=tiny"], ["model=tiny", "sampling.temperature=0.7"], ["model=tiny", "env=gsm8k"]]
    settings = [compose(TRAIN_GRPO, words).settings for words in asked]
    drawn = [training_sampling(each.sampling, each.env).temperature for each in settings]
    assert drawn == [1.2, 0.7, 1.0]


def test_what_is_drawn_is_chosen_by_all_filters_where_log_probs_are_not_trained_on() -> None:
    expected = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "stop": ["</answer>", "\n\n"]}
    words = ["model=tiny", "env=arithmetic", *FILTERS, STOP]
    iterated = compose(TRAIN_EXPERT_ITERATION, words).settings
    assert training_sampling(iterated.sampling, iterated.env) == SamplingSettings(1.0, **expected)
    assert evaluation_sampling(compose(EVAL, words).settings.sampling, 8) == SamplingSettings(1.0, **expected)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sampling.top_k=-1", "sampling.top_k=-1 is out of range: it must be at least 0"),
        ("sampling.min_p=1.5", "sampling.min_p=1.5 is out of range: it must lie between 0.0 and 1.0"),
        ("sampling.stop=['']", "sampling.stop holds an empty text, with which every completion ends: leave it out"),
        ("sampling.stops=END", "did you mean sampling.stop"),
    ],
)
def test_what_cannot_be_drawn_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", "\\[")):
        compose(EVAL, ["model=tiny", word])


def test_a_plan_says_all_that_is_not_the_usual() -> None:
    drawn = SamplingSettings(0.7, top_p=0.9, top_k=20, min_p=0.05, stop="END")  # type: ignore[arg-type]
    assert str(drawn) == "temperature 0.7, top_p 0.9, top_k 20, min_p 0.05, stops at 'END'"
    words = ["policy=transformers", STOP]
    [policy] = [
        fact for fact in facts_of(compose(TRAIN_GRPO, words).settings, [], Seen("", "")) if fact.name == "policy"
    ]
    assert policy.value == "transformers, temperature 1, stops at '</answer>' or '\\n\\n'"
