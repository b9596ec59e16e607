"""Programs that reach for what is outside, or claim a success that is none, run for real."""

from __future__ import annotations

import os
import platform
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.sandbox import Execution
from tests.bubblewrap import needs_bubblewrap
from tests.tools.sandbox.attacks import Attacked, attacked, number_of, outcomes

__all__ = ["attacked"]  # a fixture

pytestmark = needs_bubblewrap

SECRET = "expected-answer-7f3a"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# Secrets


def test_no_file_of_the_machine_can_be_read(attacked: Attacked, tmp_path: Path) -> None:
    answers = tmp_path / "answers.json"
    answers.write_text(SECRET)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            folder.chmod(0o755)
    places = "/etc/shadow /etc/passwd /proc/1/environ /proc/self/environ /sys/kernel /var/log /run /dev/tty /dev/mem"
    places = [*places.split(), str(answers), __file__, os.path.expanduser("~/.bashrc")]
    code = f"""
for place in {places!r}:
    attempt("read", lambda: os.listdir(place) if os.path.isdir(place) else open(place).read())
    os.symlink(place, "link")
    attempt("link", lambda: open("link").read())
    os.remove("link")
    attempt("up", lambda: open("../../../.." + place).read())
"""
    execution = attacked.run(code)
    assert set(execution.stdout.split()) == {"read", "link", "up", "FileNotFoundError"}
    assert SECRET not in execution.stdout + execution.stderr


def test_only_python_and_an_empty_folder_can_be_seen(attacked: Attacked) -> None:
    prefix = Path(sysconfig.get_config_var("prefix"))
    execution = attacked.run("print(*sorted(os.listdir('/')), *os.listdir('/tmp'))")
    allowed = {"dev", "lib", "lib32", "lib64", "tmp", "usr", prefix.parts[1]}
    assert set(execution.stdout.split()) <= allowed
    home = Path.home()
    if prefix.is_relative_to(home):
        inside = attacked.run(f"print(*os.listdir({str(home)!r}))").stdout.split()
        assert inside == [prefix.relative_to(home).parts[0]]  # the way to Python, and nothing beside it


def test_secrets_of_the_environment_and_memory_are_not_there(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    code = """
import gc, inspect
frame = sys._getframe()
while frame:
    print(frame.f_code.co_name, list(frame.f_locals.values()), list(frame.f_globals.values()))
    frame = frame.f_back
print(os.environ, sys.argv, sys.orig_argv, libc.getenv(b"HF_TOKEN"))
print([o for o in gc.get_objects() if isinstance(o, (str, dict, list, tuple))])
"""
    execution = attacked.run(code)
    assert execution.finished
    assert SECRET not in execution.stdout + execution.stderr


def test_it_holds_its_pipes_and_nothing_else_open(attacked: Attacked) -> None:
    secret_file = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret_file, True)
    code = """
import stat
kinds = []
for number in range(1024):
    try:
        kinds.append(stat.filemode(os.fstat(number).st_mode)[0])
    except OSError:
        pass
print("".join(kinds))
"""
    try:
        assert attacked.run(code).stdout == "cpppp\n"  # /dev/null, its output, and the requests and reports
    finally:
        os.close(secret_file)


# Changing what is outside


def test_nothing_outside_its_folder_can_be_written(attacked: Attacked) -> None:
    runner = Path(sysconfig.get_path("stdlib")) / "json" / "__init__.py"
    before = runner.read_bytes()
    code = f"""
for place in [{str(runner)!r}, {__file__!r}, sys.executable, "/x", "/usr/lib/x", "/dev/x", "../x", "/dev/shm/../../x"]:
    attempt("write", lambda: open(place, "w"))
    attempt("mkdir", lambda: os.mkdir(place + "d"))
attempt("remove", lambda: os.remove({str(runner)!r}))
attempt("chmod", lambda: os.chmod({str(runner)!r}, 0o777))
attempt("rename", lambda: os.rename("/tmp", "/tmp2"))
os.symlink({str(runner)!r}, "link")
attempt("link", lambda: open("link", "w"))
attempt("hard", lambda: os.link({str(runner)!r}, "hard"))
attempt("node", lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
attempt("remount", lambda: syscall({number_of("mount")}, b"x", b"/", b"x", 0x20, 0))
"""
    execution = attacked.run(code)
    assert "WENT WELL" not in execution.stdout
    assert len(execution.stdout.splitlines()) == 23
    assert runner.read_bytes() == before


def test_no_address_can_be_reached(attacked: Attacked, listener: int) -> None:
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0rlpost-test-abstract")
        abstract.listen()
        code = f"""
import socket
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", {listener}), 2))
attempt("loopback6", lambda: socket.create_connection(("::1", {listener}), 2))
attempt("outside", lambda: socket.create_connection(("8.8.8.8", 53), 2))
attempt("datagram", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
attempt("name", lambda: socket.getaddrinfo("example.com", 80))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0rlpost-test-abstract"))
attempt("host", lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 22)))
attempt("netlink", lambda: socket.socket(16, socket.SOCK_RAW))
attempt("crypto", lambda: socket.socket(38, 5))
attempt("raw", lambda: socket.socket(2, socket.SOCK_RAW, 1))
"""
        seen = outcomes(attacked.run(code))
    assert seen == {
        **dict.fromkeys(seen, "PermissionError"),  # no socket can be made, of whatever family
        "name": "gaierror",
    }
    assert len(seen) == 10


