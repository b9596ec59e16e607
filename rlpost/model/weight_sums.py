"""Sums over weights, by which two copies can be compared that have other names and other dtypes.

An engine that packs a layer for its kernels has no weight to sum: it computes such a layer's answer to a fixed input,
which is compared as far as rounding allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

AT_ONCE = 1 << 22  # elements that are cast to float64 at once
ROUNDED = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}  # allowed, of an answer's norm
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
