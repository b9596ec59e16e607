"""A recipe whose plugin is somebody's code, however its letters are written: the commands refuse it and run nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import CommandLine

PLUGIN = """
import rlpost
from pathlib import Path
Path(__file__).with_name("ran").touch()
rlpost.register_reward("kind", lambda completions: [1.0])
"""


def in_json(text: str) -> str:
    """Every character as JSON escapes it, and YAML within double quotes."""
    return "".join(f"\\u{ord(character):04x}" for character in text)


def in_yaml(text: str) -> str:
    """Every character as YAML alone escapes it."""
    return "".join(f"\\x{ord(character):02x}" for character in text)


# how the path is written -> the value of the line
WRITTEN: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "in escapes of YAML": lambda path: f'"{in_yaml(path)}"',
    "in a list in escapes of YAML": lambda path: f'["{in_yaml(path)}"]',
    "in escapes that YAML has of JSON": lambda path: f'"{in_json(path)}"',
    "as a list in escapes of JSON": lambda path: f"'[\"{in_json(path)}\"]'",
    "as a list of JSON in escapes of both": lambda path: f'"[\\"{in_json(path).replace(chr(92), chr(92) * 2)}\\"]"',
}

COMMANDS = {
    "a dry run": "train grpo recipe=r.yaml --dry-run",
    "a dry run as JSON": "train grpo recipe=r.yaml --dry-run --json",
    "a training": "train grpo recipe=r.yaml model=tiny policy=scripted steps=1",
    "what is shown": "config show train grpo recipe=r.yaml",
    "what is shown as JSON": "config show train grpo recipe=r.yaml --json",
    "what is explained": "config explain plugin recipe=r.yaml",
    "what is compared": "runs compare r.yaml steps=3",
    "what is written": "config show recipe=r.yaml --recipe new.yaml",
}


@pytest.fixture(autouse=True)
def plugin() -> None:
    """A plugin that works, and leaves the file `ran` where it is run."""
    Path("evil.py").write_text(PLUGIN)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("way", WRITTEN)
def test_a_plugin_of_a_recipe_is_refused_by_its_key_and_not_run(
    way: str, command: str, here: Path, rlpost: CommandLine
) -> None:
    Path("r.yaml").write_text(f"command: train grpo\nplugin: {WRITTEN[way]('./evil.py')}\n")
    refused = rlpost.refused(COMMANDS[command])
    assert refused.startswith("error: r.yaml, line 2: ")
    assert "plugin=./evil.py" in refused
    assert sorted(file.name for file in here.iterdir()) == ["evil.py", "r.yaml"]


def test_the_same_plugin_on_the_command_line_is_run(rlpost: CommandLine) -> None:
    shown = rlpost("config show train grpo plugin=./evil.py")
    assert "plugin:\n- ./evil.py\n" in shown
    assert Path("ran").is_file()
