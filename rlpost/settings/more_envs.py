"""Settings of environments: mathematics, and problems and games made on the spot."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, limited
from rlpost.settings.code import CODE_IF_MODULE
from rlpost.settings.env import MadeSettings, RowsSettings


@dataclass
class MathSettings(RowsSettings):
    """Mathematics problems answered in boxes, from the hub or from a folder or file of your own."""

    path: str = "DigitalLearningGmbH/MATH-lighteval"
    config: str | None = None  # configuration of a hub dataset
    verify_seconds: float = limited(5.0, 0.01, 3600.0)  # longest comparison of an answer; a later one is unverified: 0
    max_prompt_tokens: int = 2048  # a longer prompt is an error that names its row
    max_completion_tokens: int = 1024  # a longer completion is cut
    eval_limit: int = 100  # held-out prompts an evaluation during training plays, unless eval.limit says


class CountdownOperation(Enum):
    """An operation of the countdown environment, by its name; its value is its sign."""

    add = "+"
    subtract = "-"
    multiply = "*"
    divide = "/"


@dataclass
class CountdownSettings(MadeSettings):
    """Make a target out of a few numbers, each used exactly once; train and test share no problem unless held_out=0."""

    min_numbers: int = limited(3, at_least=2)  # numbers to make the target of, at least
    max_numbers: int = limited(3, at_most=10)  # and at most
    max_number: int = limited(25, at_least=1)  # the largest of them
    max_target: int = limited(100, at_least=1)  # the largest target
    operations: list[CountdownOperation] = field(default_factory=lambda: list(CountdownOperation))  # allowed ones
    limit: int | None = None  # use only the first problems, over and over; null: 10,000 a pass, without end
    max_completion_tokens: int = 128  # a longer completion is cut
    max_prompt_tokens: int = 256  # a longer prompt is an error that names its row

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_numbers < self.min_numbers:
            raise ConfigError(
                f"env.min_numbers={self.min_numbers} and env.max_numbers={self.max_numbers} do not fit: the second "
                "must be no smaller than the first"
            )
        if not self.operations:
            raise ConfigError("env.operations is empty: name at least one of add, subtract, multiply, divide")


class AnswerPlace(Enum):
    """Where the answer of a reply stands."""

    tags = "tags"  # between <answer> and </answer>
    reply = "reply"  # all of it


@dataclass
class ReasoningGymSettings(MadeSettings):
    """Puzzles of any of reasoning-gym's generators; train and test share no question unless held_out=0."""

    task: str = MISSING  # the generator, such as leg_counting
    task_config: list[str] = field(default_factory=list)  # its own settings: [min_animals:2,max_animals:4]
    answer_in: AnswerPlace = AnswerPlace.tags  # where the answer of a reply is looked for
    score_seconds: float = limited(5.0, 0.01, 3600.0)  # longest scoring of an answer; a later one is unverified: 0
    limit: int | None = None  # use only the first problems, over and over; null: 10,000 a pass, without end
    max_prompt_tokens: int = 1024  # a longer prompt is an error that names its row
    max_completion_tokens: int = 512  # a longer completion is cut
    eval_limit: int = 100  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        named_values("env.task_config", self.task_config)


@dataclass
class TextGameSettings(MadeSettings):
    """A game of gymnasium's registry, played by text over several turns; train and test share no start."""

    id: str = field(default=MISSING, metadata=CODE_IF_MODULE)  # name of the game: FrozenLake-v1, or MODULE:NAME
    arguments: list[str] = field(default_factory=list)  # the game is made with: [is_slippery:false]
    moves: list[str] = field(default_factory=list)  # names of the actions 0, 1, ...; empty: their numbers, or texts
    success_return: float | None = None  # what an episode has to earn to count as accurate; null: not measured
    invalid_reward: float = 0.0  # what a reply earns that is no action
    step_seconds: float = limited(10.0, 0.01, 3600.0)  # longest wait for the game; a move answered later is an error
    limit: int | None = None  # use only the first starts, over and over; null: 10,000 a pass, without end
    max_turns: int = 10  # moves in an episode
    max_prompt_tokens: int = 512  # a longer prompt is an error that names its row
    max_completion_tokens: int = 64  # of each turn; a longer completion is cut
    eval_limit: int = 50  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        named_values("env.arguments", self.arguments)


def named_values(key: str, words: list[str]) -> dict[str, Any]:
    """Name -> value of words like `name:value` or `name=value`, values as JSON where they are it, else as text.

    Raises ConfigError for a word that is neither.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, mark, text = re.match(r"\s*([A-Za-z_]\w*)?\s*([:=])?\s*(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
        if not name or not mark:
            raise ConfigError(f"{key}={word!r} names no setting: write '{key}=[name:value,other:value]'")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text.strip()
    return values
