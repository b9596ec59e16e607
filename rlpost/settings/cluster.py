"""Where a training's completions are sampled: on this machine, or by the workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlpost.settings.checks import Settings, limited


@dataclass
class ClusterSettings(Settings, group="cluster"):
    """What every choice of machines is."""

    name: ClassVar[str] = ""  # by which cluster= chooses it


@dataclass
class NoClusterSettings(ClusterSettings):
    """This machine alone."""

    name: ClassVar[str] = "none"


@dataclass
class RayClusterSettings(ClusterSettings):
    """Workers of a Ray cluster sample, each with an environment and an engine of its own; this machine trains."""

    name: ClassVar[str] = "ray"

    address: str = "auto"  # of the cluster: a host:port, auto (a running one, or a new one here) or local (a new one)
    rollout_workers: int = limited(1, at_least=1)  # that sample; a run begins with the first and goes on with all
    cpus_per_worker: float = limited(1.0, above=0.0)  # that a worker is given, and its engine's threads
    gpus_per_worker: float | None = limited(None, at_least=0.0)  # None: one a shard where the cluster has any, else 0
    tensor_parallel_size: int = limited(1, at_least=1)  # GPUs that vLLM splits the model of each worker over
    place_seconds: float = limited(300.0, above=0.0)  # longest wait for the first worker to find its place
    max_restarts: int = limited(3, at_least=0)  # of workers that die, in all; after them the others go on
