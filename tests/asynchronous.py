"""Trainings of the tiny model whose completions other processes sample, and what holds of all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.remote.child import python_module
from rlpost.train import sampling
from tests.processes import children
from tests.trainings import train_in

REWARD = '''
def small(completion_ids, **kwargs):
    """The share of ids below 120 and, so that most groups differ, one part in a hundred of their sum."""
    return [sum(i < 120 for i in ids) / 6 + sum(ids) % 7 / 100 for ids in completion_ids]
'''
WORDS = [
    "model=tiny",
    "policy=transformers",
    "model.autocast=none",
    "env=dataset",
    "prompts_per_step=2",
    "group_size=4",
    "env.max_completion_tokens=6",
    "optim.lr=1e-3",
    "checkpoint.every=2",
    "eval.limit=2",
]


def write_rows(folder: Path) -> list[str]:
    """The words of a training on rows of its own, which are written into `folder`."""
    (folder / "small.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Say {i} and {i * 7 % 13}."}) for i in range(500)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return [*WORDS, f"env.path={folder / 'rows.jsonl'}", f"env.reward={folder / 'small.py'}:small"]


def run(folder: Path, words: Sequence[str], *more: str, resume: str | None = None, command: Any = TRAIN_GRPO) -> int:
    return train_in(command, folder, [*words, *more], resume)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def trained_groups(folder: Path) -> list[int]:
    """The draw of every group that was trained on, as the rollouts tell it."""
    return [
        group
        for file in sorted((folder / "rollouts").glob("*.parquet"))
        for group in sorted(set(pq.read_table(file, columns=["group"])["group"].to_pylist()))
    ]


def check_accounts(folder: Path, steps: int, per_step: int = 2) -> None:
    """Every draw was trained on once at most, and at every step all that was issued is accounted for."""
    groups = trained_groups(folder)
    assert len(groups) == len(set(groups)) == steps * per_step
    for row in metrics(folder):
        ended = ("trained", "turned_down", "cancelled", "failed", "waiting")
        assert row["groups/issued"] == sum(row[f"groups/{name}"] for name in ended)
        assert row["groups/trained"] == row["step"] * per_step
        assert row["buffer/dropped_by_age"] == 0
    left = metrics(folder)[-1]["groups/waiting"] + metrics(folder)[-1]["groups/turned_down"]
    assert max(groups) < steps * per_step + left  # nothing was drawn that is not accounted for


def players() -> list[int]:
    """The players' processes that this one, or what it started, has under it."""
    own = "rlpost.remote.process"
    return [p.pid for p, command in children().items() if own in command and "rlpost.rewards" not in command]


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hold_in_step(step: int, until: threading.Event, patch: pytest.MonkeyPatch) -> None:
    """Let a training in this process end its step `step`, counted from now on, once `until` is set."""
    original, seen = sampling.batch_metrics, []

    def held(*args: Any) -> dict[str, float]:
        seen.append(None)
        assert len(seen) != step or until.wait(120)
        return original(*args)

    patch.setattr(sampling, "batch_metrics", held)


@contextmanager
def players_killed(folder: Path, patch: pytest.MonkeyPatch, most: int | None = None) -> Iterator[None]:
    """Kill `most` players, or all, of the training in the block, while its third step waits for that."""
    killed = threading.Event()

    def kill() -> None:
        wait_for(lambda: (folder / "metrics.jsonl").is_file() and bool(metrics(folder)))
        for pid in players()[:most]:
            os.kill(pid, signal.SIGKILL)
        killed.set()

    hold_in_step(3, killed, patch)  # `metrics` leaves out the first
    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


@contextmanager
def started(folder: Path, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`rlpost train grpo` in a process of its own; killed at the end."""
    process = python_module(
        "rlpost", "train", "grpo", *words, "--out", folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
