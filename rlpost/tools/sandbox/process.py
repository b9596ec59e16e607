"""A Python in its sandbox as seen from outside: started, asked, watched, frozen and ended.

Here are also the limits of a sandbox, the result of a program, which Python runs inside and which files it needs, and
the thread that starts every sandbox of this process.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from rlpost.errors import SandboxError
from rlpost.remote.child import ending, kill_group, put, read_available, readable_within, shell_code
from rlpost.tools.sandbox import runner

MIB = 1 << 20
START_SECONDS = 30.0  # for a sandbox to start, which takes milliseconds on an idle machine
DEATH_SECONDS = 30.0  # from SIGKILL until the last process is gone
WATCH_SECONDS = 0.05  # between two looks at the memory and files of all processes of a sandbox
CHUNK = 1 << 16
FLOOD_BYTES = 16 * MIB  # beyond the output that is kept: a program that writes more is killed
# most bytes that the kernel buffers for one: sent and unread data with overhead (twice net.core.wmem_default), and
# 16 pages
BUFFERED = {"socket": 425_984, "pipe": 65_536}
REPORT_BYTES = runner.NONCE_BYTES + 1


class NotStarted(SandboxError):
    """The sandbox cannot be set up on this machine."""


@dataclass(frozen=True)
class Limits:
    """The limits of one sandbox.

    `memory_mb` limits the address space of each process, and the memory of all processes and files together: a
    process that asks for more gets a MemoryError, several that hold more are killed. `processes` counts threads too.
    `disk_mb` is the size of its /tmp and of the longest file there, `output_bytes` how much is kept of stdout and of
    stderr.
    """

    memory_mb: int = 512
    processes: int = 16
    disk_mb: int = 32
    files: int = 10_000
    open_files: int = 128
    output_bytes: int = 64 * 1024

    def rlimits(self, cpu_seconds: int, other_tasks: int) -> dict[int, int]:
        """Resource limits of each process; `other_tasks` of the same user count against its processes."""
        return {
            resource.RLIMIT_AS: self.memory_mb * MIB,
            # not 0: with 0 the kernel would still pipe the dump to a handler outside, if it has one
            resource.RLIMIT_CORE: 1,
            resource.RLIMIT_CPU: cpu_seconds,
            resource.RLIMIT_FSIZE: self.disk_mb * MIB,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_NPROC: self.processes + other_tasks,
            resource.RLIMIT_SIGPENDING: 128,
        }


def tasks_counted_with(*, own_user: bool, own_namespace: bool) -> int:
    """How many tasks outside a sandbox its RLIMIT_NPROC counts too.

    0 if its user has no other processes, or, since Linux 5.14, which counts processes by user and namespace, if it is
    in a user namespace of its own.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    counted_apart = release is not None and (int(release[1]), int(release[2])) >= (5, 14)
    if own_user or (own_namespace and counted_apart):
        return 0
    return sum(_tasks(process) for process in Path("/proc").glob("[0-9]*"))


def _tasks(process: Path) -> int:
    try:
        return len(os.listdir(process / "task")) if process.stat().st_uid == os.getuid() else 0
    except OSError:  # it has just ended
        return 0


# The result of a program


class KilledBy(Enum):
    """The limit for which the sandbox killed a program."""

    time = "time"
    memory = "memory"
    output = "output"
    files = "files"


_REASONS = {
    KilledBy.time: "Code execution timed out",
    KilledBy.memory: "Code execution took more memory than it is allowed",
    KilledBy.output: "Code execution wrote more output than it is allowed",
    KilledBy.files: "Code execution made more files than it is allowed",
}


