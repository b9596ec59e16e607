"""Which trajectories make a group, where there are more than it holds."""

from __future__ import annotations

import random

import pytest
import torch

from rlpost.torchrl.buffer_transforms import Bounds, balanced, first, uniform


@pytest.mark.parametrize(
    ("selector", "returns", "size", "bounds", "chosen"),
    [
        (first, [5.0, 1.0, 3.0], 2, None, [0, 1]),
        (first, [5.0, 1.0, 3.0], 2, (0.0, 2.5), None),
        (uniform, [0.9, 0.0, 0.5, 0.1, 1.0], 3, None, [1, 2, 4]),  # 0, 0.5 and 1
        (uniform, [0.0, 0.0, 0.0], 2, (0.1, 0.9), None),
        (balanced, [0.4, 0.6, 0.0, 1.0], 2, (0.0, 1.0), [2, 3]),  # as near the middle as {0.4, 0.6}, and wider
        (balanced, [0.0, 0.0, 0.0, 1.0], 2, (0.0, 1.0), [0, 3]),
        (balanced, [3.0, 0.0, 7.0], 2, (4.0, 6.0), [0, 2]),
        (balanced, [0.0, 0.1, 0.2, 10.0], 2, None, [0, 3]),  # without bounds, the middle of the extremes
        (balanced, [1.0, 1.0, 1.0], 2, (0.1, 0.9), None),
    ],
)
def test_selectors(selector: object, returns: list[float], size: int, bounds: Bounds | None, chosen: object) -> None:
    assert selector([], torch.tensor(returns), size, bounds) == chosen  # type: ignore[operator]


@pytest.mark.parametrize("ones", [1, 2, 3])
def test_many_candidates_are_climbed_to_the_best_mean(ones: int) -> None:
    returns = [1.0] * ones + [0.0] * (30 - ones)  # of which 593,775 groups of 6 can be made
    random.Random(ones).shuffle(returns)
    found = balanced([], torch.tensor(returns), 6, (0.0, 1.0))
    assert found is not None
    assert len(set(found)) == 6
    assert sum(returns[i] for i in found) == ones  # three would be in the middle
