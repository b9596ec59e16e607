"""cluster=ray: a training whose completions are sampled by the workers of a cluster of two simulated nodes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpost.extras import is_installed
from rlpost.policies.vllm_process import EXCHANGE, memory_folder
from tests.asynchronous import check_accounts, metrics, players, run, wait_for, write_rows

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed"),
    pytest.mark.timeout(300),
]


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


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "r"

    def kill() -> None:
        wait_for(lambda: (folder / "metrics.jsonl").is_file() and bool(metrics(folder)))
        os.kill(players()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert run(folder, words, "steps=60", "eval.limit=2") == 0
    killer.join()
    check_accounts(folder, 60)
    rows = metrics(folder)
    assert rows[-1]["collector/restarts"] == 1
    assert {row["policy/lag_max"] for row in rows} == {0}
    assert min(row["collector/players"] for row in rows) == 1  # the other one goes on meanwhile
    assert "of the cluster was ended by SIGKILL" in (folder / "log.txt").read_text()
    assert {row["eval/prompts"] for row in rows if "eval/prompts" in row} == {2}
    wait_for(nothing_is_left)
