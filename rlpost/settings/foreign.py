"""Settings of environments that other people's packages and servers define."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.base import CODE, CODE_UNLESS_NAMES, MISSING, PROGRAM, doc
from rlpost.settings.env import AnswerPlace, GameSettings, ListedSettings, MadeSettings, OwnRowsSettings, named_values
from rlpost.settings.model import mapping_in

RESET_EXAMPLE = "{level: hard}"
_ADDRESS = re.compile(r"(ws|http)s?://(\[[\da-fA-F:]+\]|[^/:\[\]]+)(:\d{1,5})?(/.*)?")


@dataclass
class TextArenaSettings(GameSettings):
    """Games of TextArena for one player: env.id=GuessTheNumber-v0.

    Train and test share no seed; some games begin alike with every seed.
    """

    ends_itself: ClassVar = True

    id: str = doc(MISSING, "name of the game, as textarena lists it")
    arguments: list[str] = doc([], "arguments of the game: [max_turns:12]")
    max_turns: int | None = doc(None, "moves in an episode, which earns 0 if this limit ends it; null: the game's own")
    start_seconds: float = doc(60.0, "seconds the game may take to begin; longer is an error", 0.01, 3600.0)
    max_prompt_tokens: int = doc(1024, "longer prompts are an error that names the row")


@dataclass
class OpenEnvSettings(MadeSettings):
    """Environments of an OpenEnv server: env.url=ws://127.0.0.1:8000.

    An episode is a session of the server. Train and test share no seed.
    """

    repeats_with_limit: ClassVar = True
    brings_tools: ClassVar = True

    url: str = doc(MISSING, "address of the server: ws://HOST:PORT or http://HOST:PORT")
    reset: str | None = doc(None, "arguments of each reset beside the seed, as {level: hard}")
    sessions: int | None = doc(None, "sessions open at once; null: one for each conversation", at_least=1)
    success_return: float | None = doc(None, "return from which an episode counts as accurate; null: not measured")
    invalid_reward: float = doc(0.0, "reward of a reply that is not an action")
    start_seconds: float = doc(60.0, "seconds until a session has begun; longer is an error", 0.01, 3600.0)
    step_seconds: float = doc(30.0, "seconds the server may take for one step; longer is an error", 0.01, 3600.0)
    limit: int | None = doc(None, "use only the first N seeds; null: 10,000 per pass")
    max_turns: int | None = doc(10, "turns of the model in an episode")
    max_prompt_tokens: int = doc(1024, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(128, "most new tokens per turn; longer completions are truncated")
    eval_limit: int = doc(50, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "seed" in mapping_in("env.reset", self.reset, RESET_EXAMPLE):
            raise ConfigError(f"env.reset={self.reset} names the seed, and each episode has its own: write env.seed")
        if self.url != MISSING and not _ADDRESS.fullmatch(self.url):
            raise ConfigError(f"env.url={self.url} is not an address: write ws://HOST:PORT or http://HOST:PORT")


@dataclass
class VerifiersSettings(ListedSettings):
    """Tasks and rewards of a verifiers package: env.id=reverse-text env.python=PATH.

    The package runs in an interpreter of its own, as a child process. The model gives one reply a task.
    """

    splits: ClassVar = ("train", "test")

    id: str = doc(MISSING, "name of the taskset, as verifiers loads it", runs=CODE)
    args: str | None = doc(None, "arguments of the taskset, as {num_tasks: 100}", runs=CODE)
    python: str | None = doc(None, "interpreter with verifiers; null: rlpost's own", runs=PROGRAM)
    tasks: int | None = doc(None, "use only the first N tasks; null: all, of an endless taskset 1,000", at_least=1)
    start_seconds: float = doc(300.0, "seconds until the taskset is loaded; longer is an error", 0.01, 86400.0)
    score_seconds: float = doc(60.0, "seconds one scoring may take; longer is an error", 0.01, 3600.0)
    max_prompt_tokens: int = doc(2048, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(512, "most new tokens; longer completions are truncated")
    eval_limit: int = doc(100, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        mapping_in("env.args", self.args, "{num_tasks: 100}")
        if self.most_turns > 1:
            raise ConfigError(
                f"env.max_turns={self.max_turns} does not go with env=verifiers, whose rewards see one reply a task: "
                "leave it out"
            )


@dataclass
class FactorySettings(OwnRowsSettings):
    """A class as TRL takes it: env.factory=FILE.py:CLASS env.path=ROWS.

    `reset(**row)` begins an episode, the public methods are tools, and `get_reward()` scores it.
    """

    takes_whole_rows: ClassVar = True
    brings_tools: ClassVar = True
    has_replies: ClassVar = False

    factory: str = doc(MISSING, "FILE.py:CLASS", runs=CODE)
    reset_seconds: float = doc(60.0, "seconds reset and get_reward may take; longer is an error", 0.01, 3600.0)
    step_seconds: float = doc(10.0, "seconds one call of a tool may take; longer is an error", 0.01, 3600.0)
    reward: list[str] = doc(
        [], "rewards added to get_reward: FILE.py:FUNCTION or a name; several: [a.py:f,exact]", runs=CODE_UNLESS_NAMES
    )
    max_turns: int | None = doc(10, "turns of the model in an episode")

    @property
    def scores(self) -> bool:
        """See `EnvSettings.scores`: the class does, or `reward`."""
        return True


@dataclass
class ReasoningCoreSettings(ListedSettings):
    """Problems of a task of reasoning-core, drawn once and kept: env.task=arithmetics."""

    splits: ClassVar = ("train", "test")

    task: str = doc(MISSING, "the task, such as arithmetics")
    level: int = doc(0, "difficulty", at_least=0)
    task_config: list[str] = doc([], "settings of the task's own: [max_depth:4]")
    num_problems: int = doc(500, "problems that are drawn, those held out for test included", at_least=1)
    problems: str | None = doc(None, "file that keeps the problems, written if it is missing; null: in rlpost's cache")
    answer_in: AnswerPlace = doc(AnswerPlace.tags, "which part of a reply is the answer")
    draw_seconds: float = doc(60.0, "seconds until one problem is drawn; longer is an error", 0.01, 3600.0)
    score_seconds: float = doc(5.0, "seconds one scoring may take; a longer one is unverified: 0", 0.01, 3600.0)
    max_prompt_tokens: int = doc(1024, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(512, "most new tokens; longer completions are truncated")
    eval_limit: int = doc(100, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        named_values("env.task_config", self.task_config)
