"""What the model is asked, and how its replies are scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rlpost.errors import ConfigError
from rlpost.settings.checks import at_least


class Operation(Enum):
    """An operation of the arithmetic environment."""

    add = "add"
    subtract = "subtract"
    multiply = "multiply"


@dataclass
class EnvSettings:
    """What every environment has; each environment's own class adds to it.

    `prompt_template` is a Python format string over the task's fields, `{question}` among them.
    """

    split: str = "train"  # train or test
    limit: int | None = None  # use only the first rows
    system_prompt: str | None = None  # None: the environment's own
    prompt_template: str | None = None  # None: the environment's own
    max_prompt_tokens: int = 128  # a longer prompt is an error that names its row
    max_completion_tokens: int = 48  # a longer completion is cut
    eval_limit: int = 500  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise ConfigError(f"env.split={self.split} is unknown: it must be train or test")
        at_least("env.limit", self.limit, 1)
        at_least("env.max_prompt_tokens", self.max_prompt_tokens, 1)
        at_least("env.max_completion_tokens", self.max_completion_tokens, 1)
        at_least("env.eval_limit", self.eval_limit, 1)
        if self.prompt_template is not None and "{question}" not in self.prompt_template:
            raise ConfigError(
                f"env.prompt_template={self.prompt_template!r} has no {{question}}: every prompt would be the same"
            )


@dataclass
class ArithmeticSettings(EnvSettings):
    """Sums made on the spot; train and test never share a pair of operands."""

    operations: list[Operation] = field(default_factory=lambda: [Operation.add])  # drawn from at random
    digits: int = 2  # of each operand
    seed: int = 0  # of the order in which problems are drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("env.digits", self.digits, 1)
        if self.digits > 9:
            raise ConfigError(f"env.digits={self.digits} is out of range: it must be at most 9")
        if not self.operations:
            raise ConfigError("env.operations is empty: name at least one of add, subtract, multiply")


@dataclass
class GSM8KSettings(EnvSettings):
    """Grade-school word problems: a folder with train.jsonl and test.jsonl, one file, or the hub's."""

    path: str = "openai/gsm8k"  # folder, file or hub id
    shuffle: bool = True  # false: rows in the order of the file
    seed: int = 0  # of the order in which problems are drawn
    max_prompt_tokens: int = 2048  # a longer prompt is an error that names its row
    max_completion_tokens: int = 256  # a longer completion is cut
    eval_limit: int = 64
