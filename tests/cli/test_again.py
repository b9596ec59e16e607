"""`rlpost runs replay` and `rlpost runs reproduce`, as they are typed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.runs.reader import read_run
from tests.command_line import CommandLine
from tests.run_folders import make_run, step_row
from tests.says import Says
from tests.trainings import train_in

WORDS = [
    "model=tiny",
    "policy=transformers",
    "model.autocast=none",
    "deterministic=true",
    "env=dataset",
    "env.path=rows.jsonl",
    "env.reward=number",
    "env.max_completion_tokens=12",
    "overlong.penalty_tokens=11",  # random replies differ in nothing but their lengths
    "prompts_per_step=4",
    "group_size=4",
    "eval.enabled=false",
    "gate.enabled=false",
    "report.enabled=false",
    "optim.lr=1e-2",
    "steps=3",
    "checkpoint.every=2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with rows, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("again")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rows = [json.dumps({"prompt": f"Count to {n}.", "answer": str(n)}) for n in range(30)]
        Path("rows.jsonl").write_text("\n".join(rows))
        assert train_in(TRAIN_GRPO, Path("runs/mine"), WORDS) == 0
        yield folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_a_step_is_replayed_beside_other_settings(rlpost: CommandLine) -> None:
    words = ["runs", "replay", "mine", "--step", "3", "loss=cispo", "loss.aggregation=sequence_mean"]
    shown = rlpost(words)
    assert re.match(r"step 3 .* step-000002\nloss/policy ", shown)
    assert "with loss=cispo loss.aggregation=sequence_mean\n" in shown
    assert "cosine 0." in shown
    assert all(len(line) <= 80 and line.isprintable() for line in shown.splitlines())
    told = rlpost.json(words)
    assert (told["step"], told["agrees"], told["updates"]) == (3, True, 1)
    assert told["losses"]["loss/policy"]["recorded"] == read_run(Path("runs/mine")).metrics[2]["loss/policy"]
    assert told["with"]["settings"] == words[5:]
    assert told["tokens_moved"] > 0


def test_a_step_is_replayed_as_it_was(rlpost: CommandLine) -> None:
    told = rlpost.json("runs replay mine")
    assert (told["agrees"], told["with"]) == (True, None)
    shown = rlpost("runs replay mine")
    assert "cosine" not in shown


def test_a_clip_bound_that_cannot_act_is_said(rlpost: CommandLine) -> None:
    shown = " ".join(rlpost("runs replay mine --step 1 loss.clip_high=0.3").split())
    assert "cosine 1.0000, " in shown
    assert "no clip bound" in shown


@pytest.mark.parametrize("words", ["--step 2", "optim.lr=1"])
def test_what_cannot_be_replayed_is_said(words: str, rlpost: CommandLine, says: Says) -> None:
    says("runs", rlpost.refused(f"runs replay mine {words}"))


def test_code_is_named_again(rlpost: CommandLine) -> None:
    overrides = ["env=dataset", "env.path=rows.jsonl", "env.reward=./s.py:s"]
    make_run(Path("runs/own"), [step_row(1, 0.5)], overrides=overrides)
    refused = rlpost.refused("runs reproduce own")
    assert "add env.reward=./s.py:s" in refused
    shutil.rmtree("runs/own")


def test_a_replay_needs_no_reward(rlpost: CommandLine) -> None:
    shutil.copytree("runs/mine", "runs/own")
    file = Path("runs/own/overrides.txt")
    lines = file.read_text().replace("env.reward=number", "env.reward=[./gone.py:s,number]")
    file.write_text(f"{lines}env.reward_weights=[1,2]\n")
    told = rlpost.json("runs replay own loss=cispo")
    assert told["agrees"]
    shutil.rmtree("runs/own")


def test_a_deterministic_run_is_done_again_bit_for_bit(rlpost: CommandLine) -> None:
    mine = read_run(Path("runs/mine"))
    assert any(row["grad_norm"] > 0 for row in mine.metrics)
    shown = rlpost("runs reproduce mine --plain")
    assert shown.startswith("nothing differs ")
    assert re.search(r"bit for bit: 3 steps, .*\(runs/mine-again-1\)\n$", shown)
    again = read_run(Path("runs/mine-again-1"))
    assert again.config == mine.config
    told = rlpost.json("runs reproduce mine --steps 1 --name short")
    assert (told["steps"], told["equal"], told["promised"], told["differences"]) == (1, True, True, [])
    short = read_run(Path("runs/short"))
    assert short.steps_done == 1
    assert short.metrics[0]["lr"] == again.metrics[0]["lr"]  # its schedule is not shorter


def test_what_has_changed_is_named_before_training(rlpost: CommandLine) -> None:
    changed = Path("runs/changed")
    shutil.copytree("runs/mine", changed, symlinks=True)
    environment = json.loads((changed / "environment.json").read_text())
    torch = environment["packages"]["torch"]
    environment["packages"]["torch"] = "1.0"
    (changed / "environment.json").write_text(json.dumps(environment))
    config = (changed / "config.yaml").read_text()
    (changed / "config.yaml").write_text(config.replace("group_size: 4", "group_size: 8"))
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows.replace("Count to", "Count up to"))
    try:
        told = rlpost.json("runs reproduce changed")
    finally:
        Path("rows.jsonl").write_text(rows)
    assert [(each["kind"], each["name"]) for each in told["differences"]] == [
        ("version", "torch"),
        ("data", "train"),
        ("setting", "group_size"),
    ]
    assert told["differences"][0]["now"] == torch
    assert (told["equal"], told["first_step"]) == (False, 1)
    assert "entropy" in {each["name"] for each in told["first_figures"]}
