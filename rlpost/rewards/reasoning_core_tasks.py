"""The tasks of reasoning-core: problems drawn once into a file, and answers scored where they can be killed.

A seed does not fix a problem of this package, so the drawn ones are kept and read again. Only the tasks that it lists
are offered: of the others, some scorers hand the answer to `eval`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError, DataError
from rlpost.rewards.workers import MEMORY_BYTES, Worker, limit_memory
from rlpost.text import did_you_mean, nearest

TRIES = 20  # draws for each problem that is wanted, as some tasks have few; and failures in a row
DRAWER, SCORER = f"{__name__}:drawer", f"{__name__}:scorer"


def draw_into(file: Path, task: str, config: Mapping[str, Any], level: int, count: int, seconds: float) -> None:
    """Draw `count` different problems into a JSON-lines file, unless it is there; each may take `seconds`.

    Raises ConfigError for a task or setting that the package has not, DataError if it makes too few or is late.
    """
    if file.is_file():
        return
    rows: dict[str, str] = {}
    failures = 0  # in a row
    with closing(Worker(DRAWER, [task, dict(config), level])) as worker:
        for number in range(TRIES * count):
            if len(rows) == count:
                break
            outcome = worker.call(number, seconds)
            failures = 0 if outcome.error is None else failures + 1
            if outcome.lost or failures == TRIES:
                raise DataError(f"env.task={task} made no problem: {outcome.error}")
            if outcome.error is None:
                rows.setdefault(outcome.value["question"], json.dumps(outcome.value, ensure_ascii=False))
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


def check_drawn(row: Mapping[str, Any], file: Path, task: str, level: int) -> None:
    """Raise DataError if a row of a file of problems was drawn for another task or level."""
    drawn = row.get("task"), row.get("level")
    if drawn != (task, level):
        raise DataError(
            f"{file} holds problems of env.task={drawn[0]} env.level={drawn[1]}, not of env.task={task} "
            f"env.level={level}: give another env.problems"
        )


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
            "task": task,
            "level": level,
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
    fields = {field.name for field in dataclasses.fields(package.get_task(name).config)} - {"level", "seed"}
    if unknown := next((key for key in config if key not in fields), None):
        hint = did_you_mean(nearest(unknown, fields), f"it has {', '.join(sorted(fields))}")
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
