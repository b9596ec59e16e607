"""A tracker as the process that trains sees it: a process of its own, asked little and never waited for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpost.child import ending, kill_group, python_module
from rlpost.orphans import MARK
from rlpost.tracking.base import Status
from rlpost.tracking.choice import TrackerChoice
from rlpost.tracking.worker import DONE, Order, read_mark

GRACE_SECONDS = 5.0  # for the worker's own deadline to pass first: it knows what it waits for
SILENT_SECONDS = 2.0  # a wait for the end that is longer is announced


class TrackerProcess:
    """Follows one run folder from outside; nothing it does raises or stops the run.

    It is given up at its first failure. What it prints goes to the run's log.txt.
    """

    def __init__(self, choice: TrackerChoice, folder: Path, config: dict[str, Any]) -> None:
        self.choice = choice
        self.folder = folder
        self.config = config
        self._process: subprocess.Popen[str] | None = None
        self._given_up: str | None = None  # why

    @property
    def name(self) -> str:
        """The tracker's, as `tracking=NAME` chooses it."""
        return self.choice.name

    def start(self, kept_step: int) -> None:
        """Begin to follow metrics.jsonl, which exists; `kept_step` is the last step kept on resuming, else -1."""
        order = Order(**asdict(self.choice), folder=str(self.folder.resolve()), config=self.config, kept_step=kept_step)
        try:
            with (self.folder / "log.txt").open("a") as log:
                self._process = python_module(
                    "rlpost.tracking.worker",
                    environment={MARK: ""},  # it finishes what it has to send, also where the run was killed
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        except OSError as error:
            self._given_up = f"its process did not start: {error}"
            return
        self._say(json.dumps(asdict(order)))

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._process is not None or self._given_up is not None

    def failure(self) -> str | None:
        """Why the tracker was given up; None while it works or has not begun. Returns at once."""
        if self._given_up is None and self._process is not None and self._process.poll() is not None:
            self._read_last_word()
        return self._given_up

    def close(self, status: Status, note: Callable[[str], None]) -> str | None:
        """Let the tracker finish, for as long as its deadline; why it is incomplete, or None if it is not.

        A wait that can be felt is announced through `note`. An interrupt ends the wait and the tracker.
        """
        if self.failure() is None and self._process is not None:
            self._say(status.value)
            limit = self.choice.timeout_seconds
            try:
                try:
                    self._process.wait(SILENT_SECONDS)
                except subprocess.TimeoutExpired:
                    note(f"waiting for {self.name} to finish, at most {limit:g} s; Ctrl-C leaves without it")
                    self._process.wait(max(0.0, limit - SILENT_SECONDS) + GRACE_SECONDS)
                self._read_last_word()
            except subprocess.TimeoutExpired:
                self._given_up = f"no answer within {limit:g} s after the end of the run"
            except KeyboardInterrupt:
                self._given_up = "the wait for it was interrupted"
            finally:
                self._end()
        return self._given_up

    def last_step(self) -> int | None:
        """The last step that the tracker took, None if it took none."""
        with suppress(OSError, ValueError, TypeError):  # its own file may be what failed
            mark = read_mark(self.folder, self.name)
            return mark.step if mark is not None and mark.step >= 0 else None
        return None

    def _say(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, which failure() finds out
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    def _read_last_word(self) -> None:
        """What the ended process has said."""
        assert self._process is not None
        assert self._process.stdout is not None
        kill_group(self._process.pid)  # whoever it left behind may hold the pipe open
        word = self._process.stdout.read().strip()
        if word != DONE:
            self._given_up = word or f"its process {ending(self._process.returncode)}"
        self._end()

    def _end(self) -> None:
        """End the process and what it has started, and close the pipes."""
        assert self._process is not None
        if self._process.returncode is None:
            kill_group(self._process.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
