"""Loss, divergence and advantage against numbers worked out by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from rlpost.objectives.functional import clipped_policy_loss, effective_sample_size, k3


def loss_and_gradient(log_ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss = clipped_policy_loss(x, torch.tensor([advantage], dtype=torch.float64), low, high)
    loss.sum().backward()
    assert x.grad is not None
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "loss", "gradient"),
    [
        (1.5, 1.0, 0.2, 0.2, -1.2, 0.0),  # clipped above: no gradient
        (1.5, -1.0, 0.2, 0.2, 1.5, 1.5),  # a bad token grown likelier is always pushed back
        (0.5, 1.0, 0.2, 0.2, -0.5, -0.5),
        (0.5, -1.0, 0.2, 0.2, 0.8, 0.0),  # clipped below
        (1.5, 1.0, 0.2, 0.28, -1.28, 0.0),  # the upper bound alone moves
        (1.0, 2.0, 0.2, 0.2, -2.0, -2.0),  # on policy: the plain policy gradient
    ],
)
def test_clipped_loss_and_its_gradient(
    ratio: float, advantage: float, low: float, high: float, loss: float, gradient: float
) -> None:
    assert loss_and_gradient(log(ratio), advantage, low, high) == pytest.approx((loss, gradient), abs=1e-12)


def test_k3_of_a_tenth() -> None:
    own, other = torch.tensor([0.0], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)
    assert k3(own, other).item() == pytest.approx(0.00517092, abs=1e-8)


def test_k3_is_the_divergence_on_average_and_never_negative() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    samples = k3(p.log(), q.log())
    exact = 0.7 * log(0.7 / 0.5) + 0.2 * log(0.2 / 0.3) + 0.1 * log(0.1 / 0.2)
    assert (p * samples).sum().item() == pytest.approx(exact, abs=1e-12)
    assert samples.min().item() >= 0


def test_effective_sample_size_of_weights_one_and_three() -> None:
    assert effective_sample_size(torch.tensor([0.0, log(3.0)])).item() == pytest.approx(0.8)


def test_effective_sample_size_of_equal_weights_is_one() -> None:
    assert effective_sample_size(torch.full((7,), -2.5)).item() == pytest.approx(1.0)


def test_exp_of_the_log_ratio_is_the_ratio() -> None:
    loss, _ = loss_and_gradient(0.05, 1.0, 0.2, 0.2)
    assert loss == pytest.approx(-exp(0.05))
