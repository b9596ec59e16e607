"""Environments and rewards of one's own from the command line: starters, plugins, and what is said of them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from tests.command_line import CommandLine
from tests.says import Says

pytestmark = pytest.mark.thorough

ROWS = "\n".join(json.dumps({"prompt": f"What is {n} + 1?", "answer": n + 1}) for n in range(30))
OWN_ROWS = "env=dataset env.path=rows.jsonl env.reward=./own.py:own"


def test_a_new_environment_is_proved_at_once(rlpost: CommandLine, says: Says) -> None:
    says("env", rlpost("env new largest_number"))
    text = Path("largest_number.py").read_text()
    assert "class LargestNumberSettings(EnvSettings)" in text
    assert "my_env" not in text
    assert "MyEnv" not in text
    proofs = rlpost.json("env test largest_number plugin=./largest_number.py")
    assert {split: proof["failures"] for split, proof in proofs.items()} == {"train": [], "test": []}


def test_the_splits_of_a_new_environment_share_no_question() -> None:
    assert run(["env", "new", "largest_apart"]) == 0
    from rlpost.envs.build import build_env

    words = ["env=largest_apart", "plugin=largest_apart.py", "env.highest=9", "env.numbers=2"]
    sides = []
    for split in ("train", "test"):
        settings = compose(TRAIN_GRPO, [*words, "eval.enabled=false", f"env.split={split}"]).settings.env
        env = build_env(settings, num_prompts=1, group_size=1, seed=0)
        sides.append({frozenset(c.query.removesuffix("?").split()) for c in env.draw(env.num_tasks)})
    assert sides[0] & sides[1] == set()
    assert len(sides[0] | sides[1]) == 45  # pairs of ten numbers


def test_a_plugins_settings_are_shown(rlpost: CommandLine) -> None:
    rlpost("env new largest_shown")
    plugin = "plugin=./largest_shown.py"
    settings = rlpost(f"config show env=largest_shown {plugin}")
    assert "numbers: 3\n" in settings
    refused = rlpost.refused(f"train grpo env=largest_shown {plugin} env.numbres=3")
    assert "env.numbers?" in refused


def test_a_new_reward_can_be_tried_at_once(rlpost: CommandLine, says: Says) -> None:
    says("reward", rlpost("reward new last_number --out ./mine.py"))
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1.0", "0.1", "0.0"]
    Path("rows.jsonl").write_text(ROWS)
    own = "env=dataset env.path=rows.jsonl env.reward=./mine.py:last_number"
    assert "./mine.py:last_number" in rlpost(f"train grpo {own} --dry-run")


WRONG = """
    env new my-maze
    env new 3d
    env new class
    env test dataset
    env test dataset env.path=rows.jsonl
    reward new random
    reward new torch
    reward new taken
"""


def test_what_cannot_be_is_one_line_and_exit_2(rlpost: CommandLine, says: Says) -> None:
    Path("taken.py").write_text("mine")
    Path("rows.jsonl").write_text(ROWS)
    says("env", rlpost.refusals(WRONG))
    assert Path("taken.py").read_text() == "mine"


def test_rows_prove_a_built_in_reward(rlpost: CommandLine) -> None:
    Path("rows.jsonl").write_text(ROWS)
    proofs = rlpost.json("env test dataset env.path=rows.jsonl env.reward=number env.split=train")
    assert set(proofs) == {"train"}
    assert proofs["train"]["failures"] == []


def test_showing_a_configuration_runs_no_reward(rlpost: CommandLine) -> None:
    Path("rows.jsonl").write_text(ROWS)
    Path("r.py").write_text("def score(completions): ...\nraise SystemExit('run')\n")
    shown = rlpost("config show env=dataset env.path=rows.jsonl env.reward=./r.py:score")
    assert "./r.py:score" in shown


def test_three_settings_train(rlpost: CommandLine) -> None:
    Path("rows.jsonl").write_text(ROWS)
    rlpost("reward new own")
    out = rlpost(f"train grpo {OWN_ROWS} model=tiny policy=scripted steps=1 --name first")
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["reward/own"] == pytest.approx(0.1)  # "The answer is 42.": a number, and never the right one
    assert lines[-1]["reward/mean"] == pytest.approx(0.1)
    assert lines[-1]["accuracy/lenient"] is None
    assert "env.test_path=FILE" in out  # holds out more
    assert "0.100 (no interval)  ->  0.100 (no interval)\n" in out  # all earned the same


SOLVED = "\n".join(json.dumps({"question": f"{n} and 2?", "answer": f"{n}+2\n#### {n + 2}"}) for n in range(30))
CHATS = "\n".join(
    json.dumps({"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}"}]})
    for n in range(30)
)
QUESTIONS = "question,answer\n" + "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(30))
FASTER = {"eval": "policy=scripted", "train": "policy=scripted steps=1", "chat": "--max-tokens 2"}


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
    line: str, verbs: list[str], rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"rows.jsonl": ROWS, "solved.jsonl": SOLVED, "chats.jsonl": CHATS, "questions.csv": QUESTIONS}
    for name, text in files.items():
        Path(name).write_text(text)
    rlpost("reward new own")
    out = rlpost(f"{line} model=tiny steps=1 eval.limit=2 --name first")
    printed = re.findall(r"^(?:talk to it|evaluate it|train on): +rlpost (.*)$", out, re.MULTILINE)
    assert [words.split()[0] for words in printed] == verbs
    for words in printed:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
        rlpost(f"{words} {FASTER[words.split()[0]]}")


def test_a_reward_that_tells_nothing_apart_fails_its_test(rlpost: CommandLine) -> None:
    Path("rows.jsonl").write_text(ROWS)
    Path("flat.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    rlpost("env test dataset env.path=rows.jsonl env.reward=./flat.py:score env.split=train", 3)


def test_what_was_written_is_told_as_json(rlpost: CommandLine) -> None:
    train = "rlpost train grpo"
    told = rlpost.json("reward new counted")
    assert (told["file"], told["try"].split()) == ("./counted.py", ["python", "./counted.py"])
    assert told["use"] == f"{train} env=dataset env.path=FILE env.reward=./counted.py:counted"
    told = rlpost.json("env new largest_told")
    assert told["prove"].split() == ["rlpost", "env", "test", "largest_told", "plugin=./largest_told.py"]
    told = rlpost.json("config show env=dataset --recipe mine.yaml")
    assert (told["file"], told["needed"]) == ("mine.yaml", ["env.path"])
    assert told["use"] == f"{train} recipe=mine.yaml env.reward=FILE.py:FUNCTION"
