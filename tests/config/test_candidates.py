"""What a half-typed setting can become."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import COMMANDS, EVAL, TRAIN_GRPO, Command
from rlpost.cli.completion import setting_candidates
from rlpost.config.schema import all_keys, groups_of, options

pytestmark = pytest.mark.usefixtures("here")


def offered(typed: str, command: Command = TRAIN_GRPO) -> list[str]:
    return list(setting_candidates(command, typed))


@pytest.mark.parametrize(
    ("typed", "texts"),
    [
        ("optim.l", ["optim.lr=", "optim.lr=null"]),
        ("optim.be", ["optim.beta1=", "optim.beta2="]),
        ("env=g", ["env=gsm8k"]),
        ("optim.schedule=", ["optim.schedule=constant", "optim.schedule=linear", "optim.schedule=cosine"]),
        ("deterministic=", ["deterministic=true", "deterministic=false"]),
        ("env.limit=", ["env.limit=null"]),
        ("env.sh", ["env.shuffle=", "env.shuffle=true", "env.shuffle=false"]),
        ("recipe=gsm8k-s", ["recipe=gsm8k-smollm2-cpu"]),
        ("bananas", []),
        ("bananas=", []),
        ("env=", [f"env={name}" for name in options("env")]),
    ],
)
def test_what_is_offered(typed: str, texts: list[str]) -> None:
    assert offered(typed) == texts


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_key_of_every_option_is_offered(command: Command) -> None:
    groups = groups_of(command.settings)
    assert set(offered("", command)) == {f"{name}=" for name in [*all_keys(command), *groups, "recipe"]}


def test_runs_are_models(here: Path) -> None:
    (here / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    assert offered("model=run") == ["model=runs/mine"]
    assert "model=runs/mine" in offered("model=")


def test_recipes_are_those_of_the_verb(here: Path) -> None:
    (here / "recipes").mkdir()
    (here / "recipes" / "judge.yaml").write_text("# Judge\ncommand: eval\n")
    assert offered("recipe=", EVAL) == ["recipe=judge"]
    assert "recipe=judge" not in offered("recipe=")
