"""`Sandbox`: programs that nobody has read, run where they can do no harm."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from enum import Enum
from functools import cache
from math import ceil
from pathlib import Path
from typing import Self

from rlpost.errors import SandboxError
from rlpost.tools.sandbox import runner, seccomp
from rlpost.tools.sandbox.execution import Answer, Execution
from rlpost.tools.sandbox.interpreter import Interpreter
from rlpost.tools.sandbox.launcher import Launch, NotStarted, temporary_folder
from rlpost.tools.sandbox.limits import Limits, tasks_counted_with
from rlpost.tools.sandbox.process import Pipes, Process, Request
from rlpost.tools.sandbox.walls import ENVIRONMENT, PYTHON_FLAGS, WEAKER, Bubblewrap, limits_command, user_for_one

SESSION_CPU_SECONDS = 3600  # of each of its processes over a session's life; each program has its own time limit too
CODE_CHARS = 1_000_000  # of one program
PROOF_SECONDS = 30.0


class SandboxMode(Enum):
    """How programs are kept apart from this machine."""

    bubblewrap = "bubblewrap"  # no network, nothing of the disk but Python, another user
    limits = "limits"  # memory, time, processes and file sizes alone


class Sandbox:
    """Runs Python programs apart from this machine, each in a fresh interpreter or in a `Session`.

    `python` is the interpreter inside; None: the one that runs this program. It sees the standard
    library; with `packages` also what is installed for it, and the files and folders of `readable`
    at their own places. Building one does nothing; the first use proves the walls, and `prove` does
    so earlier. All methods may be called from several threads.

    In mode `limits` a program is held to its time, memory, processes and sizes of files, and ended with
    its process group; it can reach the network and, unless rlpost runs as the superuser, read and
    write what you can. It is for machines without bubblewrap, and for programs that you trust.
    """

    def __init__(
        self,
        mode: SandboxMode = SandboxMode.bubblewrap,
        *,
        limits: Limits | None = None,
        python: str | None = None,
        packages: bool = False,
        readable: Sequence[str | Path] = (),
    ) -> None:
        self.mode = mode
        self.limits = limits or Limits()
        self.python = python
        self.packages = packages
        self.readable = [Path(path).absolute() for path in readable]
        self._proving = threading.Lock()
        self._proven = False

    def run(self, code: str, *, timeout_seconds: float, show_last_value: bool = False) -> Execution:
        """Run `code` as a program of its own: its threads are waited for, then whatever it left behind is ended.

        Raises SandboxError where it cannot be run apart from this machine.
        """
        self.prove()
        return self._run(code, timeout_seconds, show_last_value)

    def session(self) -> Session:
        """An interpreter in which one program finds what those before it have left."""
        self.prove()
        return Session(self)

    def prove(self) -> None:
        """Have a program try the walls. Raises SandboxError, with what to do, where they do not hold."""
        with self._proving:
            if self._proven:
                return
            if not sys.platform.startswith("linux"):
                raise SandboxError(f"programs are run in a sandbox of Linux, which {sys.platform} has not")
            if missing := [path for path in self.readable if not path.exists()]:
                raise SandboxError(f"a sandbox cannot show {missing[0]}: there is no such file or folder")
            if self.mode is SandboxMode.bubblewrap:
                self._try_walls()
            else:
                self._try("print('up')", "up\n")
            self._proven = True

    def _try_walls(self) -> None:
        """Look from inside for a file, a listening port and the right to write: all there, none to be found."""
        with tempfile.NamedTemporaryFile("w") as file, socket.create_server(("127.0.0.1", 0)) as server:
            os.chmod(file.name, 0o644)
            lines = [_PROOF, f"prove({file.name!r}, {server.getsockname()[1]}, {os.path.expanduser('~')!r})"]
            self._try("\n".join(lines), "walls hold\n")

    def _try(self, code: str, expected: str) -> None:
        try:
            execution = self._run(code, PROOF_SECONDS, False)
        except NotStarted as error:
            raise SandboxError(f"{error}; {self._advice()}") from None
        if not execution.claims_success or execution.stdout != expected:
            said = (execution.stdout + execution.stderr).strip().splitlines() or [execution.reason]
            raise SandboxError(f"the sandbox does not hold: {said[-1]}; {self._advice()}")

    def _advice(self) -> str:
        if self.mode is SandboxMode.limits:
            return "run rlpost as an ordinary user on Linux"
        return (
            "it needs bubblewrap 0.8 or newer and user namespaces (in a container: allow them with its security "
            "options), and a Python that other users may read (python=/usr/bin/python3); or ask for the weaker mode "
            f"with {WEAKER}"
        )

    def _run(self, code: str, timeout_seconds: float, show_last_value: bool) -> Execution:
        if len(code) > CODE_CHARS:
            return _too_long(code)
        process = self._start(ceil(timeout_seconds) + 1)
        try:
            return process.run(Request(code, last=True, show_last_value=show_last_value), timeout_seconds)
        finally:
            process.kill()

    def _start(self, cpu_seconds: int) -> Process:
        """A fresh interpreter behind its walls, waiting for programs."""
        confined = self.mode is SandboxMode.bubblewrap
        interpreter = Interpreter.running() if self.python is None else Interpreter.at(self.python)
        walls = Bubblewrap.found(interpreter, self.packages, self.readable, self.limits) if confined else None
        user = user_for_one()
        others = tasks_counted_with(own_user=user is not None, own_namespace=confined)
        rlimits = self.limits.rlimits(cpu_seconds, others)
        pipes = Pipes(seccomp.program() if confined else None)
        python = [str(interpreter.executable), *PYTHON_FLAGS, "-c", _runner_source()]
        python += [str(pipes.requests_in), str(pipes.reports_in)]
        python += [",".join(f"{number}:{value}" for number, value in rlimits.items())]
        python += [":".join(str(folder) for folder in interpreter.packages if self.packages)]
        try:
            if walls is not None:
                launch = Launch(walls.command(python, user, pipes.info_in, pipes.seccomp), ENVIRONMENT, user=user)
            else:
                launch = _launch_without_walls(python, interpreter, user)
        except SandboxError:
            pipes.close()
            raise
        return Process(launch, pipes, self.limits)


class Session:
    """An interpreter whose variables, functions and modules last from program to program.

    Between two programs all its processes are stopped. One that exceeds a limit or ends the
    interpreter loses everything: the next begins in a fresh one, and `restarts` counts that. Used by
    one thread at a time; close it, or use it in a `with` statement.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.restarts = 0
        self._sandbox = sandbox
        self._process: Process | None = None

    def run(self, code: str, *, timeout_seconds: float, show_last_value: bool = False) -> Execution:
        """Run `code` after all that ran before. Raises SandboxError where it cannot be run apart from this machine."""
        if len(code) > CODE_CHARS:
            return _too_long(code)
        if self._process is None:
            self._process = self._sandbox._start(SESSION_CPU_SECONDS)
        execution = self._process.run(Request(code, show_last_value=show_last_value), timeout_seconds)
        if self._process.ended:
            self._process = None
            self.restarts += 1
        return execution

    def ask(self, expression: str, *, timeout_seconds: float) -> Answer:
        """The value of `expression`, such as `solve(7)`, in what the programs before it have left.

        Judge by this, and not by a program's own word: the value is compared outside, where it runs no code of the
        program, and what the right one would be never is inside. Raises SandboxError as `run` does.
        """
        mark = secrets.token_hex(16)
        code = f"print({mark!r} + ascii((\n{expression}\n)), flush=True)"
        return Answer.read(self.run(code, timeout_seconds=timeout_seconds), mark)

    def close(self) -> None:
        """End the interpreter and whatever it started; a second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # with this program the kernel ends its sandboxes
            self.close()


def _launch_without_walls(python: list[str], interpreter: Interpreter, user: int | None) -> Launch:
    """The weaker mode: in a folder of its own."""
    command = limits_command(python, interpreter, user)
    folder = temporary_folder()
    if user is not None:
        os.chown(folder, user, user)
    return Launch(command, ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}, folder, temporary=True, user=user)


def _too_long(code: str) -> Execution:
    said = f"a program of {len(code)} characters is not run: at most {CODE_CHARS}\n"
    return Execution("", said, 1, None, finished=True, cut_bytes=0, seconds=0.0)


@cache
def _runner_source() -> str:
    return Path(runner.__file__).read_text(encoding="utf-8")


# Run inside: names the first wall that is missing
_PROOF = """
import os, socket

def prove(secret, port, home):
    if os.getuid() == 0:
        raise SystemExit("programs run as the superuser")
    for place in (secret, home + "/.bashrc", "/etc/shadow", "/proc/self"):
        if os.path.lexists(place):
            raise SystemExit(f"programs can see {place}")
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5)
    except OSError:
        pass
    else:
        raise SystemExit("programs can reach the network")
    try:
        socket.socket(40, socket.SOCK_STREAM)
    except PermissionError:
        pass
    else:
        raise SystemExit("programs can make any system call")
    try:
        os.mkdir("/walls")
    except OSError:
        print("walls hold")
    else:
        raise SystemExit("programs can write outside /tmp")
"""
