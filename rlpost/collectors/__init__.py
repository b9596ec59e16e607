"""Collectors: an environment played with a policy."""

from rlpost.collectors.llm import LLMCollector as LLMCollector
from rlpost.weight_sync.base import WeightUpdater as WeightUpdaterBase  # noqa: F401  the name TorchRL's users know
from rlpost.weight_sync.vllm import vLLMUpdater as vLLMUpdater
