"""Collectors: an environment played with a policy."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.torchrl.collector import Collector as Collector
    from rlpost.torchrl.collector import Collector as SyncDataCollector  # noqa: F401  its name in older examples
    from rlpost.torchrl.collector import RandomPolicy as RandomPolicy
    from rlpost.torchrl.llm_collector import LLMCollector as LLMCollector
    from rlpost.torchrl.remote_collector import AsyncCollector as AsyncCollector
    from rlpost.torchrl.remote_collector import AsyncCollector as aSyncDataCollector  # noqa: F401  its name in older examples
    from rlpost.torchrl.remote_collector import RayCollector as RayCollector
    from rlpost.torchrl.remote_collector import RayLLMCollector as RayLLMCollector
    from rlpost.weight_sync.base import SharedWeights as SharedWeights
    from rlpost.weight_sync.base import WeightUpdater as WeightUpdaterBase  # noqa: F401  as TorchRL's users know it
    from rlpost.weight_sync.folder import RayWeightSyncScheme as RayWeightSyncScheme
    from rlpost.weight_sync.vllm import vLLMUpdater as vLLMUpdater

ELSEWHERE = {  # of TorchRL's names
    "MultiSyncCollector": "a Collector of rlpost.envs.ParallelEnv plays several environments in step",
    "MultiAsyncCollector": "a RayCollector takes each batch when it is there",
}

__getattr__, __dir__ = lazy_names(__name__, __file__, ELSEWHERE)
