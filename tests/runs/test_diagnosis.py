"""Diagnosis: sick traces are named, healthy ones are not spoken of at any of their steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.record import FAILED, FINISHED
from rlpost.runs.diagnosis import Diagnosis, repeated_text
from rlpost.runs.reader import read_run
from tests.command_line import CommandLine
from tests.run_folders import make_run, verdict
from tests.says import Says

# The figures of runs that learned: sums by a small model in several ways of sampling, and letters by the tiny one
HEALTHY: dict[str, dict[str, list[Any]]] = json.loads(
    Path(__file__).with_name("healthy_traces.json").read_text(encoding="utf-8")
)
Columns = dict[str, list[Any]]
Change = Callable[[Columns, int], object]  # columns of a trace, and how many steps it has


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def named_in(columns: Columns) -> dict[str, int]:
    """Symptom -> the step at which it was first named."""
    rows = rows_of(columns)
    found: dict[str, int] = {}
    diagnosis = Diagnosis()
    for row in rows:
        for symptom in diagnosis.after(row):
            found.setdefault(symptom.name, row["step"])
    return found


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_learns_has_no_symptom_at_any_step(name: str) -> None:
    assert named_in(HEALTHY[name]) == {}


def test_missing_metrics_cause_no_symptom() -> None:
    columns = HEALTHY[next(iter(HEALTHY))]
    names = [name for name in columns if name != "step"]
    for unknown in (None, math.nan):
        assert named_in(columns | {name: [unknown] * len(columns["step"]) for name in names}) == {}


def held(name: str, value: float) -> Change:
    return ramp(name, value, value)


def ramp(name: str, first: float, last: float) -> Change:
    def change(columns: Columns, steps: int) -> None:
        columns[name] = [first + (last - first) * i / (steps - 1) for i in range(steps)]

    return change


def measured(truncated: tuple[float, float], accuracy: float) -> Change:
    """An evaluation after the first step, and one after the last."""

    def change(columns: Columns, steps: int) -> None:
        columns["eval/truncated"] = [truncated[0], *[None] * (steps - 2), truncated[1]]
        columns["eval/accuracy_lenient"] = [accuracy, *[None] * (steps - 2), accuracy]

    return change


def fading(columns: Columns, steps: int) -> None:
    """Tokens become certain by a fifth a step."""
    columns["entropy"] = [1.8 * 0.8**i for i in range(steps)]


def collapsed(columns: Columns, steps: int) -> None:
    """From the middle on rewards are lost and tokens are drawn from everywhere."""
    half = steps // 2
    columns["reward/mean"][half:] = [0.01] * (steps - half)
    columns["accuracy/lenient"][half:] = [0.01] * (steps - half)
    columns["entropy"][half:] = [6.0] * (steps - half)


FLAT = [held("reward/std", 0.0), held("accuracy/lenient", 0.0)]
CUT = [held("completion/truncated", 1.0), held("reward/mean", 0.02), held("accuracy/lenient", 0.02)]
ONE_THING = [fading, held("groups/zero_std", 0.95), held("accuracy/lenient", 0.3)]
SICK: dict[str, tuple[str, list[Change], str]] = {
    "no reward at all": ("sums-bf16-0", [*FLAT, held("reward/mean", 0.0)], "dead reward"),
    "one reward for all": ("sums-bf16-1", [*FLAT, held("reward/mean", 0.5)], "dead reward"),
    "groups alike": ("sums-bf16-2", [held("groups/zero_std", 0.98), held("accuracy/lenient", 0.4)], "no spread"),
    "the form is lost": ("sums-engine-1", [ramp("accuracy/strict", 0.6, 0.1)], "form lost"),
    "longer and paid for it": (
        "sums-engine-2",
        [ramp("completion/tokens_mean", 15, 60), held("accuracy/lenient", 0.2)],
        "length hacking",
    ),
    "longer where nothing is measured": ("letters-sync", [ramp("completion/tokens_mean", 6, 40)], "length hacking"),
    "one thing is said": ("sums-wide-1", ONE_THING, "entropy collapse"),
    "all is clipped": ("sums-wide-2", [held("ratio/clip_fraction", 0.45)], "clip saturation"),
    "no rate": ("sums-seed-1", [held("lr", 0.0)], "rate zero"),
    "too high a rate": ("sums-seed-2", [collapsed], "rate too high"),
    "paid for the wrong thing": ("sums-lag", [ramp("accuracy/lenient", 0.5, 0.1)], "reward hacking"),
    "the engine goes astray": ("sums-async", [ramp("sampler/logprob_gap", 0.01, 0.9)], "sampler drift"),
    "away from the start": ("sums-sync", [ramp("kl/ref", 0.001, 6.0)], "drift"),
    "all is cut": ("sums-bf16-0", [*CUT, held("groups/zero_std", 0.85)], "truncation"),
    "held-out replies no longer end": ("letters-t0", [measured((0.67, 1.0), 0.0)], "truncation"),
    "held-out replies never end and none is right": ("sums-sync", [measured((1.0, 1.0), 0.0)], "truncation"),
    "all is cut and only the reward rises": (
        "sums-bf16-2",
        [held("completion/truncated", 1.0), held("accuracy/lenient", 0.0)],
        "truncation",
    ),
    "no completion is right": ("sums-seed-1", [held("accuracy/lenient", 0.0)], "reward without accuracy"),
    "less and less sure": ("sums-wide-1", [ramp("entropy", 0.5, 1.4), held("reward/mean", 0.2)], "entropy rises"),
    "paid by a growing reward": (
        "sums-bf16-1",
        [ramp("reward/mean", 0.1, 0.9), ramp("accuracy/lenient", 0.6, 0.3)],
        "reward hacking",
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_named_with_steps_evidence_and_a_fix(name: str) -> None:
    healthy, changes, expected = SICK[name]
    columns = {key: list(values) for key, values in HEALTHY[healthy].items()}
    for change in changes:
        change(columns, len(columns["step"]))
    assert expected in named_in(columns)
    rows = rows_of(columns)
    symptom = next((s for s in Diagnosis(rows[:-1]).after(rows[-1]) if s.name == expected), None)
    if symptom is not None:  # one that shows only while it happens is over at the end
        assert symptom.steps[0] < symptom.steps[1] <= columns["step"][-1]
        assert any(letter.isdigit() for letter in symptom.evidence)
        assert symptom.fix


def of_rows(steps: int = 12, **first_and_last: tuple[float, float]) -> Columns:
    """The figures of a training on rows, each on a straight line."""
    columns: Columns = {"step": list(range(1, steps + 1))}
    for name, (first, last) in first_and_last.items():
        ramp(name.replace("__", "/"), first, last)(columns, steps)
    return columns


def evaluated(*losses: float, steps: int = 12) -> Columns:
    """Held-out losses, the first before training, evenly spread."""
    places = [round(i * (steps - 1) / (len(losses) - 1)) for i in range(len(losses))]
    return {"eval/loss": [losses[places.index(i)] if i in places else None for i in range(steps)]}


FALLING = of_rows(loss__sft=(2.0, 0.01), epoch=(1, 12))
TOLD_APART = of_rows(pair_accuracy=(1.0, 1.0), reward_margin=(3.0, 9.0), loss__dpo=(0.3, 0.0))
OF_ROWS = {
    "rows learned by heart": (FALLING | {"loss/sft": [2.0, 1.0, 0.5, *[0.02] * 9]} | evaluated(2.0, 1.9), "memorised"),
    "held-out loss rises again": (of_rows(loss__sft=(2.0, 1.0)) | evaluated(2.0, 1.5, 1.9), "overfitting"),
    "and of pairs": (of_rows(loss__dpo=(0.69, 0.3)) | evaluated(0.69, 0.6, 0.8), "overfitting"),
    "no pair is left to learn from": (TOLD_APART, "nothing left in the pairs"),
    "both replies less likely": (
        of_rows(rewards__chosen=(0.0, -3.0), pair_accuracy=(0.5, 0.9)),
        "chosen replies fall",
    ),
}
SOUND = {
    "demonstrations": of_rows(loss__sft=(2.0, 1.2), epoch=(0, 2)) | evaluated(2.0, 1.4, 1.3, 1.31),
    "a task that is solved": of_rows(loss__sft=(2.0, 0.0), epoch=(1, 9)) | evaluated(2.0, 0.03),
    "pairs": of_rows(
        loss__dpo=(0.69, 0.4), pair_accuracy=(0.5, 0.9), reward_margin=(0, 1.5), rewards__chosen=(0, -0.3)
    ),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_sick_training_on_rows_is_named(name: str) -> None:
    columns, expected = OF_ROWS[name]
    assert list(named_in(columns)) == [expected]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_training_on_rows_has_no_symptom(name: str) -> None:
    assert named_in(SOUND[name]) == {}


@pytest.mark.parametrize(("rows", "names"), [(1, ["few held-out rows"]), (9, ["few held-out rows"]), (10, [])])
def test_few_held_out_rows_are_a_symptom_of_a_finished_run(rows: int, names: list[str], tmp_path: Path) -> None:
    trace = [{"step": 0, "eval/loss": 2.0, "eval/rows": float(rows)}, {"step": 1, "loss/sft": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trace))
    assert [symptom.name for symptom in read_run(tmp_path).diagnosis.symptoms] == names
    assert Diagnosis(trace[:-1]).after(trace[-1]) == []  # it gives no alarm, which could stop a run


def test_repeated_text_is_named() -> None:
    prompts = [f"{n} + 1?" for n in range(8) for _ in range(4)]
    looping = repeated_text(9, ["the the the " * 60] * 32, prompts)
    assert looping is not None
    assert looping.evidence.startswith("32 of 32 ")
    same = repeated_text(9, ["Unknown."] * 31 + ["4"], prompts)
    assert same is not None
    assert "31 of 32 " in same.evidence
    assert "'Unknown.'" in same.evidence
    varied = [f"{n} is the answer" for n in range(32)]
    assert repeated_text(9, varied, prompts) is None
    assert repeated_text(9, [""] * 32, prompts) is None


def diagnosed(rlpost: CommandLine, run: Path) -> str:
    """The paragraph of `runs show` about what is wrong."""
    return next(part for part in rlpost(f"runs show {run}").split("\n\n") if "symptom" in part)


def test_show_names_what_it_finds(rlpost: CommandLine, says: Says, tmp_path: Path) -> None:
    healthy, changes, expected = SICK["too high a rate"]
    well, sick = tmp_path / "well", tmp_path / "sick"
    columns = {key: list(values) for key, values in HEALTHY[healthy].items()}
    make_run(well, rows_of(columns), steps=100, log="")
    for change in changes:
        change(columns, len(columns["step"]))
    make_run(sick, rows_of(columns))
    assert diagnosed(rlpost, well).startswith("error       how it ended is unknown: ")
    (well / "log.txt").write_text(verdict(FINISHED))
    says("runs", diagnosed(rlpost, well))
    (well / "log.txt").write_text(verdict(f"{FAILED} RewardError: nan"))
    told = rlpost.json(f"runs show {well} --json")
    assert (told["state"], told["error"], told["symptoms"]) == ("failed", "RewardError: nan", [])
    told = rlpost.json(f"runs show {sick} --json")
    assert expected in [symptom["name"] for symptom in told["symptoms"]]
    assert told["steps_done"] == 60


@pytest.mark.parametrize(("steps", "names"), [(7, []), (8, ["truncation"])])
def test_show_reads_the_evaluation_before_training(
    steps: int, names: list[str], rlpost: CommandLine, says: Says, tmp_path: Path
) -> None:
    before = {"step": 0, "eval/truncated": 0.67, "eval/accuracy_lenient": 0.0}
    rows = [before, *({"step": step} for step in range(1, steps)), before | {"step": steps, "eval/truncated": 1.0}]
    run = make_run(tmp_path / "run", rows)
    assert [symptom["name"] for symptom in rlpost.json(f"runs show {run} --json")["symptoms"]] == names
    says("runs", diagnosed(rlpost, run))
