"""trackio."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from rlpost.tracking.base import Status, TrackedRun, described

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


@dataclass
class TrackioTracker:
    """A trackio run in a local database; `folder` is the database's folder, None: `trackio` in the run's.

    A resumed run goes on under the same id, and the steps from its first on are taken out of the
    database. On a Space or a server they stay, and are there twice.
    """

    project: str
    folder: str | None

    def start(self, run: TrackedRun) -> str:
        os.environ["TRACKIO_DIR"] = self.folder or str(run.folder / "trackio")
        self._local = not any(os.environ.get(name) for name in REMOTE)
        if self._local:
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask the hub for the user's name
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(  # pyright: ignore[reportAttributeAccessIssue]
            project=self.project,
            name=run.name,
            config=described(run),
            resume="never" if run.known_as is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if run.known_as not in (None, self._run.id):
            raise RuntimeError(f"another run of project {self.project} is named {run.name}: give this one another name")
        if self._local:
            self._forget_from(run.first_step)
        self._last_step: int | None = None
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)
        self._last_step = step

    def finish(self, status: Status) -> None:
        self._run.finish()
        # it turns its own failures into warnings, so what it holds is looked at
        if self._local and self._last_step is not None and self._held() != self._last_step:
            raise RuntimeError(f"it holds steps up to {self._held()} only, of {self._last_step}")

    def _held(self) -> int | None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        return SQLiteStorage.get_max_step_for_run(self.project, self._run.name, run_id=self._run.id)

    def _forget_from(self, step: int) -> None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        if (held := self._held()) is None or held < step:
            return
        with closing(sqlite3.connect(SQLiteStorage.get_project_db_path(self.project))) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self._run.id, step))
