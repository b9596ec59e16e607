"""`rlpost runs compare` and `rlpost runs plot`: several runs beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost import imports
from rlpost.cli.main import run as rlpost
from tests.evaluation_folders import keep_held_out
from tests.run_folders import evaluation, make_run, step_row


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
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """runs/first, whose reward rises, and runs/second, whose reward falls."""
    monkeypatch.chdir(tmp_path)
    return [make("first", [0.0, 0.5, 1.0], lr=1e-5), make("second", [1.0, 0.5, 0.0], lr=2e-5, seed=1)]


def compared(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert rlpost(["runs", "compare", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    return out.splitlines()


def test_curves_are_drawn_with_the_letters_of_their_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = compared("first second", capsys)
    assert lines[0] == "reward, by step"
    drawn = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[2:13]]
    assert (drawn[0][0], drawn[0].rstrip("│")[-1]) == ("B", "A")  # at the top B begins, and A ends
    assert (drawn[-1][0], drawn[-1].rstrip("│")[-1]) == ("A", "B")
    assert ("1.00" in lines[2], "0.00" in lines[12]) == (True, True)
    assert lines[14].split() == ["1", "2", "3"]
    assert "held-out accuracy (%), by step" in lines


def test_tables_have_the_last_figures_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in compared("first second", capsys)]
    assert ["A", "first", "finished", "3/3", "1.000", "300", "12.0"] in rows
    assert ["B", "second", "finished", "3/3", "0.000", "300", "12.0"] in rows
    shares = ["25.0%", "[15.0%,", "40.0%]", "50.0%", "[35.0%,", "65.0%]", "50"]
    assert ["A", "first", *shares] in rows


def test_settings_that_differ_name_the_runs_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    make("third", [0.0, 0.0, 0.0], lr=1e-5)
    lines = compared("first second third", capsys)
    assert "optim.lr  AC=1e-05  B=2e-05" in lines
    assert lines[-1] == "1 setting only some of the runs have: rlpost config diff RUN RUN lists them"
    assert not [line for line in lines if line.startswith(("model.path", "steps"))]


def test_held_out_completions_give_a_paired_test(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = two
    keep_held_out(first, 0, ["r"] * 40)  # before training: it does not count
    keep_held_out(first, 3, ["r"] * 10 + ["w"] * 30)
    keep_held_out(second, 3, ["r"] * 30 + ["w"] * 10)
    # 20 differences of 1 and 20 of 0: 0.5 ± 2.0227 sqrt(0.25 / 39)
    assert "B is better than A: +50.0% [+33.8%, +66.2%], 40 prompts" in compared("first second", capsys)
    assert "B is worse than A: -50.0% [-66.2%, -33.8%], 40 prompts" in compared("second first", capsys)
    keep_held_out(second, 4, ["r"] * 10 + ["w"] * 30)
    told = next(line for line in compared("first second", capsys) if line.startswith("B against A"))
    assert told.startswith("B against A: +0.0%, 40 prompts; no difference found")


def test_without_completions_there_is_no_paired_test(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    keep_held_out(two[1], 0, ["r"])
    [line] = [line for line in compared("second first", capsys) if line.startswith("no paired test")]
    assert "runs/second holds no held-out completions after training" in line
    assert "rlpost eval model=runs/second" in line


def test_long_runs_are_drawn_as_means_and_ten_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        make(f"more-{number}", [0.5] * 300, lr=1e-5)
    lines = compared(f"first second {' '.join(f'more-{number}' for number in range(8))}", capsys)
    assert lines[0] == "reward, by step, means of 7 steps"  # 100 columns have room for 45 points
    assert [line.split()[1] for line in lines if line.startswith("J ")] == ["more-7", "more-7"]
    assert len(lines) < 80


def test_compare_as_json(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    for run in two:
        keep_held_out(run, 3, ["r", "w"])
    told = json.loads("\n".join(compared("first second --json --key grad_norm", capsys)))
    assert [(run["letter"], run["name"], run["reward"], run["tokens"]) for run in told["runs"]] == [
        ("A", "first", 1.0, 300.0),
        ("B", "second", 0.0, 300.0),
    ]
    assert told["runs"][0]["curves"] == {"grad_norm": [[1, 1.5], [2, 1.5], [3, 1.5]]}
    assert told["settings"] == {"optim.lr": ["1e-05", "2e-05"]}
    [test] = told["tests"]
    assert (test["a"], test["b"], test["prompts"]) == ("A", "B", 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare first", "rlpost runs compare takes 2 to 26 runs: 1 given"),
        ("compare first secnd", "there is no run secnd; did you mean second?"),
        ("compare first second --key reward", "--key reward: no run has this metric; did you mean reward/"),
        ("plot first -o curve.jpg", "-o curve.jpg has no ending that says its format: give .png, .svg, .pdf"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["runs", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_has_curves_labels_and_a_legend(capsys: pytest.CaptureFixture[str]) -> None:
    make("$x_1$", [0.0, 0.9, 0.3], lr=1e-5)
    assert rlpost(["runs", "plot", "first", "$x_1$", "-o", "curves.svg", "--smooth", "3"]) == 0
    assert capsys.readouterr().out == "written to curves.svg\n"
    picture = Path("curves.svg").read_text()
    texts = re.findall(r">([^<>]+)</text>", picture)
    assert {"reward", "held-out accuracy (%)", "step", "first", "$x_1$"} <= {*texts}
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


def test_a_sweep_is_compared_by_its_settings_over_their_seeds(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = compared("lrs", capsys)
    assert "optim.lr  AB=1e-05  CD=2e-05" in lines
    table = lines.index("optim.lr  seeds  late reward  held-out accuracy")
    assert lines[table + 1].split()[:4] == ["2e-5", "2", "1.000", "20.5%"]
    # each seed is better by 10 points, and nothing else is known to vary
    assert "no difference found between optim.lr=2e-5 and optim.lr=1e-5 in held-out accuracy: +10.0%, 2 seeds" in lines
    assert not [line for line in lines if "paired" in line]
    assert rlpost(["runs", "show", "lrs"]) == 0
    assert lines[table] in capsys.readouterr().out
    assert rlpost(["runs", "list"]) == 0
    assert "sweep lrs: no difference found between" in capsys.readouterr().out


def test_a_sweep_stands_for_its_runs_beside_other_runs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads("\n".join(compared("first lrs --json", capsys)))
    assert [run["name"] for run in told["runs"]][:2] == ["first", "lr-1e-5_seed-0"]
    assert (len(told["runs"]), len(told["tests"])) == (5, 4)
    assert rlpost(["report", "lrs"]) == 0
    assert capsys.readouterr().out.startswith("runs/lrs/report.html: 4 runs")


def test_a_verb_for_one_run_names_those_of_a_sweep(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["runs", "tail", "lrs"]) == 2
    assert "lrs is a sweep: name one of runs/lrs/lr-1e-5_seed-0, " in capsys.readouterr().err


def test_a_picture_draws_the_seeds_of_a_setting_alike(sweep: Path) -> None:
    assert rlpost(["runs", "plot", "first", "lrs", "-o", "curves.svg"]) == 0
    picture = Path("curves.svg").read_text()
    assert {"first", "optim.lr=1e-5", "optim.lr=2e-5"} <= {*re.findall(r">([^<>]+)</text>", picture)}
    assert {*re.findall(r"stroke: (#\w{6})", picture)} >= {"#0072b2", "#d55e00", "#009e73"}
    assert "#cc79a7" not in picture  # the fourth colour


def test_a_picture_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imports, "is_installed", lambda package: False)
    assert rlpost(["runs", "plot", "first", "-o", "curve.pdf"]) == 3
    assert "pip install 'rlpost[plot]'" in capsys.readouterr().err
    assert not Path("curve.pdf").exists()
