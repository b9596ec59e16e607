"""Remove parts of the runs in a folder that are no longer needed, such as the state of older checkpoints.

A run that a process holds is spared, and everything outside the folder of runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlpost.config import paths
from rlpost.errors import CheckpointError
from rlpost.files import MANIFEST, bytes_of, locked, read_manifest, replaced
from rlpost.runs.reader import RunState, checkpoints, find_runs, is_running, read_run

STATE, REMOVED_STATE = "state", ".state.removed"  # folders of a checkpoint
ADVICE = "resume from another one"  # the end of a message about a damaged checkpoint


class Rule(Enum):
    """Why something can be removed."""

    unstarted = "never trained a step"
    checkpoint = "neither the last nor the best"
    state = "the run is finished"
    rollouts = "old rollouts"


@dataclass(frozen=True)
class Removal:
    """One thing to remove: a run, a checkpoint, a checkpoint's state, or a file of rollouts."""

    run: Path
    path: Path
    rule: Rule
    bytes: int

    @property
    def removed(self) -> Path:
        """The path that goes: that of the state alone where the model of a checkpoint stays."""
        return self.path / STATE if self.rule is Rule.state else self.path

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        named = {"rule": self.rule.name, "why": self.rule.value, "bytes": self.bytes}
        return {"run": str(self.run), "path": str(self.path), **named}


def removals(folder: Path, rules: frozenset[Rule], rollout_days: float) -> list[Removal]:
    """Removable parts of the runs in `folder` by `rules`, except runs that a process holds."""
    if not folder.is_dir():
        return []
    inside = folder.resolve()
    found: list[Removal] = []
    for run in find_runs(folder):
        if not run.is_symlink() and run.resolve().is_relative_to(inside) and not is_running(run):
            found += [r for r in _of_run(run, rollout_days) if r.rule in rules]
    return found


def remove(removal: Removal) -> bool:
    """Remove it under the run's lock; False if a process has taken the run since."""
    try:
        lock = (removal.run / ".lock").open("a")
    except OSError:  # gone, or no file
        return False
    with lock:
        if not locked(lock):
            return False
        if removal.rule is Rule.state:
            keep_the_model_alone(removal.path)
        elif removal.path.is_dir():
            shutil.rmtree(removal.path)
        else:
            removal.path.unlink(missing_ok=True)
        return True


def _of_run(run: Path, rollout_days: float) -> Iterator[Removal]:
    record = read_run(run)
    folder = run / "checkpoints"
    saved = checkpoints(folder)
    if not record.commands:
        return  # a user's own folder of checkpoints, or a truncated record
    if record.steps_done == 0 and not any(folder.glob("step-*")):
        yield Removal(run, run, Rule.unstarted, bytes_of(run))
        return
    links = [link for name in (paths.LATEST, paths.BEST) if (link := folder / name).is_symlink()]
    kept = {*saved[-1:], *(folder / link.readlink().name for link in links)}
    for checkpoint in [*(c for c in saved if c not in kept), *folder.glob(".step-*.incomplete")]:
        yield Removal(run, checkpoint, Rule.checkpoint, bytes_of(checkpoint))
    if record.state is RunState.finished:
        for checkpoint in sorted(kept & set(saved)):
            with contextlib.suppress(CheckpointError):  # a damaged checkpoint is left to its owner
                if not keeps_the_model_alone(checkpoint):
                    yield Removal(run, checkpoint, Rule.state, bytes_of_state(checkpoint))
    oldest = time.time() - rollout_days * 24 * 3600
    for file in sorted((run / "rollouts").glob("step-*.parquet")):
        if file.stat().st_mtime < oldest:
            yield Removal(run, file, Rule.rollouts, file.stat().st_size)


# The state of a checkpoint: what resuming needs beside the weights


def check_resumable(checkpoint: Path) -> None:
    """Raise CheckpointError if `checkpoint` keeps the model alone; the message says what to resume from instead."""
    if keeps_the_model_alone(checkpoint):
        raise CheckpointError(
            f"{checkpoint} keeps the model alone: resume from latest, or begin another run from it with "
            f"model.path={checkpoint}"
        )


def keeps_the_model_alone(checkpoint: Path) -> bool:
    """Whether the manifest names no file of state/. Raises CheckpointError if it cannot be read."""
    files = read_manifest(checkpoint, ADVICE)
    return bool(files) and not any(checkpoint / STATE in file.parents for file in files)


def bytes_of_state(checkpoint: Path) -> int:
    """Bytes of the files that only resuming needs."""
    return bytes_of(checkpoint / STATE) + bytes_of(checkpoint / REMOVED_STATE)


def keep_the_model_alone(checkpoint: Path) -> None:
    """Remove the files that only resuming needs.

    The manifest is replaced first: whenever the process dies, every file that it names exists.
    """
    files = read_manifest(checkpoint, ADVICE)
    left = {
        str(file.relative_to(checkpoint)): {"bytes": size, "sha256": digest}
        for file, (size, digest) in files.items()
        if checkpoint / STATE not in file.parents
    }
    state, removed = checkpoint / STATE, checkpoint / REMOVED_STATE
    if len(left) < len(files):
        with replaced(checkpoint / MANIFEST) as making:
            making.write_text(json.dumps(left, indent=1))
    shutil.rmtree(removed, ignore_errors=True)  # left by a process that died here
    if state.is_dir():
        os.replace(state, removed)  # a concurrent reader sees all of it or nothing
        shutil.rmtree(removed)
