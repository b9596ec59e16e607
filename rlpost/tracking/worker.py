"""The process in which a tracker lives: `python -m rlpost.tracking.worker`.

The first line of stdin is the order, as JSON; the second says how the run ended. If stdin ends without it, the process
that trains is gone. The one line on stdout is `DONE`, or why the tracker was given up; the tracker's own output goes to
stderr, which is the run's log.txt.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from rlpost.record import MetricsFile
from rlpost.remote.child import readable_within
from rlpost.tracking.trackers import DONE, METRICS_FILE, Mark, Order, Status, TrackedRun, Tracker, read_mark, write_mark

LOOK_SECONDS = 0.5  # between two looks at metrics.jsonl
REASON_LENGTH = 300  # characters


def main() -> None:
    """Follow the run that stdin names, until it ends or the tracker fails."""
    report = os.fdopen(os.dup(1), "w")  # the tracker's child processes do not inherit it
    os.dup2(2, 1)
    with os.fdopen(os.dup(0), "rb", buffering=0) as words:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a tracker that asks a question gets no answer
        order = Order(**json.loads(words.readline()))
        try:
            follow(order, words, report)
            last_word = DONE
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a tracker ends it
            traceback.print_exc()
            last_word = _reason(error)
    print(last_word, file=report, flush=True)


def follow(order: Order, words: IO[bytes], report: IO[str]) -> None:
    """Give the tracker every step of metrics.jsonl that it does not have yet, until the run ends."""
    folder = Path(order.folder)
    mark = read_mark(folder, order.name) if order.kept_step >= 0 else None
    first_step = min(mark.step, order.kept_step) + 1 if mark else 0
    known_as = mark.known_as if mark else None
    tracked = TrackedRun(folder.name, folder, order.config, known_as, first_step)
    tracker = make_tracker(order.factory, order.options)
    write_mark(folder, order.name, mark)
    with _within(order.timeout_seconds, "start", report):
        mark = Mark(tracker.start(tracked), first_step - 1)
    write_mark(folder, order.name, mark)
    metrics = MetricsFile(folder / METRICS_FILE)
    status = None
    while status is None:
        status = _ending(words)  # before the look, so that nothing written before the end is missed
        for row in metrics.new_rows():
            step = row.pop("step")
            if step >= first_step:
                with _within(order.timeout_seconds, f"logging step {step}", report):
                    tracker.log(step, {name: value for name, value in row.items() if value is not None})
                mark.step = step
                write_mark(folder, order.name, mark)
    with _within(order.timeout_seconds, "finish", report):
        tracker.finish(status)


def make_tracker(factory: str, options: dict[str, Any]) -> Tracker:
    """The tracker whose class `factory` names as `module:class`."""
    module, _, name = factory.partition(":")
    return getattr(import_module(module), name)(**options)


def _ending(words: IO[bytes]) -> Status | None:
    """How the run ended, or None while it goes on; waits up to LOOK_SECONDS for the word."""
    if not readable_within(words.fileno(), LOOK_SECONDS):
        return None
    word = words.readline().decode().strip()
    return Status(word) if word else Status.failed


@contextmanager
def _within(seconds: float, doing: str, report: IO[str]) -> Iterator[None]:
    """Report and end the process if the block takes longer; errors name the block."""

    def give_up() -> None:
        print(f"no answer to {doing} within {seconds:g} s", file=report, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        error.add_note(doing)
        raise
    finally:
        timer.cancel()


def _reason(error: BaseException) -> str:
    """The error and its notes on one line."""
    message = " ".join(str(error).split()).rstrip(".")
    doing = "".join(f"{note}: " for note in getattr(error, "__notes__", []))
    return f"{doing}{type(error).__name__}{': ' if message else ''}{message}"[:REASON_LENGTH]


if __name__ == "__main__":
    main()
