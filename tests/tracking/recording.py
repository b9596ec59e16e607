"""Trackers to test with: one that writes down what it is told, and ones that go wrong where they are told to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.tracking.trackers import Status, TrackedRun


class RecordingTracker:
    """Appends every call to `file` as a JSON list."""

    name = "fake"

    def __init__(self, file: Path) -> None:
        self.file = file

    def start(self, run: TrackedRun) -> str:
        self.write("start", run.name, str(run.folder), run.config, run.known_as, run.first_step)
        return run.known_as or "its own id"

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]]) -> None:
        self.write("log", step, dict(metrics))

    def finish(self, status: Status) -> None:
        self.write("finish", status.value)

    def write(self, *call: Any) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps(call) + "\n")


class WrongTracker(RecordingTracker):
    """In the call `where` (`log` means that of step 2) does `what`: raise, hang or exit."""

    def __init__(self, file: Path, where: str, what: str) -> None:
        super().__init__(file)
        self.where, self.what = where, what

    def write(self, *call: Any) -> None:
        if call[0] == self.where and (call[0] != "log" or call[1] == 2):
            if self.what == "raise":
                raise ConnectionError("nobody\nanswers.")
            if self.what == "hang":
                time.sleep(60)
            if self.what == "exit":
                raise SystemExit("asked for a login")
        super().write(*call)