@dataclass(frozen=True)
class Execution:
    """The result of one program.

    `exit_code` is Python's own, 128 + n if signal n ended the process, None if the sandbox killed it. `finished`
    means that the interpreter reported the program's end: a program that leaves by `os._exit(0)` before its last line
    has exit code 0 and is not finished. `cut_bytes` of output were not kept.

    The program runs inside the interpreter that reports, and can send the same report. To judge a program, compare
    its values outside: `Session.ask`.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    killed_by: KilledBy | None
    finished: bool
    cut_bytes: int
    seconds: float

    @property
    def claims_success(self) -> bool:
        """Whether the interpreter reported an end without an exception, which the program can fake."""
        return self.finished and self.exit_code == 0

    @property
    def timed_out(self) -> bool:
        return self.killed_by is KilledBy.time

    @property
    def output_cut(self) -> bool:
        return self.cut_bytes > 0

    @property
    def reason(self) -> str:
        """Why a program did not reach its end, in words; empty if it did."""
        if self.finished:
            return ""
        if self.killed_by is not None:
            return _REASONS[self.killed_by]
        if self.exit_code is not None and self.exit_code > 128:
            return f"Python {ending(128 - self.exit_code)}"
        if self.exit_code is None:
            return "Python closed the pipes that it is run by"
        return f"Python ended early with exit code {self.exit_code}"


@dataclass(frozen=True)
class Answer:
    """The value of an expression in a session; `given` is False if there was none that can be carried out.

    `value` is made of None, numbers, strings, bytes, tuples, lists, dicts and sets, of exactly those types, so
    comparing it with an expected value runs no code of the program.
    """

    given: bool
    value: Any
    execution: Execution

    @classmethod
    def read(cls, execution: Execution, mark: str) -> Answer:
        """The answer after the last `mark` in the output."""
        _, found, text = execution.stdout.rpartition(mark)
        try:
            value = ast.literal_eval(text.removesuffix("\n")) if found and execution.claims_success else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # not written by repr, or too deep
            found = ""
            value = None
        return cls(bool(found) and execution.claims_success, value, execution)


class Capture:
    """The beginning and the end of a stream of bytes, `limit` bytes in all; the rest is only counted."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._room = (limit + 1) // 2
        self._tail_room = limit - self._room
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_room)]

    @property
    def cut_bytes(self) -> int:
        return self.total - len(self._head) - len(self._tail)

    def text(self) -> str:
        """As UTF-8, with � for invalid bytes and a note that counts missing ones."""
        if not self.cut_bytes:
            return (self._head + self._tail).decode(errors="replace")
        note = f"\n[{self.cut_bytes} bytes left out]\n"
        return self._head.decode(errors="replace") + note + self._tail.decode(errors="replace")


# An interpreter behind its walls


@dataclass(frozen=True)
class Request:
    """A program to run; `last` if none follows it, `show_last_value` to print the value of a final expression."""

    code: str
    last: bool = False
    show_last_value: bool = False

    def packed(self, nonce: bytes) -> bytes:
        code = self.code.encode("utf-8", "surrogatepass")
        flags = self.last * runner.LAST + self.show_last_value * runner.SHOW_LAST_VALUE
        return nonce + bytes([flags]) + len(code).to_bytes(runner.LENGTH_BYTES, "big") + code


class Pipes:
    """Both ends of the pipes to a sandbox; `theirs` go to it and are closed here once it has started.

    With `seccomp`, a filter program, one more pipe holds the filter and another one gets the number of the first
    process.
    """

    def __init__(self, seccomp: bytes | None) -> None:
        self.requests_in, self.requests = os.pipe()
        self.reports, self.reports_in = os.pipe()
        self.info = self.info_in = self.seccomp = -1
        self.theirs = [self.requests_in, self.reports_in]
        if seccomp is not None:
            self.info, self.info_in = os.pipe()
            self.seccomp, end = os.pipe()
            os.write(end, seccomp)  # fits into a pipe's buffer
            os.close(end)
            self.theirs += [self.info_in, self.seccomp]
        os.set_blocking(self.requests, False)
        os.set_blocking(self.reports, False)

    def close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        for pipe in {self.requests, self.reports, self.info} - {-1}:
            os.close(pipe)
        self.requests = self.reports = self.info = -1


