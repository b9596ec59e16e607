"""Verbs, messages and exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlpost import __version__
from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.config.schema import options
from rlpost.errors import ConfigError, DataError, DivergedError, PolicyError, RlpostError
from rlpost.settings import GRPOSettings
from rlpost.settings.commands import RunRequest
from tests.trainings import stand_in_for_grpo


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """A stand-in for `rlpost.train.grpo` that notes what it was asked, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    noted = types.SimpleNamespace(settings=None, request=None, outcome=0)

    def train(settings: GRPOSettings, request: RunRequest, assemble: None, learn: None) -> int:
        noted.settings, noted.request = settings, request
        if isinstance(noted.outcome, BaseException):
            raise noted.outcome
        return noted.outcome

    stand_in_for_grpo(monkeypatch, train)
    return noted


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"rlpost {__version__}\n"


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


def test_a_path_that_one_may_not_use_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *arguments: Any, **more: Any) -> bool:  # as Python 3.11 does, for whoever is not root
        if "secret" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return False

    monkeypatch.setattr(Path, "is_dir", refused)
    monkeypatch.setattr(Path, "is_file", refused)
    assert run(["eval", "compare", "secret/a", "secret/b"]) == 2
    assert "secret/a: permission denied; give a path" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian grpo", "rlpost has no verb trian; did you mean rlpost train?"),
        ("grpo", "rlpost has no verb grpo; did you mean rlpost train grpo?"),
        ("env tst x", "rlpost env has no verb tst; did you mean rlpost env test?"),
        ("bananas", "rlpost has no verb bananas; it has "),
        ("train steps=3", "rlpost train needs a verb before steps=3: rlpost train grpo"),
        ("train grpo --nmae x", "rlpost train grpo has no option --nmae; did you mean --name?"),
        ("train grpo --optim.lr=3", "--optim.lr: settings are written without dashes; write optim.lr=3"),
        ("train grpo --group-size 3", "write group_size=3"),
        ("train grpo --beta null", "write loss.kl_coef=null"),
        ("train grpo --packing true", "train grpo has no option --packing: it belongs to rlpost train sft"),
        ("config show train sft --epochs 2", "write epochs=2"),
        ("doctor dpo --max-length 3", "write max_tokens=3"),
        ("chat smollm2 --learning-rate 1", "no option --learning-rate; see rlpost chat --help"),
        ("train grpo --bananas", "rlpost train grpo has no option --bananas; see rlpost train grpo --help"),
        ("train grpo --seed many", "--seed many is of the wrong type: it takes a whole number"),
        ("chat x --temperature hot", "--temperature hot is of the wrong type: it takes a number"),
        ("chat x --top-p 3", "--top-p 3 is out of range: it must be at most 1"),
        ("rollouts show x --limit 0", "--limit 0 is out of range: it must be at least 1"),
        ("rollouts show x --sort rewrd", "--sort rewrd is unknown: it is one of reward, length, advantage; did you"),
        ("runs tail x -n -1", "-n/--lines -1 is out of range"),
        ("train grpo --seed -1", "seed=-1 is out of range"),
        ("train grpo --resume", "--resume needs a value: write --resume auto|latest|PATH"),
        ("rollouts show x --sort", "--sort needs a value: write --sort reward|length|advantage"),
        ("train grpo --config x.yaml", "has no option --config; did you mean recipe=FILE.yaml?"),
        ("-V", "rlpost has no option -V; did you mean --version?"),
        ("chat", "rlpost chat needs PATH: write rlpost chat PATH [model.KEY=VALUE]...; see rlpost chat --help"),
        ("config diff a", "rlpost config diff needs B: write rlpost config diff A B; see"),
        ("rollouts export all.csv", "needs FILE: write rlpost rollouts export RUN FILE; see"),
        ("info please", "rlpost info does not take please; see rlpost info --help"),
        ("help", "rlpost has no verb help; did you mean rlpost --help?"),
        ("version", "rlpost has no verb version; did you mean rlpost --version?"),
        ("runs ls", "rlpost runs has no verb ls; did you mean rlpost runs list?"),
        ("train grpo optm.lr=1", "optm.lr is not a setting of rlpost train grpo; did you mean optim.lr?"),
        ("train grpo +steps=1", "write steps=1"),
        ("eval optim.lr=1", "it belongs to rlpost train grpo"),
        ("config list modle", "modle is not a group; did you mean model?"),
        ("config show evl", "evl has no configuration; did you mean eval?"),
        ("env show gsm9k", "env=gsm9k is unknown; did you mean gsm8k?"),
        ("env test gsm8k steps=3", "steps is not a setting of rlpost eval"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_group_without_a_verb_prints_its_help_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config"]) == 2
    assert "Usage: rlpost config" in capsys.readouterr().err


def test_training_is_given_the_settings_and_the_request(training: types.SimpleNamespace) -> None:
    arguments = ["train", "grpo", "env=gsm8k", "steps=3", "--seed", "7", "--name", "first"]
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


@pytest.mark.parametrize("status", [0, 130, 143])
def test_the_status_of_training_is_the_exit_code(status: int, training: types.SimpleNamespace) -> None:
    training.outcome = status
    assert run(["train", "grpo"]) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("no"), 2), (DataError("no"), 3), (DivergedError("no"), 4), (PolicyError("no"), 5)],
)
def test_a_deliberate_error_is_a_message_and_its_exit_code(
    error: RlpostError, status: int, training: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    training.outcome = error
    assert run(["train", "grpo"]) == status
    assert capsys.readouterr().err == "error: no\n"


def test_a_bug_keeps_its_traceback(training: types.SimpleNamespace) -> None:
    training.outcome = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        run(["train", "grpo"])


def test_a_broken_pipe_that_is_not_stdout_is_a_bug(training: types.SimpleNamespace) -> None:
    training.outcome = BrokenPipeError()
    with pytest.raises(BrokenPipeError):
        run(["train", "grpo"])


def test_an_interrupt_is_exit_130(training: types.SimpleNamespace) -> None:
    training.outcome = KeyboardInterrupt()
    assert run(["train", "grpo"]) == 130


def test_a_dry_run_says_what_would_run_and_does_not(
    training: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a\x1b[31mb").mkdir()
    Path("a\x1b[31mb/train.jsonl").write_text(
        "".join(f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(400))
    )
    words = [
        "recipe=gsm8k-smollm2-cpu",
        "model=tiny",
        "env.path=a\x1b[31mb",
        "policy=transformers",
        "--dry-run",
        "--name",
        "x",
    ]
    assert run(["train", "grpo", *words]) == 0
    assert training.request is None
    plan = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in plan[-2:]] == ["memory", "disk"]
    assert plan[:-2] == [
        "model   builtin:tiny: 90.6k parameters, float32 weights, device auto",
        "precision auto: float32 or bfloat16, chosen at the start",
        "data    gsm8k from a\\x1b[31mb, train split, 362 prompts, 38 held out",
        "policy  transformers, temperature 1",
        "work    20 steps of 4 prompts x 4 completions = 16, at most 128 tokens each, seed 0",
        "loss    grpo, advantage.estimator=grpo",
        "lr      1e-05, constant",
        "eval    32 held-out prompts, greedy; before and after training",
        "writes  runs/x",
    ]
    assert not Path("runs").exists()


def test_cfg_and_config_show_print_the_same_yaml(
    training: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for line in (
        "train grpo steps=3 --cfg",
        "config show train grpo steps=3",
        "config show grpo steps=3",
        "config show steps=3",
    ):
        assert run(line.split()) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1
    assert "\nsteps: 3\n" in outputs[0]
    assert training.request is None


def test_config_list_names_options_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "list"]) == 0
    everything = capsys.readouterr().out
    assert "model=\n" in everything
    assert "  qwen " in everything
    assert "  gsm8k-smollm2-cpu " in everything
    assert run(["config", "list", "recipes"]) == 0
    recipes = capsys.readouterr().out
    assert recipes.startswith("recipe=\n")
    assert re.search(r"^  arithmetic-smollm2-cpu  +SmolLM2-135M learns", recipes, re.MULTILINE)


def test_env_list_names_every_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(options("env"))


def test_help_starts_at_once_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, time, rlpost.cli.main\n"
        "heavy = ('torch', 'transformers', 'vllm', 'datasets', 'hydra', 'omegaconf', 'rich')\n"
        "print([m for m in heavy if m in sys.modules])\n"
        "print(time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy, seconds = done.stdout.splitlines()
    assert heavy == "[]"
    assert float(seconds) < 3  # of this process alone, whatever else the machine does; 0.1 s where it is fast


def test_the_program_exits_with_the_code_and_a_plain_message() -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rlpost", "train", "grpo", "lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: lr is not a setting of rlpost train grpo; did you mean optim.lr?\n"


def test_a_reader_that_leaves_causes_no_noise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rlpost", "config", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_training_stopped_while_torch_is_loading_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(place: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlpost.catalog.opened", interrupted)
    assert run(["train", "grpo", "model=tiny"]) == 130
    assert capsys.readouterr().err.endswith("stopped before the training began\n")
