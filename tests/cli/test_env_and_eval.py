"""`rlpost env test` and `rlpost eval`, with stand-ins for what they call."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from rlpost.cli.env import env_to_test
from rlpost.cli.main import run
from rlpost.settings import EvalSettings, GSM8KSettings


class Proof:
    def __init__(self, failures: list[str]) -> None:
        self.checked, self.tells_apart = 2, True
        self.failures = failures

    def lines(self) -> list[str]:
        return [f"{self.checked} checked", *self.failures]


class Result:
    def lines(self) -> list[str]:
        return ["accuracy 25%", "reply \x1b[2J"]

    def as_dict(self) -> dict[str, Any]:
        return {"accuracy": 0.25}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand-ins for what the verbs call, which note what they were asked."""
    noted = types.SimpleNamespace(envs=[], failures=[], settings=None)
    assemble: Any = types.ModuleType("rlpost.assemble")
    build: Any = types.ModuleType("rlpost.envs.build")
    proof: Any = types.ModuleType("rlpost.envs.proof")

    def build_env(settings: Any, *, num_prompts: int, group_size: int, seed: int) -> Any:
        noted.envs.append(settings)
        return settings

    def evaluate_command(settings: EvalSettings, progress: Callable[[int, int], None]) -> Result:
        noted.settings = settings
        print("loading the engine")
        progress(256, 500)
        return Result()

    assemble.evaluate_command = evaluate_command
    build.build_env = build_env
    proof.prove = lambda env: Proof(noted.failures if env.split == "test" else [])
    monkeypatch.setitem(sys.modules, "rlpost.assemble", assemble)
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
    assert capsys.readouterr().out.endswith("accuracy 25%\nreply \\x1b[2J\n")
    assert (noted.settings.model.path, noted.settings.env.limit) == ("builtin:tiny", 4)


def test_json_is_all_there_is_on_stdout(noted: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "model=tiny", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"accuracy": 0.25}
    assert "loading the engine" in captured.err