class Process:
    """One interpreter behind its walls; runs one program at a time.

    `init` is the first process of its namespace, with which all others end; without namespaces it is
    the interpreter. Raises NotStarted if the sandbox cannot be set up: then no program runs.
    """

    def __init__(self, launch: Launch, pipes: Pipes, limits: Limits) -> None:
        self.limits = limits
        self._launch = launch
        self.confined = pipes.info >= 0
        self.ended = False
        self._owner = os.getpid()
        self._pipes = pipes
        self._frozen: list[int] = []  # pidfds of stopped processes
        try:
            self._popen = launcher.start(launch, pipes.theirs)
        except OSError as error:
            pipes.close()
            raise NotStarted(f"a sandbox cannot be started: {error}") from None
        pipes.close_theirs()
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._out, self._err = self._popen.stdout.fileno(), self._popen.stderr.fileno()
        self.init = self._handle = -1
        try:
            self._await_ready()
            self.init = json.loads(os.read(pipes.info, CHUNK))["child-pid"] if self.confined else self._popen.pid
            self._handle = os.pidfd_open(self.init)
            self._look()
        except (OSError, ValueError, NotStarted) as error:
            self.kill()
            raise NotStarted(f"a sandbox cannot be started: {error}") from None

    def _await_ready(self) -> None:
        """Wait until the interpreter reports that its limits hold."""
        if not readable_within(self._pipes.reports, START_SECONDS):
            raise NotStarted(f"it is not up after {START_SECONDS:g} seconds")
        if os.read(self._pipes.reports, 1) != runner.READY:
            output = Capture(2000)
            _read_all(self._err, output)
            raise NotStarted(" ".join(output.text().split()) or f"exit code {self._popen.wait()}")

    def _look(self) -> None:
        """Raise NotStarted unless /proc shows everything that has to be watched."""
        if self.confined:
            os.statvfs(self._folder)
        if len(self.members()) < 1 + self.confined or not _memory_bytes(self.init):
            raise NotStarted("/proc does not show its processes and their memory")

    @property
    def _folder(self) -> str:
        """The folder in which a confined program may write, seen from outside."""
        return f"/proc/{self.init}/root/tmp"

    def run(self, request: Request, seconds: float) -> Execution:
        """Run one program for at most `seconds`; then the process has `ended` or is stopped until the next."""
        started = time.monotonic()
        nonce = secrets.token_bytes(runner.NONCE_BYTES)
        exchange = _Exchange(self, request.packed(nonce), started + seconds)
        self._thaw()
        killed_by = exchange.play()
        report = exchange.report
        finished = killed_by is None and len(report) == REPORT_BYTES and report.startswith(nonce)
        exit_code = report[-1] if finished else None
        if killed_by is None and not finished:
            exit_code = self._exit_code()
        goes_on = finished and not request.last and self._freeze()
        exchange.drain()
        if not goes_on:
            self.kill()
        return Execution(
            stdout=exchange.out.text(),
            stderr=exchange.err.text(),
            exit_code=exit_code,
            killed_by=killed_by,
            finished=finished,
            cut_bytes=exchange.out.cut_bytes + exchange.err.cut_bytes,
            seconds=time.monotonic() - started,
        )

    def _exit_code(self) -> int | None:
        """The exit code; None if the process has closed its pipes and goes on."""
        try:
            return shell_code(self._popen.wait(0.5))
        except subprocess.TimeoutExpired:
            return None

    # Between two programs nothing of a sandbox runs

    def _freeze(self) -> bool:
        """Stop every process, and every process started meanwhile; False if they start more than can be stopped."""
        if not self.confined:
            self._signal_group(signal.SIGSTOP)
            return True
        stopped: set[int] = set()
        for _ in range(100):
            fresh = set(self.members()) - stopped - {self.init}
            if not fresh:
                return True
            for pid in fresh:
                if handle := self._handle_of(pid):
                    self._frozen.append(handle)
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        signal.pidfd_send_signal(handle, signal.SIGSTOP)
            stopped |= fresh
        return False

    def _thaw(self) -> None:
        if not self.confined:
            self._signal_group(signal.SIGCONT)
        while self._frozen:
            handle = self._frozen.pop()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)

    def _handle_of(self, pid: int) -> int | None:
        """A pidfd of the sandbox's process `pid`; None if it has ended, even if its number is taken again."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if pid in self.members():  # checked while the pidfd pins the process
            return handle
        os.close(handle)
        return None

    def members(self) -> list[int]:
        """The first process of the sandbox and all that descend from it."""
        found = [self.init]
        for pid in found:
            found += _children(pid)
        return found

    # Limits over all processes together

    def overuse(self) -> KilledBy | None:
        """The limit that all processes and files together exceed; None if they exceed none."""
        files = 0
        if self.confined:
            try:
                disk = os.statvfs(self._folder)
            except OSError:  # it has just ended
                return None
            if disk.f_files - disk.f_ffree > self.limits.files:
                return KilledBy.files
            files = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        members = self.members()
        memory = sum(map(_memory_bytes, members)) + _buffer_bytes(members)
        return KilledBy.memory if memory + files > self.limits.memory_mb << 20 else None

    # The end

    def kill(self) -> None:
        """Kill every process, and return when none is left. Raises SandboxError if one stays."""
        if self.ended or os.getpid() != self._owner:  # not from a fork of its owner
            return
        self.ended = True
        if self.confined and self._handle >= 0:  # all others end with it
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        else:
            self._signal_group(signal.SIGKILL)
            self._kill_strays()
        try:
            self._popen.wait(DEATH_SECONDS)
            gone = self._handle < 0 or readable_within(self._handle, DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            gone = False
        for handle in [*self._frozen, self._handle]:
            if handle >= 0:
                os.close(handle)
        self._frozen.clear()
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        self._pipes.close()
        if self._launch.temporary:
            subprocess.run(["rm", "-rf", "--", self._launch.folder], check=True)
        if not gone:
            raise SandboxError(f"the sandbox of process {self.init} is still there after SIGKILL: look at it with ps")

    def _kill_strays(self) -> None:
        """Kill processes that have left the process group, as far as they can be recognized."""
        user = self._launch.user
        for _ in range(100):
            strays = set(self.members()) - {self.init} if user is None else _processes_of(user)
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._popen.poll() is None or not self.confined:
            kill_group(self._popen.pid, number)


class _Exchange:
    """Sends one program, and reads its output and its report until it ends or exceeds a limit."""

    def __init__(self, process: Process, packed: bytes, deadline: float) -> None:
        self.process = process
        self.deadline = deadline
        self.report = b""
        self.out = Capture(process.limits.output_bytes)
        self.err = Capture(process.limits.output_bytes)
        self._unsent = memoryview(packed)

    def play(self) -> KilledBy | None:
        """Return the limit that the program exceeds, or None once it has reported or its process is gone."""
        process, pipes = self.process, self.process._pipes
        with selectors.DefaultSelector() as selector:
            selector.register(pipes.reports, selectors.EVENT_READ)
            selector.register(pipes.requests, selectors.EVENT_WRITE)
            selector.register(process._out, selectors.EVENT_READ, self.out)
            selector.register(process._err, selectors.EVENT_READ, self.err)
            watch_at = time.monotonic() + WATCH_SECONDS
            while (now := time.monotonic()) < self.deadline:
                if now >= watch_at:
                    if (over := process.overuse()) is not None:
                        return over
                    if process._popen.poll() is not None:
                        self._read_report()
                        return None
                    watch_at = now + WATCH_SECONDS
                for key, _ in selector.select(min(watch_at, self.deadline) - now):
                    if key.fd == pipes.reports:
                        if self._read_report():
                            return None
                    elif key.fd == pipes.requests:
                        if self._send():
                            selector.unregister(key.fd)
                    elif not _read_some(key.fd, key.data):
                        selector.unregister(key.fd)
                    elif key.data.total > process.limits.output_bytes + FLOOD_BYTES:
                        return KilledBy.output
        return KilledBy.time

    def _read_report(self) -> bool:
        """Whether the report is complete, or nobody is left to write one."""
        part = read_available(self.process._pipes.reports, REPORT_BYTES + 1)
        self.report += part or b""
        return part is None or len(self.report) >= REPORT_BYTES

    def _send(self) -> bool:
        """Whether the request is sent, or nobody is left to read it."""
        self._unsent = self._unsent[put(self.process._pipes.requests, self._unsent) :]
        return not self._unsent

    def drain(self) -> None:
        """Read what the program had written before it ended."""
        for pipe, capture in ((self.process._out, self.out), (self.process._err, self.err)):
            _read_all(pipe, capture)


def _read_some(pipe: int, into: Capture) -> bool:
    """Whether there is more to come."""
    data = read_available(pipe, CHUNK)
    into.add(data or b"")
    return data is not None


def _read_all(pipe: int, into: Capture) -> None:
    """Read the content of `pipe`, at most as much as a pipe can hold."""
    for _ in range((1 << 20) // CHUNK + 1):
        before = into.total
        if not _read_some(pipe, into) or into.total == before:
            return


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has just ended
                found += [int(word) for word in task.read_text().split()]
    return found


def _processes_of(user: int) -> set[int]:
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if process.stat().st_uid == user and "\nState:\tZ" not in (process / "status").read_text():
                found.add(int(process.name))
    return found


def _buffer_bytes(pids: Sequence[int]) -> int:
    """The most that the kernel may buffer for the sockets and pipes of these processes."""
    found: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path)
                    kind = target.partition(":")[0]
                    if kind in BUFFERED:
                        found[target] = BUFFERED[kind]
    return sum(found.values())


def _memory_bytes(pid: int) -> int:
    """The memory of a process, with its share of pages held by several (PSS); 0 for one that has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))


