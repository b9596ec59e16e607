"""`rlpost eval list` and `rlpost eval show`: saved evaluations, and the completions that failed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rlpost.cli.main import run as rlpost
from tests.evaluation_folders import write
from tests.run_folders import evaluation, make_run


@pytest.fixture(autouse=True)
def evals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """evals/first, a sweep with one job, and a run with held-out completions after step 2."""
    monkeypatch.chdir(tmp_path)
    first = write(Path("evals/first"), ["r", "w", "f", "r"])
    job = write(Path("evals/sweep/seed-1"), ["rw", "ww"])
    for age, folder in ((200, first), (4000, job)):
        when = (folder / "result.json").stat().st_mtime - age
        os.utime(folder / "result.json", (when, when))
    make_run(Path("runs/trained"), [{"step": 2, **evaluation(0.5, 0.3, 0.7)}])
    kept = Path("runs/trained/held-out/step-000002.parquet")
    kept.parent.mkdir()
    shutil.copy(first / "samples.parquet", kept)
    return first


def said(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert rlpost(["eval", *words.split()]) == 0
    return capsys.readouterr().out.splitlines()


def prompts(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("prompt ")]


def test_the_list_has_a_line_for_each_evaluation_the_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    heading, first, job = said("list", capsys)
    assert heading.split() == ["evaluation", "model", "env", "figure", "n", "age"]
    # two of three scored prompts are right, and one of four completions
    assert first.startswith("first")
    assert "accuracy  66.7% [" in first
    assert (first.split()[-2:], job.split()[0], job.split()[-1]) == (["3", "3m"], "sweep/seed-1", "1h")
    assert "accuracy  25.0% [" in job
    told = json.loads("\n".join(said("list --json", capsys)))
    assert [(each["name"], each["figures"]["accuracy"]["value"], each["samples"]) for each in told] == [
        ("first", pytest.approx(2 / 3), 1),
        ("sweep/seed-1", 0.25, 2),
    ]


def test_the_worst_completions_come_first_with_the_expected_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said("show", capsys)
    assert lines[0].startswith("first  arithmetic, model builtin:tiny, greedy, 3m ago")
    assert "  4 prompts, 4 completions, 1 reward failed (--failed)" in lines
    assert prompts(lines) == ["prompt 2", "prompt 1", "prompt 4", "prompt 3"]
    begin = lines.index("prompt 2")
    assert lines[begin + 1 : begin + 8] == [
        "  reward 0  strict 0  lenient 0",
        "  2 tokens, stop",
        "  answered 'w', expected r",
        "  prompt",
        "  | <user>q1",
        "  completion",
        "  | w",
    ]


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("first --best", [1, 4, 2, 3]),
        ("first --best --limit 1", [1]),
        ("first --failed", [3]),
        ("first --text Q3", [4]),
        ("first --text nothing", []),
        ("first --part accuracy_strict", [2, 1, 4, 3]),
        ("first --sort length", [1, 2, 3, 4]),
        ("trained", [2, 1, 4, 3]),
        ("runs/trained --step 2 --best", [1, 4, 2, 3]),
        ("evals/first/samples.parquet", [2, 1, 4, 3]),
    ],
)
def test_completions_are_chosen_and_sorted(words: str, numbers: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert prompts(said(f"show {words}", capsys)) == [f"prompt {number}" for number in numbers]


def test_a_failed_reward_shows_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  error: ValueError: x" in said("show first --failed", capsys)


def test_of_several_completions_one_of_each_prompt_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    places = prompts(said("show sweep/seed-1", capsys))
    assert places == [f"prompt {n}, sample {s}" for n, s in ((1, 1), (2, 0), (2, 1), (1, 0))]


def test_the_figures_of_a_run_are_those_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said("show trained", capsys)
    assert lines[:2] == ["trained  held-out prompts, after step 2", "  accuracy  50.0% [30.0%, 70.0%]"]


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads("\n".join(said("show first --json --limit 1 --full", capsys)))
    [worst] = told["completions"]
    assert (told["found"], told["name"], worst["completion"], worst["expected"]) == (4, "first", "w", "so\nr")
    assert told["figures"]["reward"]["value"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show firsst", "there is no evaluation firsst; did you mean first?"),
        ("show first --part anwser", "--part anwser: there is no such part of the reward"),
        ("show evals/first --step 2", "--step 2 is for a run: evals/first is one evaluation"),
        ("show trained --step 3", "runs/trained holds no evaluation after step 3: it has 2"),
        ("show bare", "runs/bare holds no held-out completions: make some with rlpost eval model=runs/bare"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/bare"))
    assert rlpost(["eval", *words.split()]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err


def test_nothing_saved_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert rlpost(["eval", "list"]) == 0
    assert capsys.readouterr().err == "no evaluations in evals/ yet: rlpost eval makes one\n"
    assert rlpost(["eval", "show"]) == 2
