"""Programs that take all they can get, of the kernel too, run for real: each ends in time, and leaves nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlpost.sandbox import Execution, KilledBy, Limits, Sandbox
from tests.bubblewrap import needs_bubblewrap
from tests.tools.sandbox.attacks import PRELUDE, Attacked, number_of, outcomes, run

pytestmark = needs_bubblewrap


# Programs that do not end of themselves

ENDLESS = {
    "spins": "while True: pass",
    "sleeps": "import time; time.sleep(1e6)",
    "spins in C": "10 ** 10 ** 9",
    "backtracks": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
    "stops itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores signals": """
import signal
for n in range(1, 32):
    attempt("s", lambda: signal.signal(n, signal.SIG_IGN))
while True: pass""",
    "waits for input that never comes": "r, w = os.pipe(); os.read(r, 1)",
    "waits for a thread": "import threading; threading.Thread(target=lambda: __import__('time').sleep(1e6)).start()",
    "forks without end": "while True:\n  try: os.fork()\n  except OSError: pass",
    "starts itself again": "os.execv(sys.executable, [sys.executable, '-S', '-c', 'while True: pass'])",
    "gives up its pipes": "os.closerange(0, 64)\nwhile True: pass",
    "alarms itself": """
import signal
def spin():
    while True: pass
signal.signal(signal.SIGALRM, lambda *_: signal.alarm(1) or spin())
signal.alarm(1)
spin()""",
    "ends in an endless exit function": "import atexit\n@atexit.register\ndef spin():\n  while True: pass",
    "spins while it is taken apart": "class A:\n  def __del__(self):\n    while True: pass\nx = A()\ndel x",
    "spins in the collector": "import gc\ngc.callbacks.append(lambda *_: exec('while True: pass'))\ngc.collect()",
    "forks when its children end": """
import signal
def again(*_):
    try:
        if os.fork() == 0: os._exit(0)
    except BlockingIOError:
        pass
signal.signal(signal.SIGCHLD, again)
again()
while True: signal.pause()""",
    "executes itself for ever": """
again = "import os, sys; os.execv(sys.executable, [sys.executable, '-S', '/tmp/again.py'])"
open("/tmp/again.py", "w").write(again)
exec(again)""",
    "locks a file in ever more places": """
import fcntl
with open("x", "w") as file:
    for place in range(10**9): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * place)""",
    "sorts what compares for ever": "class A:\n  def __lt__(self, o):\n    while True: pass\nsorted([A(), A()])",
}


@pytest.fixture(scope="module")
def ended() -> dict[str, Execution]:
    """All of them at once, after whose end nothing of them is left."""
    with pytest.MonkeyPatch.context() as monkeypatch, ThreadPoolExecutor(len(ENDLESS)) as pool:
        attacked = Attacked(monkeypatch, Sandbox(limits=Limits(memory_mb=128)))
        attacked.sandbox.prove()
        started = time.monotonic()
        runs = {name: pool.submit(run, attacked.sandbox, PRELUDE + code, 1.0) for name, code in ENDLESS.items()}
        executions = {name: each.result() for name, each in runs.items()}
        assert time.monotonic() - started < 120.0
        assert attacked.survivors() == []
        return executions


@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_without_an_end_is_ended(ended: dict[str, Execution], name: str) -> None:
    execution = ended[name]
    assert not execution.claims_success
    assert not execution.finished
    if name != "gives up its pipes":  # which is noticed at once
        assert execution.timed_out
    assert execution.seconds < 60.0


def test_forks_and_threads_are_counted_together(attacked: Attacked) -> None:
    code = """
import threading, time
def most(start):
    for made in range(1000):
        try: start()
        except (OSError, RuntimeError): return made
def fork():
    if os.fork() == 0: time.sleep(60)
print(most(fork), most(lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()))
os.kill(-1, 9)
"""
    made, threads = (int(word) for word in attacked.run(code).stdout.split())
    assert 10 <= made <= 15  # of 16, one is this program and one the first process of its namespace
    assert threads == 0


# Memory, disk, output


BOMB = """
import zlib
packer = zlib.compressobj(1)
bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(150)) + packer.flush()
zlib.decompress(bomb)
"""


@pytest.mark.parametrize("code", ["x = bytearray(1 << 29)", BOMB], ids=["at once", "compressed bomb"])
def test_one_process_gets_no_more_memory_than_its_limit(attacked: Attacked, code: str) -> None:
    execution = attacked.run(code)
    assert execution.exit_code == 1
    assert "MemoryError" in execution.stderr


@pytest.mark.parametrize("mapped", ["bytearray(60 << 20)", "__import__('mmap').mmap(-1, 60 << 20)"])
def test_processes_that_take_too_much_memory_together_are_ended(attacked: Attacked, mapped: str) -> None:
    code = f"""
import time
for _ in range(8):
    if os.fork() == 0:
        held = {mapped}
        for place in range(0, len(held), 4096):
            held[place] = 1
        time.sleep(60)