# The Python inside

_QUESTION = (
    "import site, sys, sysconfig; v = sys.version_info;"
    "print(f'{sys.base_prefix}/bin/python{v[0]}.{v[1]}', sys.base_prefix, sysconfig.get_path('stdlib'),"
    " *site.getsitepackages(), sep='\\n')"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python whose files lie under one prefix, like system, pyenv, uv and conda Pythons.

    For a virtual environment it is the base's Python; `packages` are the environment's own folders.
    """

    executable: Path
    prefix: Path
    stdlib: Path
    packages: tuple[Path, ...]

    @classmethod
    @cache
    def at(cls, path: str) -> Interpreter:
        """The Python at `path`, which is run to find its folders. Raises SandboxError if that fails."""
        try:
            answer = subprocess.run(
                [path, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=20, check=True
            )
            executable, prefix, stdlib, *packages = map(Path, answer.stdout.splitlines())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{path} cannot be asked for its folders ({error}): name a Python that runs") from None
        if not executable.is_file():
            raise SandboxError(f"this Python has no {executable}: name one with python=, for example /usr/bin/python3")
        installed = tuple(folder for folder in packages if folder.is_dir())
        return cls(executable.resolve(), prefix.resolve(), stdlib.resolve(), installed)

    def readable(self) -> list[Path]:
        """Files and folders that it needs, and nothing else of the prefix, which may be somebody's home."""
        wanted = [self.executable, *(self.prefix / name for name in ("lib", "lib64"))]
        return [path for path in wanted if path.exists() and not path.is_symlink()]

    def hidden(self) -> list[Path]:
        """Folders of installed packages inside them, which may hold the answers to the tasks."""
        beside = [self.stdlib / "site-packages", self.stdlib / "dist-packages", Path("/usr/lib/python3/dist-packages")]
        return [folder for folder in beside if folder.is_dir()]


def closed_to_others(paths: Sequence[Path]) -> bool:
    """Whether other users may not enter one of `paths` or a folder above it."""
    return any(not part.stat().st_mode & os.X_OK for path in paths for part in (path, *path.parents))


# The thread that starts every sandbox

# CLONE_NEWNS, MS_BIND, MS_REC, MS_SLAVE
_NEW_MOUNTS, _BIND, _RECURSIVE, _FOLLOW_ONLY = 0x00020000, 4096, 16384, 1 << 19


@dataclass(frozen=True)
class Launch:
    """How to start an interpreter: in `folder`, as `user` if it has one of its own.

    A `temporary` folder is removed with everything the program left there.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str = "/"
    temporary: bool = False
    user: int | None = None


class Launcher:
    """One permanent thread: the kernel kills a sandbox together with the thread that started it.

    For the superuser this thread has its own mounts: they show the sandbox's files in a folder that the
    sandbox's user may enter, even if they come from a closed home.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rlpost-sandbox")
        self._stage: Path | None = None
        self._places: dict[Path, Path] = {}

    def start(self, launch: Launch, pipes: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start an interpreter with only `pipes` and its output open. Raises OSError."""
        return self._thread.submit(_start, launch, pipes).result()

    def places_of(self, paths: Sequence[Path]) -> dict[Path, Path]:
        """Place that every user can reach -> its path, for all `paths`. Raises OSError if mounting is not allowed."""
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
    """A new folder that other users can reach, wherever TMPDIR is."""
    usual = Path(tempfile.gettempdir())
    return tempfile.mkdtemp(prefix="rlpost-sandbox-", dir="/tmp" if closed_to_others([usual]) else usual)


launcher = Launcher()
os.register_at_fork(after_in_child=launcher.__init__)  # a fork has none of its parent's threads


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
    """Remove the folder, which only the launcher's thread, gone by now, saw filled."""
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
