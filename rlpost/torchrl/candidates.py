"""Which of a prompt's trajectories make its group, where more are sampled than a group holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb

import torch
from tensordict import TensorDictBase

Bounds = tuple[float, float]
# (candidates, their returns (N,), group size, bounds of the mean return) -> who is chosen; None: nobody yet
Selector = Callable[[Sequence[TensorDictBase], torch.Tensor, int, Bounds | None], Sequence[int] | None]

MOST_COMBINATIONS = 100_000  # `balanced` looks at all of these, and climbs where there are more


def within(mean: torch.Tensor, bounds: Bounds | None) -> torch.Tensor:
    """Whether a mean return lies strictly between `bounds`; elementwise."""
    return torch.ones_like(mean, dtype=torch.bool) if bounds is None else (mean > bounds[0]) & (mean < bounds[1])


def first(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """Those that came first."""
    chosen = list(range(size))
    return chosen if within(returns[chosen].mean(), bounds) else None


def uniform(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """Evenly spaced among the candidates in the order of their returns, the lowest and the highest included."""
    chosen = sorted(_evenly_spaced(returns, size))
    return chosen if within(returns[chosen].mean(), bounds) else None


def balanced(
    candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """Those whose mean return is nearest the middle of the bounds, and of these the ones furthest apart.

    Without bounds the middle is that between the lowest and the highest return. Up to
    `MOST_COMBINATIONS` choices are all compared; of more, an evenly spaced one is improved by
    exchanging one trajectory at a time until nothing is gained.
    """
    low, high = bounds if bounds is not None else (returns.min().item(), returns.max().item())
    middle = (low + high) / 2
    if comb(returns.numel(), size) <= MOST_COMBINATIONS:
        choices = torch.combinations(torch.arange(returns.numel()), size)
        chosen = choices[_best(returns[choices], middle)].tolist()
    else:
        chosen = _climb(returns, _evenly_spaced(returns, size), middle)
    return sorted(chosen) if within(returns[chosen].mean(), bounds) else None


SELECTORS: dict[str, Selector] = {"first": first, "uniform": uniform, "balanced": balanced}


def select(
    selector: Selector, candidates: Sequence[TensorDictBase], returns: torch.Tensor, size: int, bounds: Bounds | None
) -> list[int] | None:
    """What `selector` chooses, checked: `size` different places in `candidates`, or None.

    Raises ValueError for any other answer, which only a selector of the user's can give.
    """
    chosen = selector(candidates, returns, size, bounds)
    if chosen is None:
        return None
    if len(chosen) != size or len(set(chosen)) != size or not all(0 <= i < len(candidates) for i in chosen):
        raise ValueError(
            f"the candidate_selector chose {list(chosen)} of {len(candidates)} trajectories: it must give {size} "
            "different places, or None"
        )
    return [int(i) for i in chosen]


def _evenly_spaced(returns: torch.Tensor, size: int) -> list[int]:
    order = returns.argsort(stable=True)
    return order[torch.linspace(0, returns.numel() - 1, size).round().long()].tolist()


def _best(choices: torch.Tensor, middle: float) -> int:
    """The row of `choices` (C, G) whose mean is nearest `middle`; of those as near, the one of largest variance."""
    distance = (choices.double().mean(-1) - middle).abs()
    as_near = distance <= distance.min() + 1e-9
    variance = choices.double().var(-1).where(as_near, -1.0)
    return int(variance.argmax())


def _climb(returns: torch.Tensor, chosen: list[int], middle: float) -> list[int]:
    while True:
        others = [i for i in range(returns.numel()) if i not in chosen]
        exchanges = [[*chosen[:place], other, *chosen[place + 1 :]] for place in range(len(chosen)) for other in others]
        best = _best(returns[torch.tensor([chosen, *exchanges])], middle)
        if best == 0:
            return chosen
        chosen = exchanges[best - 1]
