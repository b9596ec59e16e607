"""`rlpost eval show`: saved evaluations, and the completions that failed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.evaluation_folders import write
from tests.run_folders import evaluation, make_run
from tests.says import Says


@pytest.fixture(autouse=True)
def evals(here: Path) -> Path:
    """evals/first, a sweep with one job, and a run with held-out completions after step 2."""
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


def prompts(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("prompt ")]


def test_the_list_has_a_line_for_each_evaluation_the_newest_first(rlpost: CommandLine) -> None:
    heading, first, job = rlpost.lines("eval show")
    assert heading.split() == ["evaluation", "model", "env", "figure", "n", "age"]
    # two of three scored prompts are right, and one of four completions
    assert first.startswith("first")
    assert "accuracy  66.7% [" in first
    assert (first.split()[-2:], job.split()[0], job.split()[-1]) == (["3", "3m"], "sweep/seed-1", "1h")
    assert "accuracy  25.0% [" in job
    told = rlpost.json("eval show")
    assert [(each["name"], each["figures"]["accuracy"]["value"], each["samples"]) for each in told] == [
        ("first", pytest.approx(2 / 3), 1),
        ("sweep/seed-1", 0.25, 2),
    ]
    assert [line.split()[0] for line in rlpost.lines("eval show sweep")] == ["evaluation", "seed-1"]


def test_the_worst_completions_come_first_with_the_expected_answer(rlpost: CommandLine, says: Says) -> None:
    about, *lines = rlpost.lines("eval show first")
    assert about.startswith("first  arithmetic, ")  # and its age
    assert prompts(lines) == ["prompt 2", "prompt 1", "prompt 4", "prompt 3"]
    says("eval", "\n".join(lines))


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("first --best", [1, 4, 2, 3]),
        ("first --best --limit 1", [1]),
        ("first --failed", [3]),
        ("first --text Q3", [4]),
        ("first --text nothing", []),
        ("first --sort accuracy_strict", [2, 1, 4, 3]),
        ("first --sort length", [1, 2, 3, 4]),
        ("trained", [2, 1, 4, 3]),
        ("runs/trained --step 2 --best", [1, 4, 2, 3]),
        ("evals/first/samples.parquet", [2, 1, 4, 3]),
    ],
)
def test_completions_are_chosen_and_sorted(words: str, numbers: list[int], rlpost: CommandLine) -> None:
    assert prompts(rlpost.lines(f"eval show {words}")) == [f"prompt {number}" for number in numbers]


def test_a_failed_reward_shows_its_error(rlpost: CommandLine) -> None:
    lines = rlpost.lines("eval show first --failed")
    assert "  error: ValueError: x" in lines


def test_of_several_completions_one_of_each_prompt_comes_first(rlpost: CommandLine) -> None:
    places = prompts(rlpost.lines("eval show sweep/seed-1"))
    assert places == [f"prompt {n}, sample {s}" for n, s in ((1, 1), (2, 0), (2, 1), (1, 0))]


def test_the_figures_of_a_run_are_those_of_the_step(rlpost: CommandLine) -> None:
    lines = rlpost.lines("eval show trained")
    assert lines[0].endswith("after step 2")
    assert lines[1] == "  accuracy  50.0% [30.0%, 70.0%]"


def test_show_as_json(rlpost: CommandLine) -> None:
    told = rlpost.json("eval show first --limit 1 --full")
    [worst] = told["completions"]
    assert (told["found"], told["name"], worst["completion"], worst["expected"]) == (4, "first", "w", "so\nr")
    assert told["figures"]["reward"]["value"] == pytest.approx(2 / 3)


MISTAKES = """
    eval show firsst
    eval show first --sort anwser
    eval show evals/first --step 2
    eval show trained --step 3
    eval show bare
"""


def test_mistakes_are_one_line_and_exit_2(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/bare"))
    says("eval", rlpost.refusals(MISTAKES))


def test_nothing_saved_yet(here: Path, rlpost: CommandLine, says: Says) -> None:
    shutil.rmtree(here / "evals")
    assert rlpost("eval show") == ""
    says("eval", rlpost.err)
