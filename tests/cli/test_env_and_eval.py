"""`rlpost env test`, and `rlpost eval` with a stand-in for what it calls."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.errors import RewardError
from rlpost.evaluation.play import Evaluation, summarise
from rlpost.settings import EvalSettings
from tests.command_line import CommandLine
from tests.evaluation_folders import answered, write
from tests.run_folders import make_run
from tests.says import Says


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for what plays the environment, which notes what it was asked."""
    noted = types.SimpleNamespace(settings=None, error=None)
    assemble: Any = types.ModuleType("rlpost.train.assemble")

    def evaluate_command(
        settings: EvalSettings, progress: Callable[[int, int], None], tell: object, note: object
    ) -> Evaluation:
        noted.settings = settings
        print("loading the engine")
        progress(256, 500)
        if noted.error is not None:
            raise noted.error
        played = [c for number, mark in enumerate("rwww") for c in answered(f"q{number}", mark, number)]
        for conversation in played:
            conversation.reward_parts = {"a\x1b[2J": 0.25}
        return Evaluation(summarise(played), played)

    assemble.evaluate_command = evaluate_command
    monkeypatch.setitem(sys.modules, "rlpost.train.assemble", assemble)
    return noted


def test_both_splits_are_proved_unless_one_is_named(rlpost: CommandLine, says: Says) -> None:
    says("env", rlpost("env test arithmetic env.digits=1"))
    says("env", rlpost("env test arithmetic env.digits=1 env.split=train"))


def test_a_failed_proof_is_exit_3(rlpost: CommandLine, says: Says) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n{"prompt": "2?", "answer": "\\u001b"}\n')
    Path("fails.py").write_text("def score(completions):\n    return [1 / ('\\x1b' not in c) for c in completions]\n")
    own = "dataset env.path=rows.jsonl env.reward=./fails.py:score env.held_out=0 env.split=train"
    says("env", rlpost(f"env test {own}", 3))


def test_eval_prints_lines_without_control_characters(
    noted: types.SimpleNamespace, rlpost: CommandLine, says: Says
) -> None:
    says("eval", rlpost("eval model=tiny env.limit=4"))
    assert (noted.settings.model.path, noted.settings.env.limit) == ("builtin:tiny", 4)


def make_trained(tiny_folder: Path, *overrides: str) -> None:
    """A run of the tiny model in runs/mine, with a checkpoint."""
    words = ["model=tiny", *overrides]
    folder = make_run(Path("runs/mine"), overrides=words)
    Path("label.py").write_text("def score(completions):\n    return [0.5 for _ in completions]\n")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(20)))
    (folder / "config.yaml").write_text(compose(TRAIN_GRPO, words).yaml)
    shutil.copytree(tiny_folder, folder / "checkpoints" / "step-000002" / "model")
    (folder / "checkpoints" / "latest").symlink_to("step-000002")


@pytest.mark.parametrize("model", ["mine", "runs/mine", "runs/mine/checkpoints/step-000002"])
def test_an_evaluation_of_a_run_plays_the_runs_own_environment(
    model: str, noted: types.SimpleNamespace, tiny_folder: Path, rlpost: CommandLine, says: Says
) -> None:
    make_trained(tiny_folder, "env.digits=3", "env.limit=9", "env.max_completion_tokens=7", "sampling.stop=[END]")
    rlpost(f"eval model={model} env.max_completion_tokens=8")
    env = noted.settings.env
    assert (env.digits, env.max_completion_tokens, env.split, env.limit) == (3, 8, "test", None)
    assert noted.settings.sampling.stop == ["END"]
    says("eval", "\n".join(rlpost.err.splitlines()[:2]))


def test_an_evaluation_says_first_that_a_run_was_trained_elsewhere(
    noted: types.SimpleNamespace, tiny_folder: Path, rlpost: CommandLine, says: Says
) -> None:
    make_trained(tiny_folder, "env=dataset", "env.path=rows.jsonl", "env.reward=label.py:score")
    rlpost("eval model=mine env=arithmetic")
    says("eval", "\n".join(rlpost.err.splitlines()[:2]))


