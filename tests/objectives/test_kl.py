"""Estimators of a divergence against the divergence itself, summed over a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from rlpost.objectives.functional import KL_ESTIMATORS, kl_divergence, sequence_kl_divergence

P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
EXACT = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.2)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_k2grad", "k3_rho"])
def test_the_mean_of_an_unbiased_estimator_is_the_divergence(estimator: str) -> None:
    samples = kl_divergence(P.log(), Q.log(), estimator)
    assert (P * samples).sum().item() == pytest.approx(EXACT, abs=1e-12)


def test_k2_and_k3_with_its_gradient_pull_as_the_divergence_does() -> None:
    logits = P.log().requires_grad_()
    log_p = logits.log_softmax(-1)

    def gradient(divergence: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(divergence.sum(), logits, retain_graph=True)[0]

    exact = gradient(log_p.exp() * (log_p - Q.log()))
    mean = {name: gradient(P * kl_divergence(log_p, Q.log(), name)) for name in KL_ESTIMATORS}  # over tokens of P
    for name in ("k2", "k3_k2grad", "k3_rho"):
        assert torch.allclose(mean[name], exact, atol=1e-12)
    assert not torch.allclose(mean["k3"], exact, atol=1e-2)
    assert torch.allclose(mean["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-12)


def test_only_the_weighted_estimator_is_unbiased_for_tokens_that_another_policy_drew() -> None:
    drawn = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits = P.log().requires_grad_()
    log_p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - Q.log())).sum(), logits, retain_graph=True)
    for estimator, is_unbiased in (("k3_rho", True), ("k3_k2grad", False)):
        samples = kl_divergence(log_p, Q.log(), estimator, drawn_log_probs=drawn.log())
        (gradient,) = torch.autograd.grad((drawn * samples).sum(), logits, retain_graph=True)
        assert torch.allclose(gradient, exact, atol=1e-12) == is_unbiased
        assert math.isclose((drawn * samples).sum().item(), EXACT, abs_tol=1e-12) == is_unbiased


def test_by_hand() -> None:
    own, other = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-0.9], dtype=torch.float64)
    values = {estimator: kl_divergence(own, other, estimator).item() for estimator in KL_ESTIMATORS}
    assert values == pytest.approx(
        {"k1": -0.1, "k2": 0.005, "k3": 0.00517092, "k3_k2grad": 0.00517092, "k3_rho": 0.00517092}, abs=1e-8
    )


def test_a_completions_divergence_is_the_sum_over_its_tokens() -> None:
    own = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]])
    other = torch.tensor([[-1.5, -1.0, -1.0], [math.inf, math.inf, math.inf]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert sequence_kl_divergence(own, other, mask).tolist() == [-0.5, 0.0]
    assert sequence_kl_divergence(own, other, mask, "k2").tolist() == pytest.approx([0.625, 0.0])
    assert kl_divergence(own, other, "k1", mask).tolist() == [[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]


def test_an_unknown_estimator_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"k3_k2grad$"):
        kl_divergence(P, Q, "k3_k2grda")
