"""Divergences, estimated and whole, and the distillation losses: against plain ones in float64, and by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from rlpost.model import logprobs
from rlpost.model.divergence import chunked_divergence
from rlpost.objectives.distillation import opd
from rlpost.objectives.functional import KL_ESTIMATORS, kl_divergence, sequence_kl_divergence
from rlpost.objectives.variants import Tokens
from tests.objectives import slow_reference as slow

TEMPERATURE = 0.7


def heads(bias: bool, more: int = 0) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Two heads on hidden states of 5 and 3 numbers; the second has `more` rows than the first's 13."""
    torch.manual_seed(0)
    own, other = torch.nn.Linear(5, 13, bias=bias).double(), torch.nn.Linear(3, 13 + more, bias=bias).double()
    return own, other.requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 1.0])
def test_the_chunked_divergence_is_that_of_full_logits(
    bias: bool, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", 4)  # 10 tokens, and 22 that fill up, in chunks of 4
    monkeypatch.setattr(logprobs, "HEAD_ROWS", 5)
    own, other = heads(bias)
    hidden = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    theirs, target = torch.randn(10, 3, dtype=torch.float64), torch.randint(0, 13, (10,))
    weights = torch.rand(10, dtype=torch.float64)
    found = chunked_divergence(hidden, own, theirs, other, target, TEMPERATURE, beta)

    p, q = ((head(states) / TEMPERATURE).softmax(-1) for head, states in ((own, hidden), (other, theirs)))
    if beta == 0:
        expected = (q * (q.log() - p.log())).sum(-1)
    elif beta == 1:
        expected = (p * (p.log() - q.log())).sum(-1)
    else:
        m = beta * q + (1 - beta) * p
        expected = (beta * q * (q.log() - m.log()) + (1 - beta) * p * (p.log() - m.log())).sum(-1)
    assert found.divergence.tolist() == pytest.approx(expected.tolist(), abs=1e-10)
    assert found.log_probs.tolist() == pytest.approx(p.detach().log()[range(10), target].tolist(), abs=1e-10)
    assert found.other_log_probs.tolist() == pytest.approx(q.log()[range(10), target].tolist(), abs=1e-10)
    assert found.entropy.tolist() == pytest.approx((-(p * p.log()).sum(-1)).tolist(), abs=1e-10)
    leaves = [hidden, *own.parameters()]
    gradients = torch.autograd.grad((weights * found.divergence).sum(), leaves)
    for one, two in zip(gradients, torch.autograd.grad((weights * expected).sum(), leaves), strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-10)


def test_rows_that_pad_one_head_beyond_the_other_are_left_out() -> None:
    own, padded = heads(bias=True, more=6)
    hidden, theirs = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    target = torch.tensor([0, 3, 7, 12])
    p, q = own(hidden).softmax(-1), padded(theirs)[:, :13].softmax(-1)
    found = chunked_divergence(hidden, own, theirs, padded, target, 1.0, 1.0)
    torch.testing.assert_close(found.divergence, (p * (p.log() - q.log())).sum(-1))
    back = chunked_divergence(theirs.requires_grad_(), padded, hidden, own, target, 1.0, 1.0).divergence
    torch.testing.assert_close(back, (q * (q.log() - p.log())).sum(-1))
    back.sum().backward()
    assert theirs.grad is not None


def slow_opd(x: list[Any], mu: list[float], advantage: list[float], low: float, high: float) -> Any:
    """The sum over tokens, of numbers alone; the advantage does not follow x."""
    total = 0.0
    for own, sampler, a in zip(x, mu, advantage, strict=True):
        moved = slow.exp(own).real - math.exp(sampler)
        dropped = (a < 0 and moved < -low) or (a > 0 and moved > high)
        total += (0.0 if dropped else -slow.exp(own - sampler) * a) + 0.1 * (own - sampler) ** 2
    return total


def test_opd_agrees_with_loops() -> None:
    numbers, dropped = random.Random(0), 0
    every = torch.ones(40, dtype=torch.bool)
    for low, high in ((0.2, math.inf), (0.05, 0.1), (math.inf, 0.01)):
        x, mu, q = ([numbers.uniform(-4, -0.05) for _ in range(40)] for _ in range(3))
        advantage = [b - a for a, b in zip(x, q, strict=True)]
        own = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        old, given = torch.tensor(mu, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
        bounds = [None if bound == math.inf else bound for bound in (low, high)]
        found = opd(Tokens(own, old, given, every), drop_low=bounds[0], drop_high=bounds[1], log_ratio_coef=0.1)
        dropped += int(found.low.sum() + found.high.sum())
        (gradient,) = torch.autograd.grad(found.loss.sum(), own)
        expected = lambda at: slow_opd(at[0], mu, advantage, low, high)  # noqa: B023, E731
        assert found.loss.sum().item() == pytest.approx(expected([x]), abs=1e-10)
        [slopes] = slow.slopes(expected, [x], slow.Batch([], [], [every.tolist()], [], []))
        assert gradient.tolist() == pytest.approx(slopes, abs=1e-10)
    assert dropped > 10


def test_a_token_is_dropped_where_it_moves_away_from_its_sampler() -> None:
    own, sampler = torch.tensor([0.1, 0.1, 0.9, 0.9]).log(), torch.tensor([0.4, 0.4, 0.5, 0.5]).log()
    advantage = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    surrogate = opd(Tokens(own, sampler, advantage, advantage != 0), drop_low=0.2, drop_high=0.3)
    assert surrogate.low.tolist() == [True, False, False, False]
    assert surrogate.high.tolist() == [False, False, False, True]


def test_the_mean_gradient_of_opd_is_that_of_the_reverse_kl() -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    q = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    reverse = (log_p.exp() * (log_p - q)).sum()
    tokens = Tokens(log_p, log_p.detach(), q - log_p.detach(), torch.ones(7, dtype=torch.bool))
    expected_loss = (log_p.detach().exp() * opd(tokens).loss).sum()  # over every token that could be sampled
    torch.testing.assert_close(
        *(torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (expected_loss, reverse))
    )


# Estimates of a divergence against the divergence itself, summed over a small vocabulary

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


def test_the_weighted_estimator_is_unbiased_for_other_policies() -> None:
    drawn = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits = P.log().requires_grad_()
    log_p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - Q.log())).sum(), logits, retain_graph=True)
    for estimator, is_unbiased in (("k3_rho", True), ("k3_k2grad", False)):
        samples = kl_divergence(log_p, Q.log(), estimator, drawn_log_probs=drawn.log())
        (gradient,) = torch.autograd.grad((drawn * samples).sum(), logits, retain_graph=True)
        assert torch.allclose(gradient, exact, atol=1e-12) == is_unbiased
        assert math.isclose((drawn * samples).sum().item(), EXACT, abs_tol=1e-12) == is_unbiased


def test_estimates_by_hand() -> None:
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
    with pytest.raises(ValueError, match=r"k3_k2grad\?"):
        kl_divergence(P, Q, "k3_k2grda")
