"""The weights of another model, or of a folder, copied into a model's own tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlpost.errors import PolicyError
from rlpost.model.shards import is_adapted


class SavedWeights(Mapping[str, torch.Tensor]):
    """The tensors in the *.safetensors of `folder`, each read when it is asked for.

    Raises PolicyError for a folder without any, or with a file that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}  # where each tensor is
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._files |= dict.fromkeys(tensors.keys(), file)
            except (OSError, SafetensorError) as error:
                raise PolicyError(f"{file} cannot be read ({error}): write the folder anew") from error
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
    """Copy `weights`, under the names of a checkpoint, into the tensors of `model`, in its own formats.

    Raises PolicyError, and changes nothing, where they do not fit, or the model is an adapter on frozen weights.
    """
    if is_adapted(model):
        raise PolicyError("the policy's weights are an adapter's on frozen ones: push the policy's own model")
    for own, name in _places(weights, model):  # all of which are looked at before the first is written
        own.copy_(weights[name])


def _places(weights: Mapping[str, torch.Tensor], model: torch.nn.Module) -> list[tuple[torch.Tensor, str]]:
    """Each of the model's tensors and the name of what is to be copied into it; raises as `copy_weights` says."""
    names: dict[int, list[str]] = {}  # of each tensor; a tied one has several
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
        if first.shape != mine.shape:
            raise PolicyError(
                f"{tied[0]} is {tuple(first.shape)} in this push and {tuple(mine.shape)} in the policy's model: push a "
                "model like it; nothing was pushed"
            )
        if any(not torch.equal(first, weights[other]) for other in given[1:]):
            raise PolicyError(f"{' and '.join(tied)} are one tensor in the policy's model, and two here: tie them")
        places.append((mine, given[0]))
    return places


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into `model`, those of a module that a TensorDictModule wraps too, by their names there.

    Raises ValueError where they do not fit, and changes nothing then.
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
