"""`rlpost eval` and the signals that end it: what it says, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.asynchronous import wait_for
from tests.processes import children, is_gone

pytestmark = pytest.mark.thorough

CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
# each evaluation is a fork, since importing takes most of the time; a suite run in the background ignores Ctrl-C
PROGRAM = """
import os, signal, sys
import rlpost.train.assemble
from rlpost import output
from rlpost.cli.main import main
folder, names, words = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
signal.signal(signal.SIGINT, signal.default_int_handler)
output.EVERY = 0.2
begun = []
for name in names:
    begun.append(os.fork())
    if not begun[-1]:
        os.chdir(f"{folder}/{name}")
        for descriptor, file in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}.{file}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv[1:] = words
        main()
print(*begun, flush=True)
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in begun), flush=True)
"""
REWARD = "def score(completions, **kept):\n    return [1.0 for _ in completions]\n"
WORDS = [
    *["eval", "model=tiny", "policy=transformers", "env=dataset", "env.path=rows.jsonl", "env.split=train"],
    *["env.held_out=0", "env.reward=mine.py:score", "env.max_completion_tokens=1900"],  # takes a minute
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, SimpleNamespace]:
    """Three evaluations whose reward has a process of its own, each sent its signal while it sampled."""
    folder, temporary = tmp_path_factory.mktemp("evaluations"), tmp_path_factory.mktemp("temporary")
    rows = "".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(32))
    for name in CODES:
        (folder / name).mkdir()
        (folder / name / "mine.py").write_text(REWARD)
        (folder / name / "rows.jsonl").write_text(rows)
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), " ".join(CODES), " ".join(WORDS)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    begun = dict(zip(CODES, map(int, running.stdout.readline().split()), strict=True))
    had: dict[str, list[psutil.Process]] = {}
    try:
        for name, pid in begun.items():
            said = folder / f"{name}.err"
            wait_for(lambda said=said: said.is_file() and "\nevaluating 0 of 32, " in said.read_text())
            had[name] = list(children(pid))
            os.kill(pid, signal.Signals[name])
        out, _ = running.communicate(timeout=120)
    finally:
        for process in [*psutil.Process(running.pid).children(), running] if running.poll() is None else []:
            process.kill()
        running.wait()
    left = [str(file) for file in temporary.rglob("*") if file.is_file()]
    return {
        name: SimpleNamespace(
            code=code,
            files=sorted([file.name for file in (folder / name).rglob("*")] + left),
            out=(folder / f"{name}.out").read_text(),
            err=(folder / f"{name}.err").read_text(),
            children=had[name],  # when the signal came
        )
        for name, code in zip(CODES, map(int, out.split()), strict=True)
    }


@pytest.mark.parametrize("name", CODES)
def test_a_signal_ends_an_evaluation_which_says_so_and_leaves_nothing(
    name: str, ended: dict[str, SimpleNamespace]
) -> None:
    evaluation = ended[name]
    assert evaluation.code == CODES[name]
    assert evaluation.err.splitlines()[-1].startswith("stopping: ")
    assert "Traceback" not in evaluation.err
    assert evaluation.out == ""
    assert evaluation.files == ["mine.py", "rows.jsonl"]
    assert evaluation.children
    assert all(is_gone(child.pid) for child in evaluation.children)
