"""`rlpost reward test`: what it is told, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.says import Says

FILE = """
def right(completions, answer, **others):
    return [float(text.strip() == str(wanted)) for text, wanted in zip(completions, answer)]

def by_level(completions, answer, level):
    return [number * (text.strip() == str(wanted)) for number, text, wanted in zip(level, completions, answer)]

def within(completions, answer, **others):
    print("\\x1b[2Jit prints")
    return [float(str(wanted) in text) for text, wanted in zip(completions, answer)]

def of_trl(completions, trainer_state):
    return [0.0 for _ in completions]
"""


@pytest.fixture(autouse=True)
def placed(here: Path) -> None:
    """Rewards and rows."""
    (here / "mine.py").write_text(FILE)
    rows = [{"prompt": f"{n} + {n}?", "answer": 2 * n, "level": 1 + n % 2} for n in range(11, 16)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def untimed(shown: str) -> str:
    """What a test of a reward prints, but for the checks that say how long it takes."""
    return "\n".join(line for line in shown.splitlines() if not re.match("  ok +(very long|latency) ", line))


def test_a_sound_reward_ends_with_0(rlpost: CommandLine, says: Says) -> None:
    shown = rlpost("reward test ./mine.py:by_level env.path=rows.jsonl")
    assert re.search(r"(?m)^  ok  corrupted +earns 0 on average$", shown)
    says("reward", untimed(shown))


def test_faults_end_with_3_and_show_the_reply_inert(capfd: pytest.CaptureFixture[str]) -> None:
    rlpost = CommandLine(capfd)
    lines = rlpost.lines("reward test ./mine.py:within", 3)
    place = next(i for i, line in enumerate(lines) if line.startswith("  fault  hidden"))
    assert lines[place].endswith("(12 + 30)")
    assert lines[place + 1].strip() == r"reply: '<think>42</think>\n43'"
    assert lines[-1].endswith(" 3 faults")
    assert not any("\x1b" in line for line in lines)
    assert rlpost.err == ""


def test_a_built_in_reward_on_an_environments_rows_as_json(rlpost: CommandLine) -> None:
    told = rlpost.json("reward test exact env=arithmetic --rows 3")
    assert (told["reward"], told["rows"].split()[:3]) == ("exact", ["3", "rows", "of"])
    assert (told["ok"] + told["weak"], told["fault"]) == (13, 0)
    assert {check["name"] for check in told["checks"] if check["verdict"] == "weak"} <= {"very long"}  # a slow machine
    assert [check["name"] for check in told["checks"]][:2] == ["returns", "values"]
    assert all(set(check) == {"name", "verdict", "reason", "reply"} for check in told["checks"])


MISTAKES = {
    2: """
        reward test ./nowhere.py:right
        reward test ./mine.py:rihgt
        reward test ./mine.py
        reward test numbr
        reward test ./mine.py:of_trl
        reward test exact env=arithmetik
    """,
    3: """
        reward test ./mine.py:by_level
        reward test exact env.path=nowhere.jsonl
        reward test exact env.path=rows.jsonl env.answer_column=levle
    """,
}


@pytest.mark.parametrize("code", MISTAKES)
def test_what_cannot_be_tested_is_one_line(code: int, rlpost: CommandLine, says: Says) -> None:
    says("reward", rlpost.refusals(MISTAKES[code], code))


def test_a_plugins_reward_is_attacked_in_a_process_of_its_own(rlpost: CommandLine) -> None:
    Path("plug.py").write_text(
        "import os, rlpost\n"
        f"rlpost.register_reward('elsewhere', lambda completions, answer: [(os.getpid() != {os.getpid()}) * float("
        "text.strip() == wanted) for text, wanted in zip(completions, answer)])\n"
    )
    told = rlpost.json("reward test elsewhere plugin=./plug.py")
    assert (told["ok"], told["weak"], told["fault"]) == (13, 0, 0)


def test_a_reward_without_a_right_answer_skips_the_gold_attacks(rlpost: CommandLine, says: Says) -> None:
    Path("brief.py").write_text("def brief(completions, **others):\n    return [-len(c) / 100 for c in completions]\n")
    Path("asks.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    for words in ("env.path=rows.jsonl env.gold=false", "env.path=asks.jsonl"):
        says("reward", untimed(rlpost(f"reward test ./brief.py:brief {words}")))
