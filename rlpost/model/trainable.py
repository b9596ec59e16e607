"""A model made ready for training: loaded, with its adapter, its optimizer and the reference it may be held to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpost.config.paths import NAMED_MODELS, REFERENCE, resolve_adapter_path
from rlpost.data.rendering import set_day
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.model.device import pick_device
from rlpost.model.families import attending
from rlpost.model.load import load_model
from rlpost.model.locate import locate_config, locate_merged, locate_model, locate_tokenizer
from rlpost.model.logprobs import trainable_verdict
from rlpost.model.optim import build_optimizer
from rlpost.model.packing import Reference
from rlpost.model.tokenizer import load_tokenizer
from rlpost.model.weights import is_sharded
from rlpost.settings import Autocast, ClusterSettings, DType, ModelSettings, Push, Sharding
from rlpost.settings.commands import TrainingSettings

if TYPE_CHECKING:
    from rlpost.model.sharding import ShardingPlan


@dataclass
class Trainable:
    """The trained model with everything that belongs to it.

    `folder` is a plain HF folder for an engine to start from. `adapter_rank` is set if an engine should keep the
    weights of `folder` and apply the adapter beside them; a resumed run starts with that in the folder `adapter`.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    folder: Path
    adapter_rank: int | None
    adapter: Path | None
    reference: Reference | None


def load_trainable(
    settings: TrainingSettings, checkpoint: Path | None, *, with_reference: bool | None = None
) -> Trainable:
    """The starting model of `settings`, or that of the folder `checkpoint`, with a new optimizer.

    The reference, loaded if the loss reads one or as `with_reference` says, is the model of `settings.reference_path`,
    or the starting model: that of `model.path`, with the adapter of `lora.path` merged into it, which under LoRA is the
    trained model with its adapter off. With a `reference_hint` it is the trained model as it is; one that moves comes
    from the checkpoint. Raises ConfigError for a model that cannot be trained.
    """
    lora, plan = settings.lora, sharding_plan(settings.cluster, settings.model)
    start, of_reference = locate_models(settings.model, lora.path, settings.reference_path)
    current = checkpoint / "model" if checkpoint is not None else start
    adapter = checkpoint / "adapter" if checkpoint is not None and lora.enabled else None
    moved = checkpoint / REFERENCE if checkpoint is not None and (checkpoint / REFERENCE).is_dir() else None
    model = _load(start if lora.enabled else current, settings.model, plan, whole=lora.enabled)
    trainable_verdict(model)  # before anything is sampled from it
    if lora.enabled:
        from rlpost.model.lora import add_adapter

        add_adapter(model, lora, base=_name(settings.model.path, lora.path, start))
    if adapter is not None:
        from rlpost.model.lora import load_adapter

        load_adapter(model, adapter)
    if settings.model.activation_checkpointing:
        recompute_activations(model)
    if plan is not None:
        _divide(model, plan)
    reference: Reference | None = None
    with_reference = settings.needs_reference if with_reference is None else with_reference
    if with_reference and settings.reference_hint is not None:
        reference = partial(nullcontext, model)
    elif with_reference and settings.reference_path is None and lora.enabled:
        from rlpost.model.lora import adapter_off

        reference = partial(adapter_off, model)
    elif with_reference:
        frozen = _load(moved or of_reference, settings.model, plan, whole=lora.enabled)
        if plan is not None:
            _divide(frozen, plan)
        reference = partial(nullcontext, frozen.requires_grad_(False))
    beside = lora.enabled and lora.push is Push.adapter
    return Trainable(
        model=model,
        optimizer=build_optimizer(model, settings.optim),
        folder=start if beside else current,
        adapter_rank=lora.rank if beside else None,
        adapter=adapter if beside else None,
        reference=reference,
    )


