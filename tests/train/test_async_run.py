"""collector=async, whole: learning beside sampling, resuming, and processes that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlpost.assemble import assemble_grpo
from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO
from rlpost.child import python_module
from rlpost.collectors.process import WorkerProcess
from rlpost.collectors.remote_policy import RemotePolicy
from rlpost.config.compose import compose
from rlpost.errors import ConfigError, PolicyError
from rlpost.settings.run import RunRequest
from rlpost.train import expert_iteration, grpo
from tests.processes import children, is_gone

REWARD = '''
def small(completion_ids, **kwargs):
    """The share of ids below 120 and, so that most groups differ, one part in a hundred of their sum."""
    return [sum(i < 120 for i in ids) / 6 + sum(ids) % 7 / 100 for ids in completion_ids]
'''
WORDS = [
    "model=tiny",
    "policy=transformers",
    "model.autocast=none",
    "collector=async",
    "env=dataset",
    "prompts_per_step=2",
    "group_size=4",
    "env.max_completion_tokens=6",
    "optim.lr=1e-3",
    "checkpoint.every=2",
    "eval.limit=2",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "small.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Say {i} and {i * 7 % 13}."}) for i in range(500)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return [*WORDS, f"env.path={folder / 'rows.jsonl'}", f"env.reward={folder / 'small.py'}:small"]


def run(folder: Path, words: Sequence[str], *more: str, resume: str | None = None, command: Any = TRAIN_GRPO) -> int:
    composed = compose(command, [*words, *more])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    loop = grpo if command is TRAIN_GRPO else expert_iteration
    return loop.train(composed.settings, request)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def trained_groups(folder: Path) -> list[int]:
    """The draw of every group that was trained on, as the rollouts tell it."""
    return [
        group
        for file in sorted((folder / "rollouts").glob("*.parquet"))
        for group in sorted(set(pq.read_table(file, columns=["group"])["group"].to_pylist()))
    ]


def check_accounts(folder: Path, steps: int, per_step: int = 2) -> None:
    """Every draw was trained on once at most, and at every step all that was issued is accounted for."""
    groups = trained_groups(folder)
    assert len(groups) == len(set(groups)) == steps * per_step
    for row in metrics(folder):
        ended = ("trained", "turned_down", "cancelled", "failed", "waiting")
        assert row["groups/issued"] == sum(row[f"groups/{name}"] for name in ended)
        assert row["groups/trained"] == row["step"] * per_step
        assert row["buffer/dropped_by_age"] == 0
    left = metrics(folder)[-1]["groups/waiting"] + metrics(folder)[-1]["groups/turned_down"]
    assert max(groups) < steps * per_step + left  # nothing was drawn that is not accounted for


def test_a_run_learns_beside_sampling_and_goes_on_where_it_was(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "r"
    assert run(folder, words, "steps=3", "max_policy_lag=2", "collector.depth=1") == 0
    said = capsys.readouterr().out
    assert "policy  transformers in its own process, temperature 1" in said
    assert "lag     completions may be 2 versions older than the policy; pi_old / mu corrects for it" in said
    first, second, third = metrics(folder)
    assert (first["policy/lag_max"], first["policy/version"], third["policy/version"]) == (0, 0, 2)
    assert max(second["policy/lag_max"], third["policy/lag_max"]) <= 2
    assert third["eval/prompts"] == 2
    assert 0 < third["sampler/ess"] <= 1
    assert run(folder, words, "steps=5", "max_policy_lag=2", "collector.depth=1", resume="latest") == 0
    check_accounts(folder, 5)
    with pytest.raises(ConfigError, match="the run began with collector=async or cluster=ray; keep that"):
        run(folder, [word for word in words if word != "collector=async"], "steps=6", resume="latest")
    assert [row["policy/version"] for row in metrics(folder)] == [0, 1, 2, 3, 4]


def test_a_player_that_is_killed_is_replaced_and_nothing_is_lost(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "r"

    def kill() -> None:
        wait_for(lambda: (folder / "metrics.jsonl").is_file() and bool(metrics(folder)))
        for pid in players():
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert run(folder, words, "steps=5", "eval.enabled=false") == 0
    killer.join()
    check_accounts(folder, 5)
    assert metrics(folder)[-1]["collector/restarts"] == 1
    said = "was ended by SIGKILL, as the kernel does where memory runs out; starting another one (1 of 3)"
    assert said in (folder / "log.txt").read_text()
    assert players() == []


def test_expert_iteration_takes_the_same_collector(words: list[str], tmp_path: Path) -> None:
    more = ["steps=2", "topk_size=2", "eval.enabled=false"]
    assert run(tmp_path / "r", words, *more, command=TRAIN_EXPERT_ITERATION) == 0
    check_accounts(tmp_path / "r", 2)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["deterministic=true"], "deterministic=true promises bitwise equal runs, and with collector=async"),
        (["collector.depth=2"], "collector.depth=2 begins groups that would be too old .* max_policy_lag=1"),
        (["max_policy_lag=0", "collector.depth=1"], "at most max_policy_lag=0"),
        (["collector.gpus=[1,1]"], "1 is no number of one GPU"),
    ],
)
def test_what_cannot_be_together_is_refused(words: list[str], more: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        compose(TRAIN_GRPO, [*words, *more])


def test_the_player_sees_the_gpus_that_it_is_given(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    given = compose(TRAIN_GRPO, [*words, "collector.gpus=[2,0]"]).settings
    policy = assemble_grpo(given).policy
    assert isinstance(policy, RemotePolicy)
    worker = policy.players.new_worker(0)
    assert isinstance(worker, WorkerProcess)
    assert worker.environment == {"CUDA_VISIBLE_DEVICES": "7,4"}
    with pytest.raises(ConfigError, match="there is no GPU 3, this process sees 3"):
        assemble_grpo(compose(TRAIN_GRPO, [*words, "collector.gpus=[3]"]).settings)


# By the dozen: rlpost's own end, and its player's, at any moment


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_any_moment_is_resumed_with_every_draw_once(
    words: list[str], tmp_path: Path, seed: int
) -> None:
    folder, rng = tmp_path / "r", random.Random(seed)
    asked = [*words, "steps=16", "eval.enabled=false", "max_policy_lag=2", "dynamic.enabled=true", "checkpoint.every=1"]
    with started(folder, asked) as process:
        wait_for(lambda: (folder / "metrics.jsonl").is_file())
        time.sleep(rng.uniform(0, 8))
        left = players()
        process.kill()
        process.wait(30)
    wait_for(lambda: all(map(is_gone, left)))  # it ends with its owner
    saved = (folder / "checkpoints" / "latest").exists()
    assert run(folder, asked, resume="latest" if saved else None) == 0
    check_accounts(folder, 16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_player_killed_at_any_moment_is_replaced(words: list[str], tmp_path: Path, seed: int) -> None:
    folder, rng = tmp_path / "r", random.Random(seed)
    asked = [*words, "steps=30", "eval.enabled=false", "max_policy_lag=2", "dynamic.enabled=true"]
    with started(folder, asked) as process:
        wait_for(lambda: bool(players()))
        time.sleep(rng.uniform(0, 15))
        for pid in players():
            os.kill(pid, signal.SIGKILL)
        code = process.wait(300)
    if code == PolicyError.exit_code:  # it was killed while it was being built: nothing was trained on yet
        assert "was ended by SIGKILL" in (folder / "log.txt").read_text()
        assert not (folder / "checkpoints").exists()
        folder = tmp_path / "again"
        code = run(folder, asked)
    assert code == 0
    check_accounts(folder, 30)
    assert players() == []


def players() -> list[int]:
    """The players' processes that this one, or what it started, has under it."""
    return [process.pid for process, command in children().items() if "rlpost.collectors.worker" in command]


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def started(folder: Path, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`rlpost train grpo` in a process of its own; killed at the end."""
    process = python_module(
        "rlpost", "train", "grpo", *words, "--out", folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
