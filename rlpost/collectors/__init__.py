"""Collectors: an environment played with a policy."""

from rlpost.collectors.llm import LLMCollector as LLMCollector
from rlpost.weight_sync.vllm import vLLMUpdater as vLLMUpdater
