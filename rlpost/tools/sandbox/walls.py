"""The commands that put a Python behind its walls."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpost.errors import SandboxError
from rlpost.tools.sandbox.interpreter import Interpreter, closed_to_others
from rlpost.tools.sandbox.launcher import NotStarted, launcher
from rlpost.tools.sandbox.limits import MIB, Limits

# Users that nobody is: the second range is for containers that know 65,536 users, there kept for passing services
_USERS = (range(1_900_000_000, 1_901_000_000), range(61_184, 65_520))

_LIBRARIES = ("lib", "lib64", "lib32")  # of the system, in / and in /usr
_SHOWN = [Path(f"/usr/{name}") for name in _LIBRARIES]

WEAKER = "sandbox=limits (on the command line: tools.python_sandbox=limits)"

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # sets print in the same order every time
    "TMPDIR": "/tmp",
    "TZ": "UTC",
}
PYTHON_FLAGS = ("-s", "-S", "-X", "utf8")


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces of its own: no network, of the disk only a Python and an empty /tmp, and another user."""

    bwrap: str
    interpreter: Interpreter
    packages: bool
    readable: tuple[Path, ...]
    limits: Limits

    @classmethod
    def found(cls, interpreter: Interpreter, packages: bool, readable: Sequence[Path], limits: Limits) -> Bubblewrap:
        """Raises SandboxError where bubblewrap is not installed."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(
                "programs that a model writes are run in bubblewrap, which is not installed: apt install bubblewrap, "
                f"or ask for the weaker mode, which keeps them from no file and no network, with {WEAKER}"
            )
        return cls(bwrap, interpreter, packages, tuple(readable), limits)

    def command(self, python: Sequence[str], user: int | None, info: int, seccomp: int) -> list[str]:
        """Run `python` inside, as `user` where that can be chosen.

        bwrap writes the number of the first process to `info` and reads the filter from `seccomp`.
        Raises NotStarted where the superuser may not open a closed folder to that user.
        """
        folders = self.interpreter.packages if self.packages else ()
        paths = list(dict.fromkeys([*self.interpreter.readable(), *folders, *self.readable]))
        shown = {path: path for path in paths if path not in _SHOWN}
        if user is not None and closed_to_others(list(shown)):
            try:
                shown = launcher().places_of(list(shown))
            except OSError as error:
                raise NotStarted(f"{self.interpreter.prefix} cannot be opened to a sandbox: {error}") from None
        become = [] if user is None else _as_user(user)
        return [*become, *self._bwrap(shown, info, seccomp), "--", *python]

    def _bwrap(self, shown: Mapping[Path, Path], info: int, seccomp: int) -> list[str]:
        words = [self.bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
        words += ["--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
        words += ["--info-fd", str(info), "--seccomp", str(seccomp)]
        for name in _LIBRARIES:
            if os.path.islink(f"/{name}"):
                words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            words += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
                words += ["--ro-bind", f"/{name}", f"/{name}"]
        words += ["--ro-bind-try", "/usr/share/zoneinfo", "/usr/share/zoneinfo"]
        for device in ("null", "zero", "full", "random", "urandom"):
            words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        words += ["--size", str(self.limits.disk_mb * MIB), "--perms", "0700", "--tmpfs", "/tmp"]
        words += ["--symlink", "/tmp", "/dev/shm"]  # what C libraries share between processes has the same limit
        for source, place in shown.items():
            words += ["--ro-bind", str(source), str(place)]
        if not self.packages:
            for folder in self.interpreter.hidden():
                words += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
        return [*words, "--remount-ro", "/", "--chdir", "/tmp"]


def limits_command(python: Sequence[str], interpreter: Interpreter, user: int | None) -> list[str]:
    """Run `python` with no wall around it but that of `user`, where the superuser starts it.

    Raises SandboxError where that user could not enter the interpreter's folder.
    """
    if user is None:
        return [_setpriv(), "--no-new-privs", "--pdeathsig", "KILL", *python]
    if closed_to_others(interpreter.readable()):
        raise SandboxError(
            f"the mode limits runs programs as another user, who may not enter {interpreter.prefix}: name another "
            "Python with python=, for example /usr/bin/python3"
        )
    return [*_as_user(user), "--pdeathsig", "KILL", *python]


def user_for_one() -> int | None:
    """A user without any process, so that a sandbox's can be counted; None where only this one can be had.

    Raises SandboxError for a superuser whose container knows none.
    """
    if os.getuid() != 0:
        return None
    rows = [[int(word) for word in row.split()] for row in Path("/proc/self/uid_map").read_text().splitlines()]
    for users in _USERS:
        if any(first <= users[0] and users[-1] < first + count for first, _, count in rows):
            return secrets.choice(users)
    raise SandboxError(
        f"this container knows no user {_USERS[-1][0]} that programs could run as: run rlpost as an ordinary user"
    )


def _as_user(user: int) -> list[str]:
    return [_setpriv(), "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs"]


def _setpriv() -> str:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SandboxError(
            "the sandbox gives up its rights with setpriv, which is not installed: apt install util-linux"
        )
    return setpriv
