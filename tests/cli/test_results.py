"""`--json` of `rlpost train grpo`: the result on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path

import pytest

from rlpost.cli.train import run_result
from rlpost.errors import ConfigError, DivergedError
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import RunRequest
from tests.command_line import CommandLine
from tests.trainings import stand_in_for_grpo

METRICS = [
    {"step": 0, "eval/prompts": 8.0, "eval/accuracy_lenient": 0.25},
    {"step": 1, "reward/mean": 0.5, "ess": None},
    {"step": 2, "reward/mean": 0.75, "ess": None, "eval/prompts": 8.0, "eval/accuracy_lenient": 0.5},
]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for `rlpost.train.grpo` that talks, leaves METRICS in the run folder, and ends as `outcome` says."""
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


@pytest.fixture
def rlpost(capfd: pytest.CaptureFixture[str]) -> CommandLine:
    """Command lines whose whole output is looked at, that of C++ too."""
    return CommandLine(capfd)


@pytest.mark.parametrize("code", [0, 130])
def test_the_result_has_the_last_step_and_both_evaluations(
    code: int, training: types.SimpleNamespace, rlpost: CommandLine
) -> None:
    training.outcome = code
    result = rlpost.json("train grpo model=tiny --name x", code)
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
    assert "step 1/2" in rlpost.err
    assert "from C++" in rlpost.err


def test_a_run_that_diverged_says_so_in_its_result_too(training: types.SimpleNamespace, rlpost: CommandLine) -> None:
    training.outcome = DivergedError("nan")
    result = rlpost.json("train grpo model=tiny", 4)
    assert (result["exit_code"], result["error"], result["steps"]) == (4, "nan", 2)
    assert rlpost.err.endswith("error: nan\n")


def test_an_error_of_the_configuration_leaves_stdout_empty(
    training: types.SimpleNamespace, rlpost: CommandLine
) -> None:
    training.outcome = ConfigError("runs/x is in use")
    out = rlpost("train grpo model=tiny --json", 2)
    assert out == ""


def test_a_run_that_wrote_nothing_has_no_figures(here: Path) -> None:
    result = run_result(here, 3, 1.26, "no disk")
    assert (result["exit_code"], result["error"], result["steps"], result["seconds"]) == (3, "no disk", 0, 1.3)
    assert {result[name] for name in ("metrics", "evaluation_before", "evaluation_after")} == {None}


def test_a_dry_run_is_json_too(rlpost: CommandLine) -> None:
    line = "train grpo model=tiny steps=3 env.operations=[add,subtract]"
    plan = rlpost.json(f"{line} --dry-run --name x")
    assert (plan["command"], plan["folder"], plan["resume"]) == ("train grpo", "runs/x", None)
    assert plan["choices"]["model"] == "tiny"
    assert plan["overrides"][:2] == ["model=tiny", "steps=3"]
    settings = plan["settings"]
    assert (settings["steps"], settings["env"]["operations"]) == (3, ["add", "subtract"])
    assert settings["model"]["dtype"] == "float32"
    assert not Path("runs").exists()


def test_what_the_users_reward_prints_while_it_is_imported_is_no_json(rlpost: CommandLine) -> None:
    Path("mine.py").write_text("print('hello')\ndef score(completions, **kwargs): return [0.0 for _ in completions]\n")
    Path("mine.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "b"}}\n' for n in range(40)))
    words = "env=dataset env.path=./mine.jsonl env.reward=./mine.py:score model=tiny"
    plan = rlpost.json(f"train grpo {words} --dry-run")  # what a reward prints goes to the log of a run
    assert plan["choices"]["env"] == "dataset"
