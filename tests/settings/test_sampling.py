"""How completions are drawn: at what temperature, from which ids, and what ends them."""

from __future__ import annotations

import pytest

from rlpost.catalog import EVAL, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, Command
from rlpost.config.compose import compose
from rlpost.errors import ConfigError
from rlpost.policies.drawing import evaluation_sampling, training_sampling
from rlpost.settings import ArithmeticSettings, SamplingSettings
from rlpost.train.facts import Seen, facts_of
from tests.says import Says

FILTERS = ["sampling.top_p=0.9", "sampling.top_k=20", "sampling.min_p=0.05"]
STOP = 'sampling.stop=["</answer>","\\n\\n"]'


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_EXPERT_ITERATION], ids=lambda command: command.name)
@pytest.mark.parametrize(("words", "temperature"), [([], 1.0), (["sampling.temperature=0.7"], 0.7)])
def test_a_training_samples_at_the_environments_temperature(
    command: Command, words: list[str], temperature: float
) -> None:
    settings = compose(command, [*words, STOP]).settings
    drawn = training_sampling(settings.sampling, settings.env)
    assert drawn == SamplingSettings(temperature, stop=["</answer>", "\n\n"])


def test_an_environment_may_have_a_temperature_of_its_own() -> None:
    class Warm(ArithmeticSettings):
        train_temperature = 1.2

    temperatures = []
    for words in ([], ["sampling.temperature=0.7"]):
        sampling = compose(TRAIN_GRPO, words).settings.sampling
        temperatures.append(training_sampling(sampling, Warm()).temperature)
    assert temperatures == [1.2, 0.7]
    assert compose(EVAL, ["env=arithmetic", "model=tiny"]).settings.sampling.temperature is None


def test_all_filters_choose_where_log_probs_are_not_trained_on() -> None:
    expected = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "stop": ["</answer>", "\n\n"]}
    words = ["model=tiny", "env=arithmetic", *FILTERS, STOP]
    iterated = compose(TRAIN_EXPERT_ITERATION, words).settings
    assert training_sampling(iterated.sampling, iterated.env) == SamplingSettings(1.0, **expected)
    assert evaluation_sampling(compose(EVAL, words).settings.sampling, 8) == SamplingSettings(1.0, **expected)


@pytest.mark.parametrize("word", FILTERS)
def test_grpo_refuses_to_draw_from_a_part_of_the_distribution(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word} "):
        compose(TRAIN_GRPO, [word])


@pytest.mark.parametrize(
    "word", ["sampling.top_k=-1", "sampling.min_p=1.5", "sampling.stop=['']", "sampling.stops=END"]
)
def test_what_cannot_be_drawn_is_refused(word: str, says: Says) -> None:
    with says.refused("eval", ConfigError, word.partition("=")[0]):
        compose(EVAL, ["model=tiny", word])


def test_a_plan_says_all_that_is_not_the_usual(says: Says) -> None:
    says("train", SamplingSettings(0.7, top_p=0.9, top_k=20, min_p=0.05, stop="END"))  # type: ignore[arg-type]
    facts = facts_of(compose(TRAIN_GRPO, ["policy=transformers", STOP]).settings, [], Seen("", ""))
    [policy] = [fact for fact in facts if fact.name == "policy"]
    says("train", policy.value)
