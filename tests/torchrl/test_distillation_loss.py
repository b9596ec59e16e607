"""DistillationLoss on conversations: values by hand, and what it refuses."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from chats import TRAINED, batch, shifted

from rlpost.errors import DataError
from rlpost.models import load_model, locate_model
from rlpost.objectives import DistillationLoss, DistillationLossOutput


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(locate_model("builtin:tiny")).double()


def test_the_loss_is_k3_of_the_assistants_tokens(model: Any, tiny_tokenizer: Any) -> None:
    k3 = exp(0.5) - 1 - 0.5
    given = batch(teacher_log_probs=shifted(model, tiny_tokenizer, 0.5))
    for reduction, expected in {"mean": k3, "sum": 2 * k3, "none": [k3, k3]}.items():
        output = DistillationLoss(model, tiny_tokenizer, reduction=reduction, distill_coeff=3.0)(given)
        assert isinstance(output, DistillationLossOutput)
        assert output.loss.tolist() == pytest.approx((3 * torch.tensor(expected)).tolist(), rel=1e-6)
        assert output.kl_to_teacher.item() == pytest.approx(k3)
    summed = DistillationLoss(model, tiny_tokenizer, reduction="none", normalize_by_seq_length=False)(given)
    assert summed.loss_distill.tolist() == pytest.approx([count * k3 for count in TRAINED])
    assert summed.sum().item() == pytest.approx(8 * k3)


def test_a_model_that_is_its_own_teacher_has_a_loss_of_zero(model: Any, tiny_tokenizer: Any) -> None:
    given = batch(teacher_log_probs=shifted(model, tiny_tokenizer, 0.0))
    output = DistillationLoss(model, tiny_tokenizer)(given)
    assert output.loss_distill.item() == pytest.approx(0.0, abs=1e-12)


def test_log_probs_that_are_missing_or_do_not_fit_are_named(model: Any, tiny_tokenizer: Any) -> None:
    loss = DistillationLoss(model, tiny_tokenizer)
    with pytest.raises(KeyError, match="teacher_log_probs"):
        loss(batch())
    with pytest.raises(DataError, match=r"\[3, 4\]"):
        loss(batch(teacher_log_probs=[torch.zeros(3), torch.zeros(4)]))
