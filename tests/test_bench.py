"""scripts/bench: what is compared, and what is made of the times. The timing itself is no test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_compare.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_compare", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_compare"] = module
    spec.loader.exec_module(module)
    return module


def timing(bench: ModuleType, seconds: list[float], prompts: list[str]) -> object:
    return bench.Timing(seconds, [20.0] * len(seconds), [0.5] * len(seconds), 1.5, prompts, {"torch": "2.13.0"})


def test_the_works_are_listed(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(bench.WORKS)


@pytest.mark.parametrize(("arguments", "message"), [(["grpo-shrt"], "there is no work grpo-shrt"), ([], "name what")])
def test_unknown_work_is_refused_with_the_names(
    arguments: list[str], message: str, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "grpo-short" in error


def test_the_ratio_is_of_medians_and_needs_both_sides(bench: ModuleType) -> None:
    ours, theirs = timing(bench, [9.0, 1.0, 2.0, 3.0], ["p"]), timing(bench, [10.0, 30.0, 20.0, 5.0], ["p"])
    result = bench.report("grpo-short", {"ours": ours, "trl": theirs})
    assert result["median_seconds"] == {"ours": 2.5, "trl": 15.0}
    assert result["ratio"] == 6.0
    assert "ratio     6.00" in bench.lines(result)[-1]
    alone = bench.report("grpo-short", {"trl": theirs})
    assert alone["ratio"] is None
    assert not any("ratio" in line for line in bench.lines(alone))


def test_sides_with_different_prompts_are_not_compared(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "BENCH", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    sides = {"ours": timing(bench, [1.0], ["a"]), "trl": timing(bench, [3.0], ["b"])}
    monkeypatch.setattr(bench, "measure", lambda *args: sides)
    assert bench.main(["smoke"]) == 3
    assert "different prompts" in capsys.readouterr().err
    sides["trl"] = timing(bench, [3.0], ["a"])
    assert bench.main(["smoke"]) == 0
    [file] = (tmp_path / "results").iterdir()
    assert json.loads(file.read_text())["ratio"] == 3.0


def test_a_side_that_fails_is_exit_3(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise subprocess.CalledProcessError(5, ["rlpost"])

    monkeypatch.setattr(bench, "measure", fail)
    assert bench.main(["smoke"]) == 3
    assert "see the logs" in capsys.readouterr().err


def test_trl_is_asked_for_the_default_grpo_work(bench: ModuleType, tmp_path: Path) -> None:
    work = bench.Work("the default settings on a small model", ("model=tiny",), 2)
    request = bench.trl_request(work, tmp_path, 8)
    assert len(request["rows"]) == 2 * 8  # steps x prompts a step
    assert len({row["prompt"][-1]["content"] for row in request["rows"]}) == 16
    a, b = request["rows"][0]["prompt"][-1]["content"].removeprefix("What is ").partition("?")[0].split(" + ")
    assert request["rows"][0]["answer"] == str(int(a) + int(b))
    sizes = ("steps", "group_size", "completions_per_step", "max_completion_tokens", "temperature", "kl_coef")
    assert [request[name] for name in sizes] == [2, 8, 64, 20, 1.0, 0.0]
    assert (request["optim"]["lr"], request["optim"]["schedule"]) == (2e-5, "linear")
    assert (Path(request["model"]) / "config.json").is_file()
