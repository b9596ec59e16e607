"""Settings of environments that other people's packages and servers define."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.base import CODE, MISSING, PROGRAM, limited
from rlpost.settings.env import MadeSettings, OwnRowsSettings, RowsSettings, named_values
from rlpost.settings.model import template_variables


@dataclass
class TextArenaSettings(MadeSettings):
    """Games of TextArena for one player: env.id=GuessTheNumber-v0.

    Train and test share no start.
    """

    repeats_with_limit: ClassVar = True

    id: str = MISSING  # name of the game, as textarena lists it
    arguments: list[str] = field(default_factory=list)  # arguments of the game: [max_turns:12]
    success_return: float | None = None  # return from which an episode counts as accurate; null: not measured
    start_seconds: float = limited(60.0, 0.01, 3600.0)  # seconds the game may take to begin; longer is an error
    step_seconds: float = limited(10.0, 0.01, 3600.0)  # seconds the game may take for one move; longer is an error
    limit: int | None = None  # use only the first N starts; null: 10,000 per pass
    max_turns: int = 10  # moves in an episode
    max_prompt_tokens: int = 1024  # longer prompts are an error that names the row
    max_completion_tokens: int = 64  # most new tokens per turn; longer completions are truncated
    eval_limit: int = 50  # held-out prompts per evaluation in training, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        named_values("env.arguments", self.arguments)


@dataclass
class OpenEnvSettings(MadeSettings):
    """Environments of an OpenEnv server: env.url=ws://127.0.0.1:8000.

    An episode is a session of the server. Train and test share no seed.
    """

    repeats_with_limit: ClassVar = True

    url: str = MISSING  # address of the server: ws://HOST:PORT or http://HOST:PORT
    reset: str | None = None  # what each reset is told beside the seed, as {level: hard}
    sessions: int | None = limited(None, at_least=1)  # sessions open at once; null: one for each conversation
    success_return: float | None = None  # return from which an episode counts as accurate; null: not measured
    invalid_reward: float = 0.0  # reward of a reply that is not an action
    start_seconds: float = limited(60.0, 0.01, 3600.0)  # seconds until a session has begun; longer is an error
    step_seconds: float = limited(30.0, 0.01, 3600.0)  # seconds the server may take for one step; longer is an error
    limit: int | None = None  # use only the first N seeds; null: 10,000 per pass
    max_turns: int = 10  # turns of the model in an episode
    max_prompt_tokens: int = 1024  # longer prompts are an error that names the row
    max_completion_tokens: int = 128  # most new tokens per turn; longer completions are truncated
    eval_limit: int = 50  # held-out prompts per evaluation in training, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        template_variables("env.reset", self.reset)
        if self.url != MISSING and not re.match(r"(ws|http)s?://[^/]", self.url):
            raise ConfigError(f"env.url={self.url} is not an address: write ws://HOST:PORT or http://HOST:PORT")


@dataclass
class VerifiersSettings(RowsSettings):
    """Tasks and rewards of a verifiers package: env.id=reverse-text env.python=PATH.

    The package runs in an interpreter of its own, as a child process.
    """

    path: str = "verifiers"  # where the rows come from: the taskset itself
    id: str = field(default=MISSING, metadata=CODE)  # name of the taskset, as verifiers loads it
    args: str | None = None  # arguments of the taskset, as {num_tasks: 100}
    python: str | None = field(default=None, metadata=PROGRAM)  # interpreter with verifiers; null: rlpost's own
    start_seconds: float = limited(300.0, 0.01, 86400.0)  # seconds until the taskset is loaded; longer is an error
    score_seconds: float = limited(60.0, 0.01, 3600.0)  # seconds one scoring may take; longer is an error
    max_prompt_tokens: int = 2048  # longer prompts are an error that names the row
    max_completion_tokens: int = 512  # most new tokens; longer completions are truncated
    eval_limit: int = 100  # held-out prompts per evaluation in training, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        template_variables("env.args", self.args)


@dataclass
class FactorySettings(OwnRowsSettings):
    """A class as TRL takes it: env.factory=FILE.py:CLASS env.path=ROWS.

    `reset(**row)` begins, the public methods are tools, and `get_reward()` ends an episode.
    """

    factory: str = field(default=MISSING, metadata=CODE)  # FILE.py:CLASS
    reset_seconds: float = limited(60.0, 0.01, 3600.0)  # seconds reset and get_reward may take; longer is an error
    step_seconds: float = limited(10.0, 0.01, 3600.0)  # seconds one call of a tool may take; longer is an error
    max_turns: int = 10  # turns of the model in an episode


@dataclass
class ReasoningCoreSettings(RowsSettings):
    """Problems of reasoning-core, drawn once and kept: env.task=arithmetics."""

    path: str = "reasoning_core"  # where the rows come from: the generator itself
    task: str = MISSING  # the generator, such as arithmetics
