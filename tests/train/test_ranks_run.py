"""One training over several processes that train: the same run as one process's, whatever each of them holds."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlpost.catalog import TRAIN_DPO, TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings.loss import ESTIMATORS
from tests.asynchronous import players, started, trained_groups, wait_for, write_rows
from tests.says import Says
from tests.trainings import ends_alike, metrics, train_in, weights

pytestmark = pytest.mark.thorough

PLAIN = ["cluster.trainer_ranks=2"]
DIVIDED = [*PLAIN, "cluster.sharding=full"]
ASYNC = ["collector=async", "max_policy_lag=0"]
SHARDED = [*DIVIDED, *ASYNC]
THREE = "cluster.trainer_ranks=3"
LORA = ["lora.enabled=true"]
KILLED = r"rank \d of \d .*SIGKILL"
NOT_COMPARED = ("time/", "memory/", "collector/", "groups/issued", "groups/waiting")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    more = ["prompts_per_step=3", "eval.enabled=false", "cluster.rank_seconds=60", "optim.schedule=constant"]
    return [*write_rows(tmp_path), *more]


def run(folder: Path, words: Sequence[str], resume: str | None = None) -> int:
    return train_in(TRAIN_GRPO, folder, words, resume)


def rollouts(folder: Path, step: int) -> list[Any]:
    return sorted((row["group"], row["token_ids"], row["reward"]) for row in read_rollouts(folder, step))


def check_equal(folder: Path, other: Path, later: float = 1e-3) -> None:
    """The figures of two runs are equal within 1e-5 in the first step, and later within 1e-3 of their size."""
    rows, others = metrics(folder), metrics(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for number, (row, its) in enumerate(zip(rows, others, strict=True)):
        for name in row.keys() & its.keys():
            if not name.startswith(NOT_COMPARED):
                values = [float("nan") if each is None else each for each in (row[name], its[name])]
                near = pytest.approx(values[1], rel=1e-5 if number == 0 else later, abs=1e-5, nan_ok=True)
                assert values[0] == near, (row["step"], name)


def once(words: Sequence[str]) -> list[str]:
    """Each key once, as a command line has it; its last value counts."""
    return list({word.partition("=")[0]: word for word in words}.values())


def launched(ranks: int, folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node RANKS -m rlpost train grpo WORDS`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "rlpost", "train", "grpo", *once(words), "--out", str(folder), "--plain"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_torchrun_starts_one_run(words: list[str], tmp_path: Path, says: Says) -> None:
    three = [*words, "steps=3", "loss.kl_coef=0.1", "passes=2", "minibatch_size=4"]
    started = launched(2, tmp_path / "two", three)
    assert run(tmp_path / "one", three) == 0
    said, complaints = started.communicate(timeout=240)
    assert started.returncode == 0, complaints
    says("train", "\n".join(line for line in said.splitlines() if line.startswith("ranks ")))
    assert said.count("step 3/3") == 1
    assert rollouts(tmp_path / "one", 1) == rollouts(tmp_path / "two", 1)
    check_equal(tmp_path / "two", tmp_path / "one")
    last = metrics(tmp_path / "two")[-1]
    assert 0.1 < last["memory/rank_0_gb"] < 20
    assert 0.1 < last["memory/rank_1_gb"] < 20
    assert not players()


def test_divided_run_is_the_same_and_goes_on_with_one_rank(words: list[str], tmp_path: Path) -> None:
    assert run(tmp_path / "one", [*words, "steps=4"]) == 0
    assert run(tmp_path / "two", [*words, "steps=2", *SHARDED]) == 0
    assert (tmp_path / "two" / "checkpoints" / "latest" / "state" / "optimizer").is_dir()
    assert run(tmp_path / "two", [*words, "steps=4", *ASYNC], resume="latest") == 0
    check_equal(tmp_path / "two", tmp_path / "one")
    assert len(set(trained_groups(tmp_path / "two"))) == 12
    ours, right = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert ours.keys() == right.keys()
    assert max((ours[name] - right[name]).abs().max().item() for name in ours) < 1e-4


def test_killed_rank_ends_the_run_by_name(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "r"
    asked = [*words, *PLAIN, "steps=400", "checkpoint.every=1"]
    with started(folder, asked) as process:
        wait_for(lambda: (folder / "checkpoints" / "latest").exists())
        [other] = players()
        os.kill(other, signal.SIGKILL)
        assert process.wait(55) == 5  # and not after the 60 s of `words`
    assert re.search(KILLED, (folder / "log.txt").read_text())
    done = metrics(folder)[-1]["step"]
    assert run(folder, [*words, f"steps={done + 1}"], resume="latest") == 0
    assert not players()


# Slow: every kind of training, and of ranks


@pytest.mark.slow
def test_divided_model_that_learned_nothing_goes_on(words: list[str], tmp_path: Path) -> None:
    """Of a group whose replies score alike log-probs are read, and no backward follows."""
    asked = [*words, "steps=2", "policy=scripted", "passes=2", "loss.sampler_correction=tis_token", *SHARDED]
    assert run(tmp_path / "r", asked) == 0
    assert [row["groups/zero_std"] for row in metrics(tmp_path / "r")] == [1.0, 1.0]
    assert [row["grad_norm"] for row in metrics(tmp_path / "r")] == [0.0, 0.0]


def check_ranks(command: Command[Any], folder: Path, words: Sequence[str], kind: Sequence[str]) -> None:
    """A training on several ranks, as `kind` says, has the figures of one rank's; both have the adapter of `kind`."""
    assert train_in(command, folder / "one", [*words, *(LORA if LORA[0] in kind else [])]) == 0
    assert train_in(command, folder / "two", [*words, *kind]) == 0
    check_equal(folder / "two", folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("more", [*(f"advantage.estimator={name}" for name in ESTIMATORS), "loss.kl_in=reward"])
@pytest.mark.parametrize("kind", [PLAIN, SHARDED, [*PLAIN, *LORA], [*SHARDED, *LORA]], ids=str)
def test_every_estimator_sees_all_ranks(words: list[str], tmp_path: Path, more: str, kind: list[str]) -> None:
    check_ranks(TRAIN_GRPO, tmp_path, [*words, "steps=2", "loss.kl_coef=0.1", more], kind)
    assert rollouts(tmp_path / "one", 1) == rollouts(tmp_path / "two", 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, SHARDED, [*SHARDED, *LORA]], ids=str)
