"""Losses on pairs of replies against loops over tokens, and by hand."""

from __future__ import annotations

import random
from math import exp, log, log1p, nan

import pytest
import torch

from rlpost.objectives.preference import pair_loss, pair_terms

Table = list[list[float]]
PAIRS = 3
CHOICES = [
    ("dpo", {"beta": 0.3}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2, "sft_coef": 0.5}),
    ("dpo_norm", {"beta": 4.0, "label_smoothing": 0.1}),
    ("ipo", {"beta": 0.2, "sft_coef": 2.0}),
]


def draw(seed: int) -> tuple[Table, Table, list[list[bool]]]:
    """Log-probs, those of a reference, and masks with gaps, of PAIRS chosen and rejected replies in turn."""
    numbers = random.Random(seed)
    x = [[numbers.uniform(-3, -0.1) for _ in range(5)] for _ in range(2 * PAIRS)]
    ref = [[value + numbers.gauss(0, 0.5) for value in row] for row in x]
    mask = [[numbers.random() < 0.7 for _ in range(5)] for _ in range(2 * PAIRS)]
    for row in mask:
        row[numbers.randrange(5)] = True
    return x, ref, mask


def sigmoid(value: float) -> float:
    return 1 / (1 + exp(-value))


def slow(
    name: str,
    x: Table,
    ref: Table,
    mask: list[list[bool]],
    normaliser: float,
    beta: float,
    sft_coef: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[float, Table]:
    """The loss and its gradient, pair by pair, token by token."""
    loss, gradient = 0.0, [[0.0] * len(row) for row in x]
    for chosen in range(0, len(x), 2):
        tokens = {row: [t for t, counts in enumerate(mask[row]) if counts] for row in (chosen, chosen + 1)}
        scale = {row: 1.0 if name == "dpo" else 1 / len(its) for row, its in tokens.items()}
        ratio = {row: scale[row] * sum(x[row][t] - ref[row][t] for t in its) for row, its in tokens.items()}
        h = ratio[chosen] - ratio[chosen + 1]
        if name == "ipo":
            loss += (h - 1 / (2 * beta)) ** 2 / normaliser
            slope = 2 * (h - 1 / (2 * beta))
        else:
            loss += (
                (1 - label_smoothing) * log1p(exp(-beta * h)) + label_smoothing * log1p(exp(beta * h))
            ) / normaliser
            slope = beta * (label_smoothing * sigmoid(beta * h) - (1 - label_smoothing) * sigmoid(-beta * h))
        for row, sign in ((chosen, 1), (chosen + 1, -1)):
            for t in tokens[row]:
                gradient[row][t] += sign * slope * scale[row] / normaliser
        for t in tokens[chosen]:
            loss -= sft_coef * x[chosen][t] / len(tokens[chosen]) / normaliser
            gradient[chosen][t] -= sft_coef / len(tokens[chosen]) / normaliser
    return loss, gradient


@pytest.mark.parametrize(("name", "coefficients"), CHOICES)
@pytest.mark.parametrize("normaliser", [None, 7.0])
def test_a_loss_and_its_gradient_agree_with_loops(
    name: str, coefficients: dict[str, float], normaliser: float | None
) -> None:
    for seed in range(4):
        x, ref, mask = draw(seed)
        kept = torch.tensor(mask)
        log_probs = torch.tensor(x, dtype=torch.float64).masked_fill(~kept, nan).requires_grad_()
        reference = torch.tensor(ref, dtype=torch.float64).masked_fill(~kept, nan)
        loss, _ = pair_loss(name, log_probs, reference, kept, normaliser=normaliser, **coefficients)
        [found] = torch.autograd.grad(loss, log_probs)
        expected, gradient = slow(name, x, ref, mask, normaliser or PAIRS, **coefficients)
        assert loss.item() == pytest.approx(expected, abs=1e-10)
        assert (found - torch.tensor(gradient, dtype=torch.float64)).abs().max() < 1e-10


def test_terms_by_hand() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0], [-1.0, -1.0], [-2.0, -2.0]])
    reference = torch.tensor([[-1.5, -2.5], [-2.0, 0.0], [-1.0, -1.0], [-2.0, -2.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    by_sum = pair_terms("dpo", log_probs, reference, mask, beta=0.5)
    assert by_sum.chosen.tolist() == [0.5, 0.0]  # half of 0.5 + 0.5; the second pair is as under the reference
    assert by_sum.rejected.tolist() == [-0.5, 0.0]
    assert by_sum.margin.tolist() == [1.0, 0.0]
    assert by_sum.right.tolist() == [1.0, 0.5]
    assert by_sum.loss.tolist() == pytest.approx([log(1 + exp(-1)), log(2)])
    assert by_sum.sft.tolist() == [1.5, 1.0]
    assert pair_terms("dpo_norm", log_probs, reference, mask, beta=0.5).margin.tolist() == [0.75, 0.0]
    assert pair_terms("ipo", log_probs, reference, mask, beta=0.5).loss.tolist() == [0.25, 1.0]  # (1.5 - 1)², (0 - 1)²