time.sleep(60)
"""
    assert attacked.run(code, 30.0).killed_by is KilledBy.memory


def test_memory_that_no_limit_counts_is_refused(attacked: Attacked) -> None:
    code = """
attempt("memfd", lambda: os.memfd_create("x"))
attempt("shm", lambda: libcall("shmget", 0, 1 << 29, 0o1600))
attempt("messages", lambda: libcall("msgget", 0, 0o1600))
attempt("secret", lambda: syscall(447, 0))
attempt("mlock", lambda: libcall("mlockall", 3))
attempt("raise", lambda: __import__("resource").setrlimit(9, (-1, -1)))
attempt("nice", lambda: os.nice(-20))
"""
    assert set(outcomes(attacked.run(code)).values()) <= {"PermissionError", "ValueError", "OSError"}


def test_the_disk_it_can_fill_is_small(attacked: Attacked) -> None:
    code = """
written = 0
def fill():
    global written
    for number in range(1000):
        with open(f"/dev/shm/{number}" if number % 2 else f"/tmp/{number}", "wb", buffering=0) as file:
            for _ in range(8):
                written += file.write(bytes(1 << 20))
attempt("fill", fill)
attempt("long", lambda: os.truncate("/tmp/0", 1 << 40))
print("written", written >> 20)
"""
    seen = outcomes(attacked.run(code))
    assert seen["fill"] == seen["long"] == "OSError"  # no space left, and longer than a file may be
    assert 24 <= int(seen["written"]) <= 32


def test_making_files_without_end_is_ended(attacked: Attacked) -> None:
    execution = attacked.run("n = 0\nwhile True:\n  os.close(os.open(f'/tmp/{n}', os.O_CREAT)); n += 1", 30.0)
    assert execution.killed_by is KilledBy.files


@pytest.mark.parametrize("pipe", [1, 2])
def test_output_without_end_is_cut_and_ended(attacked: Attacked, pipe: int) -> None:
    execution = attacked.run(f"while True: os.write({pipe}, b'spam ' * 10_000)", 20.0)
    assert execution.killed_by is KilledBy.output
    kept = execution.stdout if pipe == 1 else execution.stderr
    assert len(kept) < 64 * 1024 + 100
    assert f"[{execution.cut_bytes} " in kept
    assert execution.cut_bytes > 16 << 20


def test_what_crashes_leaves_no_core(attacked: Attacked) -> None:
    before = set(Path.cwd().iterdir())
    assert attacked.run("ctypes.string_at(0)").exit_code == 139  # SIGSEGV
    assert set(Path.cwd().iterdir()) == before


def test_endless_recursion_is_an_exception_or_a_crash_of_its_own(attacked: Attacked) -> None:
    assert "RecursionError" in attacked.run("def f(): f()\nf()").stderr
    deep = attacked.run("sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)")
    assert not deep.claims_success


# What the kernel keeps for a program, and calls that no Python needs

IN_EACH_OF = """
import socket, time
def in_each_of(processes, work):
    for _ in range(processes):
        if os.fork() == 0:
            held = work()
            time.sleep(60)
    time.sleep(60)

def fill(end):
    end.setblocking(False)
    try:
        while True: end.send(bytes(65536))
    except OSError:
        return end
"""

BUFFERS = {
    **{
        kind: f"in_each_of(14, lambda: [[fill(end) for end in socket.socketpair(type={n})] for _ in range(50)])"
        for kind, n in (("streams", 1), ("datagrams", 2), ("packets", 5))
    },
    "ends whose others are closed": """
def one():
    kept, gone = socket.socketpair()
    fill(gone).close()
    return kept
in_each_of(14, lambda: [one() for _ in range(100)])""",
    "shared pages": """
import mmap
held = [mmap.mmap(-1, 20 << 20) for _ in range(3)]
for pages in held:
    for _ in range(20): pages.write(bytes(1 << 20))
in_each_of(4, lambda: bytearray(b"x") * (30 << 20))""",
    "files that have no name": """
def one():
    file = open(str(os.getpid()), "wb", buffering=0)
    os.remove(file.name)
    file.write(bytes(2 << 20))
    return file
in_each_of(14, lambda: (one(), bytearray(b"x") * (8 << 20)))""",
}


@pytest.mark.parametrize("code", BUFFERS.values(), ids=BUFFERS.keys())
def test_what_the_kernel_keeps_for_a_program_is_its_memory(attacked: Attacked, code: str) -> None:
    execution = attacked.run(IN_EACH_OF + code, 30.0)
    assert execution.killed_by is KilledBy.memory
    assert execution.seconds < 20.0


def test_pipes_hold_what_they_always_do_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Attacked(monkeypatch, Sandbox(limits=Limits(memory_mb=64)))
    code = """
def pipes():
    made = [os.pipe() for _ in range(60)]
    for _, end in made:
        os.set_blocking(end, False)
        os.write(end, bytes(65536))
    return made
