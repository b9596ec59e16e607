"""`rlpost env test` and `rlpost eval`, with stand-ins for what they call."""

from __future__ import annotations

import json
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
from rlpost.cli.env import env_to_test
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.errors import RewardError
from rlpost.evaluation.play import Evaluation, summarise
from rlpost.settings import EvalSettings, GSM8KSettings
from tests.evaluation_folders import answered, write
from tests.run_folders import make_run


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Proof:
    def __init__(self, failures: list[str]) -> None:
        self.checked, self.tells_apart = 2, True
        self.failures = failures

    def lines(self) -> list[str]:
        return [f"{self.checked} checked", *self.failures]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand-ins for what the verbs call, which note what they were asked."""
    noted = types.SimpleNamespace(envs=[], failures=[], settings=None, error=None)
    assemble: Any = types.ModuleType("rlpost.train.assemble")
    build: Any = types.ModuleType("rlpost.envs.build")
    proof: Any = types.ModuleType("rlpost.envs.proof")

    def build_env(settings: Any, *, num_prompts: int, group_size: int, seed: int) -> Any:
        noted.envs.append(settings)
        part = types.SimpleNamespace(split=settings.split, source_name="", rehearse=lambda: None, close=lambda: None)
        return types.SimpleNamespace(parts=[part])

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
    build.build_env = build_env
    proof.prove = lambda env: Proof(noted.failures if env.split == "test" else [])
    monkeypatch.setitem(sys.modules, "rlpost.train.assemble", assemble)
    monkeypatch.setitem(sys.modules, "rlpost.envs.build", build)
    monkeypatch.setitem(sys.modules, "rlpost.envs.proof", proof)
    return noted


def test_both_splits_are_tested(noted: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "test", "arithmetic", "env.digits=3"]) == 0
    assert [(env.split, env.digits) for env in noted.envs] == [("train", 3), ("test", 3)]
    assert capsys.readouterr().out == ("arithmetic, train split\n  2 checked\narithmetic, test split\n  2 checked\n")


def test_a_failed_proof_is_exit_3(noted: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    noted.failures = ["row 7: the gold answer \x1b scores 0"]
    assert run(["env", "test", "arithmetic"]) == 3
    assert "row 7: the gold answer \\x1b scores 0" in capsys.readouterr().out
    assert run(["env", "test", "arithmetic", "env.split=train"]) == 0


def test_a_split_can_be_named() -> None:
    settings, splits = env_to_test("gsm8k", ["env.split=train", "env.limit=5"])
    assert isinstance(settings, GSM8KSettings)
    assert settings.limit == 5
    assert splits == ("train",)


def test_eval_prints_lines_without_control_characters(
    noted: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", "model=tiny", "env.limit=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "4 prompts, greedy, 95% intervals",
        "  accuracy           25.0%  [2.7%, 74.2%]",
    ]
    assert any(line.startswith("    a\\x1b[2J ") for line in lines)
    assert lines[-1] == "written to evals/arithmetic-tiny-1"
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
    model: str, noted: types.SimpleNamespace, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tiny_folder, "env.digits=3", "env.limit=9", "env.max_completion_tokens=7", "sampling.stop=[END]")
    assert run(["eval", f"model={model}", "env.max_completion_tokens=8"]) == 0
    env = noted.settings.env
    assert (env.digits, env.max_completion_tokens, env.split, env.limit) == (3, 8, "test", None)
    assert noted.settings.sampling.stop == ["END"]
    path = model if "/" in model else f"runs/{model}"
    assert capsys.readouterr().err.splitlines()[:2] == [
        "plays   arithmetic, test split, at most 8 tokens each",
        f"model   {path}, trained on the same, but with env.max_completion_tokens=7",
    ]


def test_an_evaluation_says_first_that_the_run_was_trained_on_another_environment(
    noted: types.SimpleNamespace, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tiny_folder, "env=dataset", "env.path=rows.jsonl", "env.reward=label.py:score")
    assert run(["eval", "model=mine", "env=arithmetic"]) == 0
    assert capsys.readouterr().err.splitlines()[:2] == [
        "plays   arithmetic, test split, at most 20 tokens each",
        "model   runs/mine, trained on another environment, dataset from rows.jsonl",
    ]


def test_code_of_a_run_is_named_again_by_the_printed_command(
    noted: types.SimpleNamespace, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tiny_folder, "env=dataset", "env.path=rows.jsonl", "env.reward=label.py:score")
    assert run(["eval", "model=mine", "--name", "it"]) == 2
    said, _, command = capsys.readouterr().err.rstrip().rpartition(": ")
    assert said.startswith("error: runs/mine used your code")
    assert command == "rlpost eval model=mine --name it env.reward=label.py:score"
    assert run(shlex.split(command)[1:]) == 0
    assert noted.settings.env.path == "rows.jsonl"


def test_json_is_all_there_is_on_stdout_and_the_same_as_the_file(
    noted: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", "model=tiny", "eval.k=[1,2]", "--json", "--name", "mine"]) == 0
    captured = capfd.readouterr()
    record = json.loads(captured.out)
    assert record == json.loads(Path("evals/mine/result.json").read_text())
    assert record["result"]["accuracy_lenient"]["value"] == 0.25
    assert record["settings"]["eval"] == {"k": [1, 2], "samples": None}
    assert record["choices"] == {"model": "tiny", "env": "arithmetic", "policy": "auto"}
    assert record["command"] == ["rlpost", "eval", "model=tiny", "eval.k=[1,2]", "--json", "--name", "mine"]
    assert record["environment"]["packages"]["torch"]
    assert "loading the engine" in captured.err
    assert pq.read_table("evals/mine/samples.parquet").num_rows == 4


def test_evaluations_are_numbered_and_none_is_written_over(
    noted: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(["eval", "model=tiny", "env=gsm8k"]) == 0
    assert sorted(path.name for path in Path("evals").iterdir()) == ["gsm8k-tiny-1", "gsm8k-tiny-2"]
    assert run(["eval", "model=tiny", "--out", "kept/here"]) == 0
    assert Path("kept/here/result.json").is_file()
    noted.settings = None
    assert run(["eval", "model=tiny", "--out", "kept/here"]) == 2
    assert "kept/here already holds an evaluation: give another --name" in capsys.readouterr().err
    assert noted.settings is None  # refused before anything was played


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--name a/b", "--name 'a/b' is not a name of an evaluation"),
        ("--name a --out b", "--out and --name both say where an evaluation goes"),
        ("--out file", "file is a file: an evaluation needs a folder"),
        ("--resume auto", "--resume belongs to a sweep of several evaluations"),
    ],
)
def test_a_folder_that_cannot_be_one_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    make_run(Path("runs/r"))
    assert run(["eval", "model=tiny", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_an_evaluation_that_fails_leaves_no_folder(
    noted: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    noted.error = RewardError("all 4 rewards of the evaluation failed")
    assert run(["eval", "model=tiny"]) == RewardError.exit_code
    assert not Path("evals").exists()


def test_compare_prints_a_verdict_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("evals/before"), ["w"] * 30)
    write(Path("evals/after"), ["r"] * 20 + ["w"] * 10)
    assert run(["eval", "compare", "before", "after"]) == 0
    assert "lenient  B is better" in capsys.readouterr().out.splitlines()
    assert run(["eval", "compare", "after", "before", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "B is worse"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("eval compare", 2, "rlpost eval compare needs A: write rlpost eval compare A B"),
        ("eval compare before", 2, "rlpost eval compare needs B: write rlpost eval compare A B"),
        ("eval compare before after c", 2, "rlpost eval compare A B does not take c"),
        ("eval compare before aftr", 2, "there is no evaluation aftr; did you mean after?"),
        ("eval compare before r", 2, "runs/r holds no held-out completions: make some with rlpost eval model=runs/r"),
        ("eval compare before other", 3, "A was asked env=arithmetic and B env=gsm8k"),
        ("eval compare before after --josn", 2, "has no option --josn; did you mean --json?"),
        ("eval comapre before after", 2, "rlpost eval has no verb comapre; did you mean rlpost eval compare?"),
        ("compare before after", 2, "rlpost has no verb compare; did you mean rlpost eval compare?"),
        ("eval eval.k=[8] sampling.temperature=0", 2, "sampling.temperature=0 gives the same completion 8 times"),
        ("eval eval.k=[1,8] eval.samples=4", 2, "eval.samples=4 is fewer than the 8 attempts"),
        ("eval eval.k=0", 2, "eval.k=[0]: give numbers of attempts from 1 up"),
    ],
)
def test_mistakes_say_what_was_meant(line: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("evals/before"), ["w"])
    write(Path("evals/after"), ["r"])
    write(Path("evals/other"), ["r"], choice="gsm8k")
    make_run(Path("runs/r"))
    assert run(line.split()) == code
    assert said in capsys.readouterr().err
