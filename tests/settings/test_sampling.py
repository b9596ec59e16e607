"""At what temperature a training samples."""

import pytest

from rlpost.catalog import EVAL, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, Command
from rlpost.config.compose import compose
from rlpost.policies.sampling import training_sampling


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_EXPERT_ITERATION], ids=lambda command: command.name)
@pytest.mark.parametrize(
    ("words", "temperature"),
    [
        (["env=arithmetic"], 1.2),
        (["env=countdown"], 1.0),
        (["env=arithmetic", "sampling.temperature=0.7"], 0.7),
    ],
)
def test_a_training_samples_at_the_environments_temperature_unless_told(
    command: Command, words: list[str], temperature: float
) -> None:
    drawn = training_sampling(compose(command, [*words, "sampling.top_p=0.9"]).settings)
    assert (drawn.temperature, drawn.top_p) == (temperature, 0.9)


def test_an_evaluation_does_not() -> None:
    assert compose(EVAL, ["env=arithmetic", "model=tiny"]).settings.sampling.temperature is None
