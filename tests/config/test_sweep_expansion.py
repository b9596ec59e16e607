"""Settings with several values become jobs."""

from __future__ import annotations

import pytest

from rlpost.cli.sweep import expand
from rlpost.errors import ConfigError
from tests.says import Says


def test_a_sweep_is_every_combination_the_last_changes_fastest() -> None:
    jobs = expand(["optim.lr=1e-05,3e-05", "steps=3", "group_size=4,8"])
    assert [job.words for job in jobs] == [
        ["optim.lr=1e-05", "steps=3", "group_size=4"],
        ["optim.lr=1e-05", "steps=3", "group_size=8"],
        ["optim.lr=3e-05", "steps=3", "group_size=4"],
        ["optim.lr=3e-05", "steps=3", "group_size=8"],
    ]
    assert jobs[1].differs == {"optim.lr": "1e-05", "group_size": "8"}
    assert jobs[1].title == "optim.lr=1e-05 group_size=8"
    assert jobs[1].name == "lr-1e-05_group-size-8"


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=choice(0, 7)", ["0", "7"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=range(1,4)", ["1", "2", "3"]),
        ("seed=range(3,0,-1)", ["3", "2", "1"]),
        ("seed=range(10,60,20)", ["10", "30", "50"]),
        ("x=range(0,1,0.25)", ["0.0", "0.25", "0.5", "0.75"]),
        ("model=tiny,runs/a", ["tiny", "runs/a"]),
        ("env.operations=[add],[add,subtract]", ["[add]", "[add,subtract]"]),
        ("env.operations=choice([add],[add,subtract])", ["[add]", "[add,subtract]"]),
        ("""env.system_prompt="one, two",no""", ['"one, two"', "no"]),
        ("env.limit=null,4", ["null", "4"]),
    ],
)
def test_several_values_are_written_with_commas_choice_or_range(word: str, values: list[str]) -> None:
    [key] = {word.partition("=")[0]}
    assert [job.differs[key] for job in expand([word])] == values


def test_what_is_no_sweep_is_refused(says: Says) -> None:
    wrong = [["steps=3"], [], ["steps"], ["model=~/a,~/b"], ["seed=1,2,1"]]
    says.refusals("config", ConfigError, expand, wrong)


def test_folder_names_tell_jobs_apart_whatever_the_others_are() -> None:
    assert [job.name for job in expand(["env.seed=0", "env.seed=0,1", "seed=0,1"])][:2] == [
        "env.seed-0_seed-0",
        "env.seed-0_seed-1",
    ]
    signs = [job.name for job in expand(['env.system_prompt="?","!"'])]
    assert len(set(signs)) == 2
    more = [job.name for job in expand(['env.system_prompt="...","?","!"'])]
    assert more[1:] == signs
    long = [job.name for job in expand([f"model=runs/{'x' * 80}/a,runs/{'x' * 80}/b"])]
    assert len(set(long)) == 2
    assert all(len(name) < 80 for name in long)


def test_names_are_single_folders() -> None:
    names = [job.name for job in expand(["model=../../a,./b,'~/c',/d", "env.system_prompt=..,x"])]
    assert all("/" not in name and not name.startswith(".") for name in names)
    assert len(set(names)) == 8
