"""Keys, types and comments as the settings classes state them."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.config.comments import docs_of
from rlpost.config.schema import groups_of, keys_of
from rlpost.settings import EvalSettings, GRPOSettings, GSM8KSettings


@dataclass
class Inner:
    size: int | None = 3  # of the thing

    name: str = "# no comment"


@dataclass
class Outer(Inner):
    size: int | None = 4  # of the bigger thing


def test_docs_are_the_comments_of_a_class_and_its_bases() -> None:
    assert docs_of(Inner) == {"size": "of the thing"}
    assert docs_of(Outer) == {"size": "of the bigger thing"}
    assert docs_of(GSM8KSettings)["split"] == "train, test, or another that the rows have"


def test_a_chosen_class_adds_its_keys() -> None:
    plain = {key.name for key in keys_of(GRPOSettings)}
    chosen = {key.name: key for key in keys_of(GRPOSettings, chosen={"env": GSM8KSettings})}
    assert set(chosen) - plain == {
        "env.path",
        "env.held_out",
        "env.long_prompts",
        "env.pass_rates",
        "env.min_pass_rate",
        "env.max_pass_rate",
        "env.shuffle",
        "env.seed",
    }
    assert chosen["env.max_prompt_tokens"].default == 2048


def test_groups_are_the_fields_without_a_value() -> None:
    assert groups_of(GRPOSettings) == ["model", "env", "policy", "loss", "optim", "cluster", "tracking", "collector"]
    assert groups_of(EvalSettings) == ["model", "env", "policy"]
