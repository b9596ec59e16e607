"""`Sandbox`: runs programs that nobody has read, where they can do no harm.

Bubblewrap's namespaces keep a program from files, processes and the network. A filter of system calls keeps it from
the rest of the kernel, including calls that later kernels add: other processes' memory, mounts, keys, memory and
sockets that no limit counts, and the parts that most container escapes have used.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from errno import ENOSYS, EPERM
from functools import cache
from math import ceil
from pathlib import Path
from typing import Self

from rlpost.errors import SandboxError
from rlpost.tools.sandbox import runner
from rlpost.tools.sandbox.process import (
    MIB,
    Answer,
    Execution,
    Interpreter,
    Launch,
    Limits,
    NotStarted,
    Pipes,
    Process,
    Request,
    closed_to_others,
    launcher,
    tasks_counted_with,
    temporary_folder,
)

SESSION_CPU_SECONDS = 3600  # per process over a session's life; each program has its own time limit too
CODE_CHARS = 1_000_000  # longest program
PROOF_SECONDS = 30.0
WEAKER = "tools.python_sandbox=limits (in Python: sandbox='limits')"
OTHER_PYTHON = "run rlpost with one (in Python: python='/usr/bin/python3')"
PYTHON_FLAGS = ("-s", "-S", "-X", "utf8")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # sets print in the same order each time
    "TMPDIR": "/tmp",
    "TZ": "UTC",
}


class SandboxMode(Enum):
    """How programs are isolated from this machine."""

    bubblewrap = "bubblewrap"  # no network, nothing of the disk but Python, another user
    limits = "limits"  # memory, time, processes and file sizes alone


class Sandbox:
    """Runs Python programs apart from this machine, each in a fresh interpreter or in a `Session`.

    `python` is the interpreter inside; None: the one that runs this program. It sees the standard library, with
    `packages` also its installed packages, and the files and folders of `readable` at their own paths. The first use
    tests the walls; `prove` does so earlier. All methods may be called from several threads.

    The mode `limits` only limits a program's time, memory, processes and file sizes, and kills its process group;
    the program can reach the network and, unless rlpost runs as the superuser, read and write whatever you can. It is
    for machines without bubblewrap, and for programs that you trust.
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
        """Run `code` as a program of its own: wait for its threads, then kill whatever it left behind.

        Raises SandboxError if it cannot be isolated from this machine.
        """
        self.prove()
        return self._run(code, timeout_seconds, show_last_value)

    def session(self) -> Session:
        """An interpreter in which each program finds what the earlier ones have left."""
        self.prove()
        return Session(self)

    def prove(self) -> None:
        """Test the walls from inside. Raises SandboxError, with what to do, if they do not hold."""
        with self._proving:
            if self._proven:
                return
            if not sys.platform.startswith("linux"):
                raise SandboxError(f"programs are run in a sandbox of Linux, which {sys.platform} has not")
            if self.mode is SandboxMode.bubblewrap:
                self._try_walls()
            else:
                self._try("print('up')", "up\n")
            self._proven = True

    def _try_walls(self) -> None:
        """Look from inside for a file, a listening port and a writable folder that exist outside."""
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
            output = (execution.stdout + execution.stderr).strip().splitlines() or [execution.reason]
            raise SandboxError(f"the sandbox does not hold: {output[-1]}; {self._advice()}")

    def _advice(self) -> str:
        if self.mode is SandboxMode.limits:
            return "run rlpost as an ordinary user on Linux"
        return (
            "it needs bubblewrap 0.8 or newer and user namespaces (in a container: allow them with its security "
            "options), and a Python that other users may read: "
            f"{OTHER_PYTHON}; or take the weaker mode with {WEAKER}"
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
        """A new interpreter behind its walls, waiting for programs."""
        confined = self.mode is SandboxMode.bubblewrap
        interpreter = Interpreter.at(self.python or sys.executable)
        user = user_for_one()
        others = tasks_counted_with(own_user=user is not None, own_namespace=confined)
        rlimits = self.limits.rlimits(cpu_seconds, others)
        pipes = Pipes(seccomp_filter() if confined else None)
        python = [str(interpreter.executable), *PYTHON_FLAGS, "-c", _runner_source()]
        python += [str(pipes.requests_in), str(pipes.reports_in)]
        python += [",".join(f"{number}:{value}" for number, value in rlimits.items())]
        python += [":".join(str(folder) for folder in interpreter.packages if self.packages)]
        try:
            if confined:
                shown = self._shown(interpreter, user)
                command = self._walled(interpreter, shown, pipes)
                become = [] if user is None else _as_user(user)
                launch = Launch([*become, *command, "--", *python], ENVIRONMENT, user=user)
            else:
                launch = _launch_without_walls(python, interpreter, user)
        except SandboxError:
            pipes.close()
            raise
        return Process(launch, pipes, self.limits)

    def _shown(self, interpreter: Interpreter, user: int | None) -> dict[Path, Path]:
        """Each file and folder that is shown inside -> its place there.

        Raises NotStarted if the superuser may not open a closed folder to `user`.
        """
        folders = interpreter.packages if self.packages else ()
        paths = dict.fromkeys([*interpreter.readable(), *folders, *self.readable])
        shown = {path: path for path in paths if path not in _SHOWN}
        if user is not None and closed_to_others(list(shown)):
            try:
                return launcher.places_of(list(shown))
            except OSError as error:
                raise NotStarted(f"{interpreter.prefix} cannot be opened to a sandbox: {error}") from None
        return shown

    def _walled(self, interpreter: Interpreter, shown: Mapping[Path, Path], pipes: Pipes) -> list[str]:
        """The command of bubblewrap: no network, only a Python and an empty /tmp on disk, and another user.

        It writes the number of the first process to a pipe and reads the filter from another.
        """
        words = [found_bubblewrap(), "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
        words += ["--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
        words += ["--info-fd", str(pipes.info_in), "--seccomp", str(pipes.seccomp)]
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
        words += ["--symlink", "/tmp", "/dev/shm"]  # so that shared memory has the same limit
        for source, place in shown.items():
            words += ["--ro-bind", str(source), str(place)]
        if not self.packages:
            for folder in interpreter.hidden():
                words += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
        return [*words, "--remount-ro", "/", "--chdir", "/tmp"]


class Session:
    """An interpreter whose variables, functions and modules last from program to program.

    Between two programs all its processes are stopped. A program that exceeds a limit or ends the
    interpreter loses everything: the next one starts in a new interpreter, and `restarts` counts that. For one
    thread at a time; close it, or use it in a `with` statement.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.restarts = 0
        self._sandbox = sandbox
        self.process: Process | None = None  # the interpreter; None before the first program and after a restart

    def run(self, code: str, *, timeout_seconds: float, show_last_value: bool = False) -> Execution:
        """Run `code` after all earlier programs. Raises SandboxError if it cannot be isolated from this machine."""
        if len(code) > CODE_CHARS:
            return _too_long(code)
        if self.process is None:
            self.process = self._sandbox._start(SESSION_CPU_SECONDS)
        execution = self.process.run(Request(code, show_last_value=show_last_value), timeout_seconds)
        if self.process.ended:
            self.process = None
            self.restarts += 1
        return execution

    def ask(self, expression: str, *, timeout_seconds: float) -> Answer:
        """The value of `expression`, such as `solve(7)`, after the earlier programs.

        Judge a program by this, not by its own report: you compare the value outside, without running code of the
        program, and the right value is never inside. Raises SandboxError as `run` does.
        """
        mark = secrets.token_hex(16)
        code = f"print({mark!r} + ascii((\n{expression}\n)), flush=True)"
        return Answer.read(self.run(code, timeout_seconds=timeout_seconds), mark)

    def close(self) -> None:
        """End the interpreter and whatever it started; a second call does nothing."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the kernel kills all sandboxes
            self.close()


def _too_long(code: str) -> Execution:
    refusal = f"a program of {len(code)} characters is not run: at most {CODE_CHARS}\n"
    return Execution("", refusal, 1, None, finished=True, cut_bytes=0, seconds=0.0)


@cache
def _runner_source() -> str:
    return Path(runner.__file__).read_text(encoding="utf-8")


# Runs inside, and names the first wall that is missing
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


# The commands that start a Python behind its walls

# Unused user ids; the second range, for transient services, is for containers with only 65,536 users
_USERS = (range(1_900_000_000, 1_901_000_000), range(61_184, 65_520))
_LIBRARIES = ("lib", "lib64", "lib32")  # system folders in / and in /usr
_SHOWN = [Path(f"/usr/{name}") for name in _LIBRARIES]


def found_bubblewrap() -> str:
    """The path of the bwrap program. Raises SandboxError if it is not installed."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise SandboxError(
            "programs that a model writes are run in bubblewrap, which is not installed: apt install bubblewrap, "
            f"or ask for the weaker mode, which blocks neither files nor network, with {WEAKER}"
        )
    return bwrap


def _launch_without_walls(python: list[str], interpreter: Interpreter, user: int | None) -> Launch:
    """The weaker mode, in a folder of its own; the superuser runs it as `user`.

    Raises SandboxError if that user could not enter the interpreter's folder.
    """
    if user is not None and closed_to_others(interpreter.readable()):
        raise SandboxError(
            f"the mode limits runs programs as another user, who may not enter {interpreter.prefix}; a Python "
            f"outside of it can be used: {OTHER_PYTHON}"
        )
    command = [*([_setpriv(), "--no-new-privs"] if user is None else _as_user(user)), "--pdeathsig", "KILL", *python]
    folder = temporary_folder()
    if user is not None:
        os.chown(folder, user, user)
    return Launch(command, ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}, folder, temporary=True, user=user)


def user_for_one() -> int | None:
    """A user id without any process, so that a sandbox's processes can be counted; None unless run as superuser.

    Raises SandboxError for a superuser whose container has no such user.
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
        raise SandboxError("the sandbox drops privileges with setpriv, which is missing: apt install util-linux")
    return setpriv


# The filter of system calls: it allows the ones that CPython and its C library need, and no others

# name:number on x86_64:number on aarch64; - if it has none
_ALLOWED = (
    # files
    "read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 "
    "preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 openat2:437:437 creat:85:- close:3:57 "
    "close_range:436:436 lseek:8:62 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 statfs:137:43 "
    "fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- "
    "pipe2:293:59 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 fallocate:285:47 "
    "fadvise64:221:223 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- "
    "renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37 unlink:87:- "
    "unlinkat:263:35 symlink:88:- symlinkat:266:36 readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52 "
    "fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 umask:95:166 utime:132:- "
    "utimes:235:- utimensat:280:88 futimesat:261:- sendfile:40:71 copy_file_range:326:285 getxattr:191:8 "
    "lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 "
    # memory
    "brk:12:214 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 msync:26:227 mincore:27:232 "
    "membarrier:324:283 "
    # processes and threads
    "fork:57:- vfork:58:- execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 getpid:39:172 "
    "getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 "
    "getresuid:118:148 getresgid:120:150 setpgid:109:154 getpgid:121:155 getpgrp:111:- setsid:112:157 "
    "getsid:124:156 getpriority:140:141 setpriority:141:140 getrlimit:97:163 setrlimit:160:164 prlimit64:302:261 "
    "getrusage:98:165 times:100:153 sysinfo:99:179 uname:63:160 sched_yield:24:124 sched_getaffinity:204:123 "
    "sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125 "
    "sched_get_priority_min:147:126 sched_rr_get_interval:148:127 arch_prctl:158:- set_tid_address:218:96 "
    "set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 getcpu:309:168 futex:202:98 futex_waitv:449:449 "
    "restart_syscall:219:128 pidfd_open:434:434 "
    # signals
    "rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 "
    "rt_sigsuspend:130:133 sigaltstack:131:132 kill:62:129 tkill:200:130 tgkill:234:131 pause:34:- "
    "pidfd_send_signal:424:424 signalfd:282:- signalfd4:289:74 "
    # time
    "time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 "
    "nanosleep:35:101 alarm:37:- getitimer:36:102 setitimer:38:103 timerfd_create:283:85 timerfd_settime:286:86 "
    "timerfd_gettime:287:87 getrandom:318:278 "
    # waiting
    "poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 "
    "epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 "
    # pairs of sockets
    "sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205 "
)
# number on x86_64 and on aarch64 of calls whose arguments are checked
_CLONE, _CLONE3, _IOCTL, _SOCKETPAIR, _PRCTL, _FCNTL = (56, 220), (435, 435), (16, 29), (53, 199), (157, 167), (72, 25)
_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_LOCAL = 1  # AF_UNIX: nobody else can join a pair, and it holds only unread data
_TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_OWN = (1, 2, 3, 15, 16, 0x53564D41)  # PR_SET_PDEATHSIG, GET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA
_LARGER_PIPE = 1031  # F_SETPIPE_SZ
_UNKNOWN_FROM = 463  # newer calls, which C libraries try first and do without

# instructions of a classic BPF program (linux/bpf_common.h), and offsets in struct seccomp_data
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _ABSENT = 0x00050000 | EPERM, 0x00050000 | ENOSYS


@dataclass(frozen=True)
class _Machine:
    column: int
    audit: int  # AUDIT_ARCH_*
    foreign_from: int  # numbers from here on belong to another calling convention


_MACHINES = {"x86_64": _Machine(0, 0xC000003E, 0x40000000), "aarch64": _Machine(1, 0xC00000B7, 0xFFFFFFFF)}


@cache
def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter for `machine` (None: this one), as an array of struct sock_filter.

    Raises SandboxError for a machine whose system call numbers are unknown.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxError(
            f"the sandbox knows the system calls of {' and '.join(_MACHINES)}, not of {name}: ask for the weaker "
            f"mode with {WEAKER}"
        )
    this = _MACHINES[name]
    code = [
        _op(_LOAD, _MACHINE),
        _op(_IF_EQUAL, this.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_IF_AT_LEAST, this.foreign_from, 0, 1),
        _op(_RETURN, _REFUSE),
        _op(_IF_AT_LEAST, _UNKNOWN_FROM, 0, 1),
        _op(_RETURN, _ABSENT),
        # clone3 keeps its flags in memory, where no filter can read them; C libraries fall back to clone
        _op(_IF_EQUAL, _CLONE3[this.column], 0, 1),
        _op(_RETURN, _ABSENT),
    ]
    code += _judged(_CLONE[this.column], _ARGUMENT_0, [_op(_IF_ANY_BIT, _NEW_NAMESPACE, 0, 1)])
    code += _judged(_FCNTL[this.column], _ARGUMENT_1, [_op(_IF_EQUAL, _LARGER_PIPE, 0, 1)])
    for number, argument, values in (
        (_SOCKETPAIR, _ARGUMENT_0, (_LOCAL,)),
        (_IOCTL, _ARGUMENT_1, _TERMINAL),
        (_PRCTL, _ARGUMENT_0, _OWN),
    ):
        tests = [_op(_IF_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
        code += _judged(number[this.column], argument, tests)
    for word in _ALLOWED.split():
        if (number := word.split(":")[1 + this.column]) != "-":
            code += [_op(_IF_EQUAL, int(number), 0, 1), _op(_RETURN, _ALLOW)]
    return b"".join([*code, _op(_RETURN, _REFUSE)])


def _judged(number: int, argument: int, tests: list[bytes]) -> list[bytes]:
    """For system call `number`, load `argument` and test it; the tests lead to a refusal, or over it."""
    body = [_op(_LOAD, argument), *tests, _op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
    return [_op(_IF_EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; a test skips `if_true` or `if_false` instructions."""
    return struct.pack("HBBI", code, if_true, if_false, value)
