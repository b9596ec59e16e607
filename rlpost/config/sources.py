"""The sources of a mix of environments, once they are settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

from rlpost.config.paths import check_data_path, check_reward
from rlpost.errors import ConfigError, DataError
from rlpost.settings import DatasetSettings, EnvSettings, MixSettings, ToolsSettings
from rlpost.settings.mix import SourceText
from rlpost.settings.tools import check_turns

LIMITS = ("max_prompt_tokens", "max_completion_tokens", "max_turns", "max_observation_tokens")


@dataclass(frozen=True)
class Source:
    """A whole environment as a part of a mix, by a name that no other source has."""

    name: str
    weight: float  # shares of the prompts are as the weights
    text: str
    settings: EnvSettings

    def within(self, mix: MixSettings) -> Source:
        """The same with the split of the mix, unless that is train, and no limit above the mix's."""
        own = self.settings
        limits = {key: min(getattr(own, key), getattr(mix, key)) for key in LIMITS}
        split = SourceText.of(self.text).given.get("split", "train") if mix.split == "train" else mix.split
        return replace(self, settings=replace(own, split=split, **limits))


def named_apart(sources: Sequence[Source], *, weighted: bool) -> list[Source]:
    """The same with a name each: that it was given, else its environment's, those of one kind numbered (dataset-2).

    `weighted` is whether weights mean anything. Raises ConfigError where there is no source, two were given one
    name, or one says what holds for all of a mix.
    """
    if not sources:
        raise ConfigError("env.sources is empty: name at least one environment, as in 'env.sources=[arithmetic,gsm8k]'")
    said = [SourceText.of(source.text) for source in sources]
    names = [each.name for each in said if each.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"env.sources has two sources named {twice}: give one of them another name=")
    found: list[Source] = []
    for source, each in zip(sources, said, strict=True):
        if reason := _not_of_one(source, each, weighted):
            raise ConfigError(f'env.sources "{source.text}": {reason}')
        numbered = (f"{each.env}-{number}" if number > 1 else each.env for number in count(1))
        name = each.name or next(name for name in numbered if name not in names)
        names.append(name)
        found.append(replace(source, name=name))
    return found


def _not_of_one(source: Source, said: SourceText, weighted: bool) -> str | None:
    """Why a source cannot say what it says; None where it can."""
    if not weighted and source.weight != 1:
        return "rlpost train sft trains once on every row of every source, so a weight means nothing; leave it out"
    if said.given.get("split") == "test":
        return "the split test is what the mix is measured on: leave it out, or give env.split=test for all sources"
    if "limit" in said.given:
        return "how many prompts are used is said for the whole mix: give env.limit"
    return None


def widened(sources: Sequence[Source], mix: Any, given: Collection[str]) -> dict[str, int]:
    """The limits of a mix that nobody has `given`: the greatest that a source has, for which there has to be room."""
    defaults = {field.name: field.default for field in fields(MixSettings)}
    unsaid = [key for key in LIMITS if f"env.{key}" not in given and getattr(mix, key) == defaults[key]]
    return {key: max(getattr(source.settings, key) for source in sources) for key in unsaid}


def check_environment(settings: Any, sources: Sequence[Source]) -> None:
    """Raise what is wrong with the environment among the other settings, or with one of its `sources` if it is a mix.

    That is ConfigError, and DataError for a local path that is missing.
    """
    if not sources:
        _check_rows(settings.env)
    overlong = getattr(settings, "overlong", None)
    for source in sources:
        own = source.settings
        try:
            _check_rows(own)
            check_turns(own, getattr(settings, "tools", None) or ToolsSettings())
        except (ConfigError, DataError) as error:
            raise type(error)(f'env.sources "{source.text}": {error}') from None
        if overlong and overlong.penalty_tokens and own.max_completion_tokens < settings.env.max_completion_tokens:
            raise ConfigError(
                "overlong.penalty_tokens is measured from one limit, and the sources of env.sources have several: give "
                "each the same max_completion_tokens, or leave it out"
            )


def _check_rows(env: EnvSettings) -> None:
    for key in ("path", "test_path"):
        if isinstance(data := getattr(env, key, None), str):
            check_data_path(data, f"env.{key}")
    if isinstance(env, DatasetSettings):
        for reward in env.reward:
            check_reward(reward, "env.reward")
        if env.accuracy is not None:
            check_reward(env.accuracy, "env.accuracy")