def starting_tokenizer(model: ModelSettings, adapter: str | None, checkpoint: Path | None) -> tuple[Any, Path]:
    """The tokenizer of the model that `load_trainable` returns, and the folder of its config; reads no weights.

    The tokenizer may be that of the `adapter` to start from. A checkpoint's tokenizer was saved with the run's chat
    template and its variables.
    """
    if checkpoint is not None:
        tokenizer = load_tokenizer(checkpoint / "model")
        if model.day is not None:
            set_day(tokenizer, model.day)
        return tokenizer, checkpoint / "model"
    folder = locate_tokenizer(model.path, model.revision, adapter=adapter)
    return load_tokenizer(folder, model), locate_config(model.path, model.revision)


def locate_models(model: ModelSettings, adapter: str | None, reference: str | None) -> tuple[Path, Path]:
    """The folders of the starting model and of the reference, built, converted or downloaded if needed.

    An `adapter` is merged into the model; a `reference` of None is the starting model. Each rank calls this before it
    joins the process group, in which transformers writes models on rank 0 only.
    """
    start = locate_model(model.path, model.revision)
    start = start if adapter is None else locate_merged(start, resolve_adapter_path(adapter))
    return start, start if reference is None else locate_model(reference, key="teacher")


def sharding_plan(cluster: ClusterSettings, model: ModelSettings) -> ShardingPlan | None:
    """How to divide the model; None if each rank holds all of it, or there is only one rank."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if cluster.sharding is Sharding.none or not several:
        return None
    from rlpost.model.sharding import ShardingPlan

    dtype = None if cluster.gather_dtype is DType.auto else getattr(torch, cluster.gather_dtype.value)
    if dtype is None and _gathers_in_bfloat16(cluster, model):
        dtype = torch.bfloat16
    return ShardingPlan(offload=cluster.cpu_offload, gather_dtype=dtype)


def forward_precision(cluster: ClusterSettings, model: ModelSettings) -> Autocast:
    """The autocast of a forward: none where layers are gathered in bfloat16, which autocast would copy once more."""
    divides = cluster.sharding is Sharding.full
    return Autocast.none if divides and _gathers_in_bfloat16(cluster, model) else model.autocast


def _gathers_in_bfloat16(cluster: ClusterSettings, model: ModelSettings) -> bool:
    """Whether a divided model gathers its layers in bfloat16 on a GPU, as its products are.

    In float32 they would be twice the traffic, and autocast would keep a copy of every layer until the backward ends.
    """
    wanted = cluster.gather_dtype in (DType.auto, DType.bfloat16)
    on_gpu = pick_device(model.device).type == "cuda"
    return wanted and on_gpu and model.autocast is Autocast.bfloat16


def _divide(model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Divide `model` among the ranks, unless it was loaded that way."""
    from rlpost.model.sharding import shard

    if not is_sharded(model):
        shard(model, plan)


def recompute_activations(model: Any) -> None:
    """Let every layer of `model` keep only its inputs and compute its activations again backward (arXiv:1604.06174).

    transformers' own switch works in training mode only, which would turn dropout on. Without
    gradients (while sampling) nothing changes. Raises ConfigError for a model without layers.
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
            with attending(config, attention):  # another may be set when the backward pass runs
                return forward(*args, **kwargs)

        # nothing in the model is random, so there is no generator to rewind
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


def _name(path: str, adapter: str | None, start: Path) -> str:
    """The name of the starting model in an adapter's config: its hub id, or the folder on this machine."""
    is_hub_id = path not in NAMED_MODELS and not expanded(path).exists() and adapter is None
    return path if is_hub_id else str(start.resolve())


def _load(folder: Path, settings: ModelSettings, plan: ShardingPlan | None, *, whole: bool) -> PreTrainedModel:
    """The model of `folder`: only this rank's part, or all of it on the CPU if it is wanted `whole` or has to be.

    The caller divides the latter, with its adapter.
    """
    if plan is None:
        return load_model(folder, settings)
    from rlpost.model.sharding import load_sharded

    divided = None
    if not whole:
        divided = load_sharded(folder, getattr(torch, settings.dtype.value), pick_device(settings.device), plan)
    return load_model(folder, replace(settings, device="cpu")) if divided is None else divided
