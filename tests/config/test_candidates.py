"""What a half-typed setting can become."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.catalog import CHOICES, COMMANDS, EVAL, TRAIN_GRPO, Command
from rlpost.cli.completion import file_candidates, key_candidates, recipe_candidates, setting_candidates
from rlpost.config.compose import merge_all
from rlpost.config.schema import options


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(typed: str, *given: str, command: Command = TRAIN_GRPO, files: bool = True) -> list[str]:
    return [candidate.text for candidate in setting_candidates(command, given, typed, files=files)]


@pytest.mark.parametrize(
    ("typed", "given", "texts"),
    [
        ("optim.l", [], ["optim.lr=", "optim.lr=null"]),
        ("optim.be", [], ["optim.beta1=", "optim.beta2="]),
        ("optim.be", ["optim.beta1=0.8"], ["optim.beta2=", "optim.beta2=0.999"]),
        ("env=g", [], ["env=gsm8k"]),
        ("optim.schedule=", [], ["optim.schedule=constant", "optim.schedule=linear", "optim.schedule=cosine"]),
        ("deterministic=", [], ["deterministic=true", "deterministic=false"]),
        ("env.limit=", [], ["env.limit=null"]),
        ("env.sh", [], []),
        ("env.sh", ["env=gsm8k"], ["env.shuffle=", "env.shuffle=true", "env.shuffle=false"]),
        ("env.sh", ["recipe=gsm8k-smollm2-cpu"], ["env.shuffle=", "env.shuffle=true", "env.shuffle=false"]),
        ("env.dig", ["recipe=gsm8k-smollm2-cpu", "env=arithmetic"], ["env.digits=", "env.digits=2"]),
        ("steps=", ["recipe=gsm8k-smollm2-cpu"], ["steps=20"]),
        ("recipe=gsm8k-s", [], ["recipe=gsm8k-smollm2-cpu"]),
        ("bananas", [], []),
        ("bananas=", [], []),
        ("env=", ["env"], [f"env={name}" for name in options("env")]),
    ],
)
def test_what_is_offered(typed: str, given: list[str], texts: list[str]) -> None:
    assert offered(typed, *given) == texts


def test_the_value_that_holds_comes_from_conf_too() -> None:
    assert offered("model.path=", "model=tiny", files=False) == ["model.path=builtin:tiny"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_key_under_every_option_is_offered(command: Command) -> None:
    for group in (g for g in CHOICES if g in command.settings.__dataclass_fields__):
        for option in options(group, command):
            word = f"{group}={option}"
            keys = {f"{key.name}=" for key in merge_all(command, [word]).keys}
            groups = {f"{g}=" for g in CHOICES if g in command.settings.__dataclass_fields__ and g != group}
            assert set(offered("", word, command=command)) == keys | groups | {"recipe="}


def test_every_candidate_says_something() -> None:
    silent = [c.text for c in setting_candidates(TRAIN_GRPO, [], "") if not c.about]
    assert silent == []


def test_runs_are_models(folder: Path) -> None:
    (folder / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "no-run").mkdir()
    assert offered("model=run") == ["model=runs/mine"]
    assert "model=runs/mine" in offered("model=")


def test_recipes_are_those_of_the_verb(folder: Path) -> None:
    (folder / "recipes").mkdir()
    (folder / "recipes" / "judge.yaml").write_text("# Judge\ncommand: eval\n")
    assert [c.text for c in recipe_candidates("", EVAL)] == ["judge"]
    assert "judge" not in [c.text for c in recipe_candidates("", TRAIN_GRPO)]


def test_files_are_offered_by_ending_and_a_lone_folder_with_what_is_in_it(folder: Path) -> None:
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("")
    (folder / "score.py").write_text("def exactness(): ...\ndef _own(): ...\n")
    (folder / ".hidden").write_text("")
    assert [c.text for c in file_candidates("")] == ["rows/", "score.py"]
    assert [c.text for c in file_candidates("r")] == ["rows/", "rows/train.jsonl"]
    assert [c.text for c in file_candidates("", (".py",))] == ["rows/", "score.py"]
    assert [c.text for c in file_candidates("nowhere/")] == []
    assert offered("plugin=s") == ["plugin=score.py"]
    assert offered("env.path=rows/", "env=gsm8k") == ["env.path=rows/train.jsonl"]
    assert offered("env.path=rows/", "env=gsm8k", files=False) == []
    assert offered("env.reward=score.py:", "env=dataset") == ["env.reward=score.py:exactness"]


def test_broken_files_of_the_users_are_passed_over(folder: Path) -> None:
    (folder / "conf" / "env").mkdir(parents=True)
    (folder / "conf" / "env" / "mine.yaml").write_text("limit: [3\n")
    (folder / "broken.yaml").write_text("\xff: [")
    assert offered("env=min") == ["env=mine"]
    assert offered("env.li", "env=mine") == ["env.limit=", "env.limit=null"]
    assert offered("optim.l", "recipe=broken.yaml") == ["optim.lr=", "optim.lr=null"]
    assert offered("optim.l", "recipe=nowhere") == ["optim.lr=", "optim.lr=null"]


def test_keys_to_explain_are_those_of_every_option() -> None:
    names = [c.text for c in key_candidates(TRAIN_GRPO, "env")]
    assert names[0] == "env"
    assert {"env.digits", "env.path", "env.reward"} <= set(names)
    assert "sampling" in [c.text for c in key_candidates(TRAIN_GRPO, "sam")]


def test_completing_needs_neither_hydra_nor_torch() -> None:
    program = (
        "import sys; from rlpost.catalog import TRAIN_GRPO; from rlpost.cli.completion import *\n"
        "setting_candidates(TRAIN_GRPO, ['env=gsm8k', 'recipe=gsm8k-smollm2-cpu'], 'env.')\n"
        "print([m for m in ('hydra', 'omegaconf', 'torch', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
