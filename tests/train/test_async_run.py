"""collector=async, whole: learning beside sampling, resuming, and processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.errors import ConfigError
from rlpost.policies.remote import RemotePolicy
from rlpost.remote.process import WorkerProcess
from rlpost.runs.reader import read_run
from rlpost.train.assemble import assemble_grpo
from tests.asynchronous import check_accounts, metrics, players, players_killed, run, started, wait_for, write_rows
from tests.processes import is_gone
from tests.says import Says

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    return [*write_rows(folder), "collector=async"]


def test_run_learns_beside_sampling_and_resumes_where_it_was(words: list[str], tmp_path: Path, says: Says) -> None:
    folder = tmp_path / "r"
    assert run(folder, words, "steps=3", "max_policy_lag=2", "collector.depth=1") == 0
    for fact in read_run(folder).facts:
        if fact.name in ("policy", "lag"):
            says("train", fact)
    first, second, third = metrics(folder)
    assert (first["policy/lag_max"], first["policy/version"], third["policy/version"]) == (0, 0, 2)
    assert max(second["policy/lag_max"], third["policy/lag_max"]) <= 2
    assert third["eval/prompts"] == 2
    assert 0 < third["sampler/ess"] <= 1
    assert run(folder, words, "steps=5", "max_policy_lag=2", "collector.depth=1", resume="latest") == 0
    check_accounts(folder, 5)
    with pytest.raises(ConfigError, match="collector=async"):
        run(folder, [word for word in words if word != "collector=async"], "steps=6", resume="latest")
    assert [row["policy/version"] for row in metrics(folder)] == [0, 1, 2, 3, 4]


def test_killed_player_is_replaced_and_nothing_is_lost(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    with players_killed(folder, monkeypatch):
        assert run(folder, words, "steps=5", "eval.enabled=false") == 0
    check_accounts(folder, 5)
    assert metrics(folder)[-1]["collector/restarts"] == 1
    assert "SIGKILL" in (folder / "log.txt").read_text()
    assert players() == []


def test_expert_iteration_takes_the_same_collector(words: list[str], tmp_path: Path) -> None:
    more = ["steps=2", "topk_size=2", "eval.enabled=false"]
    assert run(tmp_path / "r", words, *more, command=TRAIN_EXPERT_ITERATION) == 0
    check_accounts(tmp_path / "r", 2)


def test_asynchronous_run_cannot_be_deterministic(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"deterministic=true .*collector=async"):
        compose(TRAIN_GRPO, [*words, "deterministic=true"])


def test_player_sees_the_gpus_that_it_is_given(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    given = compose(TRAIN_GRPO, [*words, "collector.gpus=[2,0]"]).settings
    policy = assemble_grpo(given).policy
    assert isinstance(policy, RemotePolicy)
    worker = policy.players.new_worker(0)
    assert isinstance(worker, WorkerProcess)
    assert worker.environment == {"CUDA_VISIBLE_DEVICES": "7,4"}
    with pytest.raises(ConfigError, match="GPU 3"):
        assemble_grpo(compose(TRAIN_GRPO, [*words, "collector.gpus=[3]"]).settings)


# By the dozen: rlpost's own end, and its player's, at any moment


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_run_resumes_with_every_draw_once(words: list[str], tmp_path: Path, seed: int) -> None:
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
def test_player_killed_at_any_moment_is_replaced(words: list[str], tmp_path: Path, seed: int) -> None:
    folder, rng = tmp_path / "r", random.Random(seed)
    asked = [*words, "steps=30", "eval.enabled=false", "max_policy_lag=2", "dynamic.enabled=true"]
    with started(folder, asked) as process:
        wait_for(lambda: bool(players()))
        time.sleep(rng.uniform(0, 15))
        for pid in players():
            os.kill(pid, signal.SIGKILL)
        code = process.wait(300)
    assert code == 0
    check_accounts(folder, 30)
    assert players() == []
