"""LLMCollector, and a vLLM engine, as Ray actors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from talk import scripted, told

from rlpost.collectors import LLMCollector
from rlpost.policies import Request, make_vllm_worker, vLLMWrapper
from rlpost.settings import DType, SamplingSettings, VLLMSettings

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


@pytest.mark.vllm
def test_an_engine_in_an_actor_is_sampled_from(cluster: Any, tiny_folder: Path) -> None:
    settings = VLLMSettings(dtype=DType.float32, max_num_seqs=4, timeout_seconds=200)
    engine = make_vllm_worker(tiny_folder, make_ray_worker=True, settings=settings, max_model_len=64)
    policy = vLLMWrapper(engine)
    requests = [Request([5, 6, 7], 5, 1)]
    first = policy.generate(requests, SamplingSettings())
    assert first == policy.generate(requests, SamplingSettings())
    assert 1 <= len(first[0].token_ids) <= 5
    engine.close()
