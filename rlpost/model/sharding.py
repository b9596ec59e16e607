"""A model whose weights, gradients and moments are divided among the ranks of a training (FSDP2, arXiv:2304.11277).

Each layer is a unit: gathered while it computes, forward and backward, then dropped. Embeddings, norm and head are
one more unit, that of the model itself, since heads are often tied to the embeddings; so a model is read inside its
own forward (`rlpost.model.logprobs`). Only trainings on several ranks import this module.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpost.config.paths import weight_files
from rlpost.errors import ConfigError
from rlpost.model.logprobs import READ_INSIDE, trainable_verdict
from rlpost.model.lora import MergedWeights
from rlpost.model.memory import give_back_freed_memory
from rlpost.model.weights import announced, is_adapted, whole

INDEX = "model.safetensors.index.json"
OUTSIDE_LAYERS = "outside"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # names in safetensors


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is divided over the ranks of the process group."""

    offload: bool = False  # keep weights, gradients and moments in host memory between uses
    gather_dtype: torch.dtype | None = None  # dtype of gathered layers and their products; None: that of the weights


def shard(model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Divide `model` among the ranks, so that each holds a part of every parameter. All ranks must call this.

    Gradients are summed over ranks. Raises ConfigError for a model that is not read as one packed row: its ranks would
    gather different numbers of times.
    """
    verdict = trainable_verdict(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if verdict.reading not in READ_INSIDE or not layers:
        raise ConfigError(
            f"cluster.sharding=full cannot divide {type(model).__name__}: {verdict.reason or 'it names no layers'}; "
            "take cluster.sharding=none"
        )
    device = "cuda" if "nccl" in str(torch.distributed.get_backend_config()) else "cpu"
    how: dict[str, Any] = {"mesh": init_device_mesh(device, (torch.distributed.get_world_size(),))}
    if plan.offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
    if plan.gather_dtype is not None:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=plan.gather_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # and a factor of 1: plain sums, which gloo can do
            module.set_gradient_divide_factor(1.0)


def load_sharded(folder: Path, dtype: torch.dtype, device: torch.device, plan: ShardingPlan) -> Any | None:
    """The model of `folder`; each rank reads only its own part. None if its files use other names.

    Builds the model without weights, then reads the safetensors files part by part.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    if wanted.items() - _shapes(folder).items():
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    trainable_verdict(model)
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    shard(model, plan)
    model.to_empty(device="cpu" if plan.offload else device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer
    _read_shards(dict(model.named_parameters()), folder)
    return model


class GatheredWeights(Mapping[str, torch.Tensor]):
    """The whole weights of a sharded model, under the names of a plain checkpoint, each gathered when it is read.

    An adapter is merged. Reading a weight is a collective operation: rank 0 announces it and the others follow.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = MergedWeights(model) if is_adapted(model) else model.state_dict()
        self._names = dict.fromkeys(self._weights)  # names alone, so that looking them up gathers nothing

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        announced(self._model, name)
        return whole(self._weights[name].detach())

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def export(model: Any, folder: Path) -> None:
    """Write the whole model as a plain HF folder, one file per layer, gathering one layer at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = GatheredWeights(model)
    files: dict[str, list[str]] = {}
    for name in weights:
        if name not in model.all_tied_weights_keys:
            files.setdefault(_layer_of(name), []).append(name)
    weight_map, size = {}, 0
    for number, names in enumerate(files.values(), start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        size += _write({name: weights[name].cpu() for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
        give_back_freed_memory()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1))
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _write(tensors: Mapping[str, torch.Tensor], file: Path) -> int:
    """Write a safetensors file without the library's full copy in memory; returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)  # align the tensors
    with file.open("wb") as stream:
        stream.write(len(words).to_bytes(8, "little") + words)
        for tensor in tensors.values():
            content: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            stream.write(content)  # its bytes in memory order
    return end


def save_moments(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the optimizer's state as safetensors, each rank its own part (torch.distributed.checkpoint)."""
    state = _moments(model, optimizer)
    with _quiet():
        checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load the state that `save_moments` wrote on any number of ranks, or that of a one-rank checkpoint."""
    if not any(folder.glob("*.safetensors")):
        return  # it was saved before the first update
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device if parameter.device.type == "cuda" else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    _read_shards(_moments(model, optimizer), folder)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of AdamW, named as by `optimizer_tensors`."""
    return {
        f"optimizer/{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _read_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill `tensors`, this rank's parts, from the safetensors files of `folder`, reading only those parts."""
    by_layer: dict[str, dict[str, torch.Tensor]] = {}  # holds one layer of the files at a time
    for name, tensor in tensors.items():
        by_layer.setdefault(_layer_of(name), {})[name] = tensor
    with _quiet(), torch.no_grad():
        for part in by_layer.values():
            checkpoint.load(part, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of torch.distributed.checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _shapes(folder: Path) -> dict[str, torch.Size]:
    """The shape of every tensor in the files of `folder`."""
    found = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def _layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; `OUTSIDE_LAYERS` for weights of no layer."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return OUTSIDE_LAYERS if number is None else ".".join(parts[: number + 1])
