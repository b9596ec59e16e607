"""Settings of environments: mathematics, and problems and games made on the spot."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, at_least, between
from rlpost.settings.code import CODE_IF_MODULE
from rlpost.settings.env import EnvSettings


@dataclass
class MathSettings(EnvSettings):
    """Mathematics problems answered in boxes, from the hub or from a folder or file of your own."""

    path: str = "DigitalLearningGmbH/MATH-lighteval"  # folder, file or hub id
    config: str | None = None  # configuration of a hub dataset
    held_out: float = 0.1  # share of the problems kept for test where no file of its own holds that split
    shuffle: bool = True  # false: rows in the order of the file
    seed: int = 0  # of the order in which problems are drawn
    verify_seconds: float = 5.0  # longest comparison of an answer; a later one earns 0 and counts as unverified
    max_prompt_tokens: int = 2048  # a longer prompt is an error that names its row
    max_completion_tokens: int = 1024  # a longer completion is cut
    eval_limit: int = 100  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        between("env.held_out", self.held_out, 0.0, 1.0)
        between("env.verify_seconds", self.verify_seconds, 0.01, 3600.0)


class CountdownOperation(Enum):
    """An operation of the countdown environment."""

    add = "add"
    subtract = "subtract"
    multiply = "multiply"
    divide = "divide"


@dataclass
class CountdownSettings(EnvSettings):
    """Make a target out of a few numbers, each used exactly once; train and test share no problem unless held_out=0."""

    min_numbers: int = 3  # numbers to make the target of, at least
    max_numbers: int = 3  # and at most
    max_number: int = 25  # the largest of them
    max_target: int = 100  # the largest target
    operations: list[CountdownOperation] = field(default_factory=lambda: list(CountdownOperation))  # allowed ones
    held_out: float = 0.2  # share of the problems kept for test; 0: test is the problems of train too
    seed: int = 0  # of the order in which problems are made
    limit: int | None = None  # use only the first problems, over and over; null: 10,000 a pass, without end
    max_completion_tokens: int = 128  # a longer completion is cut
    max_prompt_tokens: int = 256  # a longer prompt is an error that names its row

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("env.min_numbers", self.min_numbers, 2)
        if self.max_numbers < self.min_numbers:
            raise ConfigError(
                f"env.max_numbers={self.max_numbers} is below env.min_numbers={self.min_numbers}: change one"
            )
        at_least("env.max_number", self.max_number, 1)
        at_least("env.max_target", self.max_target, 1)
        between("env.held_out", self.held_out, 0.0, 0.99)
        if not self.operations:
            raise ConfigError("env.operations is empty: name at least one of add, subtract, multiply, divide")


class AnswerPlace(Enum):
    """Where the answer of a reply stands."""

    tags = "tags"  # between <answer> and </answer>
    reply = "reply"  # all of it


@dataclass
class ReasoningGymSettings(EnvSettings):
    """Puzzles of any of reasoning-gym's generators; train and test share no question unless held_out=0."""

    task: str = MISSING  # the generator, such as leg_counting
    task_config: list[str] = field(default_factory=list)  # its own settings: [min_animals:2,max_animals:4]
    answer_in: AnswerPlace = AnswerPlace.tags  # where the answer of a reply is looked for
    score_seconds: float = 5.0  # longest scoring of an answer; a later one earns 0 and counts as unverified
    held_out: float = 0.2  # share of the questions kept for test; 0: test is the questions of train too
    seed: int = 0  # of the order in which problems are made
    limit: int | None = None  # use only the first problems, over and over; null: 10,000 a pass, without end
    max_prompt_tokens: int = 1024  # a longer prompt is an error that names its row
    max_completion_tokens: int = 512  # a longer completion is cut
    eval_limit: int = 100  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        between("env.held_out", self.held_out, 0.0, 0.99)
        between("env.score_seconds", self.score_seconds, 0.01, 3600.0)
        named_values("env.task_config", self.task_config)


@dataclass
class TextGameSettings(EnvSettings):
    """A game of gymnasium's registry, played by text over several turns; train and test share no start."""

    id: str = field(default=MISSING, metadata=CODE_IF_MODULE)  # name of the game: FrozenLake-v1, or MODULE:NAME
    arguments: list[str] = field(default_factory=list)  # the game is made with: [is_slippery:false]
    moves: list[str] = field(default_factory=list)  # names of the actions 0, 1, ...; empty: their numbers, or texts
    success_return: float | None = None  # what an episode has to earn to count as accurate; null: not measured
    invalid_reward: float = 0.0  # what a reply earns that is no action
    step_seconds: float = 10.0  # longest wait for a game to answer a move, after which its completion is an error
    held_out: float = 0.2  # share of the starts kept for test; 0: test is the starts of train too
    seed: int = 0  # of the order in which starts are made
    limit: int | None = None  # use only the first starts, over and over; null: 10,000 a pass, without end
    max_turns: int = 10  # moves in an episode
    max_prompt_tokens: int = 512  # a longer prompt is an error that names its row
    max_completion_tokens: int = 64  # of each turn; a longer completion is cut
    eval_limit: int = 50  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        between("env.held_out", self.held_out, 0.0, 0.99)
        between("env.step_seconds", self.step_seconds, 0.01, 3600.0)
        named_values("env.arguments", self.arguments)


def named_values(key: str, words: list[str]) -> dict[str, Any]:
    """Name -> value of words like `name:value` or `name=value`, values as JSON where they are it, else as text.

    Raises ConfigError for a word that is neither.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, mark, text = re.match(r"\s*([A-Za-z_]\w*)?\s*([:=])?\s*(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
        if not name or not mark:
            raise ConfigError(f"{key}={word!r} names no setting: write {key}=[name:value,other:value]")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text.strip()
    return values
