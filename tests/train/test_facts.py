"""The facts of a training: each is worded in one file, and shown alike wherever a training is described."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_DISTILL, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.record import Fact, facts_in
from rlpost.runs.reader import read_run
from rlpost.train.facts import Seen, facts_of
from tests.trainings import train_in

PACKAGE = Path(__file__).parents[2] / "rlpost"
SMALL = ["model=tiny", "policy=transformers", "steps=1", "env.max_completion_tokens=4", "eval.limit=30"]
BEST, OFTEN = "the best 4 of each prompt", "before and after training, and every 5 steps"
SAMPLED = [*SMALL, "prompts_per_step=2", "group_size=2"]


def test_every_fact_is_made_and_named_in_one_file() -> None:
    made: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func).rpartition(".")[2] == "Fact" and call.args:
                assert isinstance(call.args[0], ast.Constant), f"{file}: {ast.unparse(call)}"
                made.setdefault(str(call.args[0].value), set()).add(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in made.items() if files != {"train/facts.py"}} == {}
    assert {"model", "precision", "data", "policy", "work", "lag", "loss", "lr", "eval", "chosen"} <= made.keys()


@pytest.mark.parametrize(("command", "words"), [(TRAIN_GRPO, SAMPLED), (TRAIN_SFT, SMALL)])
def test_a_dry_run_words_its_facts_as_the_training_does(
    command: Command, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.verb.split(), *words, "--dry-run", "--json"]) == 0
    planned = [(fact["name"], fact["value"]) for fact in json.loads(capsys.readouterr().out)["facts"]]
    assert train_in(command, tmp_path / "run", words) == 0
    shown = capsys.readouterr().out.splitlines()
    kept = read_run(tmp_path / "run").facts
    assert [line for line in shown if line in map(str, kept)] == [str(fact) for fact in kept]
    known_later = ("model", "precision", "data", "tokens", "eval", "writes", "memory")
    alike = [(name, value) for name, value in planned if name not in known_later and name != "work"]
    assert alike == [(fact.name, fact.value) for fact in kept if fact.name not in known_later and fact.name != "work"]
    assert {name for name, _ in planned} <= {fact.name for fact in kept}


@pytest.mark.parametrize(("command", "words"), [(TRAIN_GRPO, SAMPLED), (TRAIN_SFT, SMALL)])
def test_notes_about_the_model_are_among_the_facts(
    command: Command, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.train.run.notes_of_model", lambda *given: ["its licence asks for a name"])
    assert train_in(command, tmp_path / "run", words) == 0
    kept = facts_in(json.loads((tmp_path / "run" / "environment.json").read_text()))
    assert "its licence asks for a name" in [fact.note for fact in kept]


def test_runs_show_the_report_and_the_model_card_show_the_kept_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    assert train_in(TRAIN_GRPO, folder, [*SAMPLED, "eval.enabled=false"]) == 0
    environment = json.loads((folder / "environment.json").read_text())
    for fact in environment["facts"]:
        fact["value"] = fact["value"].replace("2 prompts", "two prompts")
    (folder / "environment.json").write_text(json.dumps(environment))
    capsys.readouterr()
    assert run(["runs", "show", str(folder)]) == 0
    assert "1 step of two prompts x 2 completions = 4" in capsys.readouterr().out
    assert run(["report", str(folder)]) == 0
    assert "1 step of two prompts x 2 completions = 4" in (folder / "report.html").read_text()
    assert run(["export", str(folder), "--out", "exported"]) == 0
    assert "1 step of two prompts x 2 completions = 4" in Path("exported/README.md").read_text()


def test_a_run_folder_without_facts_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_in(TRAIN_GRPO, tmp_path / "old", [*SAMPLED, "eval.enabled=false"]) == 0
    environment = json.loads((tmp_path / "old" / "environment.json").read_text())
    del environment["facts"]
    (tmp_path / "old" / "environment.json").write_text(json.dumps(environment))
    capsys.readouterr()
    assert run(["runs", "show", str(tmp_path / "old")]) == 0
    assert "model       tiny (builtin:tiny)" in capsys.readouterr().out
    assert run(["report", str(tmp_path / "old")]) == 0


@pytest.mark.parametrize(
    ("command", "words", "fact"),
    [
        (TRAIN_EXPERT_ITERATION, [], Fact("select", f"{BEST}, better than the median")),
        (
            TRAIN_EXPERT_ITERATION,
            ["min_reward=1"],
            Fact("select", f"{BEST}, with a reward of 1 or more"),
        ),
        (TRAIN_DISTILL, ["teacher=builtin:tiny"], Fact("teacher", "builtin:tiny")),
        (TRAIN_DISTILL, ["hint='It is {answer}.'"], Fact("teacher", "the model itself, told: It is {answer}.")),
        (TRAIN_GRPO, ["env.max_turns=3"], Fact("turns", "at most 3 a conversation")),
        (TRAIN_GRPO, ["lora.enabled=true"], Fact("lora", "rank 16, alpha 32, on all linear layers")),
        (TRAIN_GRPO, ["eval.enabled=false"], Fact("eval", "none, by eval.enabled=false")),
        (
            TRAIN_SFT,
            ["eval.every=5"],
            Fact("eval", "loss on up to 500 held-out rows; before and after training, and every 5 steps"),
        ),
    ],
)
def test_each_kind_of_training_has_facts_of_its_own(command: Command, words: list[str], fact: Fact) -> None:
    settings = compose(command, ["model=tiny", "policy=transformers", *words]).settings
    assert fact in facts_of(settings, [], Seen("tiny", "runs/x"))
