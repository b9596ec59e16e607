"""Every policy loss against the slow reference, value and gradient; then edge cases by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import pytest
import torch

from rlpost.objectives.functional import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    SAMPLER_CORRECTIONS,
    VARIANTS,
    default_normaliser,
    effective_sample_size,
    policy_loss,
    policy_metrics,
    policy_terms,
)
from tests.objectives import slow_reference as slow
from tests.objectives.slow_reference import Batch, Choice, Table

ROWS, LENGTH = 3, 4
FIRST, SEEDS = 6, 4  # together they reach every branch of every variant, as a test below holds
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
COEFFICIENTS: dict[str, dict[str, Any]] = {
    "grpo": CLIP,
    "dr_grpo": CLIP,
    "dapo": CLIP,
    "gspo": CLIP,  # far wider than its own, so that some completions are inside
    "gspo_token": CLIP,
    "cispo": CLIP,
    "two_sided": {**CLIP, "max_ratio": 1.9},
    "dual_clip": {**CLIP, "max_ratio": 1.7},
    "reinforce": {},
    "sapo": {"tau_good": 1.0, "tau_bad": 1.3},
    "gmpo": {"clip_low": 0.25, "clip_high": 0.35},
    "dppo_tv": {"max_ratio": 1.5, "max_fall": 0.06, "max_rise": 0.08},
    "dppo_kl": {"max_ratio": 1.5, "max_kl": 0.01},
}
NEVER_CLIP = ("reinforce", "sapo")
RATIO_BOUNDS = {
    "tis_token": (0.0, 1.1),
    "tis_sequence": (0.0, 1.1),
    "mis_token": (0.8, 1.2),
    "mis_sequence": (0.7, 1.4),
    "icepop": (0.85, 1.15),
    "geo_mask": (0.9, 1.2),
    "geo_mask_tis": (0.9, 1.2),
}


def table(draw: random.Random, low: float, high: float) -> Table:
    return [[draw.uniform(low, high) for _ in range(LENGTH)] for _ in range(ROWS)]


def moved(draw: random.Random, start: Table, spread: float) -> Table:
    return [[min(value + draw.gauss(0, spread), -0.05) for value in row] for row in start]


@cache
def draw_batch(seed: int) -> tuple[Table, Batch]:
    """Log-probabilities and a ragged batch: rows of any length, gaps, an empty row in every third seed."""
    draw = random.Random(seed)
    x = table(draw, -3, -0.5)
    mask = [[draw.random() < 0.75 for _ in range(LENGTH)] for _ in range(ROWS)]
    mask[0][0] = True
    if seed % 3 == 0:
        mask[-1] = [False] * LENGTH
    if seed % 2:
        advantage = table(draw, -1.5, 1.5)
    else:
        advantage = [[value] * LENGTH for value in (draw.uniform(0.2, 1.5), draw.uniform(-1.5, -0.2), 0.0)]
    return x, Batch(moved(draw, x, 0.5), advantage, mask, moved(draw, x, 0.15), moved(draw, x, 0.4))


def cases(number: int) -> Iterator[tuple[Table, Batch]]:
    """`number` batches."""
    return map(draw_batch, range(FIRST, FIRST + number))


def tensors(x: Table, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same as float64 tensors, with rubbish wherever nothing may be read; all but the mask take gradients."""
    mask = torch.tensor(batch.mask)

    def rubbish(values: Table, what: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).masked_fill(~mask, what).requires_grad_()

    by_row = all(len(set(row)) == 1 for row in batch.advantage)
    advantage = torch.tensor([row[0] for row in batch.advantage], dtype=torch.float64).requires_grad_()
    return rubbish(x, math.nan), {
        "old_log_probs": rubbish(batch.old, math.inf),
        "advantage": advantage if by_row else rubbish(batch.advantage, math.nan),
        "mask": mask,
        "sampler_log_probs": rubbish(batch.sampler, -math.inf),
        "ref_log_probs": rubbish(batch.ref, math.nan),
    }


def keywords(choice: Choice) -> dict[str, Any]:
    given = asdict(choice)
    del given["variant"]
    return given.pop("coefficients") | given


