"""The tasks of reasoning-core: problems drawn once into a file, and answers scored where they can be killed.

A seed does not fix a problem of this package, so the drawn ones are kept and read again. Only the tasks that it lists
are offered: of the others, some scorers hand the answer to `eval`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError, DataError
from rlpost.output import Heartbeat
from rlpost.rewards.workers import MEMORY_BYTES, Worker, limit_memory
from rlpost.text import did_you_mean, nearest

TRIES = 20  # draws for each problem that is wanted, as some tasks have few; and failures in a row
LOST = 3  # draws in a row that are late, or end the process
DRAWER, SCORER = f"{__name__}:drawer", f"{__name__}:scorer"


@dataclass(frozen=True)
class Drawn:
    """The settings that decide which problems a file holds; each of its rows has them."""

    task: str
    level: int
    task_config: Mapping[str, Any]
    num_problems: int

    def words(self) -> str:
        """The settings as they would be given."""
        config = ",".join(f"{name}:{json.dumps(value)}" for name, value in self.task_config.items())
        of_task = f"env.task={self.task} env.level={self.level} env.task_config=[{config}]"
        return f"{of_task} env.num_problems={self.num_problems}"


def draw_into(file: Path, wanted: Drawn, seconds: float) -> None:
    """Draw different problems as `wanted` into a JSON-lines file, unless it is there; each may take `seconds`.

    Raises ConfigError for a task or setting that the package has not, DataError if it makes too few or is late.
    """
    if file.is_file():
        return
    task, count = wanted.task, wanted.num_problems
    rows: dict[str, str] = {}
    failures = lost = 0  # in a row
    worker = Worker(DRAWER, [task, dict(wanted.task_config), wanted.level])
    with closing(worker), Heartbeat(lambda: f"drew {len(rows)} of {count} problems of env.task={task}", _say):
        for number in range(TRIES * count):
            if len(rows) == count:
                break
            outcome = worker.call(number, seconds)
            failures = 0 if outcome.error is None else failures + 1
            lost = lost + 1 if outcome.lost else 0
            if lost == LOST or failures == TRIES:
                raise DataError(f"env.task={task} made no problem {failures} times in a row: {outcome.error}")
            if outcome.error is None:
                row = {**outcome.value, **asdict(wanted)}
                rows.setdefault(row["question"], json.dumps(row, ensure_ascii=False))
    if len(rows) < count:
        raise DataError(
            f"env.task={task} made {len(rows)} different problems in {TRIES * count} draws: give "
            f"env.num_problems={len(rows)} or less, or another env.level"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent) as beside:
            beside.write("".join(f"{row}\n" for row in rows.values()))
            beside.flush()
            os.chmod(beside.name, 0o644)
            with suppress(FileExistsError):  # another process was first, and its problems are the ones that count
                os.link(beside.name, file)
    except OSError as error:
        raise DataError(f"cannot write the problems to {file}: {error}; give env.problems=FILE") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_drawn(row: Mapping[str, Any], file: Path, wanted: Drawn) -> None:
    """Raise DataError if a row of a file of problems was drawn with other settings."""
    try:
        drawn = Drawn(**{each.name: row[each.name] for each in fields(Drawn)})
    except KeyError as error:
        raise DataError(
            f"{file} holds no problems of env=reasoning_core, as its rows have no {error}: give another env.problems"
        ) from error
    if drawn != wanted:
        raise DataError(f"{file} holds problems of {drawn.words()}, not of {wanted.words()}: give another env.problems")


# In a process of its own


def drawer(task: str, config: Mapping[str, Any], level: int) -> tuple[Callable[[int], dict[str, Any]], None]:
    """The function that draws a problem; its argument means nothing."""
    made = _task(task, config)
    limit_memory(MEMORY_BYTES)

    def draw(number: int) -> dict[str, Any]:
        entry = made.generate_example(level=level)
        metadata = json.dumps(entry.metadata)
        return {
            "question": entry.prompt,
            "answer": str(entry.answer),
            "entry": json.dumps({"answer": entry.answer, "metadata": metadata, "task": task}),
        }

    return draw, None


def scorer(task: str) -> tuple[Callable[[tuple[str, str]], float], None]:
    """The task's own score of an (answer, `entry` of a row), mostly between 0 and 1."""
    package = _package_with(task)
    limit_memory(MEMORY_BYTES)

    def score(item: tuple[str, str]) -> float:
        answer, entry = item
        return float(package.score_answer(answer, json.loads(entry)))

    return score, None


def _task(name: str, config: Mapping[str, Any]) -> Any:
    """The task with `config`. Raises ConfigError for a task or setting that the package has not."""
    package = _package_with(name)
    known = {field.name for field in fields(package.get_task(name).config)} - {"level", "seed"}
    if unknown := next((key for key in config if key not in known), None):
        hint = did_you_mean(nearest(unknown, known), f"it has {', '.join(sorted(known))}")
        raise ConfigError(f"env.task_config sets {unknown}, which env.task={name} does not have{hint}")
    return package.get_task(name, **config)


def _package_with(name: str) -> Any:
    """The package. Raises ConfigError if it does not list the task `name`."""
    package = import_module("reasoning_core")
    names = sorted(package.list_tasks())
    if name not in names:
        hint = did_you_mean(nearest(name, names), f"it is one of {', '.join(names)}")
        raise ConfigError(f"env.task={name} is not a task that reasoning-core lists{hint}")
    return package
