"""What the model is asked, and how its replies are scored."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from string import Formatter
from typing import ClassVar, Self

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, Settings, limited
from rlpost.settings.code import CODE_UNLESS_NAMES


class Operation(Enum):
    """An operation of the arithmetic environment, by its name; its value is its sign."""

    add = "+"
    subtract = "-"
    multiply = "*"


class LongPrompts(Enum):
    """What becomes of rows whose prompts are longer than env.max_prompt_tokens."""

    error = "error"  # training does not begin
    skip = "skip"  # they are left out, and counted


@dataclass
class EnvSettings(Settings, group="env"):
    """What every environment has; each environment's own class adds to it.

    `prompt_template` is a Python format string over the task's fields, such as `{question}`.
    """

    train_temperature: ClassVar[float] = 1.0  # of sampling in a training, where sampling.temperature is not set

    split: str = "train"  # train, test, or another that the rows have
    limit: int | None = limited(None, at_least=1)  # use only the first rows
    system_prompt: str | None = None  # None: the environment's own
    prompt_template: str | None = None  # None: the environment's own
    max_prompt_tokens: int = limited(128, at_least=1)  # a longer prompt is an error that names its row
    max_completion_tokens: int = limited(48, at_least=1)  # of each turn; a longer completion is cut
    max_turns: int = limited(1, at_least=1)  # of the model in a conversation; more for tools and games
    max_observation_tokens: int = limited(256, at_least=1)  # between two turns, for which the context has room
    eval_limit: int = limited(500, at_least=1)  # held-out prompts an evaluation in training plays, or eval.limit

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w.-]+", self.split):
            raise ConfigError(f"env.split={self.split!r} is no name of a split: it is train, test, validation, ...")
        if self.prompt_template is not None:
            _check_template(self.prompt_template)

    def held_out_for(self, plays: int | None) -> Self:
        """Settings for the test split, where an evaluation plays `plays` prompts (None: `eval_limit`)."""
        return replace(self, split="test", limit=None)


@dataclass
class RowsSettings(EnvSettings):
    """What environments have whose tasks are the rows of a file, a folder or a data set of the hub."""

    path: str = MISSING  # folder, file or hub id; several: [a.jsonl,b.jsonl]
    held_out: float = limited(0.1, 0.0, 1.0)  # share of the rows kept for test where no file of its own holds it
    long_prompts: LongPrompts = LongPrompts.error  # rows with longer ones, found before training begins
    pass_rates: str | None = None  # of rlpost data measure: how often a model answers each prompt right
    min_pass_rate: float = limited(0.0, 0.0, 1.0)  # of the prompts that are trained on
    max_pass_rate: float = limited(1.0, 0.0, 1.0)  # of the prompts that are trained on
    shuffle: bool = True  # false: rows in the order of the file
    seed: int = 0  # of the order in which rows are drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pass_rates is None and (self.min_pass_rate > 0 or self.max_pass_rate < 1):
            raise ConfigError(
                "env.min_pass_rate and env.max_pass_rate choose by rates that were measured: name their file with "
                "env.pass_rates, as rlpost data measure writes one"
            )
        if self.min_pass_rate > self.max_pass_rate:
            raise ConfigError(
                f"env.min_pass_rate={self.min_pass_rate:g} is above env.max_pass_rate={self.max_pass_rate:g}: no "
                "prompt would be left"
            )

    def held_out_for(self, plays: int | None) -> Self:
        """See `EnvSettings.held_out_for`: with a `limit`, no more rows than that or an evaluation need."""
        limit = None if self.limit is None else max(self.limit, plays or self.eval_limit)
        return replace(super().held_out_for(plays), limit=limit)


@dataclass
class MadeSettings(EnvSettings):
    """What environments have that make their problems on the spot."""

    held_out: float = limited(0.2, 0.0, 0.99)  # share kept for test; 0: test is the problems of train too
    seed: int = 0  # of the order in which problems are drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in ("train", "test"):
            raise ConfigError(f"env.split={self.split} is unknown: it must be train or test")


@dataclass
class ArithmeticSettings(MadeSettings):
    """Sums made on the spot; train and test share no pair of operands unless `held_out` is 0."""

    operations: list[Operation] = field(default_factory=lambda: [Operation.add])  # drawn from at random
    digits: int = limited(2, 1, 9)  # of each operand

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.operations:
            raise ConfigError("env.operations is empty: name at least one of add, subtract, multiply")


@dataclass
class GSM8KSettings(RowsSettings):
    """Grade-school word problems: a folder with train.jsonl and test.jsonl, one file, or the hub's."""

    path: str = "openai/gsm8k"
    max_prompt_tokens: int = 2048  # a longer prompt is an error that names its row
    max_completion_tokens: int = 256  # a longer completion is cut
    eval_limit: int = 64


@dataclass
class DatasetSettings(RowsSettings):
    """Rows of your own, scored by rewards of your own, or shown as demonstrations.

    For training on rewards a row is a prompt. As a demonstration it holds a conversation
    (`messages`, or `conversations` with from and value), a prompt and a completion, or plain `text`.
    """

    path: str = MISSING  # .jsonl, .json, .csv or .parquet file, folder with train.* and test.*, or hub id
    reward: list[str] = field(
        default=MISSING, metadata=CODE_UNLESS_NAMES
    )  # FILE.py:FUNCTION or a name (rlpost reward list); several: [a.py:f,exact]
    reward_weights: list[float] | None = None  # one a reward; None: 1 each
    prompt_column: str | None = None  # text or messages; None: prompt, messages or question, the first there is
    completion_column: str | None = None  # what a demonstration answers to its prompt; None: completion, if there
    answer_column: str | None = None  # what the built-in rewards compare with; None: answer, where there is one
    gold: bool | None = None  # whether a reply is right or wrong (false: length, style); None: if rows have an answer
    accuracy: str | None = field(default=None, metadata=CODE_UNLESS_NAMES)  # a reward of 0 and 1; None: exact or number
    reward_timeout_seconds: float = limited(60.0, 0.001, 86400.0)  # of a call: a batch, or a row of one that failed
    test_path: str | None = None  # where the split test is; None: in path, or held out
    config: str | None = None  # configuration of a hub dataset
    max_prompt_tokens: int = 1024  # a longer prompt is an error that names its row
    max_completion_tokens: int = 256  # a longer completion is cut
    eval_limit: int = 200  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward):
            raise ConfigError(
                f"env.reward_weights has {len(self.reward_weights)} numbers for {len(self.reward)} rewards: each "
                "needs one"
            )
        if self.test_path is not None and self.test_path == self.path:
            raise ConfigError(
                f"env.test_path={self.test_path} is env.path too: leave it out, and a share of the rows is held out"
            )


def _check_template(template: str) -> None:
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"env.prompt_template={template!r} does not fit: {error}; write {{{{ and }}}} for braces"
        ) from None
    if inside := next((name for name in fields if "." in name), None):
        raise ConfigError(
            f"env.prompt_template={template!r} reaches into {{{inside}}}: a field is the name of a column, as "
            "{question} is"
        )
    if not fields:
        raise ConfigError(
            f"env.prompt_template={template!r} has no field such as {{question}}: every prompt would be the same"
        )
