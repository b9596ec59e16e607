"""Programs that reach for what is outside, or claim a success that is none, run for real."""

from __future__ import annotations

import os
import platform
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.sandbox import Limits, Sandbox, Session
from tests.bubblewrap import needs_bubblewrap
from tests.tools.sandbox.attacks import Attacked, number_of, open_to_all, outcomes, run

pytestmark = needs_bubblewrap

SECRET = "expected-answer-7f3a"

# Secrets


def test_no_file_of_the_machine_can_be_read(attacked: Attacked, tmp_path: Path) -> None:
    answers = tmp_path / "answers.json"
    answers.write_text(SECRET)
    open_to_all(tmp_path)
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


def test_no_address_can_be_reached(attacked: Attacked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        port = listener.getsockname()[1]
        abstract.bind("\0rlpost-test-abstract")
        abstract.listen()
        code = f"""
import socket
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
attempt("loopback6", lambda: socket.create_connection(("::1", {port}), 2))
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
    assert (execution.claims_success, execution.stdout) == (True, "left behind\n")


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


# An answer that is compared outside is what the program gave, and no more


@pytest.fixture
def session() -> Iterator[Session]:
    with Sandbox(limits=Limits(memory_mb=128)).session() as session:
        yield session


def passes(session: Session, program: str, seconds: float = 20.0) -> bool:
    """Whether `solve` squares its number: asked of the program, judged here."""
    run(session, program, seconds)
    answer = session.ask("solve(7)", timeout_seconds=seconds)
    return answer.given and answer.value == 49


# Each finds the report that says that a program has ended, in one of the ways Python offers, and sends it
FORGED = """
import os, sys
def send(nonce, ended=b"\\0"):
    for pipe in range(3, 64):
        try: os.write(pipe, nonce + ended)
        except OSError: pass
    os._exit(0)
"""

LIES = {
    "takes the nonce from a frame": FORGED
    + """
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_locals.items()):
        if name == "nonce": send(value)
    frame = frame.f_back""",
    "takes the nonce from the collector": FORGED
    + """
import gc
for thing in gc.get_objects():
    if getattr(thing, "__name__", "") == "report": send(thing.__defaults__[0])""",
    "ends what it is run by": """
import gc
for thing in gc.get_objects():
    if getattr(thing, "__name__", "") == "report":
        thing.__defaults__[1][:] = [0]; thing(); __import__("os")._exit(0)""",
    "jumps over the question": """
import sys
def solve(n): sys.settrace(lambda *_: None); raise SystemExit(0)""",
    "equals everything": "class A:\n  __eq__ = lambda *_: True\ndef solve(n): return A()",
    "is an int that says otherwise": "class A(int):\n  __eq__ = lambda *_: True\ndef solve(n): return A(3)",
    "prints answers": "def solve(n):\n  for guess in range(60): print(guess)\n  return None",
    "gives what success may look like": "def solve(n): return 'PASSED 1/1 ok True success'",
    "looks through the frames": "import sys\ndef solve(n):\n  frame = sys._getframe(1)\n"
    "  return [v for v in frame.f_globals.values() if v == 49] or 0",
    "prints for ascii": "import builtins\nbuiltins.ascii = lambda x: 'True'\ndef solve(n): return 0",
    "takes print away": "import builtins\nbuiltins.print = lambda *a, **k: None\ndef solve(n): return 49",
    "takes stdout away": "import sys\nsys.stdout = None\ndef solve(n): return 49",
    "leaves while it is asked": "import os\ndef solve(n): print(49); os._exit(0)",
    "is asked in two processes": "import os\ndef solve(n): return 49 if os.fork() == 0 and os._exit(0) else 0",
    "raises": "def solve(n): raise ValueError(49)",
    "gives what repr cannot write": "def solve(n): return object()",
    "gives what is too deep": "class A: __repr__ = lambda self: '[' * 30000 + ']' * 30000\nsolve = lambda n: A()",
    "gives signs without end": "class A: __repr__ = lambda self: '-' * 60000 + '1'\nsolve = lambda n: A()",
    "gives a call": "class A: __repr__ = lambda self: '__import__(\"os\").getpid()'\nsolve = lambda n: A()",
    "gives a sum": "class A: __repr__ = lambda self: '9**9**9'\nsolve = lambda n: A()",
    "gives more than is kept": "def solve(n): return [49] * 10**6",
    "replaces the module": "import sys\nsys.modules['__main__'] = sys\ndef solve(n): return -49",
}


@pytest.mark.parametrize("program", LIES.values(), ids=LIES.keys())
def test_no_lie_is_taken_for_the_answer(session: Session, program: str) -> None:
    assert not passes(session, program, 5.0)


def test_a_program_that_spins_when_it_is_asked_is_ended(session: Session) -> None:
    spinning = "def solve(n):\n  while True: pass"
    assert not passes(session, spinning, 1.0)
    assert session.restarts == 1


def test_an_honest_program_is_asked_any_number_of_things(session: Session) -> None:
    run(session, "print('hello')\ndef solve(n): print('at work'); return n * n")
    answers = {
        "solve(7)": 49,
        "[solve(n) for n in range(3)]": [0, 1, 4],
        "'é\\n', {'a': (1.5, None)}, {2}": ("é\n", {"a": (1.5, None)}, {2}),
        "print(1)": None,
    }
    for question, value in answers.items():
        answer = session.ask(question, timeout_seconds=20.0)
        assert (answer.given, answer.value) == (True, value)
    failed = session.ask("solve('x')", timeout_seconds=20.0)
    assert (failed.given, failed.value) == (False, None)
    assert "TypeError" in failed.execution.stderr
    assert not session.ask("1 +", timeout_seconds=20.0).given
