"""LLMCollector as a Ray actor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from talk import scripted, told

from rlpost.collectors import LLMCollector

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray  # pyright: ignore[reportMissingImports]

    module: Any = ray
    module.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    yield module
    module.shutdown()


def test_a_collector_in_an_actor_gives_its_batches(cluster: Any) -> None:
    # made there, of a class that the actor's process can import: an environment has a lock and does not travel
    from rlpost.envs import DatasetChatEnv

    make = lambda: DatasetChatEnv([{"question": "q0"}, {"question": "q1"}], num_envs=2, shuffle=False)  # noqa: E731
    remote = LLMCollector.as_remote({"num_cpus": 1})
    actor = remote.remote(make, policy=scripted("a", "b"), dialog_turns_per_batch=2, flatten_data=True)
    batch = cluster.get(actor.rollout.remote(), timeout=120)
    assert told(batch) == [("q0", 1), ("q1", 1)]
    assert cluster.get(actor.get_policy_version.remote(), timeout=60) == 0
    cluster.kill(actor)
