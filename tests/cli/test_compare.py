"""`rlpost runs compare`: several runs beside each other, and the settings that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost import imports
from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from tests.command_line import CommandLine
from tests.evaluation_folders import keep_held_out
from tests.run_folders import evaluation, make_run, step_row
from tests.says import Says

Compared = Callable[[str], list[str]]


def make(name: str, rewards: Sequence[float], *, lr: float, **config: Any) -> Path:
    """A run of as many steps as `rewards`, with an evaluation before and after."""
    rows: list[dict[str, Any]] = [{"step": 0, **evaluation(0.25, 0.15, 0.4)}]
    rows += [step_row(step, reward) for step, reward in enumerate(rewards, start=1)]
    rows[-1] |= evaluation(0.5, 0.35, 0.65)
    folder = make_run(Path("runs") / name, rows, steps=len(rewards))
    settings = {"model": {"path": "builtin:tiny"}, "steps": len(rewards), "optim": {"lr": lr}, **config}
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def two(here: Path) -> list[Path]:
    """runs/first, whose reward rises, and runs/second, whose reward falls."""
    return [make("first", [0.0, 0.5, 1.0], lr=1e-5), make("second", [1.0, 0.5, 0.0], lr=2e-5, seed=1)]


@pytest.fixture
def compared(rlpost: CommandLine) -> Compared:
    """The lines of a comparison of these runs."""

    def lines(words: str) -> list[str]:
        out = rlpost(f"runs compare {words}")
        assert "\x1b" not in out
        return out.splitlines()

    return lines


def test_two_runs_are_drawn_and_tabled_beside_each_other(compared: Compared, says: Says) -> None:
    lines = compared("first second")
    drawn = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[2:13]]
    assert (drawn[0][0], drawn[0].rstrip("│")[-1]) == ("B", "A")  # at the top B begins, and A ends
    assert (drawn[-1][0], drawn[-1].rstrip("│")[-1]) == ("A", "B")
    assert ("1.00" in lines[2], "0.00" in lines[12]) == (True, True)
    assert lines[14].split() == ["1", "2", "3"]
    rows = [line.split() for line in lines]
    assert ["A", "first", "finished", "3/3", "1.000", "300", "12.0"] in rows
    assert ["B", "second", "finished", "3/3", "0.000", "300", "12.0"] in rows
    shares = ["25.0%", "[15.0%,", "40.0%]", "50.0%", "[35.0%,", "65.0%]", "50"]
    assert ["A", "first", *shares] in rows
    says("runs", "\n".join(line for line in lines if not {*"│─"} & {*line}))


def test_settings_that_differ_name_the_runs_of_each_value(compared: Compared) -> None:
    make("third", [0.0, 0.0, 0.0], lr=1e-5)
    lines = compared("first second third")
    assert "optim.lr  AC=1e-05  B=2e-05" in lines
    assert lines[-1].startswith("1 setting ")  # seed, which only one of them has
    assert not [line for line in lines if line.startswith(("model.path", "steps"))]


def test_held_out_completions_give_a_paired_test(two: list[Path], compared: Compared, says: Says) -> None:
    def verdict(runs: str) -> str:
        [line] = [line for line in compared(runs) if line.endswith("40 prompts") or "40 prompts;" in line]
        return line

    first, second = two
    keep_held_out(first, 0, ["r"] * 40)  # before training: it does not count
    keep_held_out(first, 3, ["r"] * 10 + ["w"] * 30)
    keep_held_out(second, 3, ["r"] * 30 + ["w"] * 10)
    better, worse = verdict("first second"), verdict("second first")
    assert "better" in better
    assert "+50.0% [+33.8%, +66.2%]" in better  # 20 differences of 1 and 20 of 0: 0.5 ± 2.0227 sqrt(0.25 / 39)
    assert "worse" in worse
    assert "-50.0% [-66.2%, -33.8%]" in worse
    keep_held_out(second, 4, ["r"] * 10 + ["w"] * 30)
    says("runs", "\n".join([better, worse, verdict("first second")]))


def test_without_completions_there_is_no_paired_test(two: list[Path], compared: Compared, says: Says) -> None:
    keep_held_out(two[1], 0, ["r"])
    says("runs", next(line for line in compared("second first") if line.startswith("no paired")))


def test_long_runs_are_drawn_as_means_and_ten_fit(compared: Compared) -> None:
    more = [f"more-{number}" for number in range(8)]
    for name in more:
        make(name, [0.5] * 300, lr=1e-5)
    lines = compared(f"first second {' '.join(more)}")
    assert lines[0].endswith("of 7 steps")  # 100 columns have room for 45 points
    assert [line.split()[1] for line in lines if line.startswith("J ")] == ["more-7", "more-7"]
    assert len(lines) < 80


def test_compare_as_json(two: list[Path], rlpost: CommandLine) -> None:
    for run in two:
        keep_held_out(run, 3, ["r", "w"])
    told = rlpost.json("runs compare first second --key grad_norm")
    assert [(run["letter"], run["name"], run["reward"], run["tokens"]) for run in told["runs"]] == [
        ("A", "first", 1.0, 300.0),
        ("B", "second", 0.0, 300.0),
    ]
    assert told["runs"][0]["curves"] == {"grad_norm": [[1, 1.5], [2, 1.5], [3, 1.5]]}
    assert told["settings"] == {"optim.lr": ["1e-05", "2e-05"]}
    assert told["settings_of_some"] == {"seed": ["-", "1"]}
    [test] = told["tests"]
    assert (test["a"], test["b"], test["prompts"]) == ("A", "B", 2)


def test_settings_of_two_verbs_mark_what_one_lacks(rlpost: CommandLine) -> None:
    found = rlpost.json("runs compare 'train grpo env=gsm8k' 'eval env=gsm8k'")
    assert found["settings"]["steps"] == {"a": 60}
    assert found["settings"]["env.split"] == {"a": "train", "b": "test"}
    assert "env" not in found["settings"]


def test_settings_of_a_group_stand_together(rlpost: CommandLine) -> None:
    keys = [line.split()[0] for line in rlpost("runs compare '' env=gsm8k").splitlines()[1:]]
    assert keys[0] == "env"
    assert all(key.startswith("env.") for key in keys[1:])
    assert rlpost("runs compare '' 'env=gsm8k steps=3'").splitlines()[-1].split() == ["steps", "60", "3"]


def test_two_runs_without_figures_differ_in_settings_and_versions(rlpost: CommandLine) -> None:
    for name, lr, torch in (("a", "1e-6", "2.12"), ("b", "1e-5", "2.13")):
        composed = compose(TRAIN_GRPO, ["env=gsm8k", f"optim.lr={lr}"])
        folder = make_run(Path("runs", name), overrides=composed.overrides)
        (folder / "config.yaml").write_text(composed.yaml)
        (folder / "environment.json").write_text(json.dumps({"packages": {"torch": torch}, "seed": len(lr)}))
    lines = rlpost("runs compare runs/a b").splitlines()
    assert "optim.lr  A=1e-06  B=1e-05" in lines
    assert lines[-1] == "version torch  A=2.12  B=2.13"
    found = rlpost.json("runs compare runs/a gsm8k-smollm2-cpu")
    assert found["environment"] == {}
    assert found["settings"]["steps"] == {"a": 60, "b": 20}


def test_comparing_runs_nothing_that_a_run_names(rlpost: CommandLine, here: Path) -> None:
    Path("code.py").write_text("raise SystemExit('this ran')\n")
    for name, env in (("a", "largest"), ("b", "gsm8k")):
        words = [f"plugin={here}/code.py", f"env={env}", "env.numbers=3", "model=tiny"]
        make_run(Path("runs", name), overrides=words)
    assert "env  A=largest  B=gsm8k" in rlpost("runs compare a b").splitlines()


MISTAKES = """
    runs compare first
    runs compare first secnd
    runs compare first second --key reward
    runs compare first --plot curve.jpg
    runs compare gsm8k-smollm-cpu ''
    runs compare . ''