def assert_as_slow(choice: Choice, x: Table, batch: Batch) -> None:
    log_probs, given = tensors(x, batch)
    loss, metrics = policy_loss(choice.variant, log_probs, **given, **keywords(choice))
    constants = [given[name] for name in given if name != "mask"]
    gradient, *others = torch.autograd.grad(loss, [log_probs, *constants], allow_unused=True)
    assert others == [None] * len(constants)
    assert loss.item() == pytest.approx(slow.loss(choice, x, x, batch), abs=1e-10, rel=1e-10)
    for row, expected in zip(gradient.tolist(), slow.gradient(choice, x, batch), strict=True):
        assert row == pytest.approx(expected, abs=1e-10, rel=1e-10)
    assert not any(value.requires_grad for value in metrics.values())
    measured = {name: metrics[name].item() for name in metrics if not name.startswith("loss_")}
    assert measured == pytest.approx(slow.metrics(choice, x, batch), abs=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_value_gradient_and_metrics_for_every_kl_choice(variant: str, aggregation: str) -> None:
    kl_choices = [("k3", 0.0, 0.0), *((e, *coefs) for e in KL_ESTIMATORS for coefs in ((0.3, 0.0), (0.0, 0.2)))]
    for estimator, kl_coef, sampler_kl_coef in kl_choices:
        choice = Choice(variant, aggregation, COEFFICIENTS[variant], estimator, kl_coef, sampler_kl_coef)
        for x, batch in cases(SEEDS):
            assert_as_slow(choice, x, batch)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_value_gradient_and_metrics_for_every_sampler_correction(variant: str, aggregation: str) -> None:
    for correction, (low, high) in RATIO_BOUNDS.items():
        choice = Choice(variant, aggregation, COEFFICIENTS[variant], kl_coef=0.1, normaliser=7.5)
        choice.sampler_correction, choice.sampler_ratio_low, choice.sampler_ratio_high = correction, low, high
        for x, batch in cases(SEEDS):
            assert_as_slow(choice, x, batch)


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_gradient_and_metrics_with_moved_completions_dropped(variant: str) -> None:
    dropped = 0.0
    for x, batch in cases(SEEDS):
        choice = Choice(variant, "token_mean", COEFFICIENTS[variant], off_policy_mask=0.05)
        assert_as_slow(choice, x, batch)
        dropped += any(
            slow.off_policy(choice, x, batch, row, t) for row in range(ROWS) for t in slow.trained(batch, row)
        )
    assert dropped


def test_every_correction_is_in_the_proof() -> None:
    assert {"none", *RATIO_BOUNDS} == set(SAMPLER_CORRECTIONS)
    assert set(COEFFICIENTS) == set(VARIANTS)


def test_the_batches_of_the_proof_reach_every_branch() -> None:
    for variant, coefficients in COEFFICIENTS.items():
        choice = Choice(variant, "token_mean", coefficients, sampler_correction="icepop")
        choice.sampler_ratio_low, choice.sampler_ratio_high = RATIO_BOUNDS["icepop"]
        seen = [slow.metrics(choice, x, batch) for x, batch in cases(SEEDS)]
        cuts = ["sampler_cut_fraction"] + ([] if variant in NEVER_CLIP else ["clip_fraction_low", "clip_fraction_high"])
        for name in cuts:
            assert 0 < sum(metrics[name] for metrics in seen) < len(seen), (variant, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_defaults_are_the_papers(variant: str) -> None:
    expected: dict[str, tuple[str, dict[str, float]]] = {
        "grpo": ("token_mean", {"clip_low": 0.2, "clip_high": 0.2}),
        "dr_grpo": ("constant_length", {"clip_low": 0.2, "clip_high": 0.2}),
        "dapo": ("token_mean", {"clip_low": 0.2, "clip_high": 0.28}),
        "gspo": ("sequence_mean", {"clip_low": 3e-4, "clip_high": 4e-4}),
        "gspo_token": ("sequence_mean", {"clip_low": 3e-4, "clip_high": 4e-4}),
        "cispo": ("token_mean", {"clip_low": 1.0, "clip_high": 4.0}),
        "two_sided": ("token_mean", {"clip_low": 0.2, "clip_high": 0.2, "max_ratio": 4.0}),
        "dual_clip": ("token_mean", {"clip_low": 0.2, "clip_high": 0.2, "max_ratio": 3.0}),
        "reinforce": ("token_mean", {}),
        "sapo": ("sequence_mean", {"tau_good": 1.0, "tau_bad": 1.05}),
        "gmpo": ("sequence_mean", {"clip_low": 0.4, "clip_high": 0.4}),
        "dppo_tv": ("token_mean", {"max_ratio": 20.0, "max_fall": 0.2, "max_rise": 0.2}),
        "dppo_kl": ("token_mean", {"max_ratio": 20.0, "max_kl": 0.05}),
    }
    for x, batch in cases(2):
        log_probs, given = tensors(x, batch)
        loss, _ = policy_loss(variant, log_probs, **given)
        assert loss.item() == pytest.approx(slow.loss(Choice(variant, *expected[variant]), x, x, batch), abs=1e-9)


def one_token(
    variant: str, log_ratio: float, advantage: float, log_prob: float = -1.0, **coefficients: Any
) -> tuple[float, float]:
    """Loss and slope of a single token whose ratio is exp(log_ratio)."""
    x = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = policy_loss(variant, x, x.detach() - log_ratio, torch.tensor([advantage]), mask, **coefficients)
    (slope,) = torch.autograd.grad(loss, x)
    return loss.item(), slope.item()


@pytest.mark.parametrize(
    ("variant", "ratio", "advantage", "coefficients", "loss", "slope"),
    [
        ("grpo", 1.5, 1.0, {}, -1.2, 0.0),  # clipped above: no slope
        ("grpo", 1.5, -1.0, {}, 1.5, 1.5),  # a bad token grown likelier is always pushed back
        ("grpo", 0.5, 1.0, {}, -0.5, -0.5),
        ("grpo", 0.5, -1.0, {}, 0.8, 0.0),
        ("grpo", 1.0, 2.0, {}, -2.0, -2.0),  # on policy: the plain policy gradient
        ("dapo", 1.5, 1.0, {}, -1.28, 0.0),
        ("cispo", 1.5, 1.0, {"clip_high": 0.2}, 1.2, -1.2),  # −1.2 · 1 · log π with log π = −1; clipped, yet a slope
        ("cispo", 1.5, -1.0, {"clip_high": 0.2}, -1.2, 1.2),
        ("cispo", 0.5, -1.0, {"clip_low": 0.2}, -0.8, 0.8),
        ("two_sided", 6.0, -1.0, {}, 4.0, 0.0),
        ("two_sided", 3.0, -1.0, {}, 3.0, 3.0),
        ("dual_clip", 6.0, -2.0, {}, 6.0, 0.0),
        ("dual_clip", 6.0, 1.0, {}, -1.2, 0.0),
        ("reinforce", 1.5, 2.0, {}, 2.0, -2.0),
        ("sapo", 1.0, 1.0, {}, -2.0, -1.0),  # at ratio 1 the sigmoid is 1/2 and the slope the plain one
        ("gmpo", 2.0, 1.0, {}, -math.exp(0.4), 0.0),
        ("gmpo", 2.0, -1.0, {}, 2.0, 2.0),
        ("dppo_tv", 1.5, 1.0, {}, 1.5, -1.5),  # from 0.245 to 0.368: less than 0.2 more
        ("dppo_tv", 3.0, 1.0, {}, 0.0, 0.0),  # from 0.123 to 0.368
        ("dppo_tv", 3.0, -1.0, {}, -3.0, 3.0),  # a bad token may rise as far as it likes
        ("dppo_kl", 3.0, 1.0, {}, 0.0, 0.0),
    ],
)
def test_one_token_by_hand(
    variant: str, ratio: float, advantage: float, coefficients: dict[str, Any], loss: float, slope: float
) -> None:
    assert one_token(variant, math.log(ratio), advantage, **coefficients) == pytest.approx((loss, slope), abs=1e-12)


def test_gspo_by_hand() -> None:
    """Ratios 1.2 and 0.8 have the geometric mean 0.979796: inside wide bounds, below 1 − 3e-4 by its own."""
    ratios = torch.tensor([[1.2, 0.8]], dtype=torch.float64)
    x = torch.full((1, 2), -1.0, dtype=torch.float64, requires_grad=True)
    given = (x.detach() - ratios.log(), torch.tensor([-1.0]), torch.ones(1, 2, dtype=torch.bool))
    wide, _ = policy_loss("gspo", x, *given, clip_low=0.2, clip_high=0.2)
    own, metrics = policy_loss("gspo", x, *given)
    assert wide.item() == pytest.approx(0.979796, abs=1e-6)
    assert torch.autograd.grad(wide, x)[0].tolist()[0] == pytest.approx([0.489898, 0.489898], abs=1e-6)
    assert own.item() == pytest.approx(0.9997)
    assert metrics["clip_fraction_low"].item() == 1.0
    assert metrics["clip_fraction_high"].item() == 0.0


def test_lengths_one_and_three_by_hand() -> None:
    """Losses 1 and 0: a quarter of the tokens, half of the completions, one of six places."""
    x = torch.tensor([[-1.0, 9.0, 9.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    expected = {"token_mean": 0.25, "sequence_mean": 0.5, "constant_length": 1 / 6}
    for aggregation, value in expected.items():
        loss, _ = policy_loss("reinforce", x, x, torch.ones(2), mask, aggregation=aggregation)
        assert loss.item() == pytest.approx(value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shares_of_a_split_batch_add_up(variant: str) -> None:
    averaging = ("aggregation", "normaliser", "kl_coef", "sampler_kl_coef")  # policy_terms has not averaged yet
    choice = Choice(variant, VARIANTS[variant].aggregation, COEFFICIENTS[variant], kl_coef=0.1, normaliser=9.0)
    choice.sampler_correction = "mis_sequence"
    choice.sampler_ratio_low, choice.sampler_ratio_high = RATIO_BOUNDS["mis_sequence"]
    for x, batch in cases(2):
        log_probs, given = tensors(x, batch)
        whole, metrics = policy_loss(variant, log_probs, **given, **keywords(choice))
        shares, terms = [], []
        for part in (slice(0, 1), slice(1, 3)):
            own = {name: tensor[part] for name, tensor in given.items()}
            shares.append(policy_loss(variant, log_probs[part], **own, **keywords(choice))[0])
            of_terms = {k: v for k, v in keywords(choice).items() if k not in averaging}
            terms.append(policy_terms(variant, log_probs[part], **own, **of_terms))
            for field in fields(terms[-1]):
                assert not getattr(terms[-1], field.name)[~own["mask"]].any(), field.name
        total = torch.stack(shares).sum()
        assert total.item() == pytest.approx(whole.item(), abs=1e-12)
        gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (whole, total)]
        assert torch.allclose(gradients[0], gradients[1], atol=1e-12)
        combined = {name: value.item() for name, value in policy_metrics(terms).items()}
        assert combined == pytest.approx({name: metrics[name].item() for name in combined})


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_to_train_on_is_a_loss_of_zero(variant: str) -> None:
    x = torch.full((2, 3), math.nan, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for aggregation in AGGREGATIONS:
        loss, metrics = policy_loss(variant, x, x.detach(), torch.ones(2), nothing, aggregation=aggregation)
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, x)[0].abs().sum().item() == 0.0
        assert math.isnan(metrics["ratio_mean"].item())  # the mean of nothing, which is not 0


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "reinforce"])
def test_a_ratio_that_overflows_leaves_no_nan(variant: str) -> None:
    x = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-501.0, -501.0], [-501.0, -501.0]])  # exp(500) is infinite in float32
    loss, _ = policy_loss(variant, x, old, torch.tensor([1.0, 0.0]), torch.ones(2, 2, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_a_sampler_weight_that_overflows_is_cut_to_its_bound() -> None:
    x = torch.tensor([[-1.0]], requires_grad=True)
    given = (x.detach(), torch.tensor([2.0]), torch.ones(1, 1, dtype=torch.bool))
    for correction, expected in (("tis_token", 2.0), ("tis_sequence", 2.0), ("mis_token", 0.0), ("icepop", 0.0)):
        loss, metrics = policy_loss(
            "grpo", x, *given, sampler_log_probs=torch.tensor([[-501.0]]), sampler_correction=correction
        )
        assert loss.item() == -2 * expected
        assert metrics["sampler_weight_mean"].item() == expected
        assert metrics["sampler_cut_fraction"].item() == 1.0


def test_a_dropped_token_still_counts_in_the_normaliser() -> None:
    x = torch.full((1, 2), -1.0)
    mu = torch.tensor([[-1.0, -5.0]])  # w = 1 and e⁴
    given = (x, torch.ones(1), torch.ones(1, 2, dtype=torch.bool))
    loss, _ = policy_loss("dapo", x, *given, sampler_log_probs=mu, sampler_correction="mis_token")
    assert loss.item() == pytest.approx(-0.5)


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(torch.tensor([0.0, math.log(3.0)])).item() == pytest.approx(0.8)
    assert effective_sample_size(torch.full((7,), -2.5)).item() == pytest.approx(1.0)
    assert math.isnan(effective_sample_size(torch.tensor([])).item())


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("gpro", {}, ValueError, "grpo"),
        ("grpo", {"aggregation": "token_means"}, ValueError, "did you mean token_mean?"),
        ("grpo", {"kl_estimator": "k4"}, ValueError, "k4"),
        ("grpo", {"sampler_correction": "icepops"}, ValueError, "did you mean icepop?"),
        ("grpo", {"clip_hihg": 0.3}, TypeError, "clip_hihg; did you mean clip_high?"),
        ("two_sided", {"delta": 4.0}, TypeError, "delta; did you mean max_ratio?"),
        ("reinforce", {"clip_low": 0.2}, TypeError, "clip_low"),
        ("grpo", {"kl_coef": 0.1}, ValueError, "kl_coef=0.1 needs ref_log_probs"),
        ("grpo", {"sampler_kl_coef": 0.1}, ValueError, "needs sampler_log_probs"),
        ("grpo", {"sampler_correction": "tis_token"}, ValueError, "needs sampler_log_probs"),
        ("grpo", {"sampler_correction": "icepop", "sampler_ratio_high": 0.9}, ValueError, "0.9"),
    ],
)
def test_a_mistake_is_named(name: str, given: dict[str, Any], error: type[Exception], message: str) -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(error, match=message):
        policy_loss(name, ones, ones, torch.ones(2), ones.bool(), **given)


def test_a_divisor_of_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="token_means"):
        default_normaliser(torch.ones(2, 3).bool(), "token_means")
