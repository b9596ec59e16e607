"""A step's figures do not depend on how it was split, and what an objective counts and needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from rlpost.model.packing import Row, pack
from rlpost.objectives.policy_loss import PolicyObjective, PolicyOutput
from rlpost.settings import (
    DAPOLossSettings,
    GRPOLossSettings,
    PolicyLossSettings,
    SamplerCorrection,
)
from rlpost.train.progress import loss_metrics
from tests.train.test_split import minibatch, small_model


def objective_of(settings: PolicyLossSettings) -> PolicyObjective:
    return PolicyObjective(settings, temperature=1.0, max_completion_tokens=10)


def row(num_trained: int, advantage: float | torch.Tensor = 1.0) -> Row:
    sampled = torch.arange(4) < num_trained
    return Row(torch.tensor([1]), torch.zeros(4, dtype=torch.int64), sampled, torch.zeros(4), advantage)


def test_only_what_can_change_the_gradient_is_read() -> None:
    alone = objective_of(GRPOLossSettings())
    of_trained = torch.tensor([0.0, 0.0, 0.0, 1.0])
    rows = [row(2), row(2, 0.0), row(0), row(3, of_trained), row(4, of_trained)]
    assert [alone.needs(r) for r in rows] == [True, False, False, False, True]
    for settings in (
        GRPOLossSettings(kl_coef=0.1),
        GRPOLossSettings(sampler_kl_coef=0.1),
        GRPOLossSettings(entropy_coef=0.1),
    ):
        assert [objective_of(settings).needs(r) for r in rows] == [True, True, False, True, True]


def outputs(objective: PolicyObjective, rows: Sequence[Row], budget: int) -> list[PolicyOutput]:
    model, normaliser = small_model(torch.float64), objective.normaliser(rows)
    needed = [r for r in rows if objective.needs(r)]
    return [objective(model, part, normaliser) for part in pack(needed, budget, torch.device("cpu"))]


def test_figures_are_means_over_tokens_whatever_the_split() -> None:
    settings = DAPOLossSettings(
        kl_coef=0.3, sampler_kl_coef=0.2, entropy_coef=0.1, sampler_correction=SamplerCorrection.mis_token
    )
    objective, rows = objective_of(settings), minibatch(small_model(torch.float64))
    whole = loss_metrics([outputs(objective, rows, 10_000)], corrected=True)
    split = loss_metrics([outputs(objective, rows, 15)], corrected=True)
    assert split == pytest.approx(whole, rel=1e-6)
    assert whole["ratio/clip_fraction"] == pytest.approx(whole["ratio/clip_low"] + whole["ratio/clip_high"])
    assert 0 < whole["ratio/clip_fraction"] < 1
    assert whole["loss/kl"] == pytest.approx(0.3 * whole["kl/ref"])  # both are means over the same tokens
    assert whole["loss/sampler_kl"] == pytest.approx(0.2 * whole["kl/sampler"])
    assert whole["loss/entropy"] == pytest.approx(-0.1 * whole["entropy"])
    minimised = sum(output.loss.item() for output in outputs(objective, rows, 15))
    assert minimised == pytest.approx(sum(value for name, value in whole.items() if name.startswith("loss/")))
    assert {"sampler/weight_mean", "sampler/cut"} <= set(whole)


def test_weights_are_told_only_where_a_correction_gives_them() -> None:
    objective, rows = objective_of(GRPOLossSettings()), minibatch(small_model(torch.float64))
    told = loss_metrics([outputs(objective, rows, 10_000)], corrected=False)
    assert {"sampler/weight_mean", "sampler/cut"}.isdisjoint(told)
    assert told["sampler/logprob_gap"] > 0


def test_a_loss_is_the_mean_over_a_steps_updates() -> None:
    objective, rows = objective_of(GRPOLossSettings()), minibatch(small_model(torch.float64))
    once = outputs(objective, rows, 10_000)
    both = loss_metrics([once, [], once], corrected=False)
    assert both["loss/policy"] == pytest.approx(loss_metrics([once], corrected=False)["loss/policy"])


def test_where_nothing_is_read_the_loss_is_0_and_means_are_nothing() -> None:
    told = loss_metrics([[]], corrected=True)
    assert told.pop("loss/policy") == 0.0
    assert {"ratio/clip_fraction", "ess", "entropy"} <= set(told)
    assert all(math.isnan(value) for value in told.values())
