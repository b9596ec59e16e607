"""Work repeated in a thread, which can be held, waited for and stopped, each with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlpost.errors import PolicyError


class Background:
    """Calls `work` again and again in a thread, until it returns False, raises or is told to stop.

    A round begins where nobody holds the work, and `may_begin` says so or somebody waits for one.
    What `work` raised is raised by the next call of `check`, `wait_for_round`, `held` or `stop`, in
    their caller's thread. A wait of more than `wait_seconds` raises PolicyError, which names `work_name`.
    """

    def __init__(
        self,
        work: Callable[[], bool],
        work_name: str,
        wait_seconds: float,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self.wait_seconds = wait_seconds
        self._work = work
        self._name = work_name
        self._may_begin = may_begin
        self._changed = threading.Condition()  # of all that follows
        self._rounds = 0  # ended so far
        self._at_work = False
        self._holders = 0
        self._is_asked = False  # for a round whatever `may_begin` says
        self._stopping = False
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rlpost-collector", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether there may be further rounds."""
        return not self._ended

    def check(self) -> None:
        """Raise what `work` raised, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_for_round(self) -> None:
        """Return when one more round has ended, or no further will."""
        with self._changed:
            asked = self._rounds
            self._is_asked = True
            self._changed.notify_all()
            self._wait(lambda: self._rounds > asked or self._ended, self.wait_seconds)
        self.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No round is under way, and none begins, while the block runs."""
        with self._changed:
            self._holders += 1
        try:
            with self._changed:
                self._wait(lambda: not self._at_work, self.wait_seconds)
            self.check()
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def look_again(self) -> None:
        """Ask `may_begin` again: something that it looks at has changed."""
        with self._changed:
            self._changed.notify_all()

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Begin no further round, and return when the one under way has ended."""
        self.tell_to_stop()
        with self._changed:
            self._wait(lambda: self._ended, self.wait_seconds if timeout_seconds is None else timeout_seconds)
        self.check()

    def tell_to_stop(self) -> None:
        """Begin no further round; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        if not self._changed.wait_for(until, seconds):
            raise PolicyError(
                f"waited {time.monotonic() - began:.0f} s for {self._name} to end: the policy or the environment may "
                "hang"
            )

    def _run(self) -> None:
        try:
            while self._begin():
                goes_on = self._work()
                with self._changed:
                    self._at_work = False
                    self._rounds += 1
                    self._changed.notify_all()
                if not goes_on:
                    break
        except BaseException as error:  # noqa: BLE001  raised again in the thread that asks next
            self._failure = error
        finally:
            with self._changed:
                self._at_work, self._ended = False, True
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait until a round may begin; False once the work is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (not self._holders and self._is_wanted()))
            self._at_work, self._is_asked = not self._stopping, False
            return self._at_work

    def _is_wanted(self) -> bool:
        return self._is_asked or self._may_begin()