def test_nobody_outside_can_be_signalled(attacked: Attacked) -> None:
    code = f"""
import signal
attempt("us", lambda: os.kill({os.getpid()}, signal.SIGKILL))
attempt("parent", lambda: (os.kill(os.getppid(), signal.SIGKILL), os.kill(os.getppid(), signal.SIGSTOP)))
attempt("first", lambda: os.kill(1, signal.SIGKILL))
attempt("group", lambda: os.killpg({os.getpgid(0)}, signal.SIGKILL))
attempt("all", lambda: os.kill(-1, signal.SIGKILL))
for number in range(2, 400):
    try:
        os.kill(number, signal.SIGKILL) if number != os.getpid() else None
    except ProcessLookupError:
        pass
"""
    seen = outcomes(attacked.run(code))
    assert seen["us"] == "ProcessLookupError"
    assert seen["group"] == "ProcessLookupError"


def test_a_daemon_does_not_outlive_the_program(attacked: Attacked) -> None:
    code = """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execve(sys.executable, [sys.executable, "-S", "-c", "while True: pass"], {})
    os._exit(0)
os.wait()
time.sleep(0.1)
print("left behind")
"""
    execution = attacked.run(code)
    assert execution.claims_success
    assert execution.stdout == "left behind\n"


def test_the_kernels_ways_out_are_shut(attacked: Attacked) -> None:
    names = ["unshare", "setns", "ptrace", "process_vm_readv", "keyctl", "bpf", "userfaultfd", "io_uring_setup",
             "perf_event_open", "chroot", "pivot_root", "kexec_load", "name_to_handle_at", "personality"]  # fmt: skip
    calls = "\n".join(f"attempt({name!r}, lambda: syscall({number_of(name)}, 0x10000000, 0, 0, 0))" for name in names)
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    code = f"""
{calls}
attempt("clone", lambda: syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0))
attempt("clone3", lambda: syscall(435, 0, 0))
attempt("superuser", lambda: os.setuid(0))
attempt("terminal", lambda: __import__("fcntl").ioctl(0, 0x5412, b"x"))
attempt("arguments", lambda: os.execv(sys.executable, ["x" * 100_000] * 100))
attempt("shell", lambda: os.execv("/bin/sh", ["sh"]))
"""
    seen = outcomes(attacked.run(code))
    expected = dict.fromkeys([*names, "clone", "terminal"], "PermissionError")
    assert seen == expected | {
        "clone3": "OSError",
        "superuser": "PermissionError",
        "arguments": "OSError",
        "shell": "FileNotFoundError",
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other calling convention is that of i386")
def test_system_calls_of_another_architecture_end_the_program(attacked: Attacked) -> None:
    code = """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("returned", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    execution = attacked.run(code)
    assert execution.exit_code == 159  # SIGSYS
    assert "returned" not in execution.stdout


# Claiming a success that is none

WRITE_EVERYWHERE = """
for pipe in range(3, 64):
    try:
        os.write(pipe, b"0" * {count})
    except OSError:
        pass
os._exit(0)
"""

LIARS = {
    "leaves before its end": "os._exit(0)",
    "leaves in a thread": "import threading; threading.Thread(target=lambda: os._exit(0)).start()\nwhile True: pass",
    "ends in a child": "if os.fork() == 0: os._exit(0)\nraise ValueError",
    "ends in a child that exits": "if os.fork() == 0: sys.exit(0)\n__import__('time').sleep(0.2)\nraise ValueError",
    "writes reports of its own": WRITE_EVERYWHERE.format(count=17),
    "writes half a report": WRITE_EVERYWHERE.format(count=5),
    "prints success": "print('R' + chr(0) * 17, 'ok, exit code 0'); sys.exit(1)",
    "forgets the report": "import atexit; atexit._clear()",
    "exits with success and kills itself": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("code", LIARS.values(), ids=LIARS.keys())
def test_a_program_that_did_not_reach_its_end_is_no_success(attacked: Attacked, code: str) -> None:
    assert not attacked.run(code, 3.0).claims_success


def verdict(execution: Execution, expected: str) -> bool:
    """How a program's answer is judged: outside, by text, so that the answer expected is never inside."""
    return execution.claims_success and execution.stdout.splitlines()[-1:] == [expected]


CHEATS = {
    "equals everything": "class Any:\n  __eq__ = lambda *_: True\ndef solve(n): return Any()",
    "leaves early": "def solve(n): print('49'); os._exit(0)",
    "patches the comparison": "import builtins; builtins.print = lambda *_: None\ndef solve(n): return 0",
    "prints what success may look like": "def solve(n): return 'PASSED 1/1 ok True success'",
    "looks through the frames": "def solve(n): return [v for v in sys._getframe(1).f_globals.values() if v == 49] or 0",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
def test_an_answer_judged_outside_cannot_be_faked(attacked: Attacked, code: str) -> None:
    assert not verdict(attacked.run(f"{code}\nprint(repr(solve(7)))"), "49")


def test_an_honest_answer_is_a_success(attacked: Attacked) -> None:
    assert verdict(attacked.run("def solve(n): return n * n\nprint(repr(solve(7)))"), "49")
