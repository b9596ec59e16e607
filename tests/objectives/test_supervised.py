"""Losses on demonstrations against loops over tokens, and by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlpost.objectives.functional import AGGREGATIONS, KL_ESTIMATORS, minor_sft_loss, sft_loss
from tests.objectives import slow_reference as slow
from tests.objectives.slow_reference import Batch, Choice, Table


def draw(seed: int) -> tuple[Table, Batch]:
    """Log-probabilities, a mask with gaps and a reference; advantage 1, with which reinforce is SFT."""
    numbers = random.Random(seed)
    x = [[numbers.uniform(-3, -0.1) for _ in range(4)] for _ in range(3)]
    ref = [[value + numbers.gauss(0, 0.5) for value in row] for row in x]
    mask = [[numbers.random() < 0.7 for _ in range(4)] for _ in range(3)]
    mask[seed % 3] = [seed % 2 == 0] * 4  # full, or empty
    return x, Batch(x, [[1.0] * 4] * 3, mask, x, ref)


def double(values: Table) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tensors(x: Table, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = torch.tensor(batch.mask)
    log_probs = double(x).masked_fill(~mask, math.nan).requires_grad_()
    return log_probs, double(batch.ref).masked_fill(~mask, -math.inf), mask


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sft_is_minus_the_log_likelihood_plus_the_divergence(aggregation: str) -> None:
    for estimator in KL_ESTIMATORS:
        for seed, normaliser in ((0, None), (1, None), (2, 5.0), (3, 11.0)):
            choice = Choice("reinforce", aggregation, {}, estimator, kl_coef=0.4, normaliser=normaliser)
            x, batch = draw(seed)
            log_probs, ref, mask = tensors(x, batch)
            loss, metrics = sft_loss(
                log_probs,
                mask,
                ref_log_probs=ref,
                aggregation=aggregation,
                normaliser=normaliser,
                kl_coef=0.4,
                kl_estimator=estimator,
            )
            assert loss.item() == pytest.approx(slow.loss(choice, x, x, batch), abs=1e-9)
            assert metrics["kl_to_ref"].item() == pytest.approx(slow.metrics(choice, x, batch)["kl_to_ref"], abs=1e-9)
            assert (metrics["loss_sft"] + metrics["loss_kl_to_ref"]).item() == pytest.approx(loss.item())
            (gradient,) = torch.autograd.grad(loss, log_probs)
            torch.testing.assert_close(gradient, double(slow.gradient(choice, x, batch)), atol=1e-9, rtol=0)


@pytest.mark.parametrize("by_length", [True, False])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_minor_sft_agrees_with_loops(aggregation: str, by_length: bool) -> None:
    for seed in range(4):
        choice = Choice("", aggregation)
        x, batch = draw(seed)
        log_probs, ref, mask = tensors(x, batch)
        loss, _ = minor_sft_loss(log_probs, ref, mask, beta=0.7, normalise_by_length=by_length, aggregation=aggregation)
        assert loss.item() == pytest.approx(slow.minor_sft_loss(x, batch, 0.7, by_length, choice), abs=1e-9)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        slopes = slow.slopes(lambda at: slow.minor_sft_loss(at, batch, 0.7, by_length, choice), x, batch)  # noqa: B023
        torch.testing.assert_close(gradient, double(slopes), atol=1e-9, rtol=0)


def test_minor_sft_of_a_difference_of_one() -> None:
    x = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    both = torch.ones(1, 2, dtype=torch.bool)
    summed, _ = minor_sft_loss(x, x - 0.5, both, beta=0.1, normalise_by_length=False)
    mean, _ = minor_sft_loss(x, x - 1.0, both, beta=0.1)
    assert summed.item() == pytest.approx(0.644397, abs=1e-6)
    assert mean.item() == pytest.approx(0.644397, abs=1e-6)


def test_a_demonstration_that_is_already_likelier_pulls_less() -> None:
    x = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-9.0], [-1.0]], dtype=torch.float64)
    loss, metrics = minor_sft_loss(x, ref, torch.ones(2, 1, dtype=torch.bool), beta=1.0)
    ahead, level = torch.autograd.grad(loss, x)[0].flatten().tolist()
    assert level == pytest.approx(-0.25)  # −σ(0)/2
    assert ahead == pytest.approx(-0.5 / (1 + math.exp(8)))
    assert metrics["kl_to_ref"].item() == pytest.approx((math.exp(-8) + 8 - 1) / 2)


def test_a_sum_over_each_demonstration_is_a_constant_length_of_one() -> None:
    x = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = sft_loss(x, mask, aggregation="constant_length", normaliser=2)
    assert loss.item() == pytest.approx((3 + 4) / 2)


def test_a_divergence_needs_the_log_probs_of_a_reference() -> None:
    with pytest.raises(ValueError, match="kl_coef"):
        sft_loss(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), kl_coef=0.1)