"""


def test_mistakes_are_one_line_and_exit_2(rlpost: CommandLine, says: Says) -> None:
    says("runs", rlpost.refusals(MISTAKES))


def test_a_picture_has_curves_labels_and_a_legend(rlpost: CommandLine) -> None:
    make("$x_1$", [0.0, 0.9, 0.3], lr=1e-5)
    rlpost("runs compare first $x_1$ --plot curves.svg --smooth 3")
    picture = Path("curves.svg").read_text()
    texts = re.findall(r">([^<>]+)</text>", picture)
    assert {"reward of the step's completions", "held-out accuracy (%)", "step", "first", "$x_1$"} <= {*texts}
    # the second run's reward, each value the mean of its neighbours: 0.45, 0.4, 0.6
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke-dasharray[^>]*stroke: #d55e00', picture)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", paths[0])]
    assert (heights[1] - heights[0]) / (heights[2] - heights[0]) == pytest.approx((0.4 - 0.45) / (0.6 - 0.45), rel=1e-3)


@pytest.fixture
def sweep() -> Path:
    """runs/lrs, of two learning rates with two seeds each."""
    folder = Path("runs/lrs")
    jobs = []
    for lr in ("1e-5", "2e-5"):
        for seed in (0, 1):
            run = make(f"lrs/lr-{lr}_seed-{seed}", [0.0, 0.5, 1.0], lr=float(lr), seed=seed)
            after = evaluation(1e4 * float(lr) + 0.01 * seed, 0.1, 0.9)
            result = {"metrics": {}, "evaluation_before": None, "evaluation_after": after}
            differs = {"optim.lr": lr, "seed": str(seed)}
            jobs.append({"name": run.name, "differs": differs, "exit_code": 0, "result": result})
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return folder


def test_a_sweep_is_compared_by_its_settings_over_their_seeds(
    sweep: Path, compared: Compared, rlpost: CommandLine, says: Says
) -> None:
    lines = compared("lrs")
    assert "optim.lr  AB=1e-05  CD=2e-05" in lines
    table = next(i for i, line in enumerate(lines) if line.startswith("optim.lr  seeds "))
    assert lines[table + 1].split()[:4] == ["2e-5", "2", "1.000", "20.5%"]
    [found] = [line for line in lines if "2 seeds" in line]
    assert "+10.0%" in found  # each seed is better by 10 points, and nothing else is known to vary
    says("runs", found)
    assert not [line for line in lines if "paired" in line]
    assert lines[table] in rlpost("runs show lrs")


def test_a_sweep_stands_for_its_runs_beside_other_runs(sweep: Path, rlpost: CommandLine) -> None:
    told = rlpost.json("runs compare first lrs")
    assert [run["name"] for run in told["runs"]][:2] == ["first", "lr-1e-5_seed-0"]
    assert (len(told["runs"]), len(told["tests"])) == (5, 4)
    assert rlpost("report lrs").startswith("runs/lrs/report.html: 4 runs")


def test_a_picture_draws_the_seeds_of_a_setting_alike(sweep: Path, rlpost: CommandLine) -> None:
    rlpost("runs compare first lrs --plot curves.svg")
    picture = Path("curves.svg").read_text()
    assert {"first", "optim.lr=1e-5", "optim.lr=2e-5"} <= {*re.findall(r">([^<>]+)</text>", picture)}
    assert {*re.findall(r"stroke: (#\w{6})", picture)} >= {"#0072b2", "#d55e00", "#009e73"}
    assert "#cc79a7" not in picture  # the fourth colour


def test_a_picture_without_matplotlib_names_the_extra(rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_installed", lambda package: False)
    rlpost("runs compare first --plot curve.pdf", 3)
    assert "rlpost[plot]" in rlpost.err
    assert not Path("curve.pdf").exists()
