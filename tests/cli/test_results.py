"""`--json` of `rlpost train grpo`: the result on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path

import pytest

from rlpost.cli.main import run
from rlpost.cli.train import run_result
from rlpost.errors import ConfigError, DivergedError
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import RunRequest
from tests.trainings import stand_in_for_grpo

METRICS = [
    {"step": 0, "eval/prompts": 8.0, "eval/accuracy_lenient": 0.25},
    {"step": 1, "reward/mean": 0.5, "ess": None},
    {"step": 2, "reward/mean": 0.75, "ess": None, "eval/prompts": 8.0, "eval/accuracy_lenient": 0.5},
]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """A stand-in for `rlpost.train.grpo` that talks, leaves METRICS in the run folder, and ends as `outcome` says."""
    monkeypatch.chdir(tmp_path)
    noted = types.SimpleNamespace(outcome=0)

    def train(settings: GRPOSettings, request: RunRequest, assemble: None, learn: None) -> int:
        print("step 1/2")
        os.write(1, b"from C++\n")
        request.folder.mkdir(parents=True)
        (request.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
        if isinstance(noted.outcome, BaseException):
            raise noted.outcome
        return noted.outcome

    stand_in_for_grpo(monkeypatch, train)
    return noted


@pytest.mark.parametrize("code", [0, 130])
def test_the_result_has_the_last_step_and_both_evaluations(
    code: int, training: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    training.outcome = code
    assert run(["train", "grpo", "model=tiny", "--name", "x", "--json"]) == code
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result.pop("seconds") >= 0
    assert result == {
        "folder": "runs/x",
        "exit_code": code,
        "error": None,
        "steps": 2,
        "metrics": {"reward/mean": 0.75, "ess": None},
        "evaluation_before": {"eval/prompts": 8.0, "eval/accuracy_lenient": 0.25},
        "evaluation_after": {"eval/prompts": 8.0, "eval/accuracy_lenient": 0.5},
    }
    assert "step 1/2" in captured.err
    assert "from C++" in captured.err


def test_a_run_that_diverged_says_so_in_its_result_too(
    training: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    training.outcome = DivergedError("the loss is nan")
    assert run(["train", "grpo", "model=tiny", "--json"]) == 4
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert (result["exit_code"], result["error"], result["steps"]) == (4, "the loss is nan", 2)
    assert captured.err.endswith("error: the loss is nan\n")


def test_an_error_of_the_configuration_leaves_stdout_empty(
    training: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    training.outcome = ConfigError("runs/x is in use")
    assert run(["train", "grpo", "model=tiny", "--json"]) == 2
    assert capfd.readouterr().out == ""


def test_a_run_that_wrote_nothing_has_no_figures(tmp_path: Path) -> None:
    assert run_result(tmp_path, 3, 1.26, "no disk") == {
        "folder": str(tmp_path),
        "exit_code": 3,
        "error": "no disk",
        "steps": 0,
        "seconds": 1.3,
        "metrics": None,
        "evaluation_before": None,
        "evaluation_after": None,
    }


def test_a_dry_run_and_cfg_are_json_too(training: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "grpo", "model=tiny", "steps=3", "env.operations=[add,subtract]", "--json"]
    assert run([*line, "--dry-run", "--name", "x"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["command"], plan["folder"], plan["resume"]) == ("train grpo", "runs/x", None)
    assert plan["choices"]["model"] == "tiny"
    assert plan["overrides"][:2] == ["model=tiny", "steps=3"]
    assert run([*line, "--cfg"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings == plan["settings"]
    assert (settings["steps"], settings["env"]["operations"]) == (3, ["add", "subtract"])
    assert settings["model"]["dtype"] == "float32"
    assert not Path("runs").exists()


def test_what_the_users_reward_prints_while_it_is_imported_is_no_json(
    training: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("print('hello')\ndef score(completions, **kwargs): return [0.0 for _ in completions]\n")
    Path("mine.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "b"}}\n' for n in range(40)))
    words = ["env=dataset", "env.path=./mine.jsonl", "env.reward=./mine.py:score", "model=tiny"]
    assert run(["train", "grpo", *words, "--json", "--dry-run"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["choices"]["env"] == "dataset"
    assert "hello" not in captured.out  # what a reward prints goes to the log of a run
