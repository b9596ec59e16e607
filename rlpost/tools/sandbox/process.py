"""A Python in its sandbox as seen from outside: started, asked, watched, frozen and ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpost.child import kill_group, put, readable_within, shell_code, taken
from rlpost.errors import SandboxError
from rlpost.tools.sandbox import runner
from rlpost.tools.sandbox.execution import Capture, Execution, KilledBy
from rlpost.tools.sandbox.launcher import Launch, NotStarted, launcher
from rlpost.tools.sandbox.limits import Limits

START_SECONDS = 30.0  # until the walls stand; on an idle machine they take milliseconds
DEATH_SECONDS = 30.0  # from SIGKILL until the last process is gone
WATCH_SECONDS = 0.05  # between two looks at the memory and files that all processes of a sandbox take together
CHUNK = 1 << 16
# bytes that the kernel keeps for one at most: what its owner has sent and nobody read, overhead included (twice
# net.core.wmem_default), and 16 pages
BUFFERED = {"socket": 425_984, "pipe": 65_536}
REPORT_BYTES = runner.NONCE_BYTES + 1


@dataclass(frozen=True)
class Request:
    """A program to run: `last` where none follows it, `show_last_value` to print what a final expression gives."""

    code: str
    last: bool = False
    show_last_value: bool = False

    def packed(self, nonce: bytes) -> bytes:
        code = self.code.encode("utf-8", "surrogatepass")
        flags = self.last * runner.LAST + self.show_last_value * runner.SHOW_LAST_VALUE
        return nonce + bytes([flags]) + len(code).to_bytes(runner.LENGTH_BYTES, "big") + code


class Pipes:
    """Both ends of the pipes to a sandbox; `theirs` go to it and are closed here once it has started.

    With `seccomp`, a filter program, there is a pipe that holds it, and one that tells the number of
    the first process.
    """

    def __init__(self, seccomp: bytes | None) -> None:
        self.requests_in, self.requests = os.pipe()
        self.reports, self.reports_in = os.pipe()
        self.info = self.info_in = self.seccomp = -1
        self.theirs = [self.requests_in, self.reports_in]
        if seccomp is not None:
            self.info, self.info_in = os.pipe()
            self.seccomp, end = os.pipe()
            os.write(end, seccomp)  # far less than a pipe holds
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
    the interpreter. Raises NotStarted where the walls cannot be put up: then no program runs.
    """

    def __init__(self, launch: Launch, pipes: Pipes, limits: Limits) -> None:
        self.limits = limits
        self._launch = launch
        self.confined = pipes.info >= 0
        self.ended = False
        self._owner = os.getpid()
        self._pipes = pipes
        self._frozen: list[int] = []  # handles of stopped processes
        try:
            self._popen = launcher().start(launch, pipes.theirs)
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
        """Wait until the interpreter says that its limits hold."""
        if not readable_within(self._pipes.reports, START_SECONDS):
            raise NotStarted(f"it is not up after {START_SECONDS:g} seconds")
        if os.read(self._pipes.reports, 1) != runner.READY:
            said = Capture(2000)
            _read_all(self._err, said)
            raise NotStarted(" ".join(said.text().split()) or f"exit code {self._popen.wait()}")

    def _look(self) -> None:
        """See whether what has to be watched can be: /proc may be kept from us, or lack a part."""
        if self.confined:
            os.statvfs(self._folder)
        if len(self.members()) < 1 + self.confined or not _memory_bytes(self.init):
            raise NotStarted("its processes and their memory are not to be seen in /proc")

    @property
    def _folder(self) -> str:
        """The folder in which a confined program may write, as reached from outside."""
        return f"/proc/{self.init}/root/tmp"

    def run(self, request: Request, seconds: float) -> Execution:
        """Run one program for at most `seconds`; then the process has `ended`, or is stopped until the next."""
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
        """What the process ended with; None where it gave up its pipes and goes on."""
        try:
            return shell_code(self._popen.wait(0.5))
        except subprocess.TimeoutExpired:
            return None

    def has_exited(self) -> bool:
        return self._popen.poll() is not None

    # Between two programs nothing of a sandbox runs

    def _freeze(self) -> bool:
        """Stop every process, and those that they make meanwhile; False where they make more than can be stopped."""
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
        """A handle of the sandbox's process `pid`; None where it has ended, whoever has its number now."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if pid in self.members():  # looked at while the handle keeps hold of the process
            return handle
        os.close(handle)
        return None

    def members(self) -> list[int]:
        """The processes of the sandbox, its first one included; of a process group, those that descend from it."""
        found = [self.init]
        for pid in found:
            found += _children(pid)
        return found

    # What no limit of a single process says

    def overuse(self) -> KilledBy | None:
        """The limit that all processes and files together are over."""
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
        """End every process, and return when none is left. Raises SandboxError where that cannot be had."""
        if self.ended or os.getpid() != self._owner:  # a fork of its owner leaves it alone
            return
        self.ended = True
        if self.confined and self._handle >= 0:  # its end is that of all; those that wait for it then end by themselves
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
        """End those that have left the process group, as far as they can be told from others."""
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
    """One program sent, and its output and its report read until it ends or is over a limit."""

    def __init__(self, process: Process, packed: bytes, deadline: float) -> None:
        self.process = process
        self.deadline = deadline
        self.report = b""
        self.out = Capture(process.limits.output_bytes)
        self.err = Capture(process.limits.output_bytes)
        self._unsent = memoryview(packed)

    def play(self) -> KilledBy | None:
        """Returns the limit that the program is over, or None when it has reported or its process is gone."""
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
                    if process.has_exited():
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
                    elif key.data.total > process.limits.flood_bytes:
                        return KilledBy.output
        return KilledBy.time

    def _read_report(self) -> bool:
        """Whether nothing more is to be read: the report is whole, or nobody is there to write one."""
        part = taken(self.process._pipes.reports, REPORT_BYTES + 1)
        self.report += part or b""
        return part is None or len(self.report) >= REPORT_BYTES

    def _send(self) -> bool:
        """Whether all of the request is sent, as far as somebody is there to read it."""
        self._unsent = self._unsent[put(self.process._pipes.requests, self._unsent) :]
        return not self._unsent

    def drain(self) -> None:
        """Take what the program had written when it ended."""
        for pipe, capture in ((self.process._out, self.out), (self.process._err, self.err)):
            _read_all(pipe, capture)


def _read_some(pipe: int, into: Capture) -> bool:
    """Whether there is more to come."""
    data = taken(pipe, CHUNK)
    into.add(data or b"")
    return data is not None


def _read_all(pipe: int, into: Capture) -> None:
    """Read what lies in `pipe`, at most as much as one can hold."""
    for _ in range((1 << 20) // CHUNK + 1):
        before = into.total
        if not _read_some(pipe, into) or into.total == before:
            return


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
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
    """The most that the kernel may hold in the sockets and pipes of these processes, beside their memory."""
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
    """Its share of the memory that it uses: pages of several processes are divided among them."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))