def test_expert_iteration_is_the_same_on_ranks(words: list[str], tmp_path: Path, kind: list[str]) -> None:
    check_ranks(TRAIN_EXPERT_ITERATION, tmp_path, [*words, "steps=3"], kind)


OWN_ROWS: list[tuple[Command[Any], str]] = [
    *((TRAIN_SFT, more) for more in ("loss=minor_sft", "loss.kl_coef=0.1", "packing=false")),
    *((TRAIN_DPO, more) for more in ("loss=dpo", "loss=ipo", "packing=false")),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, DIVIDED, [*DIVIDED, *LORA]], ids=str)
@pytest.mark.parametrize(("command", "more"), OWN_ROWS, ids=lambda each: getattr(each, "name", each))
def test_training_on_rows_is_the_same_on_ranks(
    tmp_path: Path, kind: list[str], command: Command[Any], more: str
) -> None:
    """Rows of SFT are replies of one to five numbers; of DPO, those are the chosen ones."""
    rows, asked = tmp_path / "rows.jsonl", ["model=tiny", "model.autocast=none", "minibatch_size=6", "steps=3", more]
    if command is TRAIN_SFT:
        replies = [{"prompt": f"Say {i}.", "completion": f"{i} " * (1 + i % 5)} for i in range(40)]
        asked += ["env=dataset", "env.prompt_column=prompt", "env.completion_column=completion"]
    else:
        replies = [{"prompt": f"Say {i // 2}.", "chosen": f"{i} " * (1 + i % 5), "rejected": "no"} for i in range(40)]
    rows.write_text("\n".join(map(json.dumps, replies)))
    check_ranks(command, tmp_path, [*asked, f"env.path={rows}", "optim.lr=1e-3", "eval.limit=4"], kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        *[(PLAIN, []), (PLAIN, [THREE]), ([], PLAIN)],
        *[(SHARDED, [*SHARDED, THREE]), (ASYNC, SHARDED), (SHARDED, [*PLAIN, *ASYNC])],
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [[], LORA], ids=str)
def test_run_goes_on_with_other_ranks(
    words: list[str], tmp_path: Path, first: list[str], then: list[str], more: list[str]
) -> None:
    kept = ASYNC if first[-2:] == ASYNC else []
    assert run(tmp_path / "one", [*words, *more, *kept, "steps=4"]) == 0
    assert run(tmp_path / "two", [*words, *more, "steps=2", *first]) == 0
    assert run(tmp_path / "two", [*words, *more, "steps=4", *then, *kept], resume="latest") == 0
    check_equal(tmp_path / "two", tmp_path / "one", later=1e-4)
    groups = trained_groups(tmp_path / "two")
    assert len(groups) == len(set(groups)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], LORA], ids=str)
