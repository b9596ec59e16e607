"""Sums over weights: by them two copies are compared that are kept under other names and in other formats.

An engine that packs a layer for its kernels has no weight to sum any more: such a layer is asked for its answer to a
fixed input, which is compared as far as rounding allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # how names of what a head is tied to end
AT_ONCE = 1 << 22  # elements that are widened together
ROUNDED = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}  # of an answer's norm
OFF = 1e-10  # of a sum: what the order of summing explains, far below any update


@dataclass(frozen=True)
class WeightSum:
    """Of one weight, or of several that are kept as one: elements, their sum and that of their squares, in float64."""

    numel: int
    total: float
    squares: float

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype | None = None) -> WeightSum:
        """The sums of `weight`, rounded to `dtype` first where one is given."""
        total = squares = 0.0
        for part in weight.detach().flatten().split(AT_ONCE):
            wide = (part if dtype is None else part.to(dtype)).double()
            total += wide.sum().item()
            squares += wide.square().sum().item()
        return cls(weight.numel(), total, squares)

    def __add__(self, other: WeightSum) -> WeightSum:
        return WeightSum(self.numel + other.numel, self.total + other.total, self.squares + other.squares)

    def is_of(self, other: WeightSum) -> bool:
        """Whether both can be of the same values; an engine may pad with zeros."""
        squares, numel = max(self.squares, other.squares), max(self.numel, other.numel)
        absolute = (numel * squares) ** 0.5  # the sum of absolute values at most, by Cauchy and Schwarz
        return abs(self.squares - other.squares) <= OFF * squares and abs(self.total - other.total) <= OFF * absolute


@dataclass(frozen=True)
class EngineSums:
    """The sums of an engine's weights by its own names, and what it calls those that it keeps as one (qkv_proj).

    `answers` are those of layers that it has packed for its kernels, to `asked`.
    """

    sums: Mapping[str, WeightSum]
    answers: Mapping[str, Sequence[float]]
    dtypes: Mapping[str, str]
    packed: Mapping[str, Sequence[str]]

    def engine_name(self, name: str) -> str:
        """The engine's name for the weight that a checkpoint has as `name`."""
        for one, parts in self.packed.items():
            for part in parts:
                if f".{part}." in name:
                    return name.replace(f".{part}.", f".{one}.")
        return name

    def names_of(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Engine's name -> those of `names` that it keeps under it, of what it has told sums of."""
        found: dict[str, list[str]] = {}
        for name in names:
            if (own := self.engine_name(name)) in self.sums or own in self.answers:
                found.setdefault(own, []).append(name)
        return found

    def differing(self, weights: Mapping[str, torch.Tensor]) -> tuple[list[str], int]:
        """The engine's names of weights that are not those of `weights`, and how many were compared."""
        off: list[str] = []
        compared = 0
        for own, names in self.names_of(weights).items():
            compared += 1
            if not (self._answers_as if own in self.answers else self._sums_as)(own, names, weights):
                off.append(own)
        return off, compared

    def moved_since(self, earlier: EngineSums) -> bool:
        """Whether any weight that both tell of is another one now."""
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
        wanted = []
        for name in ordered:
            weight = weights[name].detach().to("cpu", dtype).float()
            bias = weights.get(f"{name.removesuffix('.weight')}.bias")
            answer = weight @ asked(weight.shape[1], dtype).float()
            wanted.append(answer if bias is None else answer + bias.detach().cpu().to(dtype).float())
        expected, given = torch.cat(wanted), torch.tensor(self.answers[own])[: sum(map(len, wanted))]
        return (given - expected).norm().item() <= ROUNDED[dtype] * expected.norm().item()


def sums_of(model: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The sums of an engine's `model`, of all its weights or those of `names`, as plain data: see `EngineSums.of`."""
    told = {name: w for name, w in model.named_parameters() if names is None or name in names}
    packed = {name: weight for name, weight in told.items() if not weight.numel()}
    head = next((name for name, _ in model.named_modules() if name.endswith("lm_head")), "")
    answers = {name: _answer(model.get_submodule(name.rpartition(".")[0]), weight) for name, weight in packed.items()}
    if head and f"{head}.weight" not in told and (names is None or f"{head}.weight" in names):
        answers[f"{head}.weight"] = _logits(model)
    formats = {name: weight.dtype for name, weight in told.items()} | dict.fromkeys(
        [f"{head}.weight"], next(model.parameters()).dtype
    )
    return {
        "sums": {n: (w.numel(), *_pair(WeightSum.of(w))) for n, w in told.items() if n not in packed},
        "answers": {name: answer.tolist() for name, answer in answers.items() if answer is not None},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in formats.items()},
        "packed": {one: list(parts) for one, parts in getattr(model, "packed_modules_mapping", {}).items()},
    }


def as_engine_sums(told: Mapping[str, Any]) -> EngineSums:
    """What `sums_of` gave, in another process."""
    sums = {name: WeightSum(*each) for name, each in told["sums"].items()}
    return EngineSums(sums, told["answers"], told["dtypes"], told["packed"])


def asked(width: int, dtype: torch.dtype) -> torch.Tensor:
    """The fixed input of a layer that is asked, (width,) on the CPU."""
    return torch.randn(width, generator=torch.Generator().manual_seed(width)).to(dtype)


@torch.inference_mode()
def _answer(layer: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """What a packed linear layer of the engine makes of `asked`; None of a layer of another kind."""
    width = getattr(layer, "input_size", None)
    if width is None:
        return None
    answer = layer(asked(width, weight.dtype).to(weight.device)[None])
    return (answer[0] if isinstance(answer, tuple) else answer)[0].float().cpu()


@torch.inference_mode()
def _logits(model: Any) -> torch.Tensor | None:
    """What the output head makes of `asked`."""
    norm = next((w for name, w in model.named_parameters() if name.endswith("norm.weight")), None)
    if norm is None:
        return None
    return model.compute_logits(asked(norm.numel(), norm.dtype).to(norm.device)[None])[0].float().cpu()


def _pair(of: WeightSum) -> tuple[float, float]:
    return of.total, of.squares
