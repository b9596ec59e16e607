"""`--resume`: which settings a run goes on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.paths import SWEEP_FILE
from rlpost.files import MANIFEST
from tests.command_line import CommandLine
from tests.run_folders import add_checkpoint
from tests.says import Says

pytestmark = pytest.mark.thorough

Planned = Callable[[str], dict[str, Any]]
ASKED = ["model=tiny", "policy=scripted", "prompts_per_step=2", "group_size=2", "env.digits=3", "optim.lr=3e-05"]


def make_run(folder: Path, *, steps: int) -> None:
    """A run as far as `--resume` looks at it before anything is loaded."""
    add_checkpoint(folder, steps)
    (folder / "overrides.txt").write_text("".join(f"{word}\n" for word in ASKED))


@pytest.fixture
def planned(rlpost: CommandLine) -> Planned:
    """The plan of a training, as JSON."""
    return lambda words: rlpost.json(f"train grpo {words} --dry-run")


def test_a_run_goes_on_with_its_own_settings_under_those_given_now(planned: Planned) -> None:
    make_run(Path("runs/sums"), steps=30)
    for resume in ("--name sums --resume auto", "--resume runs/sums"):
        plan = planned(f"{resume} steps=90 optim.lr=1e-5")
        assert plan["folder"] == "runs/sums"
        assert plan["choices"]["model"] == "tiny"
        assert (plan["settings"]["env"]["digits"], plan["settings"]["prompts_per_step"]) == (3, 2)
        assert (plan["settings"]["steps"], plan["settings"]["optim"]["lr"]) == (90, 1e-5)
        assert plan["overrides"] == [*ASKED[:-1], "steps=90", "optim.lr=1e-05"]


def test_settings_that_differ_from_those_of_the_run_are_shown(rlpost: CommandLine) -> None:
    make_run(Path("runs/sums"), steps=30)
    again = "train grpo --name sums --resume auto --dry-run"
    rlpost(f"{again} steps=90 optim.lr=1e-5 loss=dapo env.digits=3")
    assert rlpost.err.endswith(": steps: 60 -> 90; optim.lr: 3e-05 -> 1e-05; loss: grpo -> dapo\n")
    rlpost(f"{again} optim.lr=3e-5")
    assert not rlpost.err


def test_without_a_name_the_settings_given_now_say_which_run_is_meant(planned: Planned) -> None:
    make_run(Path("runs/grpo-arithmetic-tiny-4"), steps=30)
    plan = planned("model=tiny --resume auto")
    assert (plan["folder"], plan["settings"]["env"]["digits"]) == ("runs/grpo-arithmetic-tiny-4", 3)


def test_without_a_name_there_must_be_a_run_to_resume(planned: Planned, rlpost: CommandLine, says: Says) -> None:
    says("train", rlpost.refused("train grpo model=tiny --resume auto --dry-run"))
    plan = planned("model=tiny --resume auto --name new")
    assert plan["folder"] == "runs/new"


def test_a_fork_takes_the_settings_along(planned: Planned) -> None:
    make_run(Path("runs/sums"), steps=30)
    plan = planned("--resume runs/sums/checkpoints/step-000030 --name fork")
    assert (plan["folder"], plan["settings"]["env"]["digits"]) == ("runs/fork", 3)


def test_a_checkpoint_that_keeps_the_model_alone_is_refused_at_once(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/sums"), steps=30)
    older = Path("runs/sums/checkpoints/step-000010")
    shutil.copytree("runs/sums/checkpoints/step-000030", older)
    (older / MANIFEST).write_text('{"model/config.json": {"bytes": 2, "sha256": "0"}}')
    says("train", rlpost.refused(f"train grpo --resume {older} --dry-run", 3))


def without_checkpoint(folder: Path) -> None:
    make_run(folder, steps=30)
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n')


def test_a_run_without_a_checkpoint_begins_again_with_its_settings(
    planned: Planned, rlpost: CommandLine, says: Says
) -> None:
    without_checkpoint(Path("runs/sums"))
    plan = planned("--name sums --resume auto steps=90")
    assert (plan["settings"]["env"]["digits"], plan["settings"]["steps"]) == (3, 90)
    assert plan["overrides"] == [*ASKED, "steps=90"]
    resume = "train grpo --name sums --resume auto --dry-run"
    says("train", "\n".join(line for line in rlpost.lines(resume) if line.startswith("writes")))
    assert "seed=0, not 4" in rlpost.refused(f"{resume} seed=4")
    Path("runs/sums/overrides.txt").write_text("")  # a run that was asked nothing keeps the defaults
    assert "seed=0, not 4" in rlpost.refused(f"{resume} seed=4")


def test_a_run_that_does_not_say_what_it_was_asked_is_not_begun_again(rlpost: CommandLine, says: Says) -> None:
    without_checkpoint(Path("runs/sums"))
    Path("runs/sums/overrides.txt").unlink()
    says("train", rlpost.refused("train grpo --name sums --resume auto --dry-run", 3))


def test_without_a_checkpoint_only_auto_goes_on(rlpost: CommandLine, says: Says) -> None:
    without_checkpoint(Path("runs/sums"))
    for resume in ("--resume runs/sums", "--name sums --resume latest"):
        says("train", rlpost.refused(f"train grpo {resume} --dry-run", 3))


def test_a_job_that_its_sweep_resumes_is_told_everything_by_it(planned: Planned) -> None:
    make_run(Path("runs/lrs/lr-1"), steps=30)
    Path("runs/lrs", SWEEP_FILE).write_text("{}")
    for resume, digits in {"--out runs/lrs/lr-1 --resume auto": 2, "--resume runs/lrs/lr-1": 3}.items():
        assert planned(resume)["settings"]["env"]["digits"] == digits


MUST_STAY = """
    train grpo --resume runs/sums --dry-run seed=4
    train grpo --resume runs/sums --dry-run group_size=4
    train grpo --resume runs/sums --dry-run model.chat_template=plain
    train grpo --resume runs/sums --dry-run model.chat_template_kwargs={enable_thinking:false}
    train grpo --resume runs/sums --dry-run model=smollm2