def test_two_runs_of_as_many_ranks_are_bitwise_equal(words: list[str], tmp_path: Path, more: list[str]) -> None:
    asked = [*words, *PLAIN, *more, "steps=3", "deterministic=true"]
    for name in ("a", "b"):
        assert run(tmp_path / name, asked) == 0
    assert ends_alike(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_rank_killed_at_any_moment_ends_the_run_by_name(words: list[str], tmp_path: Path, seed: int) -> None:
    folder, rng = tmp_path / "r", random.Random(seed)
    kind = (PLAIN, [THREE], SHARDED)[seed % 3]
    asked = [*words, "steps=2000", "checkpoint.every=1", "eval.enabled=true", "eval.every=1", "eval.limit=20", *kind]
    with started(folder, once(asked)) as process:
        wait_for(lambda: any(folder.glob("rank-*.log")) and bool(players()))
        if seed % 4:
            wait_for(lambda: (folder / "checkpoints" / "latest").exists())
        time.sleep(rng.uniform(0, 2))
        logs = {pid: [Path(each.path).name for each in psutil.Process(pid).open_files()] for pid in players()}
        ranks = [pid for pid, files in logs.items() if {"rank-1.log", "rank-2.log"} & set(files)]
        os.kill(rng.choice(ranks), signal.SIGKILL)
        assert process.wait(30) == 5
    assert re.search(KILLED, (folder / "log.txt").read_text())
    wait_for(lambda: not players())
    if (folder / "checkpoints" / "latest").exists():
        done = metrics(folder)[-1]["step"]
        assert run(folder, [*asked, f"steps={done + 2}", "eval.every=0"], resume="latest") == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_when_rank_0_of_torchrun_is_killed_the_others_end(words: list[str], tmp_path: Path, ranks: int) -> None:
    launcher = launched(ranks, tmp_path / "r", [*words, "steps=2000", "checkpoint.every=1"])
    wait_for(lambda: (tmp_path / "r" / "checkpoints" / "latest").exists())
    [rank_0] = [child for child in psutil.Process(launcher.pid).children() if child.environ()["RANK"] == "0"]
    rank_0.kill()
    _, complaints = launcher.communicate(timeout=40)
    assert launcher.returncode != 0
    assert "rank 0" in complaints
    wait_for(lambda: not players())
    assert run(tmp_path / "r", [*words, f"steps={metrics(tmp_path / 'r')[-1]['step'] + 1}"], resume="latest") == 0
