"""GRPO on a mix of environments: figures by source add up, and a run goes on as if it had never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.runs.rollouts import read_rollouts
from tests.trainings import train_in, untimed

WORDS = [
    *["model=tiny", "policy=transformers", "model.autocast=none", "deterministic=true", "env=mix", "eval.limit=6"],
    *["env.max_completion_tokens=6", "prompts_per_step=3", "group_size=4"],
    *["optim.lr=1e-3", "optim.schedule=constant", "steps=4"],
]
REWARD = """
def length(completions, number, **columns):
    return [len(text) + each for text, each in zip(completions, number, strict=True)]
"""


def run(folder: Path, rows: Path, *words: str, resume: str | None = None) -> None:
    """Train on own rows and countdown."""
    sources = ["countdown weight=2", f"dataset path={rows} reward={rows.with_name('reward.py')}:length name=own"]
    assert train_in(TRAIN_GRPO, folder, [*WORDS, f"env.sources={json.dumps(sources)}", *words], resume) == 0


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The figures of a run's steps, but for those of time, memory and evaluations."""
    steps = [line for line in untimed(folder) if "reward/mean" in line]
    return [{name: value for name, value in line.items() if "eval/" not in name} for line in steps]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"Say {n}.", "number": n}) for n in range(40)))
    file.with_name("reward.py").write_text(REWARD)
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    folder = tmp_path_factory.mktemp("mix") / "run"
    run(folder, rows)
    return folder


def test_figures_by_source_add_up_to_the_steps(trained: Path) -> None:
    steps = steps_of(trained)
    assert len(steps) == 4
    for line in steps:
        counts = {name: line[f"source/{name}/completions"] for name in ("countdown", "own")}
        assert counts == {"countdown": 8, "own": 4}  # two of three prompts, in every step of three
        for own, whole in (("reward", "reward/mean"), ("zero_std", "groups/zero_std")):
            summed = sum(counts[name] * line[f"source/{name}/{own}"] for name in counts)
            assert summed / 12 == pytest.approx(line[whole])
        assert line["source/own/accuracy_lenient"] is None  # which has no measure of it
        assert line["source/countdown/accuracy_lenient"] == line["accuracy/lenient"]
        completions = read_rollouts(trained, line["step"])
        for name, count in counts.items():
            rewards = [row["reward"] for row in completions if row["source"] == name]
            assert len(rewards) == count
            assert sum(rewards) / count == pytest.approx(line[f"source/{name}/reward"])
            assert all(("Say" in row["prompt"]) == (name == "own") for row in completions if row["source"] == name)


def test_resumed_run_of_a_mix_is_bitwise_the_unbroken_one(trained: Path, rows: Path, tmp_path: Path) -> None:
    run(tmp_path / "resumed", rows, "steps=2")
    run(tmp_path / "resumed", rows, resume="auto")
    assert steps_of(tmp_path / "resumed") == steps_of(trained)
    for step in (3, 4):
        assert read_rollouts(tmp_path / "resumed", step) == read_rollouts(trained, step)
