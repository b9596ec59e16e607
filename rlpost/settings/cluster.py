"""Whose machines a training uses: the processes that train, and the workers of a Ray cluster that sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import Settings, limited
from rlpost.settings.code import MACHINE
from rlpost.settings.model import DType


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
