"""`rlpost reward test`: what it is told, what it prints, how it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlpost.cli.main import run

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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rewards and rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    rows = [{"prompt": f"{n} + {n}?", "answer": 2 * n, "level": 1 + n % 2} for n in range(11, 16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_sound_reward_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reward", "test", "./mine.py:by_level", "env.path=rows.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "./mine.py:by_level on 5 rows of rows.jsonl, train split"
    assert lines[2] == "  ok     returns             a number for each of 5 rows in one call"
    assert lines[3] == "  ok     gold                earns 1.6 on average, a wrong reply 0"  # 2, 1, 2, 1, 2
    assert lines[-1] == "14 ok, 0 weak, 0 faults"


def test_faults_end_with_3_and_show_the_reply_inert(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["reward", "test", "./mine.py:within"]) == 3
    captured = capfd.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "./mine.py:within on 6 sample sums; for rows of your own: env.path=FILE, or --env NAME"
    place = next(i for i, line in enumerate(lines) if line.startswith("  fault  hidden"))
    assert lines[place].endswith("earns 1, as much as the gold reply (12 + 30)")
    assert lines[place + 1].strip() == r"reply: '<think>42</think>\n43'"
    assert lines[-1] == "11 ok, 0 weak, 3 faults"
    assert "\x1b" not in captured.out
    assert captured.err == ""


def test_a_built_in_reward_on_an_environments_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reward", "test", "exact", "--env", "arithmetic", "--rows", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["reward"], told["rows"]) == ("exact", "3 rows of arithmetic, train split")
    assert (told["ok"], told["weak"], told["fault"]) == (14, 0, 0)
    assert [check["name"] for check in told["checks"]][:4] == ["returns", "gold", "corrupted", "values"]
    assert all(set(check) == {"name", "verdict", "reason", "reply"} for check in told["checks"])


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("./nowhere.py:right", 2, "reward ./nowhere.py:right: there is no file ./nowhere.py"),
        ("./mine.py:rihgt", 2, "./mine.py defines no function rihgt; did you mean right?"),
        ("./mine.py", 2, "./mine.py is not a reward; give FILE.py:FUNCTION, or one of exact, number, contains"),
        ("numbr", 2, "numbr is not a reward; did you mean number?"),
        ("./mine.py:by_level", 3, "takes level, which is not a column of the sample rows; did you mean label?"),
        ("./mine.py:by_level", 3, "which is not a column of the sample rows"),
        ("./mine.py:of_trl", 2, "takes trainer_state, which rlpost does not offer: write trainer_state=None there"),
        ("exact --env arithmetik", 2, "env=arithmetik is unknown; did you mean arithmetic?"),
        ("exact model=tiny", 2, "model=tiny is not a setting of an environment: write env=NAME"),
        ("exact env.path=nowhere.jsonl", 3, "env.path=nowhere.jsonl does not exist"),
        ("exact env.path=rows.jsonl env.answer_column=levle", 3, "levle"),
    ],
)
def test_what_cannot_be_tested_is_one_line(line: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reward", "test", *line.split()]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_a_plugins_reward_is_attacked_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plug.py").write_text(
        "import os, rlpost\n"
        f"rlpost.register_reward('elsewhere', lambda completions, answer: [(os.getpid() != {os.getpid()}) * float("
        "text.strip() == wanted) for text, wanted in zip(completions, answer)])\n"
    )
    assert run(["reward", "test", "elsewhere", "plugin=./plug.py"]) == 0
    assert capsys.readouterr().out.endswith("14 ok, 0 weak, 0 faults\n")


def test_a_reward_without_a_right_answer_skips_the_gold_attacks(capsys: pytest.CaptureFixture[str]) -> None:
    Path("brief.py").write_text("def brief(completions, **others):\n    return [-len(c) / 100 for c in completions]\n")
    Path("asks.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    words = ["reward", "test", "./brief.py:brief"]
    names = "gold, corrupted, empty, prompt echo, everything, hidden in thinking, repeated, another form"
    told = "left out, since they compare with a right reply"
    assert run([*words, "env.path=rows.jsonl", "env.gold=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "6 ok, 0 weak, 0 faults"
    assert f"{told} (env.gold=false): {names}" in lines
    assert run([*words, "env.path=asks.jsonl"]) == 0
    assert f"{told} (the rows have no answer; if they have, name its column with" in capsys.readouterr().out


def test_attacks_that_fail_for_one_reason_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("fragile.py").write_text(
        "def fragile(completions, answer, **others):\n"
        "    return [float(int(c.split()[-1]) == a) for c, a in zip(completions, answer)]\n"
    )
    assert run(["reward", "test", "./fragile.py:fragile", "env.path=rows.jsonl"]) == 3
    lines = capsys.readouterr().out.splitlines()
    [failed] = [line for line in lines if "invalid literal for int()" in line]
    assert failed.startswith("  fault  prompt echo ")
    assert failed.endswith(": '11?' (and hidden in thinking, very long, control characters)")
    assert lines[-3].endswith("leave out what compares with a right one: add env.gold=false")
