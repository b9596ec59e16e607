"""A checkpoint that is written while the next step samples."""

from __future__ import annotations

import threading
from collections.abc import Callable

MOMENT = 1.0  # seconds that a save may be waited for without a word


class Saving:
    """At most one save under way, in a thread; nothing it reads may change before `wait` has returned.

    Nothing is copied for it: weights and moments stay as they are until the next update. `say` is called where it is
    waited for, unless that is short.
    """

    def __init__(self, say: Callable[[], None] = lambda: None) -> None:
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Have `write` done by a thread, once what was begun before is done."""
        self.wait()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  raised again by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="rlpost-save")
        self._thread.start()

    def wait(self) -> None:
        """What was begun is on the disk when this returns. Raises what it raised."""
        if self._thread is not None:
            self._thread.join(MOMENT)
            if self._thread.is_alive():
                self._say()
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
