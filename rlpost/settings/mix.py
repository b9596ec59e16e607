"""A mix of whole environments: what `env.sources` says, as text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING
from rlpost.settings.code import NAME, RUNS, Runs
from rlpost.settings.env import EnvSettings


@dataclass(frozen=True)
class SourceText:
    """A source as it was written: `arithmetic digits=1 weight=3`. `name` is empty where none was given."""

    env: str
    name: str
    weight: float
    given: dict[str, str]  # the environment's own settings: key without env. -> text

    @classmethod
    def of(cls, text: str) -> SourceText:
        """What `text` says. Raises ConfigError where it is not read as an environment and settings of it."""
        try:
            env, *words = shlex.split(text)
        except ValueError as error:
            wrong = "a quote is not closed" if text.strip() else "it is empty"
            raise ConfigError(f"{_said(text)}: {wrong}; write NAME key=value ..., as in arithmetic digits=1") from error
        if not NAME.fullmatch(env):
            raise ConfigError(f"{_said(text)}: {env!r} is no name; begin with that of an environment")
        given: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise ConfigError(
                    f"{_said(text)}: {word!r} is no setting; write key=value, in quotes where it has spaces"
                )
            if key.startswith("env."):
                raise ConfigError(f"{_said(text)}: settings of a source are written without env.; write {key[4:]}=...")
            if key in given:
                raise ConfigError(f"{_said(text)}: {key} stands there twice; give it once")
            given[key] = value
        name = given.pop("name", "")
        if name and not NAME.fullmatch(name):
            raise ConfigError(f"{_said(text)}: name={name} is no name; it is letters, digits, - and _, a letter first")
        return cls(env, name, _weight(text, given.pop("weight", "1")), given)


def _weight(text: str, said: str) -> float:
    try:
        weight = float(said)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ConfigError(f"{_said(text)}: weight={said} is no share; give a number above 0, or leave the source out")
    return weight


def _said(text: str) -> str:
    return f'env.sources "{text}"'


def runs_code(sources: Any) -> bool:
    """Whether a setting of one of `sources` makes something run, asked as it is for the same setting of `env=NAME`."""
    if isinstance(sources, str):  # nothing yet, or a reference to what nobody has read
        return sources != MISSING
    return any(_runs_code(text) for text in sources or ())


def _runs_code(text: Any) -> bool:
    try:
        given = SourceText.of(str(text)).given
    except ConfigError:  # composing it raises this
        return False
    return any(
        runs.by([part.strip() for part in given[key].strip("[] ").split(",")])
        for key, runs in _running(EnvSettings)
        if key in given and given[key] != "null"
    )


def _running(settings: type) -> Iterator[tuple[str, Runs]]:
    """The fields that make something run, of all settings classes of environments, those of plugins included."""
    for name, own in getattr(settings, "__dataclass_fields__", {}).items():
        if RUNS in own.metadata and settings is not MixSettings:
            yield name, own.metadata[RUNS]
    for derived in settings.__subclasses__():
        yield from _running(derived)


@dataclass
class MixSettings(EnvSettings):
    """Several environments at once: every prompt is drawn from one of them, in shares as their weights are.

    A source is the name of an environment, as `env=NAME` takes it, then settings of that environment without
    `env.`, and of the source: `weight=` (1) and `name=`, by which figures and rollouts know it (else the
    environment's name). `limit` is how many prompts of the mix are used; the limits of tokens and turns are the
    greatest that a source has, and one that is given here holds for all of them.
    """

    sources: list[str] = field(
        default=MISSING, metadata={RUNS: Runs("name code to run", runs_code)}
    )  # [arithmetic,gsm8k], or with settings and shares: ["arithmetic digits=1 weight=3","ifeval path=FOLDER"]
    eval_limit: int = 200  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("system_prompt", "prompt_template"):
            if getattr(self, key) is not None:
                raise ConfigError(f'env.{key} is each source\'s own in a mix: write it there, as in "gsm8k {key}=..."')
