"""Verbs, messages and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from rlpost import __version__
from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import VERBS, run
from rlpost.config.compose import compose
from rlpost.config.schema import options
from rlpost.errors import ConfigError, DataError, DivergedError, PolicyError, RlpostError
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import RunRequest
from tests.command_line import CommandLine
from tests.says import Says
from tests.trainings import stand_in_for_grpo

pytestmark = pytest.mark.thorough


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for `rlpost.train.grpo` that notes what it was asked."""
    noted = types.SimpleNamespace(settings=None, request=None, outcome=0)

    def train(settings: GRPOSettings, request: RunRequest, assemble: None, learn: None) -> int:
        noted.settings, noted.request = settings, request
        if isinstance(noted.outcome, BaseException):
            raise noted.outcome
        return noted.outcome

    stand_in_for_grpo(monkeypatch, train)
    return noted


def test_version(rlpost: CommandLine) -> None:
    assert rlpost("--version") == f"rlpost {__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")
def test_openmp_threads_wait_briefly_unless_somebody_says_otherwise() -> None:
    program = """
import sys
from rlpost.cli.main import main
sys.argv = ["rlpost", "--version"]
try:
    main()
except SystemExit:
    import torch
"""
    for chosen, spins in [({}, "2000"), ({"GOMP_SPINCOUNT": "300"}, "300"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")]:
        environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE", **chosen}  # OpenMP then prints its settings
        environment.pop("LD_PRELOAD", None)  # vLLM, in an earlier test: OpenMP would be loaded before the program
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_training_is_given_the_settings_and_the_request(training: types.SimpleNamespace) -> None:
    arguments = ["train", "grpo", "env=gsm8k", "steps=3", "seed=7", "--name", "first"]
    assert run(arguments) == 0
    assert (training.settings.steps, training.settings.seed) == (3, 7)
    assert training.request == RunRequest(
        folder=Path("runs/first"),
        resume=None,
        overrides=["env=gsm8k", "steps=3", "seed=7"],
        command=["rlpost", *arguments],
        config_yaml=training.request.config_yaml,
    )
    asked = yaml.safe_load(compose(TRAIN_GRPO, ["env=gsm8k", "steps=3", "seed=7"]).yaml)
    assert yaml.safe_load(training.request.config_yaml) == asked


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ([], "runs/grpo-arithmetic-smollm2-1"),
        (["model=qwen", "env=gsm8k"], "runs/grpo-gsm8k-qwen-1"),
        (["model=Qwen/Qwen2.5-0.5B"], "runs/grpo-arithmetic-qwen2.5-0.5b-1"),
        (["--out", "else/where"], "else/where"),
    ],
)
def test_a_run_goes_where_it_says(words: list[str], folder: str, training: types.SimpleNamespace) -> None:
    assert run(["train", "grpo", *words]) == 0
    assert training.request.folder == Path(folder)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        *[(code, code) for code in (0, 130, 143)],
        (KeyboardInterrupt(), 130),
        (ConfigError("no"), 2),
        (DataError("no"), 3),
        (DivergedError("no"), 4),
        (PolicyError("no"), 5),
    ],
)
def test_how_a_training_ends_is_the_exit_code(
    outcome: int | BaseException, code: int, training: types.SimpleNamespace, rlpost: CommandLine
) -> None:
    training.outcome = outcome
    rlpost("train grpo", code)
    if isinstance(outcome, RlpostError):
        assert rlpost.err == "error: no\n"


@pytest.mark.parametrize("bug", [ValueError("a bug"), BrokenPipeError()])  # of another pipe than stdout
def test_a_bug_keeps_its_traceback(bug: Exception, training: types.SimpleNamespace) -> None:
    training.outcome = bug
    with pytest.raises(type(bug)):
        run(["train", "grpo"])


def test_a_dry_run_says_what_would_run_and_does_not(
    training: types.SimpleNamespace, rlpost: CommandLine, says: Says
) -> None:
    rows = Path("a\x1b[31mb")
    rows.mkdir()
    lines = [f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(400)]
    (rows / "train.jsonl").write_text("".join(lines))
    words = ["recipe=gsm8k-smollm2-cpu", "model=tiny", f"env.path={rows}", "policy=transformers"]
    plan = rlpost.lines(["train", "grpo", *words, "--dry-run", "--name", "x"])
    assert training.request is None
    assert not Path("runs").exists()
    assert [line.split()[0] for line in plan[-2:]] == ["memory", "disk"]  # which differ between machines
    says("train", "\n".join(plan[:-2]))


def test_config_show_prints_yaml(rlpost: CommandLine) -> None:
    shown = rlpost("config show train grpo steps=3")
    assert "\nsteps: 3\n" in shown
    for line in ("config show grpo steps=3", "config show steps=3"):
        assert rlpost(line) == shown


def test_lists_name_options_recipes_and_environments(rlpost: CommandLine) -> None:
    everything = rlpost("config list")
    assert "model=\n" in everything
    assert "  qwen " in everything
    recipes = rlpost("config list recipes")
    assert recipes.startswith("recipe=\n")
    assert recipes in everything
    assert re.search(r"^  arithmetic-smollm2-cpu  +\w", recipes, re.MULTILINE)
    assert [line.split()[0] for line in rlpost.lines("config list env")[1:]] == list(options("env"))


@pytest.mark.parametrize(("line", "verbs"), [("--help", []), ("runs list", ["runs"])])
def test_a_verb_is_loaded_when_it_is_named(line: str, verbs: list[str]) -> None:
    program = "import sys\nfrom rlpost.cli.main import run\nrun(sys.argv[1:])\nprint(*sys.modules)\n"
    command = [sys.executable, "-c", program, *line.split()]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert {"torch", "transformers", "vllm", "datasets", "hydra", "omegaconf", "rich"}.isdisjoint(modules)
    assert [verb for verb in (*VERBS, "compare", "again") if f"rlpost.cli.{verb}" in modules] == verbs
    assert ("rlpost.catalog" in modules) <= (verbs != [])


def test_the_program_exits_with_the_code_and_a_plain_message() -> None:
    command = [sys.executable, "-m", "rlpost", "train", "grpo", "lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: lr ")
    assert done.stderr.endswith(" optim.lr?\n")


def test_a_reader_that_leaves_causes_no_noise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rlpost", "config", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.stderr, done.returncode) == ("", 141)


def test_a_training_stopped_while_torch_is_loading_says_so(
    monkeypatch: pytest.MonkeyPatch, rlpost: CommandLine, says: Says
) -> None:
    def interrupted(place: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlpost.catalog.opened", interrupted)
    rlpost("train grpo model=tiny", 130)
    says("train", rlpost.err.splitlines()[-1])
