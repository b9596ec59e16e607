"""The weights of a model: read from a folder, copied into another model, gathered from ranks, and compared by sums.

`rlpost.model.sharding` divides a model among ranks; what other rooms need to know of such a model stands here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from rlpost.errors import PolicyError
from rlpost.remote.exchange import with_room


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
Announce = Callable[[str], None]  # called with the name of a weight that all ranks must gather


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
    for begin, part in _blocks(own, BLOCK_BYTES // ranks):
        block = own.new_empty(ranks, *part.shape)
        torch.distributed.all_gather(list(block.unbind()), part.contiguous(), group=group)
        gathered[:, begin : begin + part.shape[0]] = block
    return gathered.flatten(0, 1)[: shared.shape[0]]


def _blocks(tensor: torch.Tensor, most_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of `tensor` in pieces of at most `most_bytes`, or one row, each with the index of its first row."""
    size = max(1, most_bytes // max(1, tensor[:1].nbytes))
    for begin in range(0, tensor.shape[0], size):
        yield begin, tensor[begin : begin + size]


_ANNOUNCE: weakref.WeakKeyDictionary[nn.Module, Announce] = weakref.WeakKeyDictionary()


def announce_with(model: nn.Module, announce: Announce) -> None:
    """Have `announce` tell the other ranks of each weight of `model` that this rank is about to gather."""
    _ANNOUNCE[model] = announce


def announced(model: nn.Module, name: str) -> None:
    """Announce that all ranks must gather `name`, if `model` is divided among them."""
    if model in _ANNOUNCE:
        _ANNOUNCE[model](name)


# Sums over weights, by which two copies can be compared that have other names and other dtypes.
#
# An engine that packs a layer for its kernels has no weight to sum: it computes such a layer's answer to a fixed input,
# which is compared as far as rounding allows.

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # endings of the names of input embeddings
AT_ONCE = 1 << 22  # elements that are cast to float64 at once
ROUNDED = {
    torch.bfloat16: 0.02,
    torch.float16: 0.005,
    torch.float32: 1e-4,
}  # allowed, of an answer's norm
OFF = 1e-10  # allowed relative difference of sums: above the effect of summation order, far below any update


@dataclass(frozen=True)
class WeightSum:
    """Number, sum and sum of squares, in float64, of the elements of one weight or of several fused into one."""

    numel: int
    total: float
    squares: float

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype | None = None) -> WeightSum:
        """The sums of `weight`, cast to `dtype` first if given."""
        total = squares = 0.0
        for part in weight.detach().flatten().split(AT_ONCE):
            wide = (part if dtype is None else part.to(dtype)).double()
            total += wide.sum().item()
            squares += wide.square().sum().item()
        return cls(weight.numel(), total, squares)

    def __add__(self, other: WeightSum) -> WeightSum:
        return WeightSum(self.numel + other.numel, self.total + other.total, self.squares + other.squares)

    def is_of(self, other: WeightSum) -> bool:
        """Whether both can belong to the same values; an engine may pad with zeros."""
        squares, numel = max(self.squares, other.squares), max(self.numel, other.numel)
        absolute = (numel * squares) ** 0.5  # bounds the sum of absolute values (Cauchy-Schwarz)
        return abs(self.squares - other.squares) <= OFF * squares and abs(self.total - other.total) <= OFF * absolute


