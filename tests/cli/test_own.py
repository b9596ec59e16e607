"""Environments and rewards of one's own from the command line: starters, plugins, and what is said of them."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.cli.env import key_lines
from rlpost.cli.main import run

ROWS = "\n".join(json.dumps({"prompt": f"What is {n} + 1?", "answer": n + 1}) for n in range(30))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], line: str, exit_code: int = 0) -> str:
    assert run(line.split()) == exit_code
    captured = capsys.readouterr()
    return captured.err if exit_code == 2 else captured.out


def test_a_new_environment_is_proved_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "env new largest_number")
    assert said.splitlines() == [
        "wrote ./largest_number.py",
        "prove it:  rlpost env test largest_number plugin=./largest_number.py",
        "train it:  rlpost train grpo env=largest_number plugin=./largest_number.py",
    ]
    text = Path("largest_number.py").read_text()
    assert "class LargestNumberSettings(EnvSettings)" in text
    assert "my_env" not in text
    assert "MyEnv" not in text
    assert told(capsys, "env test largest_number plugin=./largest_number.py").count("all scored rightly") == 2


def test_the_splits_of_a_new_environment_share_no_question() -> None:
    assert run(["env", "new", "largest_apart"]) == 0
    from rlpost.catalog import TRAIN_GRPO
    from rlpost.config.compose import compose
    from rlpost.envs.build import build_env

    words = ["env=largest_apart", "plugin=largest_apart.py", "env.highest=9", "env.numbers=2"]
    sides = []
    for split in ("train", "test"):
        settings = compose(TRAIN_GRPO, [*words, "eval.enabled=false", f"env.split={split}"]).settings.env
        env = build_env(settings, num_prompts=1, group_size=1, seed=0)
        sides.append({frozenset(c.query.removesuffix("?").split()) for c in env.draw(env.num_tasks)})
    assert sides[0] & sides[1] == set()
    assert len(sides[0] | sides[1]) == 45  # pairs of ten numbers


def test_a_plugins_settings_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run(["env", "new", "largest_shown"])
    capsys.readouterr()
    shown = told(capsys, "env show largest_shown plugin=./largest_shown.py")
    assert shown.startswith("largest_shown: Which of a few numbers is the largest?\n")
    assert "  env.numbers                 whole number                3        to choose from\n" in shown
    listed = told(capsys, "env list plugin=./largest_shown.py")
    assert re.search(r"largest_shown +Which of a few numbers is the largest\?\n", listed)
    assert "numbers: 3\n" in told(capsys, "config show env=largest_shown plugin=./largest_shown.py")
    assert "did you mean env.numbers?" in told(
        capsys, "train grpo env=largest_shown plugin=./largest_shown.py env.numbres=3", 2
    )


def test_a_new_reward_can_be_tried_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "reward new last_number --out ./mine.py")
    assert said.splitlines()[-1].endswith(" env=dataset env.path=FILE env.reward=./mine.py:last_number")
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1.0  It is 12.", "0.1  It is 13.", "0.0  I do not know."]
    Path("rows.jsonl").write_text(ROWS)
    plan = told(capsys, "train grpo env=dataset env.path=rows.jsonl env.reward=./mine.py:last_number --dry-run")
    assert "data    dataset from rows.jsonl, train split, reward ./mine.py:last_number, " in plan


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("env new my-maze", "'my-maze' is not a Python name, which the file and its code need; write my_maze"),
        ("env new 3d", "write my_3d"),
        ("env new class", "write my_class"),
        ("reward new random", "random is a Python module already, which random.py would hide; write my_random"),
        ("reward new torch", "torch is a Python module already"),
        ("reward new taken", "taken.py exists already: give another name, or --out FILE"),
        ("env list bananas", "bananas is not a plugin: rlpost env list takes plugin=FILE only"),
        ("env list plugin=./nowhere.py", "there is no file ./nowhere.py"),
        ("env test dataset", "env.path has no value: give env.path=...; it takes .jsonl"),
        (
            "env test dataset env.path=rows.jsonl",
            "env.reward has no value: give env.reward=...; it takes FILE.py:FUNCTION",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken.py").write_text("mine")
    Path("rows.jsonl").write_text(ROWS)
    error = told(capsys, line, 2)
    assert said in error
    assert error.count("\n") == 1
    assert Path("taken.py").read_text() == "mine"


def test_settings_that_need_a_value_are_shown_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "env show dataset")
    assert [line.split()[0] for line in shown.splitlines() if "(needed)" in line] == ["env.path", "env.reward"]
    keys = {key["key"]: key for key in json.loads(told(capsys, "env show dataset --json"))["keys"]}
    assert (keys["env.path"]["needed"], keys["env.path"]["default"]) == (True, None)
    assert (keys["env.held_out"]["needed"], keys["env.held_out"]["default"]) == (False, "0.1")


def test_meanings_go_below_where_the_screen_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, meanings = [("env.path", "text", "(needed)")], ["a file of your own, which may have a long explanation"]
    assert key_lines(rows, meanings)[1] == f"  env.path  text  (needed)  {meanings[0]}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert key_lines(rows, meanings)[1:] == [
        "  env.path  text  (needed)",
        "      a file of your own, which may have",
        "      a long explanation",
    ]


def test_rows_prove_a_built_in_reward(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(ROWS)
    line = "env test dataset env.path=rows.jsonl env.reward=number"
    assert told(capsys, line).count("all scored rightly") == 2
    proofs = json.loads(told(capsys, f"{line} env.split=train --json"))
    assert set(proofs) == {"train"}
    assert proofs["train"]["failures"] == []


def test_rewards_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "reward list")
    assert [line.split()[0] for line in listed.splitlines()[1:5]] == ["exact", "number", "contains", "math"]
    described = json.loads(told(capsys, "reward list --json"))
    assert [reward["accuracy"] for reward in described] == [True, True, False, True]


@pytest.mark.parametrize(
    "line",
    [
        "train grpo {words}",
        "train grpo {words} --dry-run",
        "eval {words}",
        "env test dataset env.path=rows.jsonl env.reward=./r.py:score",
    ],
)
def test_a_reward_that_does_not_import_is_told_before_anything_is_loaded(line: str) -> None:
    Path("rows.jsonl").write_text(ROWS)
    Path("r.py").write_text("\nimport no_such_package\n\ndef score(completions): ...\n")
    program = (
        "import sys\nfrom rlpost.cli.main import run\ncode = run(sys.argv[1:])\nprint(code, 'torch' in sys.modules)\n"
    )
    words = line.format(words="env=dataset env.path=rows.jsonl env.reward=./r.py:score").split()
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("error: ./r.py, line 2: importing it failed: ModuleNotFoundError")
    assert done.stderr.count("\n") == 1


def test_showing_a_configuration_runs_no_reward(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(ROWS)
    Path("r.py").write_text("def score(completions): ...\nraise SystemExit('run')\n")
    words = "env=dataset env.path=rows.jsonl env.reward=./r.py:score"
    assert "./r.py:score" in told(capsys, f"config show {words}")


def test_three_settings_train(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(ROWS)
    run(["reward", "new", "own"])
    words = "env=dataset env.path=rows.jsonl env.reward=./own.py:own"
    assert run(f"train grpo {words} model=tiny policy=scripted steps=1 --name first".split()) == 0
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["reward/own"] == pytest.approx(0.1)  # "The answer is 42.": a number, and never the right one
    assert lines[-1]["reward/mean"] == pytest.approx(0.1)
    assert lines[-1]["accuracy/lenient"] is None
    out = capsys.readouterr().out
    assert "held-out figures will rest on " in out
    assert "; hold out more with env.test_path=FILE, or a larger env.held_out\n" in out
    assert re.search(r"before and after training on \d+ held-out prompts?, 95% intervals\n", out)
    assert "  reward            0.100 (no interval)  ->  0.100 (no interval)\n" in out  # all earned the same


SOLVED = "\n".join(json.dumps({"question": f"{n} and 2?", "answer": f"{n}+2\n#### {n + 2}"}) for n in range(30))
CHATS = "\n".join(
    json.dumps({"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}"}]})
    for n in range(30)
)
QUESTIONS = "question,answer\n" + "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(30))
OWN_ROWS = "env=dataset env.path=rows.jsonl env.reward=./own.py:own"
FASTER = {"eval": ["policy=scripted"], "train": ["policy=scripted", "steps=1"], "chat": ["--max-tokens", "2"]}


@pytest.mark.parametrize(
    ("line", "verbs"),
    [
        ("train grpo env.digits=1 policy=scripted", ["eval"]),
        (
            f"train grpo {OWN_ROWS} 'env.prompt_template=Say: {{prompt}}' policy=scripted env.held_out=0 "
            "eval.enabled=false",
            ["eval"],
        ),
        ("train sft env=gsm8k env.path=solved.jsonl", ["chat", "eval", "train"]),
        ("train sft env=dataset env.path=questions.csv env.completion_column=answer", ["chat", "eval", "train"]),
        ("train sft env=dataset env.path=chats.jsonl", ["chat", "eval"]),
    ],
)
def test_every_command_printed_after_a_training_works(
    line: str, verbs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"rows.jsonl": ROWS, "solved.jsonl": SOLVED, "chats.jsonl": CHATS, "questions.csv": QUESTIONS}
    for name, text in files.items():
        Path(name).write_text(text)
    run(["reward", "new", "own"])
    assert run([*shlex.split(line), "model=tiny", "steps=1", "eval.limit=2", "--name", "first"]) == 0
    printed = re.findall(r"^(?:talk to it|evaluate it|train on): +rlpost (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [words.split()[0] for words in printed] == verbs
    for words in map(shlex.split, printed):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
        assert run([*words, *FASTER[words[0]]]) == 0


def test_a_reward_that_tells_nothing_apart_fails_its_test(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(ROWS)
    Path("flat.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    said = told(capsys, "env test dataset env.path=rows.jsonl env.reward=./flat.py:score env.split=train", 3)
    assert "the reward does not tell them apart" in said


def test_what_was_written_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(told(capsys, "reward new counted --json")) == {
        "file": "./counted.py",
        "try": "python ./counted.py",
        "use": "rlpost train grpo env=dataset env.path=FILE env.reward=./counted.py:counted",
    }
    assert json.loads(told(capsys, "env new largest_told --json"))["prove"] == (
        "rlpost env test largest_told plugin=./largest_told.py"
    )
    assert json.loads(told(capsys, "config init mine.yaml env=dataset --json")) == {
        "file": "mine.yaml",
        "needed": ["env.path"],
        "use": "rlpost train grpo recipe=mine.yaml env.reward=FILE.py:FUNCTION",
    }
