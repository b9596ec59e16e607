"""The results of a sweep: means over seeds with their intervals, and which settings are better, if any."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.evaluation.statistics import crossed_interval
from rlpost.evaluation.sweeps import Verdict, read_sweep
from tests.evaluation_folders import keep_held_out, write
from tests.says import Says


def held_out(value: float, half: float = 0.1, key: str = "eval/accuracy_lenient") -> dict[str, float]:
    return {"eval/prompts": 10.0, key: value, f"{key}_low": value - half, f"{key}_high": value + half}


def made(folder: Path, jobs: Mapping[str, Mapping[str, Any] | None]) -> Path:
    """A sweep of trainings, `{"lr=1 seed=0": its result}`; None stands for a job that failed."""
    told = []
    for words, result in jobs.items():
        differs = dict(word.split("=") for word in words.split())
        (folder / words.replace(" ", "_")).mkdir(parents=True)
        told.append({"name": words.replace(" ", "_"), "differs": differs, "exit_code": 0 if result else 4})
        told[-1]["result"] = result
        if result:
            row = json.dumps({"step": 1, **result["metrics"]})
            (folder / words.replace(" ", "_") / "metrics.jsonl").write_text(row + "\n")
    (folder / "sweep.json").write_text(json.dumps({"jobs": told}))
    return folder


def verdict_of(folder: Path) -> Verdict:
    """What `read_sweep` finds of the first two settings."""
    verdict = read_sweep(folder).verdict
    assert verdict is not None
    return verdict


def trained(after: Mapping[str, float] | None, before: Mapping[str, float] | None = None) -> dict[str, Any]:
    return {"metrics": {"reward/mean": 0.5}, "evaluation_before": before, "evaluation_after": after}


def answering(folder: Path, right: Mapping[str, Sequence[int]], prompts: int = 40) -> Path:
    """A sweep whose runs answer these held-out prompts right."""
    made(folder, {words: trained(held_out(len(its) / prompts)) for words, its in right.items()})
    for words, its in right.items():
        keep_held_out(folder / words.replace(" ", "_"), 3, ["r" if i in its else "w" for i in range(prompts)])
    return folder


def test_a_lucky_seed_is_not_a_candidate(tmp_path: Path) -> None:
    figures = {"lr=1 seed=0": 0.2, "lr=1 seed=1": 0.9, "lr=1 seed=2": 0.1, "lr=2 seed=0": 0.5, "lr=2 seed=1": 0.55}
    found = read_sweep(made(tmp_path, {words: trained(held_out(x)) for words, x in figures.items()}))
    assert [(each.settings, each.seeds) for each in found.candidates] == [({"lr": "2"}, 2), ({"lr": "1"}, 3)]
    first, second = (each.figure for each in found.candidates)
    assert first is not None
    assert second is not None
    # t of 1 degree 12.706, sd 0.03536: 12.706 * 0.03536 / sqrt(2) = 0.3177; t of 2 degrees 4.3027, sd 0.4359
    assert (first.value, first.low, first.high) == pytest.approx((0.525, 0.2073, 0.8427), abs=1e-4)
    assert (second.value, second.low, second.high) == pytest.approx((0.4, 0.0, 1.0), abs=1e-4)
    assert found.verdict is not None
    assert (found.verdict.first, found.verdict.better, found.verdict.seeds) == ("lr=2", False, 2)  # those in common
    assert found.verdict.value == pytest.approx((0.3 - 0.35) / 2)


def test_a_difference_of_every_seed_and_many_prompts_is_found(tmp_path: Path, says: Says) -> None:
    right = {f"lr={lr} seed={seed}": range(10 * lr + seed) for lr in (1, 2) for seed in (0, 1, 2)}
    verdict = verdict_of(answering(tmp_path, right))
    assert (verdict.first, verdict.better, verdict.seeds, verdict.prompts) == ("lr=2", True, 3, 40)
    assert verdict.value == pytest.approx(0.25)
    says("train", verdict.sentence)


def test_seeds_that_agree_on_too_few_prompts_show_no_difference(tmp_path: Path) -> None:
    """All three seeds answer the same two of eight prompts more: seeds vary by nothing, prompts by much."""
    right = {f"lr={lr} seed={seed}": range(2 * lr) for lr in (1, 2) for seed in (0, 1, 2)}
    verdict = verdict_of(answering(tmp_path, right, prompts=8))
    assert (verdict.value, verdict.better) == (0.25, False)


def test_a_difference_that_is_the_same_on_every_prompt_is_found(tmp_path: Path) -> None:
    """Nothing varies, so there is no interval: rate 2 answers every prompt right, rate 1 none."""
    right = {f"lr={lr} seed={seed}": range(40 * (lr - 1)) for lr in (1, 2) for seed in (0, 1)}
    verdict = verdict_of(answering(tmp_path, right))
    assert (verdict.first, verdict.value, verdict.low, verdict.better) == ("lr=2", 1.0, None, True)


def test_one_seed_each_is_compared_by_the_prompts_alone(tmp_path: Path, says: Says) -> None:
    verdict = verdict_of(answering(tmp_path, {"lr=1": range(10), "lr=2": range(30)}))
    # 20 differences of 1 and 20 of 0: 0.5 ± 2.0227 sqrt(0.25 / 39), as in `rlpost eval compare`
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((0.5, 0.3380, 0.6620), abs=1e-3)
    assert verdict.better
    says("train", verdict.sentence)


def test_one_seed_without_held_out_prompts_tells_nothing(tmp_path: Path, says: Says) -> None:
    for number, words in enumerate(["lr=1", "lr=2"]):
        (tmp_path / words).mkdir()
        rows = [{"step": i, "reward/mean": float(number)} for i in range(8)]
        (tmp_path / words / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = made(tmp_path / "s", {"lr=1": trained(None), "lr=2": trained(None)})
    assert read_sweep(folder).by == "late reward"
    verdict = verdict_of(folder)
    assert not verdict.better
    says("train", verdict.sentence)


def test_held_out_losses_are_compared_and_the_smallest_is_first(tmp_path: Path) -> None:
    losses = {"lr=1 seed=0": 1.0, "lr=1 seed=1": 1.01, "lr=2 seed=0": 2.0, "lr=2 seed=1": 2.02}
    jobs = {words: trained(held_out(x, 0.1, "eval/loss")) for words, x in losses.items()}
    verdict = verdict_of(made(tmp_path, jobs))
    # -1.0 and -1.01: sd 0.00707 * 12.706 / sqrt(2) = 0.0635
    assert (verdict.first, verdict.better, verdict.prompts) == ("lr=1", True, None)
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((-1.005, -1.0685, -0.9415), abs=1e-4)


def test_a_failed_seed_is_left_out_and_the_table_says_so(tmp_path: Path, says: Says) -> None:
    jobs = {"lr=1 seed=0": trained(held_out(0.5), held_out(0.25)), "lr=1 seed=1": None, "lr=2 seed=0": None}
    found = read_sweep(made(tmp_path, jobs))
    head, *rows = found.rows()
    says("train", " | ".join(head))
    assert rows == [
        ["1", "1 of 2", "0.500", "25.0%", "50.0% [40.0%, 60.0%]"],
        ["2", "0 of 1", "-", "-", "-"],
    ]
    assert found.verdict is None


def test_evaluations_of_two_models_are_compared_by_prompts(tmp_path: Path, says: Says) -> None:
    jobs = {}
    for name, right in (("model=a", 10), ("model=b", 30)):
        write(tmp_path / name, ["r"] * right + ["w"] * (40 - right))
        accuracy = {"value": right / 40, "low": 0.1, "high": 0.9, "prompts": 40}
        jobs[name] = {"result": {"reward_mean": right / 40, "num_prompts": 40, "accuracy_lenient": accuracy}}
    told = [{"name": n, "differs": dict([n.split("=")]), "exit_code": 0, "result": r} for n, r in jobs.items()]
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": told}))
    assert read_sweep(tmp_path).by == "accuracy"
    verdict = verdict_of(tmp_path)
    assert verdict.better
    says("eval", verdict.sentence)


def test_different_held_out_prompts_are_not_compared(tmp_path: Path) -> None:
    folder = made(tmp_path, {f"digits={n}": trained(held_out(n / 4)) for n in (1, 2)})
    for n in (1, 2):
        table = write(folder / f"digits={n}" / "kept", ["r", "w"], first=10 * n) / "samples.parquet"
        (folder / f"digits={n}" / "held-out").mkdir()
        table.rename(folder / f"digits={n}" / "held-out" / "step-000003.parquet")
    verdict = verdict_of(folder)
    assert (verdict.better, verdict.value) == (False, None)


def test_the_interval_over_seeds_and_prompts_holds_the_truth() -> None:
    """Where prompts differ more than seeds, an interval over three seeds' means alone misses it once in three."""
    drawn = np.random.default_rng(0)
    missed = alone = 0
    for _ in range(1000):
        values = drawn.normal(0, 0.4, (1, 40)) + drawn.normal(0, 0.02, (3, 1)) + drawn.normal(0, 0.2, (3, 40))
        _, low, high = crossed_interval(values) or (0, 0, 0)
        _, low_alone, high_alone = crossed_interval(values.mean(1, keepdims=True)) or (0, 0, 0)
        missed += not low < 0 < high
        alone += not low_alone < 0 < high_alone
    assert missed / 1000 < 0.06
    assert alone / 1000 > 0.2


def test_of_seeds_alone_it_is_students_interval() -> None:
    _, low, high = crossed_interval(np.array([[0.25], [0.5], [0.75]])) or (0, 0, 0)
    half = 4.3027 * 0.25 / math.sqrt(3)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    assert crossed_interval(np.zeros((3, 8))) is None
