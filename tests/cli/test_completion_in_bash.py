"""Completion in a real bash, with its own idea of where words end."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")]

Typed = Callable[[str], str]


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    """Types into an interactive bash with completion installed; returns the line that bash then holds."""
    folder = tmp_path_factory.mktemp("bash")
    program = folder / "bin" / "rlpost"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlpost "$@"\n')
    program.chmod(0o755)
    (folder / "runs" / "first-run" / "checkpoints").mkdir(parents=True)
    (folder / "rows").mkdir()
    (folder / "rows" / "mine.jsonl").write_text("")
    line = folder / "line"
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ |= {"PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])

    def send(text: str) -> None:
        os.write(terminal, text.encode())

    def told() -> str:
        """What the key Ctrl-G wrote, once it has; what bash prints is read meanwhile, lest it waits for a reader."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.02)[0]:
                os.read(terminal, 65536)
            if line.is_file() and (text := line.read_text()).endswith("\n"):
                line.unlink()
                return text.removesuffix("\n")
        pytest.fail("bash did not answer in 120 s")

    def type_in(text: str) -> str:
        send(f"{text}\x07")
        answer = told()
        send("\x15")  # Ctrl-U empties the line
        return answer

    send('bind -x \'"\\C-g": printf "%s\\n" "$READLINE_LINE" > line\'\n')
    send('eval "$(_RLPOST_COMPLETE=source_bash rlpost)"; complete -p rlpost > line\n')
    assert told() == "complete -o default -F _rlpost_completion rlpost"
    try:
        yield type_in
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("rlpost tra\t", "rlpost train "),
        ("rlpost train grpo --dry\t", "rlpost train grpo --dry-run "),
        ("rlpost train grpo rec\t", "rlpost train grpo recipe="),  # no space: a value comes next
        ("rlpost train grpo optim.l\t", "rlpost train grpo optim.lr="),
        ("rlpost train grpo optim.schedule=co\t", "rlpost train grpo optim.schedule=co"),  # constant or cosine
        ("rlpost train grpo env=gsm8k env.sh\t", "rlpost train grpo env=gsm8k env.shuffle="),
        ("rlpost train grpo deterministic=t\t", "rlpost train grpo deterministic=true "),
        ("rlpost train grpo model=runs/\t", "rlpost train grpo model=runs/first-run "),
        ("rlpost train grpo recipe=gsm8k-s\t", "rlpost train grpo recipe=gsm8k-smollm2-cpu "),
        ("rlpost train grpo env=gsm8k env.path=ro\t", "rlpost train grpo env=gsm8k env.path=rows/"),
        ("rlpost config explain loss.kl_c\t", "rlpost config explain loss.kl_coef "),
        ("rlpost config show train grpo optim.l\t", "rlpost config show train grpo optim.lr="),
        ("rlpost trian gr\t", "rlpost trian gr"),  # nothing to offer, and no word about it
    ],
)
def test_bash_completes(keys: str, line: str, typed: Typed) -> None:
    assert typed(keys) == line
