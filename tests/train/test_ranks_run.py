"""One training over several processes that train: the same run as one process's, whatever each of them holds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.settings.run import RunRequest
from rlpost.train import expert_iteration, grpo, sft
from tests.asynchronous import players, started, trained_groups, wait_for, write_rows
from tests.processes import children

LOOPS = {TRAIN_GRPO: grpo, TRAIN_SFT: sft, TRAIN_EXPERT_ITERATION: expert_iteration}
PLAIN = ["cluster.trainer_ranks=2"]
SHARDED = [*PLAIN, "cluster.sharding=full", "collector=async", "max_policy_lag=0"]
LORA = ["lora.enabled=true"]
NOT_COMPARED = ("time/", "memory/", "collector/", "groups/issued", "groups/waiting")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [*write_rows(tmp_path), "prompts_per_step=3", "eval.enabled=false", "cluster.rank_seconds=60"]


def run(folder: Path, words: Sequence[str], resume: str | None = None, command: Any = TRAIN_GRPO) -> int:
    last = {word.partition("=")[0]: word for word in words}
    composed = compose(command, list(last.values()))
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", *command.verb.split()], composed.yaml)
    return LOOPS[command].train(composed.settings, request)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[Any]:
    table = pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet", columns=["group", "token_ids", "reward"])
    return sorted(table.to_pylist(), key=repr)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "checkpoints" / "latest" / "model").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_equal(folder: Path, other: Path, first: float = 1e-5, later: float = 1e-3) -> None:
    """The figures of two runs are equal, within 1e-5 in the first step they share, and 1e-3 of their size after it."""
    rows, others = metrics(folder), metrics(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for number, (row, its) in enumerate(zip(rows, others, strict=True)):
        for name in row.keys() & its.keys():
            if not name.startswith(NOT_COMPARED):
                values = [float("nan") if each is None else each for each in (row[name], its[name])]
                near = pytest.approx(values[1], rel=first if number == 0 else later, abs=1e-5, nan_ok=True)
                assert values[0] == near, (row["step"], name)


def test_two_ranks_are_one_run(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    three = [*words, "steps=3", "loss.kl_coef=0.1", "passes=2", "minibatch_size=4"]
    assert run(tmp_path / "one", three) == 0
    capfd.readouterr()
    assert run(tmp_path / "two", [*three, *PLAIN]) == 0
    assert "ranks   2 train together, each holds the whole model" in (said := capfd.readouterr().out)
    assert said.count("step 3/3") == 1
    assert rollouts(tmp_path / "one", 1) == rollouts(tmp_path / "two", 1)
    check_equal(tmp_path / "two", tmp_path / "one")
    last = metrics(tmp_path / "two")[-1]
    assert 0.1 < last["memory/rank_0_gb"] < 20
    assert 0.1 < last["memory/rank_1_gb"] < 20
    assert not children()


def test_a_divided_run_is_the_same_and_goes_on_with_one_rank(words: list[str], tmp_path: Path) -> None:
    assert run(tmp_path / "one", [*words, "steps=4"]) == 0
    assert run(tmp_path / "two", [*words, "steps=2", *SHARDED]) == 0
    assert (tmp_path / "two" / "checkpoints" / "latest" / "state" / "optimizer").is_dir()
    alone = [*words, "steps=4", "collector=async", "max_policy_lag=0"]
    assert run(tmp_path / "two", alone, resume="latest") == 0
    check_equal(tmp_path / "two", tmp_path / "one")
    assert len(set(trained_groups(tmp_path / "two"))) == 12
    ours, right = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert ours.keys() == right.keys()
    assert max((ours[name] - right[name]).abs().max().item() for name in ours) < 1e-4


def test_a_rank_that_is_killed_ends_the_run_by_name(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "r"
    asked = [*words, *PLAIN, "steps=400", "checkpoint.every=1"]
    with started(folder, asked) as process:
        wait_for(lambda: (folder / "checkpoints" / "latest").exists())
        [other] = players()
        os.kill(other, signal.SIGKILL)
        assert process.wait(30) == 5
    assert "rank 1 of 2 was ended by SIGKILL" in (folder / "log.txt").read_text()
    done = metrics(folder)[-1]["step"]
    assert run(folder, [*words, f"steps={done + 1}"], resume="latest") == 0
    assert not children()
