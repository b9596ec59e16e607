"""The facts of a training: each is worded in one file, and shown alike wherever a training is described."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_DISTILL, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.record import Fact, facts_in
from rlpost.runs.reader import read_run
from rlpost.train.facts import Seen, facts_of
from tests.says import Says
from tests.trainings import printed, train_in

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
def test_dry_run_has_the_facts_of_the_training(
    command: Command, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.verb.split(), *words, "--dry-run", "--json"]) == 0
    planned = [(fact["name"], fact["value"]) for fact in json.loads(capsys.readouterr().out)["facts"]]
    assert train_in(command, tmp_path / "run", words) == 0
    shown = capsys.readouterr().out.splitlines()
    kept = read_run(tmp_path / "run").facts
    assert [line for line in shown if line in map(str, kept)] == [str(fact) for fact in kept]
    known_later = ("model", "precision", "data", "tokens", "eval", "writes", "memory", "work")
    alike = [(name, value) for name, value in planned if name not in known_later]
    assert alike == [(fact.name, fact.value) for fact in kept if fact.name not in known_later]
    assert {name for name, _ in planned} <= {fact.name for fact in kept}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with notes about its model."""
    folder = tmp_path_factory.mktemp("facts") / "mine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlpost.train.run.notes_of_model", lambda *given: ["a licence"])
        assert train_in(TRAIN_GRPO, folder, [*SAMPLED, "eval.enabled=false"]) == 0
    return folder


def test_views_of_a_run_show_its_kept_facts(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(finished, tmp_path / "mine", symlinks=True)
    environment = json.loads((folder / "environment.json").read_text())
    assert "a licence" in [fact.note for fact in facts_in(environment)]
    for fact in environment["facts"]:
        fact["value"] = fact["value"].replace("2 prompts", "zwei prompts")
    (folder / "environment.json").write_text(json.dumps(environment))
    assert run(["report", str(folder)]) == 0
    assert run(["export", str(folder), "--out", "exported"]) == 0
    capsys.readouterr()
    assert run(["runs", "show", str(folder)]) == 0
    for text in (
        capsys.readouterr().out,
        (folder / "report.html").read_text(),
        Path("exported/README.md").read_text(),
    ):
        assert "zwei prompts" in text


def test_run_folder_without_facts_is_shown_too(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = shutil.copytree(finished, tmp_path / "old", symlinks=True)
    environment = json.loads((old / "environment.json").read_text())
    del environment["facts"]
    (old / "environment.json").write_text(json.dumps(environment))
    assert run(["runs", "show", str(old)]) == 0
    assert "builtin:tiny" in capsys.readouterr().out
    assert run(["report", str(old)]) == 0


def test_held_out_prompts_that_are_trained_on_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    for name, numbers in (("train", range(12)), ("test", range(10, 14))):
        rows = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    words = [*SAMPLED, "env=dataset", f"env.path={tmp_path}", "env.reward=number"]
    assert train_in(TRAIN_GRPO, tmp_path / "shared", words) == 0
    says("train", printed(capsys, "2 of 4 held-out prompts"))
    assert train_in(TRAIN_GRPO, tmp_path / "apart", [*words, "env.limit=10"]) == 0
    assert not printed(capsys, " of 4 held-out")


@pytest.mark.parametrize(
    ("command", "words", "fact"),
    [
        (TRAIN_EXPERT_ITERATION, [], Fact("select", f"{BEST}, better than the median")),
        (TRAIN_EXPERT_ITERATION, ["min_reward=1"], Fact("select", f"{BEST}, with a reward of 1 or more")),
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
def test_each_kind_of_training_has_its_own_facts(command: Command, words: list[str], fact: Fact) -> None:
    settings = compose(command, ["model=tiny", "policy=transformers", *words]).settings
    assert fact in facts_of(settings, [], Seen("tiny", "runs/x"))