@dataclass(frozen=True)
class EngineSums:
    """The sums of an engine's weights under its own names, and `packed`: fused name (qkv_proj) -> names of the parts.

    `answers` are the outputs for `probe_input` of layers that the engine has packed for its kernels.
    """

    sums: Mapping[str, WeightSum]
    answers: Mapping[str, Sequence[float]]
    dtypes: Mapping[str, str]
    packed: Mapping[str, Sequence[str]]

    def engine_name(self, name: str) -> str:
        """The engine's name of the weight that a checkpoint calls `name`."""
        for one, parts in self.packed.items():
            for part in parts:
                if f".{part}." in name:
                    return name.replace(f".{part}.", f".{one}.")
        return name

    def names_of(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Engine's name -> the `names` it stands for, of all weights whose sums are known."""
        found: dict[str, list[str]] = {}
        for name in names:
            if (own := self.engine_name(name)) in self.sums or own in self.answers:
                found.setdefault(own, []).append(name)
        return found

    def differing(self, weights: Mapping[str, torch.Tensor]) -> tuple[list[str], int]:
        """The engine's names of weights that differ from `weights`, and how many were compared."""
        off: list[str] = []
        compared = 0
        for own, names in self.names_of(weights).items():
            compared += 1
            if not (self._answers_as if own in self.answers else self._sums_as)(own, names, weights):
                off.append(own)
        return off, compared

    def moved_since(self, earlier: EngineSums) -> bool:
        """Whether any weight that both cover has changed."""
        sums = any(self.sums[name] != earlier.sums[name] for name in self.sums.keys() & earlier.sums.keys())
        answers = self.answers.keys() & earlier.answers.keys()
        return sums or any(self.answers[name] != earlier.answers[name] for name in answers)

    def _sums_as(self, own: str, names: Sequence[str], weights: Mapping[str, torch.Tensor]) -> bool:
        dtype = getattr(torch, self.dtypes[own])
        wanted = WeightSum(0, 0.0, 0.0)
        for name in names:
            wanted += WeightSum.of(weights[name], dtype)
        return self.sums[own].is_of(wanted)

    def _answers_as(self, own: str, names: Sequence[str], weights: Mapping[str, torch.Tensor]) -> bool:
        dtype = getattr(torch, self.dtypes[own])
        parts = self.packed.get(own.split(".")[-2], ())
        ordered = sorted(names, key=lambda name: next((i for i, part in enumerate(parts) if f".{part}." in name), 0))
        read = {name: weights[name].detach().to("cpu", dtype).float() for name in ordered}
        given = torch.tensor(self.answers[own])
        for turned in (False, True):  # GPT-2's Conv1D keeps a weight as (in, out)
            wanted = []
            for name, weight in read.items():
                bias = weights.get(f"{name.removesuffix('.weight')}.bias")
                matrix = weight.T if turned else weight
                if bias is not None and len(bias) != len(matrix):
                    break
                answer = matrix @ probe_input(matrix.shape[1], dtype).float()
                wanted.append(answer if bias is None else answer + bias.detach().cpu().to(dtype).float())
            else:
                answers = [torch.cat(wanted)]
                if len(answers[0]) > len(given):
                    break
                if "query_key_value" in own:
                    answers += _by_part(answers[0])
                near = ROUNDED[dtype] * answers[0].norm().item()
                if any((given[: len(each)] - each).norm().item() <= near for each in answers):
                    return True
        return False


def _by_part(answer: torch.Tensor) -> list[torch.Tensor]:
    """The answer of a weight that holds q, k and v head by head, as of all q, all k and all v, for any number of heads.

    Bloom's is read so, and vLLM orders it anew.
    """
    size, rest = divmod(len(answer), 3)
    heads = [] if rest else [number for number in range(2, size) if size % number == 0]
    return [answer.view(number, 3, -1).transpose(0, 1).flatten() for number in heads]


def sums_of(model: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The sums of all weights of an engine's `model`, or of `names`, as plain data for `as_engine_sums`."""
    weights = {name: w for name, w in model.named_parameters() if names is None or name in names}
    packed = {name: weight for name, weight in weights.items() if not weight.numel()}
    head = next((name for name, _ in model.named_modules() if name.endswith("lm_head")), "")
    answers = {name: _answer(model.get_submodule(name.rpartition(".")[0]), weight) for name, weight in packed.items()}
    if head and f"{head}.weight" not in weights and (names is None or f"{head}.weight" in names):
        answers[f"{head}.weight"] = _logits(model.get_submodule(head))
    formats = {name: weight.dtype for name, weight in weights.items()} | dict.fromkeys(
        [f"{head}.weight"], next(model.parameters()).dtype
    )
    return {
        "sums": {n: astuple(WeightSum.of(w)) for n, w in weights.items() if n not in packed},
        "answers": {name: answer.tolist() for name, answer in answers.items() if answer is not None},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in formats.items()},
        "packed": {one: list(parts) for one, parts in getattr(model, "packed_modules_mapping", {}).items()},
    }


def as_engine_sums(sums: Mapping[str, Any]) -> EngineSums:
    """The result of `sums_of`, which may come from another process."""
    of_weights = {name: WeightSum(*each) for name, each in sums["sums"].items()}
    return EngineSums(of_weights, sums["answers"], sums["dtypes"], sums["packed"])


def probe_input(width: int, dtype: torch.dtype) -> torch.Tensor:
    """The fixed input for a packed layer, (width,) on the CPU."""
    return torch.randn(width, generator=torch.Generator().manual_seed(width)).to(dtype)


@torch.inference_mode()
def _answer(layer: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """The output of a packed linear layer for `probe_input`; None for a layer of another kind."""
    width = getattr(layer, "input_size", None)
    if width is None:
        return None
    answer = layer(probe_input(width, weight.dtype).to(weight.device)[None])
    return (answer[0] if isinstance(answer, tuple) else answer)[0].float().cpu()


@torch.inference_mode()
def _logits(head: Any) -> torch.Tensor:
    """The output of vLLM's output head for `probe_input`, before the model scales or caps its logits."""
    weight = head.weight
    question = probe_input(head.embedding_dim, weight.dtype).to(weight.device)[None]
    return head.quant_method.apply(head, question, bias=head.bias)[0].float().cpu()
