"""A run goes on with its file where rows are gone that it had not drawn yet; not where one is that it had drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT
from rlpost.data import faults
from rlpost.data.demonstrations import Sample
from rlpost.errors import DataError
from rlpost.model.packing import Row
from rlpost.runs.rollouts import read_rollouts
from rlpost.train import sft
from rlpost.train.sft import row_of
from tests.trainings import metrics, train_in

Steps = list[list[str]]
Train = Callable[..., Steps]
A_STEP = 3  # prompts, or samples
PROMPTS = [f"Say {number}." for number in range(12)]
WORDS = ["model=tiny", "env=dataset", "env.held_out=0", "eval.enabled=false"]
OF_GRPO = ["env.reward=exact", "policy=scripted", f"prompts_per_step={A_STEP}", "group_size=2"]
OF_SFT = ["env.completion_column=answer", f"minibatch_size={A_STEP}"]


def write(file: Path, prompts: Sequence[str]) -> None:
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))


def of_grpo(folder: Path, file: Path, steps: int, resume: str | None = None) -> Steps:
    before = len(metrics(folder)) if resume else 0
    assert train_in(TRAIN_GRPO, folder, [*WORDS, *OF_GRPO, f"env.path={file}", f"steps={steps}"], resume) == 0
    played = [read_rollouts(folder, step)[::2] for step in range(before + 1, steps + 1)]
    return [[next(p for p in PROMPTS if p in row["prompt"]) for row in rows] for rows in played]


@pytest.fixture(params=["GRPO", "SFT", "SFT on many rows"])
def train(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains or resumes a run in a folder on the rows of a file; the prompts of the steps that it did."""
    seen: list[str] = []

    def noted(sample: Sample) -> Row:
        file, _, number = sample.where.rpartition(", row ")
        seen.append(json.loads(Path(file).read_text().splitlines()[int(number) - 1])["prompt"])
        return row_of(sample)

    def of_sft(folder: Path, file: Path, steps: int, resume: str | None = None) -> Steps:
        seen.clear()
        assert train_in(TRAIN_SFT, folder, [*WORDS, *OF_SFT, f"env.path={file}", f"steps={steps}"], resume) == 0
        return [seen[start : start + A_STEP] for start in range(0, len(seen), A_STEP)]

    monkeypatch.setattr(sft, "row_of", noted)
    if request.param == "SFT on many rows":
        monkeypatch.setattr(faults, "ALL_UP_TO", 5)
        monkeypatch.setattr(faults, "SAMPLE", 2)
    return of_grpo if request.param == "GRPO" else of_sft


def test_row_may_go_unless_it_was_drawn(train: Train, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write(file, PROMPTS)
    first, second, third = train(tmp_path / "whole", file, 3)
    assert len({*first, *second, *third}) == 9
    assert train(tmp_path / "run", file, 1) == [first]
    write(file, [prompt for prompt in PROMPTS if prompt != second[0]])  # the row that would be the next
    assert train(tmp_path / "run", file, 2, resume="auto") == [[*second[1:], third[0]]]
    write(file, [prompt for prompt in PROMPTS if prompt not in (second[0], first[0])])
    with pytest.raises(DataError, match=r"6 different .* 6 different"):
        train(tmp_path / "run", file, 3, resume="auto")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
