"""The thread that starts every sandbox of this process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlpost.errors import SandboxError
from rlpost.tools.sandbox.interpreter import closed_to_others

# CLONE_NEWNS, MS_BIND, MS_REC, MS_SLAVE
_NEW_MOUNTS, _BIND, _RECURSIVE, _FOLLOW_ONLY = 0x00020000, 4096, 16384, 1 << 19


class NotStarted(SandboxError):
    """The walls could not be put up here."""


@dataclass(frozen=True)
class Launch:
    """How an interpreter is started: in `folder`, as `user` where that is one of its own.

    A `temporary` folder is removed with what the program left there.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str = "/"
    temporary: bool = False
    user: int | None = None


class Launcher:
    """One thread, which stays, as the kernel ends a sandbox with the thread that started it.

    For the superuser this thread has mounts of its own, where the files that a sandbox shows lie in
    a folder that the sandbox's user may enter, whatever closed home they come from.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rlpost-sandbox")
        self._stage: Path | None = None
        self._places: dict[Path, Path] = {}

    def start(self, launch: Launch, pipes: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start an interpreter with nothing but `pipes` and its output open. Raises OSError."""
        return self._thread.submit(_start, launch, pipes).result()

    def places_of(self, paths: Sequence[Path]) -> dict[Path, Path]:
        """Places where every user can reach `paths`, and which each is. Raises OSError where that is not allowed."""
        return self._thread.submit(self._show, paths).result()

    def _show(self, paths: Sequence[Path]) -> dict[Path, Path]:
        if self._stage is None:
            _checked(_libc().unshare(_NEW_MOUNTS))
            _mount(None, "/", None, _RECURSIVE | _FOLLOW_ONLY)
            stage = temporary_folder()
            atexit.register(_remove, stage, os.getpid())
            _mount("tmpfs", stage, "tmpfs", 0, "mode=755")
            self._stage = Path(stage)
        for path in paths:
            if path not in self._places:
                place = self._stage / str(len(self._places))
                place.mkdir() if path.is_dir() else place.touch()
                _mount(str(path), str(place), None, _BIND | _RECURSIVE)
                self._places[path] = place
        return {self._places[path]: path for path in paths}


def temporary_folder() -> str:
    """A fresh folder that other users can reach, wherever TMPDIR may lie."""
    usual = Path(tempfile.gettempdir())
    return tempfile.mkdtemp(prefix="rlpost-sandbox-", dir="/tmp" if closed_to_others([usual]) else usual)


_launcher = Launcher()


def launcher() -> Launcher:
    """This process's own; a fork has none of its parent's threads."""
    return _launcher


def _after_fork() -> None:
    global _launcher
    _launcher = Launcher()


os.register_at_fork(after_in_child=_after_fork)


def _start(launch: Launch, pipes: Sequence[int]) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        launch.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=pipes,
        env=launch.environment,
        cwd=launch.folder,
        start_new_session=True,
        bufsize=0,
    )
    for stream in (started.stdout, started.stderr):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return started


def _remove(stage: str, owner: int) -> None:
    """Remove the folder, empty to all but the thread that is gone by now."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.rmdir(stage)


def _mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, place, kind)]
    _checked(_libc().mount(*words, ctypes.c_ulong(flags), None if options is None else options.encode()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
