"""A run that is killed takes along what it started: the engine's process, and what a reward began."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlpost.imports import is_installed
from tests.processes import children, is_gone

pytestmark = pytest.mark.thorough

SLEEP = ["sleep", f"600.{os.getpid()}"]  # and no other test's
REWARD = f"""
import subprocess
subprocess.Popen({SLEEP}, start_new_session=True)

def score(completions, **kept):
    return [len(text) % 7 / 7 for text in completions]
"""
WORDS = [
    *["model=tiny", "policy=vllm", "policy.engine=own_process", "env=dataset", "env.path=rows.jsonl"],
    *["env.reward=mine.py:score", "env.held_out=0", "env.max_completion_tokens=8", "eval.enabled=false"],
    *["prompts_per_step=2", "group_size=2", "steps=100000", "checkpoint.every=100000"],
]


def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    if not is_installed("vllm"):
        pytest.skip("vLLM is not installed")
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say 1."}\n{"prompt": "Say 2."}\n')
    command = [sys.executable, "-m", "rlpost", "train", "grpo", *WORDS, "--out", "r"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 180
        while not (tmp_path / "r/metrics.jsonl").is_file():
            assert run.poll() is None
            assert time.monotonic() < deadline, "no step in 180 s"
            time.sleep(0.1)
        started = children(run.pid)
        engines = [command for command in started.values() if "EngineCore" in command]
        asleep = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == SLEEP]
        run.kill()
    assert engines
    assert asleep
    left = {each.pid for each in (*started, *asleep) if not is_gone(each.pid, 60.0)}
    assert not left, [psutil.Process(pid).cmdline() for pid in left]
