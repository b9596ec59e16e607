"""Which trajectories make a group, where there are more than it holds."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from rlpost.torchrl import buffer_transforms
from rlpost.torchrl.buffer_transforms import Bounds, balanced, first, uniform


def chosen(
    selector: buffer_transforms.Selector, returns: list[float], size: int, bounds: Bounds | None = None
) -> list[int]:
    indices = selector([], torch.tensor(returns), size, bounds)
    assert indices is not None
    return list(indices)


def test_first_takes_those_that_came_first() -> None:
    assert chosen(first, [5.0, 1.0, 3.0], 2) == [0, 1]
    assert first([], torch.tensor([5.0, 1.0, 3.0]), 2, (0.0, 2.5)) is None


def test_uniform_spreads_over_the_order_of_the_returns() -> None:
    assert chosen(uniform, [0.9, 0.0, 0.5, 0.1, 1.0], 3) == [1, 2, 4]  # 0, 0.5 and 1
    assert uniform([], torch.tensor([0.0, 0.0, 0.0]), 2, (0.1, 0.9)) is None


def test_balanced_comes_nearest_the_middle_of_the_bounds_and_then_spreads_widest() -> None:
    # means of 0.5: {0, 1}, {0.4, 0.6}; the first is wider
    assert chosen(balanced, [0.4, 0.6, 0.0, 1.0], 2, (0.0, 1.0)) == [2, 3]
    assert chosen(balanced, [0.0, 0.0, 0.0, 1.0], 2, (0.0, 1.0)) == [0, 3]
    assert chosen(balanced, [3.0, 0.0, 7.0], 2, (4.0, 6.0)) == [0, 2]


def test_balanced_without_bounds_aims_between_the_extremes() -> None:
    assert chosen(balanced, [0.0, 0.1, 0.2, 10.0], 2) == [0, 3]


def test_balanced_finds_none_where_all_means_are_out_of_bounds() -> None:
    assert balanced([], torch.tensor([1.0, 1.0, 1.0]), 2, (0.1, 0.9)) is None


@pytest.mark.parametrize("seed", range(3))
def test_many_candidates_are_climbed_to_a_mean_as_good_as_of_all_choices(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    returns = [float(dice.random() < 0.2) for _ in range(14)] + [1.0, 0.0]
    best = min(abs(sum(c) / 4 - 0.5) for c in itertools.combinations(returns, 4))
    monkeypatch.setattr(buffer_transforms, "MOST_COMBINATIONS", 10)
    found = chosen(balanced, returns, 4, (0.0, 1.0))
    assert abs(sum(returns[i] for i in found) / 4 - 0.5) == pytest.approx(best)
    assert len(set(found)) == 4
