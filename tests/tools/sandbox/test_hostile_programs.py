"""Programs that take all they can get, run for real: each ends in time, and nothing of it is left."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlpost.sandbox import Execution, KilledBy, Limits, Sandbox
from tests.bubblewrap import needs_bubblewrap
from tests.tools.sandbox.attacks import PRELUDE, Attacked, attacked, outcomes

__all__ = ["attacked"]  # a fixture

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
        runs = {
            name: pool.submit(attacked.sandbox.run, PRELUDE + code, timeout_seconds=1.0)
            for name, code in ENDLESS.items()
        }
        executions = {name: run.result() for name, run in runs.items()}
        assert time.monotonic() - started < 120.0
        survivors = attacked.survivors()
        assert survivors == [], survivors
        return executions


@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_without_an_end_is_ended(ended: dict[str, Execution], name: str) -> None:
    execution = ended[name]
    assert not execution.claims_success
    assert not execution.finished
    assert execution.timed_out or name == "gives up its pipes"  # which is noticed at once
    assert execution.seconds < 60.0


def test_forks_and_threads_are_counted_together(attacked: Attacked) -> None:
    code = """
import threading, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    pass
threads = 0
try:
    while threads < 1000:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        threads += 1
except RuntimeError:
    pass
print(made, threads)
os.kill(-1, 9)
"""
    made, threads = (int(word) for word in attacked.run(code).stdout.split())
    assert 10 <= made <= 15  # of 16, one is this program and one the first process of its namespace
    assert threads == 0


# Memory, disk, output


def test_one_process_gets_no_more_memory_than_its_limit(attacked: Attacked) -> None:
    execution = attacked.run("x = bytearray(1 << 29)")
    assert execution.exit_code == 1
    assert "MemoryError" in execution.stderr


def test_a_compressed_bomb_ends_in_an_error_of_memory(attacked: Attacked) -> None:
    code = """
import zlib
packer = zlib.compressobj(1)
bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(150)) + packer.flush()
zlib.decompress(bomb)
"""
    assert "MemoryError" in attacked.run(code).stderr


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
    execution = attacked.run(code, 30.0)
    assert execution.killed_by is KilledBy.memory
    assert execution.reason == "Code execution took more memory than it is allowed"


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
    assert seen["fill"] == "OSError"  # no space left
    assert seen["long"] == "OSError"  # longer than a file may be
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
    assert f"[{execution.cut_bytes} bytes left out]" in kept
    assert execution.cut_bytes > 16 << 20


def test_what_crashes_leaves_no_core(attacked: Attacked) -> None:
    before = set(Path.cwd().iterdir())
    execution = attacked.run("ctypes.string_at(0)")
    assert execution.exit_code == 139
    assert execution.reason == "Python was ended by SIGSEGV"
    assert set(Path.cwd().iterdir()) == before


def test_recursion_without_end_is_an_exception_or_a_crash_of_its_own(attacked: Attacked) -> None:
    assert "RecursionError" in attacked.run("def f(): f()\nf()").stderr
    deep = attacked.run("sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)")
    assert not deep.claims_success


# All at once


def test_twenty_hostile_programs_at_once_do_not_hurt_this_process(attacked: Attacked) -> None:
    sandbox = Sandbox(limits=Limits(memory_mb=128, processes=8))
    sandbox.prove()
    fork_bomb, spam = ENDLESS["forks without end"], "while True: os.write(1, bytes(65536))"
    eat = "held = []\nwhile True:\n  try: held.append(bytearray(1 << 20))\n  except MemoryError: pass"
    daemon = "for _ in range(6):\n  if os.fork() == 0: os.setsid()\nwhile True: pass"
    programs = [PRELUDE + code for code in (fork_bomb, spam, eat, daemon, ENDLESS["spins"])] * 4
    naps: list[float] = []
    over = threading.Event()

    def nap() -> None:
        while not over.is_set():
            started = time.monotonic()
            time.sleep(0.01)
            naps.append(time.monotonic() - started)

    napping = threading.Thread(target=nap)
    napping.start()
    started = time.monotonic()
    with ThreadPoolExecutor(21) as pool:
        runs = [pool.submit(sandbox.run, code, timeout_seconds=1.0) for code in programs]
        honest = pool.submit(sandbox.run, "print(sum(range(1000)))", timeout_seconds=60.0)
        ended = [run.result() for run in runs]
        assert honest.result().stdout == "499500\n"
    over.set()
    napping.join()
    assert [execution.claims_success for execution in ended] == [False] * 20
    assert time.monotonic() - started < 120.0
    assert sorted(naps)[len(naps) // 2] < 0.5  # this process got its turns
    assert attacked.survivors() == []
