"""Losses on demonstrations, and on pairs of replies, against loops over tokens, and by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from rlpost.objectives.functional import AGGREGATIONS, KL_ESTIMATORS, minor_sft_loss, sft_loss
from rlpost.objectives.preference import pair_loss, pair_terms
from tests.objectives import slow_reference as slow
from tests.objectives.slow_reference import Batch, Choice, Table


def draw(seed: int, rows: int = 3) -> tuple[Table, Batch]:
    """Log-probabilities, a mask with gaps and a reference; advantage 1, with which reinforce is SFT."""
    numbers = random.Random(seed)
    x = [[numbers.uniform(-3, -0.1) for _ in range(4)] for _ in range(rows)]
    ref = [[value + numbers.gauss(0, 0.5) for value in row] for row in x]
    mask = [[numbers.random() < 0.7 for _ in range(4)] for _ in range(rows)]
    mask[seed % 3] = [seed % 2 == 0] * 4  # full, or empty
    return x, Batch(x, [[1.0] * 4] * rows, mask, x, ref)


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


# Pairs


def slow_pair_loss(
    name: str, x: Table, batch: Batch, beta: float, sft_coef: float = 0.0, label_smoothing: float = 0.0
) -> Any:
    """The sum over pairs, chosen and rejected replies in turn."""
    loss = 0.0
    for chosen in range(0, len(x), 2):
        tokens = [slow.trained(batch, row) for row in (chosen, chosen + 1)]
        ratios = [
            sum(x[row][t] - batch.ref[row][t] for t in its) / (1 if name == "dpo" else len(its))
            for row, its in zip((chosen, chosen + 1), tokens, strict=True)
        ]
        h = ratios[0] - ratios[1]
        if name == "ipo":
            loss += (h - 1 / (2 * beta)) ** 2
        else:
            loss += (1 - label_smoothing) * slow.log(1 + slow.exp(-beta * h))
            loss += label_smoothing * slow.log(1 + slow.exp(beta * h))
        loss -= sft_coef * sum(x[chosen][t] for t in tokens[0]) / len(tokens[0])
    return loss


@pytest.mark.parametrize(
    ("name", "coefficients"),
    [
        ("dpo", {"beta": 0.3}),
        ("dpo", {"beta": 0.7, "label_smoothing": 0.2, "sft_coef": 0.5}),
        ("dpo_norm", {"beta": 4.0, "label_smoothing": 0.1}),
        ("ipo", {"beta": 0.2, "sft_coef": 2.0}),
    ],
)
@pytest.mark.parametrize("normaliser", [None, 7.0])
def test_a_loss_of_pairs_and_its_gradient_agree_with_loops(
    name: str, coefficients: dict[str, float], normaliser: float | None
) -> None:
    for seed in (0, 2, 4, 6):  # a row is full, and none is empty
        x, batch = draw(seed, rows=6)
        for row in batch.mask:
            row[seed % 4] = True
        log_probs, ref, mask = tensors(x, batch)
        loss, _ = pair_loss(name, log_probs, ref, mask, normaliser=normaliser, **coefficients)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        divisor = normaliser or 3
        expected = lambda at: slow_pair_loss(name, at, batch, **coefficients) / divisor  # noqa: B023, E731
        assert loss.item() == pytest.approx(expected(x), abs=1e-10)
        torch.testing.assert_close(gradient, double(slow.slopes(expected, x, batch)), atol=1e-10, rtol=0)


def test_terms_of_pairs_by_hand() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0], [-1.0, -1.0], [-2.0, -2.0]])
    reference = torch.tensor([[-1.5, -2.5], [-2.0, 0.0], [-1.0, -1.0], [-2.0, -2.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    by_sum = pair_terms("dpo", log_probs, reference, mask, beta=0.5)
    assert by_sum.chosen.tolist() == [0.5, 0.0]  # half of 0.5 + 0.5; the second pair is as under the reference
    assert by_sum.rejected.tolist() == [-0.5, 0.0]
    assert by_sum.margin.tolist() == [1.0, 0.0]
    assert by_sum.right.tolist() == [1.0, 0.5]
    assert by_sum.loss.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)])
    assert by_sum.sft.tolist() == [1.5, 1.0]
    assert pair_terms("dpo_norm", log_probs, reference, mask, beta=0.5).margin.tolist() == [0.75, 0.0]
    assert pair_terms("ipo", log_probs, reference, mask, beta=0.5).loss.tolist() == [0.25, 1.0]  # (1.5 - 1)², (0 - 1)²
