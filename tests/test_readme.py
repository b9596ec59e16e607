"""Every command in README's tables works as it is typed, in a folder with a finished run or two."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from rlpost.cli.main import run

pytestmark = pytest.mark.thorough

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = [
    word for line in README.splitlines() if line.startswith("|") for word in re.findall(r"`(rlpost .*?)`", line)
]
SMALL = ["model=tiny", "policy=transformers", "steps=1", "eval.limit=2"]
OF_STEP = {"grpo": 2, "distill": 2, "expert-iteration": 2}  # prompts
GIVEN = {"env.path=...": "env.path=prompts.jsonl", "env.reward=...": "env.reward=./my_reward.py:score"}
NOT_HERE = ("env=gsm8k", "-m")  # what needs the network, or a process for each job: the plan alone

FILES = {
    "prompts.jsonl": "".join(f'{{"prompt": "Say {n}.", "answer": "{n}"}}\n' for n in range(30)),
    "chats.jsonl": "".join(f'{{"prompt": "Say {n}.", "completion": "{n}"}}\n' for n in range(30)),
    "pairs.jsonl": "".join(f'{{"prompt": "Say {n}.", "chosen": "{n}", "rejected": "No."}}\n' for n in range(30)),
    "my_reward.py": "def score(completions, answer):\n"
    "    return [float(a == c) or min(len(c), 99) / 1000 for c, a in zip(completions, answer)]\n",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the tables name, and three runs and two evaluations."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(text)
        words = ["model=tiny", "env=dataset", "env.path=prompts.jsonl", "env.reward=exact", "steps=1", "eval.limit=2"]
        words += ["policy=scripted", "policy.replies=[7,Say 7.]", "prompts_per_step=27", "group_size=2"]
        assert run(["train", "grpo", *words, "--name", "NAME"]) == 0
        for other in ("A", "B"):
            shutil.copytree("runs/NAME", f"runs/{other}", symlinks=True)
            assert run(["eval", f"model=runs/{other}", "policy=transformers", "--name", other]) == 0
    return folder


def typed(command: str) -> list[str]:
    """The words after `rlpost`, made small where they train or sample."""
    _, *words = shlex.split(command)
    words = [GIVEN.get(word, word) for word in words]
    if any(word in words for word in NOT_HERE):
        return [*words, "--dry-run"]
    if words[0] == "doctor":
        return [*words, *SMALL]
    if words[0] == "train":
        small = [each for each in SMALL if each.partition("=")[0] not in {word.partition("=")[0] for word in words}]
        if words[1] in OF_STEP:
            small += ["prompts_per_step=2", "env.max_completion_tokens=12"]
        words += small
    return [*words, *(["policy=transformers"] if words[:1] == ["eval"] and "=" in words[1] else [])]


def test_the_tables_show_commands() -> None:
    assert len(COMMANDS) > 25


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_tables_works(command: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(finished, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    if "-o pairs.jsonl" in command:
        Path("pairs.jsonl").unlink()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello.\n")))
    assert run(typed(command)) == 0
