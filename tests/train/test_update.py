"""One optimizer step that must not be taken."""

from __future__ import annotations

import pytest
import torch

from rlpost.objectives.policy_objective import PolicyObjective
from rlpost.settings import Autocast, GRPOLossSettings, OptimSettings
from rlpost.train.update import Learner, Microbatches, update
from tests.train.test_split import minibatch, small_model


def test_one_bad_gradient_changes_no_weight_and_leaves_the_others_to_be_looked_at() -> None:
    model = small_model(torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    [bad] = [name for name in before if name.endswith("q_proj.weight")]
    model.get_parameter(bad).register_hook(lambda gradient: gradient * float("nan"))
    learner = Learner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        PolicyObjective(GRPOLossSettings(), temperature=1.0, max_completion_tokens=12),
        OptimSettings(),
        Autocast.none,
        total_updates=1,
    )
    microbatches = Microbatches(1000, torch.device("cpu"), note=print, progress=lambda done, total: None)
    with pytest.raises(FloatingPointError, match="gradient norm nan"):
        update(learner, microbatches, minibatch(model), number=0)
    not_finite = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert not_finite == [bad]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
