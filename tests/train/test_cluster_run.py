"""cluster=ray: a training whose completions are sampled by the workers of a cluster of two simulated nodes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpost.files import memory_folder
from rlpost.remote.exchange import EXCHANGE
from tests.asynchronous import check_accounts, metrics, players, players_killed, run, started, wait_for, write_rows

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, where the driver is, and two nodes of two CPUs each, which Ray takes for other machines."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    simulated: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    for _ in range(2):
        simulated.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    yield simulated
    ray.shutdown()
    simulated.shutdown()


@pytest.fixture
def words(cluster: Any, tmp_path: Path) -> list[str]:
    two = ["cluster=ray", f"cluster.address={cluster.address}", "cluster.rollout_workers=2"]
    return [*write_rows(tmp_path), *two, "cluster.cpus_per_worker=2"]  # so one on each node


def nothing_is_left() -> bool:
    return not players() and not list(memory_folder().glob(f"{EXCHANGE}*"))


def test_killed_worker_is_replaced_and_nothing_is_lost(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    with players_killed(folder, monkeypatch, most=1):
        assert run(folder, words, "steps=6", "eval.limit=2") == 0
    check_accounts(folder, 6)
    rows = metrics(folder)
    assert rows[-1]["collector/restarts"] == 1
    assert {row["policy/lag_max"] for row in rows} == {0}
    assert min(row["collector/players"] for row in rows) == 1  # the other one goes on meanwhile
    assert "SIGKILL" in (folder / "log.txt").read_text()
    assert {row["eval/prompts"] for row in rows if "eval/prompts" in row} == {2}
    wait_for(nothing_is_left)


# By the dozen, and what takes a minute


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_worker_killed_at_any_moment_is_replaced(words: list[str], tmp_path: Path, seed: int) -> None:
    folder, rng = tmp_path / "r", random.Random(seed)
    asked = [*words, "steps=150", "eval.enabled=false", "dynamic.enabled=true"]
    asked += ["collector=async", "max_policy_lag=2"] if seed % 2 else []
    with started(folder, asked) as process:
        wait_for(lambda: bool(players()))
        time.sleep(rng.uniform(0, 12))
        os.kill(rng.choice(players()), signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: len(players()) == 2)
        assert time.monotonic() - killed < 120
        assert process.wait(280) == 0
    check_accounts(folder, 150)
    assert metrics(folder)[-1]["collector/restarts"] == 1
    assert metrics(folder)[-1]["collector/players"] == 2  # at full strength again
    wait_for(nothing_is_left)


@pytest.mark.slow
def test_killed_driver_leaves_nothing_and_is_resumed(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "r"
    asked = [*words, "steps=12", "eval.enabled=false", "checkpoint.every=1"]
    with started(folder, asked) as process:
        wait_for(lambda: (folder / "checkpoints" / "latest").exists())
        process.kill()
        process.wait()
        killed = time.monotonic()
        wait_for(nothing_is_left)
        assert time.monotonic() - killed < 60
    assert run(folder, asked, resume="latest") == 0
    check_accounts(folder, 12)


@pytest.mark.slow
def test_node_that_joins_a_run_samples_too(tmp_path: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    simulated: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    folder = tmp_path / "r"
    asked = [*write_rows(tmp_path), "cluster=ray", f"cluster.address={simulated.address}", "cluster.rollout_workers=2"]
    asked += ["cluster.cpus_per_worker=2", "steps=2000", "eval.enabled=false"]
    try:
        with started(folder, asked) as process:
            wait_for(lambda: (folder / "metrics.jsonl").is_file() and bool(metrics(folder)))
            assert metrics(folder)[-1]["collector/players"] == 1
            simulated.add_node(num_cpus=2)
            wait_for(lambda: metrics(folder)[-1]["collector/players"] == 2)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        wait_for(nothing_is_left)
    finally:
        simulated.shutdown()


@pytest.mark.slow
def test_lost_head_and_missing_place_end_a_run(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    simulated: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    folder = tmp_path / "r"
    asked = [*write_rows(tmp_path), "cluster=ray", f"cluster.address={simulated.address}", "eval.enabled=false"]
    try:
        with started(tmp_path / "large", [*asked, "cluster.cpus_per_worker=3", "cluster.place_seconds=5"]) as process:
            assert process.wait(120) == 5
        assert "3 CPUs" in (tmp_path / "large" / "log.txt").read_text()
        with started(folder, [*asked, "steps=100000"]) as process:
            wait_for(lambda: (folder / "metrics.jsonl").is_file() and bool(metrics(folder)))
            simulated.head_node.kill_gcs_server()
            lost = time.monotonic()
            assert process.wait(120) == 5
            assert time.monotonic() - lost < 60
        assert "the head" in (folder / "log.txt").read_text()
    finally:
        simulated.shutdown()
    wait_for(nothing_is_left)
