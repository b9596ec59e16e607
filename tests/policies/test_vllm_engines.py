"""What stands around vLLM's engines, without vLLM."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys

from rlpost.policies.vllm_process import unreached_by_the_terminal

CHILD = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(3))  # as an engine does, which then ends
signal.signal(signal.SIGHUP, lambda *_: sys.exit(3))
print("begun", flush=True)
sys.stdin.readline()
"""


def test_what_an_engine_runs_in_outlives_ctrl_c_and_a_closed_terminal() -> None:
    def begin() -> subprocess.Popen[str]:
        unreached_by_the_terminal()
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-S", "-c", CHILD], stdin=pipe, stdout=pipe, text=True)

    with concurrent.futures.ThreadPoolExecutor(1) as loop:
        child = loop.submit(begin).result()
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(child.pid, number)
    child.communicate("\n")
    assert child.returncode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGHUP} == set()
