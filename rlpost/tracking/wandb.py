"""Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.tracking.base import Status, TrackedRun, described

EXIT_CODES = {Status.finished: 0, Status.stopped: 130, Status.failed: 1}


@dataclass
class WandbTracker:
    """A W&B run, offline or online; `folder` is where its `wandb/` folder goes, None: the run's folder.

    A resumed run goes on under the same id; offline, each attempt leaves a folder, and all are to be
    synced in their order. W&B takes no step twice: of the steps that a crash undid, it keeps what it
    was told before the crash.
    """

    project: str
    entity: str | None
    mode: str
    folder: str | None

    def start(self, run: TrackedRun) -> str:
        folder = self.folder or str(run.folder)
        os.environ.setdefault("WANDB_CACHE_DIR", os.path.join(folder, "wandb", "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # of this process, which is not the one that trains
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        known_as = run.known_as or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,  # pyright: ignore[reportArgumentType]
            dir=folder,
            id=known_as,
            name=run.name,
            resume="allow",
            config=described(run),
            settings=quiet,
        )
        return known_as

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def finish(self, status: Status) -> None:
        import wandb

        self._run.finish(exit_code=EXIT_CODES[status])
        wandb.teardown()
