"""A whole terminal painted twice a second, and given back however the process ends."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from rlpost.heartbeat import Ticker
from rlpost.output import descriptors_onto, in_front, size_of

ENTER = b"\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
# what a child does that outlives us: wait until our end of the pipe is closed, then give the terminal back
WATCH = 'cat >/dev/null; printf "\\033[0m\\033[?7h\\033[?25h\\033[?1049l%s\\n" "$0"'


def takes_pictures(descriptor: int) -> bool:
    """Whether somebody looks at `descriptor` through a terminal that can be painted, and it is ours to paint."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and in_front(descriptor)


class Picture:
    """Takes the terminal over: frames on its alternate screen, all other output into `log`.

    `frame(width, height)` gives the lines to paint; it is called in a thread of its own. `last_words`
    is printed by a child process should this one die without giving the terminal back.
    """

    def __init__(
        self, descriptor: int, frame: Callable[[int, int], Sequence[Text]], *, log: Path, last_words: str
    ) -> None:
        self._frame = frame
        self._lock = threading.Lock()  # held while something is written to the terminal
        self._entered = False
        self._closed = False
        self._styles = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        with ExitStack() as opening:
            self._terminal = os.dup(descriptor)
            opening.callback(os.close, self._terminal)
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", WATCH, last_words],
                stdin=subprocess.PIPE,
                stdout=self._terminal,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            opening.callback(self._dismiss_watcher)
            sink = opening.enter_context(log.open("a"))
            opening.enter_context(descriptors_onto(sink.fileno(), 1, 2))
            self._opened = opening.pop_all()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTSTP, self._suspend)
        self._ticker = Ticker(self.paint, failed=self._give_up)

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return size_of(self._terminal)[0]

    def paint(self) -> None:
        """One frame, where the terminal is ours."""
        if not in_front(self._terminal):
            self._entered = False
            return
        picture = self._encode(self._frame(*size_of(self._terminal)))
        with self._lock:
            if not self._closed:
                self._write(picture if self._entered else ENTER + picture)
                self._entered = True

    def close(self) -> None:
        """Give the terminal back, and stdout and stderr their way; a second call does nothing."""
        if self._closed:
            return
        self._ticker.stop()
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):  # there may be no terminal any more
                self._leave()
        if self._previous is not None:
            signal.signal(signal.SIGTSTP, self._previous)
        with contextlib.suppress(OSError):  # what was written last may not have fitted into the log
            self._opened.close()

    def leave_at_once(self, last_words: bytes) -> None:
        """Give the terminal back and write `last_words`, in a signal's function and just before the process ends."""
        held = self._lock.acquire(timeout=1)  # by a frame being written; not by the code that the signal interrupted
        self._closed = True
        self._watcher.kill()
        with contextlib.suppress(OSError):  # there may be no terminal any more
            self._leave()
            self._write(last_words)
        if held:
            self._lock.release()

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self._write(LEAVE)

    def _give_up(self) -> None:
        with self._lock:
            self._leave()
            self._write(b"the live display has failed, its traceback is in the log; the training goes on\n")

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back, stop; the next frame after `fg` takes it again."""
        held = self._lock.acquire(timeout=1)
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the process is continued
        signal.signal(signal.SIGTSTP, self._suspend)
        if held:
            self._lock.release()

    def _dismiss_watcher(self) -> None:
        self._watcher.kill()
        self._watcher.wait()
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()

    def _encode(self, lines: Sequence[Text]) -> bytes:
        """Each line at its place, whatever the terminal makes of the widths of the others; nothing wraps."""
        with self._styles.capture() as styled:
            self._styles.print(Text("\n").join(lines), soft_wrap=True)
        rows = styled.get().removesuffix("\n").split("\n")
        placed = "".join(f"\x1b[{i};1H{row}\x1b[K" for i, row in enumerate(rows, 1))
        return f"\x1b[?7l{placed}\x1b[J\x1b[1;1H\x1b[?7h".encode()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._terminal, data) :]
