"""What a command does not need is not loaded: torch takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

SEEN = """
import sys
from rlpost.cli.main import run
code = run(sys.argv[1:])
assert not code, code
print("loaded", "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "grpo", "--dry-run"],
        ["train", "sft", "env=dataset", "env.path=chats.jsonl", "--dry-run"],
        ["train", "distill", "env=dataset", "env.path=chats.jsonl", "hint=Be brief.", "--dry-run"],
        ["data", "report", "chats.jsonl"],
    ],
    ids=" ".join,
)
def test_no_torch_is_loaded_to_look_at_settings_or_rows(words: list[str], tmp_path: Path, tiny_folder: Path) -> None:
    said = [{"role": "assistant", "content": "Ho"}]
    rows = [
        {"messages": [{"role": "user", "content": f"Hi {n}"}, *said][: 2 - ("distill" in words)]} for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", SEEN, *words, f"model={tiny_folder}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)  # keeps what it finds about the tokenizer
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "loaded False"
