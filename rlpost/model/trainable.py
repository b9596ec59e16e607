"""A model made ready for training: loaded, with its adapter, its optimizer and the reference it may be held to.

Activation checkpointing (arXiv:1604.06174): each layer's inputs are kept, the rest is computed again backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpost.config.paths import ADAPTER_CONFIG, NAMED_MODELS, adapter_base, resolve_adapter_path
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import expanded
from rlpost.model.families import attending
from rlpost.model.load import load_model, load_tokenizer, locate_merged, locate_model, locate_tokenizer, pick_device
from rlpost.model.logprobs import trainable_verdict
from rlpost.model.lora import adapter_off, add_adapter, load_adapter
from rlpost.model.optim import build_optimizer
from rlpost.model.weights import is_sharded
from rlpost.settings import ClusterSettings, DType, LoRASettings, ModelSettings, OptimSettings, Push, Sharding

if TYPE_CHECKING:
    from rlpost.model.sharding import ShardingPlan


def recompute_activations(model: Any) -> None:
    """Let every layer of `model` forget its activations after the forward pass and compute them again.

    transformers' own switch works in training mode only, which would turn dropout on. Without
    gradients (while sampling) nothing changes. Raises ConfigError for a model not made of layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.activation_checkpointing=true: {type(model).__name__} names no layers that could be "
            "computed again; leave it out"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward, model.config)


def _recomputed(forward: Callable[..., Any], config: Any) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        attention = config._attn_implementation

        def run(*args: Any, **kwargs: Any) -> Any:
            with attending(config, attention):  # the backward pass runs where that may have been another
                return forward(*args, **kwargs)

        # nothing in the model is random, so there is no generator to rewind
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


Reference = Callable[[], AbstractContextManager[nn.Module]]  # the frozen reference, while the context is open


class TrainingSettings(Protocol):
    """What the settings of every training have."""

    model: ModelSettings
    lora: LoRASettings
    optim: OptimSettings

    @property
    def cluster(self) -> ClusterSettings:
        """Whose machines train."""
        ...


@dataclass
class Trainable:
    """The model that is trained and what belongs to it.

    `folder` is a plain HF folder that an engine starts from. `adapter_rank` is set where an engine is to
    keep the weights of `folder` and apply the adapter beside them, beginning with that of the folder
    `adapter` where a run goes on.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    folder: Path
    adapter_rank: int | None
    adapter: Path | None
    reference: Reference | None


def starting_tokenizer(settings: TrainingSettings, checkpoint: Path | None) -> tuple[Any, Path]:
    """The tokenizer of the model that `load_trainable` gives, and the folder of its configuration, before any weights.

    That of a checkpoint was saved with the chat template, and what it is told, that the run has.
    """
    if checkpoint is not None:
        return load_tokenizer(checkpoint / "model"), checkpoint / "model"
    folder = locate_tokenizer(settings.model.path, settings.model.revision)
    return load_tokenizer(folder, settings.model), folder


def locate_start(settings: TrainingSettings) -> Path:
    """The folder of the starting model, made, converted or fetched where needed.

    transformers writes no model in a process of a group whose rank is not 0, so each looks before it joins one.
    """
    start, adapter = locate_model(settings.model.path, settings.model.revision), settings.lora.path
    return start if adapter is None else locate_merged(start, resolve_adapter_path(adapter))


def load_trainable(settings: TrainingSettings, checkpoint: Path | None, *, with_reference: bool) -> Trainable:
    """The model of `settings` as it starts, or as it is in the folder `checkpoint`, with a new optimizer.

    The reference, where there is to be one, is the starting model: that of `model.path`, with the
    adapter of `lora.path` merged into it. Under LoRA it is the trained model with its adapter off.
    Raises CheckpointError for a checkpoint whose adapter is not one of that starting model, ConfigError for a
    model that cannot be trained.
    """
    start, lora = locate_start(settings), settings.lora
    current = checkpoint / "model" if checkpoint is not None else start
    adapter = checkpoint / "adapter" if checkpoint is not None and lora.enabled else None
    plan = sharding_plan(settings.cluster)
    model = _load(start if lora.enabled else current, settings, plan)
    trainable_verdict(model)  # before anything is sampled from it
    if lora.enabled:
        add_adapter(model, lora, base=_name(settings, start))
    if adapter is not None:
        _check_same_start(adapter, _name(settings, start))
        load_adapter(model, adapter)
    if settings.model.activation_checkpointing:
        recompute_activations(model)
    if plan is not None:
        divide(model, plan)
    beside = lora.enabled and lora.push is Push.adapter
    return Trainable(
        model=model,
        optimizer=build_optimizer(model, settings.optim),
        folder=start if beside else current,
        adapter_rank=lora.rank if beside else None,
        adapter=adapter if beside else None,
        reference=_reference(model, start, settings, plan) if with_reference else None,
    )


def _name(settings: TrainingSettings, start: Path) -> str:
    """What an adapter calls the model it is for: its hub id, or the folder on this machine."""
    path = settings.model.path
    is_hub_id = path not in NAMED_MODELS and not expanded(path).exists() and settings.lora.path is None
    return path if is_hub_id else str(start.resolve())


def _check_same_start(adapter: Path, start: str) -> None:
    """Raise CheckpointError unless the adapter was begun on `start`; a run that stood for it may have gone on.

    Two folders' last parts tell: the checkpoint of a run, or the name in a cache, wherever that lies.
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        return  # loading it will say that it is missing
    begun = adapter_base(adapter)
    if Path(begun).parts[-2:] != Path(start).parts[-2:]:
        raise CheckpointError(
            f"the adapter in {adapter} was begun on {begun}, and model.path now means {start}: give model.path={begun}"
        )


def _reference(model: PreTrainedModel, start: Path, settings: TrainingSettings, plan: ShardingPlan | None) -> Reference:
    if settings.lora.enabled:
        return lambda: adapter_off(model)
    frozen = _load(start, settings, plan)
    if plan is not None:
        divide(frozen, plan)
    frozen.requires_grad_(False)
    return lambda: nullcontext(frozen)


def divide(model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Divide `model` over the ranks, unless it was loaded so."""
    from rlpost.model.sharding import shard

    if not is_sharded(model):
        shard(model, plan)


def _load(folder: Path, settings: TrainingSettings, plan: ShardingPlan | None) -> PreTrainedModel:
    """The model of `folder`: this rank's part of it where it can be read so, and else all of it.

    One that is still to be divided, with its adapter, lies on the CPU.
    """
    if plan is None:
        return load_model(folder, settings.model)
    from rlpost.model.sharding import load_sharded

    divided = None
    if not settings.lora.enabled:
        dtype, device = getattr(torch, settings.model.dtype.value), pick_device(settings.model.device)
        divided = load_sharded(folder, dtype, device, plan)
    return load_model(folder, replace(settings.model, device="cpu")) if divided is None else divided


def sharding_plan(cluster: ClusterSettings) -> ShardingPlan | None:
    """How the model is divided; None where each rank holds all of it, or there is one."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if cluster.sharding is Sharding.none or not several:
        return None
    from rlpost.model.sharding import ShardingPlan

    dtype = None if cluster.gather_dtype is DType.auto else getattr(torch, cluster.gather_dtype.value)
    return ShardingPlan(offload=cluster.cpu_offload, gather_dtype=dtype)
