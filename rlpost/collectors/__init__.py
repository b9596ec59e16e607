"""Collectors: an environment played with a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.collectors.async_process import AsyncCollector as AsyncCollector
    from rlpost.collectors.async_process import aSyncDataCollector as aSyncDataCollector
    from rlpost.collectors.frame_parts import RandomPolicy as RandomPolicy
    from rlpost.collectors.general import Collector as Collector
    from rlpost.collectors.general import Collector as SyncDataCollector  # noqa: F401  its name in older examples
    from rlpost.collectors.llm import LLMCollector as LLMCollector
    from rlpost.collectors.ray_collector import RayCollector as RayCollector
    from rlpost.collectors.ray_llm import RayLLMCollector as RayLLMCollector
    from rlpost.weight_sync.base import SharedWeights as SharedWeights
    from rlpost.weight_sync.base import WeightUpdater as WeightUpdaterBase  # noqa: F401  as TorchRL's users know it
    from rlpost.weight_sync.group import GroupWeightSyncScheme as GroupWeightSyncScheme
    from rlpost.weight_sync.ray import RayWeightSyncScheme as RayWeightSyncScheme
    from rlpost.weight_sync.vllm import vLLMUpdater as vLLMUpdater

ELSEWHERE = {  # of TorchRL's names
    "MultiSyncCollector": "a Collector of rlpost.envs.ParallelEnv plays several environments in step",
    "MultiAsyncCollector": "a Collector of rlpost.envs.AsyncEnvPool takes each frame when it is there",
}

__getattr__, __dir__ = lazy_names(__name__, __file__, ELSEWHERE)