in_each_of(14, pipes)"""
    assert small.run(IN_EACH_OF + code, 30.0).killed_by is KilledBy.memory
    larger = "import fcntl\nr, w = os.pipe()\nattempt('larger', lambda: fcntl.fcntl(w, 1031, 1 << 20))"
    assert outcomes(small.run(larger)) == {"larger": "PermissionError"}


REACHES = {
    "descriptors in flight": "socket.send_fds(a, [b'x'], [0])",
    "a larger buffer": "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
    "a server of its own": "socket.create_server(('127.0.0.1', 0))",
    "a name for others to find": "socket.socket(socket.AF_UNIX)",
    "hiding from /proc": "libcall('prctl', 4, 0, 0, 0, 0)",
    "a filter of its own": "libcall('prctl', 22, 2, 0, 0, 0)",
    "staying when its parent goes": "libcall('prctl', 36, 1, 0, 0, 0)",
    "pages lent to a pipe": f"syscall({number_of('vmsplice')}, 1, 0, 0, 0)",
    "a copy of a pipe": f"syscall({number_of('tee')}, 0, 1, 1, 0)",
    "segments of old": f"syscall({number_of('modify_ldt')}, 0, 0, 0)",
    "watching files": f"syscall({number_of('inotify_init1')}, 0)",
    "timers without number": f"syscall({number_of('timer_create')}, 0, 0, 0)",
    "notes on files": "os.setxattr('.', 'user.x', bytes(60000))",
    "the host's name": f"syscall({number_of('sethostname')}, b'x', 1)",
    "the kernel's log": f"syscall({number_of('syslog')}, 3, 0, 0)",
    "quotas": f"syscall({number_of('quotactl')}, 0, 0, 0, 0)",
    "all mounts": "syscall(458, 0, 0, 0, 0)",
    "one mount": "syscall(457, 0, 0, 0, 0)",
    "a tree with attributes": "syscall(467, 0, 0, 0, 0, 0)",
    "a call that no kernel has": "syscall(600, 0)",
}


def test_calls_that_no_python_needs_are_refused(attacked: Attacked) -> None:
    attempts = [f"attempt({number}, lambda: {code})" for number, code in enumerate(REACHES.values())]
    seen = outcomes(attacked.run("\n".join(["import socket", "a, b = socket.socketpair()", *attempts])))
    assert len(seen) == len(REACHES)
    assert set(seen.values()) <= {"PermissionError", "OSError"}  # the latter: as if the kernel had no such call


def test_what_python_programs_do_among_themselves_goes_on() -> None:
    code = """
import asyncio, concurrent.futures, multiprocessing, subprocess, sys, tempfile, threading, os, signal, shutil

async def both():
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "print(6 * 7)", stdout=-1)
    said, _ = await process.communicate()
    return int(said) + await asyncio.to_thread(lambda: 1)

print(asyncio.run(both()))
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
here, there = multiprocessing.Pipe()
here.send("x")
print(there.recv())
print(subprocess.run([sys.executable, "-S", "-c", "print('sub')"], capture_output=True, text=True).stdout.strip())
with concurrent.futures.ThreadPoolExecutor() as threads:
    print(sum(threads.map(len, ["a", "bc"])))
folder = tempfile.mkdtemp()
open(folder + "/a", "w").write("text")
shutil.copytree(folder, folder + "2")
os.utime(folder + "2/a", (1, 1))
print(open(folder + "2/a").read(), os.stat(folder + "2/a").st_mtime)
signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
"""
    execution = Sandbox().run(code, timeout_seconds=30.0)
    assert execution.stdout.split("\n") == ["43", "[1, 2]", "x", "sub", "3", "text 1.0", "alarm", ""], execution.stderr


# All at once


def test_twenty_hostile_programs_at_once_do_no_harm_here(attacked: Attacked) -> None:
    sandbox = Sandbox(limits=Limits(memory_mb=128, processes=8))
    sandbox.prove()
    fork_bomb, spam = ENDLESS["forks without end"], "while True: os.write(1, bytes(65536))"
    eat = "held = []\nwhile True:\n  try: held.append(bytearray(1 << 20))\n  except MemoryError: pass"
    daemon = "for _ in range(6):\n  if os.fork() == 0: os.setsid()\nwhile True: pass"
    programs = [PRELUDE + code for code in (fork_bomb, spam, eat, daemon, ENDLESS["spins"])] * 4
    started = time.monotonic()
    naps: list[float] = []
    with ThreadPoolExecutor(21) as pool:
        runs = [pool.submit(run, sandbox, code, 1.0) for code in programs]
        honest = pool.submit(run, sandbox, "print(sum(range(1000)))")
        while not all(each.done() for each in runs):
            began = time.monotonic()
            time.sleep(0.01)
            naps.append(time.monotonic() - began)
        assert honest.result().stdout == "499500\n"
    assert [each.result().claims_success for each in runs] == [False] * 20
    assert time.monotonic() - started < 120.0
    assert sorted(naps)[len(naps) // 2] < 0.5  # this process got its turns
    assert attacked.survivors() == []
