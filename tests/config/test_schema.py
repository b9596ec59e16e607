"""Keys, types and meanings as the settings classes state them."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.config.schema import docs_of, groups_of, keys_of
from rlpost.settings import EvalSettings, GRPOSettings, GSM8KSettings, doc


@dataclass
class Inner:
    size: int | None = doc(3, "small")
    name: str = ""
    more: int = doc(3, "more", at_least=1)


@dataclass
class Outer(Inner):
    size: int | None = doc(4, "large")
    more: int = 4


def test_meanings_are_those_of_a_class_and_its_bases() -> None:
    assert docs_of(Inner) == {"size": "small", "more": "more"}
    assert docs_of(Outer) == {"size": "large", "more": "more"}
    assert docs_of(GSM8KSettings)["split"].startswith("train, test")


def test_a_chosen_class_adds_its_keys() -> None:
    plain = {key.name for key in keys_of(GRPOSettings)}
    chosen = {key.name: key for key in keys_of(GRPOSettings, chosen={"env": GSM8KSettings})}
    own = "path held_out long_prompts pass_rates min_pass_rate max_pass_rate shuffle seed"
    assert set(chosen) - plain == {f"env.{name}" for name in own.split()}
    assert chosen["env.max_prompt_tokens"].default == 2048


def test_groups_are_the_fields_without_a_value() -> None:
    assert groups_of(GRPOSettings) == ["model", "env", "policy", "loss", "optim", "cluster", "tracking", "collector"]
    assert groups_of(EvalSettings) == ["model", "env", "policy"]
