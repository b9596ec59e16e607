"""Programs that go for the kernel: memory that is in no process, and calls that no Python needs, run for real."""

from __future__ import annotations

import pytest

from rlpost.sandbox import KilledBy, Limits, Sandbox
from tests.bubblewrap import needs_bubblewrap
from tests.tools.sandbox.attacks import Attacked, attacked, number_of, outcomes

__all__ = ["attacked"]  # a fixture

pytestmark = needs_bubblewrap

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
    "streams": "in_each_of(14, lambda: [[fill(end) for end in socket.socketpair()] for _ in range(50)])",
    "datagrams": "in_each_of(14, lambda: [[fill(end) for end in socket.socketpair(type=2)] for _ in range(50)])",
    "packets": "in_each_of(14, lambda: [[fill(end) for end in socket.socketpair(type=5)] for _ in range(50)])",
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
def test_what_the_kernel_keeps_for_a_program_counts_as_its_memory(attacked: Attacked, code: str) -> None:
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