def test_code_of_a_run_is_named_again_by_the_printed_command(
    noted: types.SimpleNamespace, tiny_folder: Path, rlpost: CommandLine
) -> None:
    make_trained(tiny_folder, "env=dataset", "env.path=rows.jsonl", "env.reward=label.py:score")
    _, _, command = rlpost.refused("eval model=mine --name it").rstrip().rpartition(": rlpost ")
    assert shlex.split(command) == ["eval", "model=mine", "--name", "it", "env.reward=label.py:score"]
    rlpost(command)
    assert noted.settings.env.path == "rows.jsonl"


def test_json_is_all_there_is_on_stdout_and_the_same_as_the_file(
    noted: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    rlpost = CommandLine(capfd)
    record = rlpost.json("eval model=tiny eval.k=[1,2] --name mine")
    assert record == json.loads(Path("evals/mine/result.json").read_text())
    assert record["result"]["accuracy_lenient"]["value"] == 0.25
    assert record["settings"]["eval"] == {"k": [1, 2], "samples": None}
    assert record["choices"] == {"model": "tiny", "env": "arithmetic", "policy": "auto"}
    assert record["command"] == ["rlpost", "eval", "model=tiny", "eval.k=[1,2]", "--name", "mine", "--json"]
    assert record["environment"]["packages"]["torch"]
    assert "the engine" in rlpost.err
    assert pq.read_table("evals/mine/samples.parquet").num_rows == 4


def test_evaluations_are_numbered_and_none_is_written_over(noted: types.SimpleNamespace, rlpost: CommandLine) -> None:
    for _ in range(2):
        rlpost("eval model=tiny env=gsm8k")
    assert sorted(path.name for path in Path("evals").iterdir()) == ["gsm8k-tiny-1", "gsm8k-tiny-2"]
    rlpost("eval model=tiny --out kept/here")
    assert Path("kept/here/result.json").is_file()
    noted.settings = None
    refused = rlpost.refused("eval model=tiny --out kept/here")
    assert "kept/here" in refused
    assert noted.settings is None  # refused before anything was played


def test_an_evaluation_that_fails_leaves_no_folder(noted: types.SimpleNamespace, rlpost: CommandLine) -> None:
    noted.error = RewardError("all 4 rewards of the evaluation failed")
    rlpost("eval model=tiny", RewardError.exit_code)
    assert not Path("evals").exists()


def test_compare_prints_a_verdict_or_json(rlpost: CommandLine) -> None:
    write(Path("evals/before"), ["w"] * 30)
    write(Path("evals/after"), ["r"] * 20 + ["w"] * 10)
    shown = rlpost("eval compare before after")
    assert re.search(r"(?m)^lenient +B is better$", shown)
    told = rlpost.json("eval compare after before")
    assert told["verdict"] == "B is worse"


MISTAKES = """
    eval model=tiny --name a/b
    eval model=tiny --name a --out b
    eval model=tiny --out file
    eval eval.k=[8] sampling.temperature=0
    eval eval.k=[1,8] eval.samples=4
    eval eval.k=0
    eval compare
    eval compare before
    eval compare before after c
    eval compare before aftr
    eval compare before r
    eval compare before after --josn
    eval comapre before after
    compare before after
"""


def test_mistakes_say_what_was_meant(rlpost: CommandLine, says: Says) -> None:
    Path("file").touch()
    write(Path("evals/before"), ["w"])
    write(Path("evals/after"), ["r"])
    write(Path("evals/other"), ["r"], choice="gsm8k")
    make_run(Path("runs/r"))
    says("eval", rlpost.refusals(MISTAKES))
    says("eval", rlpost.refusals("eval compare before other", 3))
