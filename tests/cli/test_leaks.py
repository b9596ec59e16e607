"""What strangers wrote and what is secret: where a training and what is made of it may and may not show them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

Trained = tuple[Path, subprocess.CompletedProcess[bytes]]
SAID = r"\x1b[2J\ud800\x07 of a stranger"  # as it is shown; the terminal would clear its screen by the raw text
REWARD = '''
def score(completions, **kept):
    """About a third cannot be scored."""
    if any(ord(text[0]) % 3 == 0 for text in completions):
        raise ValueError("\\x1b[2J\\ud800\\x07 of a stranger")
    return [ord(text[0]) % 7 / 7 for text in completions]
'''
WORDS = [
    *["train", "grpo", "model=tiny", "policy=transformers", "env=dataset", "env.path=rows.jsonl", "env.held_out=0"],
    *["env.reward=mine.py:score", "env.max_completion_tokens=8", "prompts_per_step=4", "group_size=4", "seed=3"],
    *["eval.enabled=false", "max_failed_share=1", "tracking=mlflow", "tracking.timeout_seconds=3"],
]
ENVIRONMENT = {
    "MLFLOW_TRACKING_URI": "http://me:s3cret@127.0.0.1:9",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "WANDB_API_KEY": "s3cret",
    "HF_TOKEN": "s3cret",
}


def rlpost(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, whose environment holds secrets."""
    command = [sys.executable, "-m", "rlpost", *words]
    return subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, timeout=250)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A folder with the run `r`, and how its two steps went."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "mine.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(8)))
    ended = rlpost(folder, *WORDS, "steps=2", "--out", "r")
    assert ended.returncode == 0, ended.stderr.decode()
    return folder, ended


def is_plain(text: str) -> bool:
    return all(character.isprintable() or character in "\n\t" for character in text)


def test_what_a_reward_raises_is_shown_without_its_control_characters(trained: Trained) -> None:
    folder, ended = trained
    log = (folder / "r/log.txt").read_text(encoding="utf-8")
    assert SAID in log
    assert is_plain(log)
    assert b"\x1b" not in ended.stdout + ended.stderr
    assert b"Logging error" not in ended.stderr
    assert is_plain(ended.stderr.decode())


def test_a_secret_of_the_environment_is_in_no_file_and_on_no_screen(trained: Trained) -> None:
    folder, ended = trained
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert not [file for file in files if b"s3cret" in file.read_bytes()]
    assert b"s3cret" not in ended.stdout + ended.stderr
    assert b"mlflow" in ended.stderr + (folder / "r/log.txt").read_bytes()  # that it could not be reached


def test_completions_on_a_terminal_cannot_steer_it(trained: Trained) -> None:
    folder, _ = trained
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                return
            if not part:
                return
            shown.extend(part)

    reading = threading.Thread(target=read)
    reading.start()
    command = [sys.executable, "-m", "rlpost", "runs", "rollouts", "r", "--full", "--sort", "length", "--limit", "99"]
    done = subprocess.run(command, cwd=folder, stdout=theirs, timeout=200, env={**os.environ, "NO_COLOR": "1"})
    os.close(theirs)
    reading.join(60)
    os.close(ours)
    lines = shown.decode().replace("\r\n", "\n")
    assert done.returncode == 0
    assert "\\x" in lines  # random bytes become escapes
    assert is_plain(lines)
