"""The weights of a model: read from a folder, copied into another model, and gathered from ranks.

`rlpost.model.sharding` divides a model among ranks; what other rooms need to know of such a model stands here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from rlpost.errors import PolicyError

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # endings of the names of input embeddings


def is_adapted(model: Any) -> bool:
    """Whether `model` has an adapter from `add_adapter`."""
    return isinstance(model, nn.Module) and hasattr(model, "peft_config")


class SavedWeights(Mapping[str, torch.Tensor]):
    """The tensors in the *.safetensors of `folder`, each read on access.

    Raises PolicyError for a folder without any, or with an unreadable file.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}  # the file of each tensor
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)
        if not self._files:
            raise PolicyError(f"{folder} holds no *.safetensors: write the whole of it before it is read")

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def copy_weights(weights: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Copy `weights`, named as in a checkpoint, into the tensors of `model`, casting to their dtypes.

    Raises PolicyError, and changes nothing, if they do not fit or the model is an adapter on frozen weights.
    """
    for own, name in _places(weights, model):  # all are checked before the first is written
        own.copy_(weights[name])


def _places(weights: Mapping[str, torch.Tensor], model: torch.nn.Module) -> list[tuple[torch.Tensor, str]]:
    """Each of the model's tensors and the name of the weight to copy into it; raises what `copy_weights` raises."""
    names: dict[int, list[str]] = {}  # names of each tensor; a tied one has several
    own = model.state_dict()
    for name, tensor in own.items():
        names.setdefault(tensor.data_ptr(), []).append(name)
    buffers = {name for name, _ in model.named_buffers()}
    if strange := sorted(weights.keys() - own.keys() - buffers):
        raise PolicyError(f"the policy's model has no weight {strange[0]}: push a model like it")
    places = []
    for tied in names.values():
        given = [name for name in tied if name in weights]
        if not given:
            raise PolicyError(f"a weight push lacks {tied[0]}, which the policy's model has; nothing was pushed")
        first, mine = weights[given[0]], own[tied[0]]
        if any(not torch.equal(first, weights[other]) for other in given[1:]):
            raise PolicyError(f"{' and '.join(tied)} are one tensor in the policy's model, and two here: tie them")
        if first.shape != mine.shape:
            raise PolicyError(
                f"{tied[0]} is {tuple(first.shape)} in this push and {tuple(mine.shape)} in the policy's model: push a "
                "model like it; nothing was pushed"
            )
        places.append((mine, given[0]))
    return places


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into `model`; a TensorDictModule also takes them under the names of the module it wraps.

    Raises ValueError, and changes nothing, if they do not fit.
    """
    own = model.state_dict()
    if own.keys() != weights.keys():
        inner = {name.removeprefix("module."): value for name, value in own.items()}
        own = inner if inner.keys() == weights.keys() else own
    wrong = sorted(own.keys() ^ weights.keys()) or [n for n, value in own.items() if weights[n].shape != value.shape]
    if wrong:
        raise ValueError(f"the weights do not fit the policy at {wrong[0]}: give those of a module like it")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])


def save_one_by_one(
    weights: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype | None = None
) -> None:
    """Write one file per weight, so that no two are held at once: another process can read a folder, not tensors.

    Each is cast to `dtype` where it is, which is the reader's: fewer bytes to write, and nothing to cast there.
    """
    from rlpost.remote.exchange import with_room

    for number, (name, weight) in enumerate(weights):
        sent = weight.detach().to(dtype).contiguous().cpu()
        file = with_room(folder / f"{number:05d}.safetensors", sent.nbytes)
        save_file({name: sent}, file)


class NamedAsSaved(Mapping[str, torch.Tensor]):
    """`weights`, named as in a model, under the names of a checkpoint of the model in the HF folder `folder`.

    transformers keeps a layer's experts in one tensor, whatever the checkpoint does; each is split when it is read.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            self._model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        own = self._model.state_dict()
        self._weights = weights
        self._sources: dict[str, str] = {}  # name in the checkpoint -> name in the model
        for name in weights:
            parts = self._saved(name, own[name]) if name in own else {name}
            self._sources |= dict.fromkeys(parts, name)
        self._last: tuple[str, Mapping[str, torch.Tensor]] = ("", {})

    def _saved(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, {name: weight})

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        if source == name:
            return self._weights[name]
        if self._last[0] != source:
            self._last = source, self._saved(source, self._weights[source])
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


# A model that is divided among ranks

BLOCK_BYTES = 2**24  # most bytes that are gathered at once
ADAPTER = "the adapter"  # announced instead of a weight's name
Announce = Callable[[str], Any]  # called with the name of a weight that all ranks must gather


def is_sharded(model: Any) -> bool:
    """Whether each rank holds only a part of `model`'s weights."""
    return hasattr(model, "unshard")  # FSDP2's own class, without importing it


def divided_again(model: Any) -> None:
    """Drop the weights that a forward pass has gathered of a divided model; a backward pass drops them by itself."""
    if is_sharded(model):
        model.reshard()


def device_of(model: Any) -> torch.device:
    """The device `model` computes on: its parts may lie in host memory and be gathered on a GPU."""
    if not is_sharded(model):
        return model.device
    kind = next(iter(model.parameters())).device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, gathered if it is divided among ranks; all ranks must call this.

    Gathers in blocks on a CPU: in one piece, gloo and DTensor would allocate its size again.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    shared: Any = tensor
    by_rows = shared.ndim and all(placement.is_shard(0) for placement in shared.placements)
    if shared.device.type != "cpu" or not by_rows:
        return shared.full_tensor()
    ranks = shared.device_mesh.size()
    rows = -(-shared.shape[0] // ranks)  # per rank; the last ranks may have fewer
    own = shared.to_local().detach()
    if own.shape[0] < rows:
        own = torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])])
    gathered = own.new_empty(ranks, rows, *own.shape[1:])
    group = shared.device_mesh.get_group()
    size = max(1, BLOCK_BYTES // ranks // max(1, own[:1].nbytes))  # rows of a block
    for begin in range(0, rows, size):
        part = own[begin : begin + size]
        block = own.new_empty(ranks, *part.shape)
        torch.distributed.all_gather(list(block.unbind()), part.contiguous(), group=group)
        gathered[:, begin : begin + part.shape[0]] = block
    return gathered.flatten(0, 1)[: shared.shape[0]]


_ANNOUNCE: weakref.WeakKeyDictionary[nn.Module, Announce] = weakref.WeakKeyDictionary()


def announce_with(model: nn.Module, announce: Announce) -> None:
    """Have `announce` tell the other ranks of each weight of `model` that this rank is about to gather."""
    _ANNOUNCE[model] = announce


def announced(model: nn.Module, name: str) -> None:
    """Announce that all ranks must gather `name`, if `model` is divided among them."""
    if model in _ANNOUNCE:
        _ANNOUNCE[model](name)