"""
ANOTHER_ENVIRONMENT = """
    train grpo --resume runs/sums --dry-run env=gsm8k
    train grpo --name sums --resume auto --dry-run env=gsm8k
"""


def test_what_must_stay_is_asked_before_anything_is_loaded(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/sums"), steps=30)
    says("train", rlpost.refusals(MUST_STAY))
    Path("runs/sums/overrides.txt").write_text("model=tiny\n")
    says("train", rlpost.refusals(ANOTHER_ENVIRONMENT))


def test_the_plan_says_where_a_run_goes_on(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/sums"), steps=30)
    for name in ("sums", "new"):
        plan = rlpost.lines(f"train grpo --name {name} --resume auto --dry-run")
        says("train", next(line for line in plan if line.startswith("writes")))


def test_code_is_given_again_since_a_folder_may_be_anybodys(rlpost: CommandLine, planned: Planned) -> None:
    make_run(Path("runs/mine"), steps=30)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(40)))
    Path("score.py").write_text("def score(completions, **columns):\n    raise SystemExit('this ran')\n")
    rows = "env=dataset\nenv.path=rows.jsonl\nenv.reward=./score.py:score\n"
    Path("runs/mine/overrides.txt").write_text(rows)
    resume = "--name mine --resume auto"
    assert "add env.reward=./score.py:score\n" in rlpost.refused(f"train grpo {resume} --dry-run")
    assert planned(f"{resume} env.reward=./score.py:score")["settings"]["env"]["path"] == "rows.jsonl"
    shown = rlpost("runs show mine")
    assert "--resume runs/mine env.reward=./score.py:score" in shown
