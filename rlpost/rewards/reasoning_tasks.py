"""The generators of reasoning-gym: problems by number, and answers scored where they can be killed.

Several of its scorers hand the answer to `eval`, or to sympy's parser, which does. What a model wrote is
given to those only where it is a plain list or a plain expression, in a process with a deadline.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from rlpost.errors import ConfigError, DataError
from rlpost.imports import require
from rlpost.rewards.workers import MEMORY_BYTES, Worker, limit_memory
from rlpost.text import did_you_mean, nearest

CHUNK = 500  # problems of one dataset; some generators make them all at once
DATASETS_KEPT = 64
PROBLEMS_KEPT = 2048
MAKE_SECONDS = 120.0  # longest wait for a problem; some generators search for one
MAX_CHARACTERS = 20_000  # of an answer that is scored
EVALUATE_LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
EVALUATE_EXPRESSIONS = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)

_FUNCTIONS = "a?(?:sin|cos|tan|sec|csc|cot)h?|exp|ln|log|sqrt|Abs|abs|pi|erf|erfi|Ei|Si|Ci|[a-zCEI]"
_EXPRESSION = re.compile(rf"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\b(?:{_FUNCTIONS})\b|[-+*/^()!,]|\s)*")
_PLAIN = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Name, ast.Load, ast.UnaryOp, ast.USub)


class Generator:
    """One of reasoning-gym's generators with `config`, its own settings; problem n of a seed is always the same.

    It runs in a process of its own, since the problems of some depend on the order of Python's sets,
    which is fixed there. Raises MissingExtraError without reasoning-gym, ConfigError for a task or setting
    it has not.
    """

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        require("reasoning_gym", "reasoning-gym", "env=reasoning_gym")
        self.task = task
        self.config = dict(config)
        arguments = [task, self.config]
        self._maker = Worker(f"{__name__}:maker", arguments, environment={"PYTHONHASHSEED": "0"})
        self._version = self._maker.ready()
        self.problem = lru_cache(PROBLEMS_KEPT)(self._make)

    def describe(self) -> str:
        """Everything besides the seed that its problems depend on, in words."""
        return f"{self.task} of reasoning-gym {self._version} {json.dumps(self.config, sort_keys=True)}"

    def close(self) -> None:
        """End its process; it is started again where it is needed again."""
        self._maker.close()

    def _make(self, seed: int, number: int) -> Problem:
        """Problem `number` of `seed`. Raises DataError where the generator fails or takes too long."""
        outcome = self._maker.call((seed, number), MAKE_SECONDS)
        if outcome.error is not None:
            raise DataError(f"env.task={self.task} made no problem {number} of seed {seed}: {outcome.error}")
        return Problem(*outcome.value)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its right answer (None where several are right), and all its scorer reads, for the scorer's eyes."""

    question: str
    answer: str | None
    entry: str


def tasks() -> list[str]:
    """The names of the generators; the one that mixes others is left out."""
    from reasoning_gym.factory import DATASETS

    return sorted(name for name in DATASETS if name != "composite")


def make_dataset(task: str, config: Mapping[str, Any], seed: int) -> Any:
    """The dataset of a generator. Raises ConfigError for settings that do not go together."""
    from reasoning_gym import create_dataset

    try:
        return create_dataset(task, seed=seed, size=CHUNK, **config)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"env.task_config does not fit env.task={task}: {error or type(error).__name__}") from error


def checked_config(task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with lists as the generator has them. Raises ConfigError for a task, name or type it has not."""
    from reasoning_gym.factory import DATASETS

    if task not in tasks():
        hint = did_you_mean(nearest(task, tasks())) or f"; it is one of {', '.join(tasks())}"
        raise ConfigError(f"env.task={task} is none of reasoning-gym's generators{hint}")
    fields = {field.name: field for field in dataclasses.fields(DATASETS[task][1])}
    checked = {}
    for name, value in config.items():
        if name not in fields:
            hint = did_you_mean(nearest(name, fields)) or f"; it has {', '.join(sorted(fields))}"
            raise ConfigError(f"env.task_config sets {name}, which env.task={task} does not have{hint}")
        checked[name] = _as_default(task, fields[name], value)
    return checked


def _as_default(task: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """`value` as the type of the field's default, where it has one that says something."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    if isinstance(default, list | tuple) and isinstance(value, list):
        return type(default)(value)
    number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
    if default in (None, dataclasses.MISSING) or type(value) is type(default) or number:
        return value
    raise ConfigError(
        f"env.task_config sets {field.name} to {value!r}: env.task={task} wants a value like its default, {default!r}"
    )


def maker(task: str, config: Mapping[str, Any]) -> tuple[Callable[[tuple[int, int]], tuple[Any, ...]], str]:
    """The function that makes the problem of a (seed, number) in a `Generator`'s process; reasoning-gym's version."""
    checked = checked_config(task, config)

    @lru_cache(DATASETS_KEPT)
    def dataset(seed: int, chunk: int) -> Any:
        digest = hashlib.blake2b(f"{seed}/{chunk}".encode(), digest_size=4).digest()
        return make_dataset(task, checked, int.from_bytes(digest, "big") >> 1)

    def make(item: tuple[int, int]) -> tuple[Any, ...]:
        seed, number = item
        entry = dataset(seed, number // CHUNK)[number % CHUNK]
        return entry["question"], entry["answer"], base64.b64encode(pickle.dumps(entry)).decode()

    make((0, 0))  # settings that do not go together are found here
    return make, version("reasoning-gym")


def scorer(task: str, config: Mapping[str, Any]) -> tuple[Callable[[tuple[str, str]], float], None]:
    """The generator's own score of an (answer, `Problem.entry`), mostly between 0 and 1."""
    dataset = make_dataset(task, checked_config(task, config), seed=0)
    limit_memory(MEMORY_BYTES)

    def score(item: tuple[str, str]) -> float:
        answer, entry = item
        return float(dataset.score_answer(answer, pickle.loads(base64.b64decode(entry))))

    return score, None


def may_be_scored(task: str, answer: str) -> bool:
    """Whether an answer may be given to the generator's scorer: not too long, and nothing that `eval` would run."""
    if len(answer) > MAX_CHARACTERS or "\0" in answer:
        return False
    if task in EVALUATE_EXPRESSIONS:
        return _EXPRESSION.fullmatch(answer) is not None
    return task not in EVALUATE_LISTS or _is_plain(answer)


def _is_plain(text: str) -> bool:
    """Whether `eval` of a text is harmless: it is not Python, or a literal, or a name."""
    try:
        parts: Sequence[ast.AST] = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError):  # eval refuses it as well
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(part, _PLAIN) for part in parts)
