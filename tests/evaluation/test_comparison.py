"""Which of two evaluations is better, prompt by prompt, in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.errors import DataError
from rlpost.evaluation.comparison import Comparison, compare
from rlpost.evaluation.saved import SavedEvaluation, read_evaluation, write_evaluation
from tests.evaluation_folders import answered, write
from tests.says import Says


def compared(folder: Path, a: list[str], b: list[str], **of_b: object) -> Comparison:
    made = write(folder / "a", a), write(folder / "b", b, **of_b)  # pyright: ignore[reportArgumentType]
    return compare(*(read_evaluation(one / "samples.parquet") for one in made))


def test_more_right_prompts_than_chance_makes_are_better(tmp_path: Path) -> None:
    found = compared(tmp_path, ["w"] * 20 + ["r"] * 20, ["r"] * 10 + ["w"] * 10 + ["r"] * 20)
    lenient = found.measures["accuracy_lenient"]
    assert found.verdict == lenient.verdict == "B is better"
    assert (lenient.a, lenient.b, lenient.difference.value) == (0.5, 0.75, 0.25)
    assert list(found.measures) == ["accuracy_lenient", "accuracy_strict", "reward"]
    assert (found.prompts, found.only_a, found.only_b) == (40, 0, 0)


def test_the_other_way_round_it_is_worse(tmp_path: Path) -> None:
    assert compared(tmp_path, ["r"] * 10 + ["w"] * 10, ["w"] * 20).verdict == "B is worse"


def test_pairs_are_formed_by_task_not_by_place(tmp_path: Path) -> None:
    """B holds tasks q1 to q20, of which q20 is not in A: q0 is only in A."""
    found = compared(tmp_path, ["w"] + ["r"] * 19, ["r"] * 20, first=1)
    assert (found.prompts, found.only_a, found.only_b) == (19, 1, 1)
    assert found.measures["accuracy_lenient"].difference.differing == 0
    assert re.findall(r"(\d+) only", found.lines()[3]) == ["1", "1"]


def test_a_prompt_without_a_scored_completion_is_left_out(tmp_path: Path) -> None:
    found = compared(tmp_path, ["f", "r", "r"], ["r", "r", "r"])
    assert (found.prompts, found.only_a, found.only_b) == (2, 0, 1)


def test_a_task_that_stands_twice_in_the_data_is_two_prompts(tmp_path: Path) -> None:
    for name, marks in (("a", "rw"), ("b", "wr")):
        played = [c for number, mark in enumerate(marks) for c in answered("same", mark, number)]
        write_evaluation(tmp_path / name, {}, played)
    found = compare(*(read_evaluation(tmp_path / name / "samples.parquet") for name in "ab"))
    assert found.prompts == 2
    assert found.measures["accuracy_lenient"].difference.differing == 2


def test_completions_of_a_prompt_are_averaged_first(tmp_path: Path) -> None:
    found = compared(tmp_path, ["rrww", "wwww"], ["r", "w"])
    lenient = found.measures["accuracy_lenient"]
    assert (lenient.a, lenient.b) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "number"),
    [
        (["r", "w"] * 30, ["r", "w"] * 30, "0 of 60"),
        # (1.96 + 0.84) * 1.0235 / sqrt(21); the difference is within noise, so no number of prompts is advised
        (["r"] * 10 + ["w"] * 11, ["w"] * 10 + ["r"] * 11, "62.6%"),
        # a difference of 0.1: 100 prompts can show 0.152, and 230 would show this one
        (["w"] * 20 + ["r"] * 80, ["r"] * 20 + ["w"] * 10 + ["r"] * 70, "15.2%"),
        (["r"], ["w"], "1 of 1"),
    ],
    ids=["equal", "noise", "few", "one prompt"],
)
def test_what_could_not_be_shown_is_measured(
    a: list[str], b: list[str], number: str, tmp_path: Path, says: Says
) -> None:
    found = compared(tmp_path, a, b)
    assert number in found.verdict
    assert [line.split()[0] for line in found.lines() if "80% power" in line] == (["230"] if number == "15.2%" else [])
    says("eval", found.verdict)


def test_a_row_has_both_values_and_their_difference(tmp_path: Path, says: Says) -> None:
    """Half of 40 differences are 1: 0.5 -+ t(39) s / sqrt(40), with s^2 = 10 / 39 and t = 2.0227, is 0.5 -+ 0.162."""
    lines = compared(tmp_path, ["w"] * 40, ["r"] * 20 + ["w"] * 20).lines()
    assert lines[4].split()[2:] == ["0.0%", "50.0%", "+50.0%", "[+33.8%,", "+66.2%]"]
    assert lines[6].split()[1:] == ["0.000", "0.500", "+0.500", "[+0.338,", "+0.662]"]
    says("eval", "\n".join(lines))


def test_the_table_fits_eighty_columns(tmp_path: Path) -> None:
    lines = compared(tmp_path, ["w"] * 20 + ["r"] * 980, ["r"] * 20 + ["w"] * 980).lines()
    assert max(map(len, lines)) <= 80
    assert lines[4].split()[:4] == ["accuracy,", "lenient", "98.0%", "2.0%"]


def test_other_environments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"env=arithmetic .* env=gsm8k"):
        compared(tmp_path, ["r"], ["r"], choice="gsm8k")


def test_prompts_of_which_none_is_the_same_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 and 1"):
        compared(tmp_path, ["r", "r"], ["r"], first=7)


def with_values(folder: Path, values: dict[str, float | None]) -> SavedEvaluation:
    """An evaluation of twelve right answers, with other values in the columns named."""
    made = read_evaluation(write(folder, ["r"] * 12) / "samples.parquet")
    return replace(made, samples=[{**sample, **values} for sample in made.samples])


@pytest.mark.parametrize("reward", [float("inf"), float("-inf"), float("nan")])
def test_a_reward_that_is_no_finite_number_is_left_out(tmp_path: Path, reward: float) -> None:
    found = compare(with_values(tmp_path / "a", {}), with_values(tmp_path / "b", {"reward": reward}))
    assert list(found.measures) == ["accuracy_lenient", "accuracy_strict"]


def test_differing_settings_are_named_except_the_models(tmp_path: Path, says: Says) -> None:
    of_b = {"sampling": {"top_p": 0.9}, "model": {"path": "b"}, "env": {"limit": 3, "prompt_template": "{question}"}}
    found = compared(tmp_path, ["r"], ["r"], **of_b)
    assert found.differing_settings == {"env.prompt_template": (None, "{question}"), "sampling.top_p": (None, 0.9)}
    says("eval", "\n".join(line for line in found.lines() if line.startswith("beware")))


def test_it_reads_as_json(tmp_path: Path) -> None:
    plain = compared(tmp_path, ["w"] * 8, ["r"] * 8).as_dict()
    assert plain["verdict"] == "B is better"
    assert plain["measures"]["reward"]["difference"]["value"] == 1.0
    assert (plain["confidence"], plain["power"]) == (0.95, 0.8)
