"""DistillationLoss on conversations: values by hand, and what it refuses."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlpost.data import History
from rlpost.data.ragged import ragged
from rlpost.errors import DataError
from rlpost.models import load_model, locate_model
from rlpost.objectives import DistillationLoss, DistillationLossOutput

CHATS = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
]
TRAINED = [2, 6]  # a byte is a token, and the end of the turn is one


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(locate_model("builtin:tiny")).double()


def batch(model: Any, tokenizer: Any, shift: float) -> TensorDict:
    """The chats, with the model's own log-probs plus `shift` at the answers as a teacher's."""
    rows = []
    for chat, count in zip(CHATS, TRAINED, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        log_p = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        row, end = torch.full((len(ids),), -77.0, dtype=torch.float64), len(ids) - 1
        row[end - count : end] = log_p.detach()[end - 1 - count : end - 1] + shift
        rows.append(row)
    teacher = {"teacher_log_probs": {"full": ragged(rows)}}
    return TensorDict({"history": {"full": History.from_chats(CHATS)}, "next": teacher}, [2])


def test_the_loss_is_k3_of_the_assistants_tokens(model: Any, tiny_tokenizer: Any) -> None:
    k3 = exp(0.5) - 1 - 0.5
    given = batch(model, tiny_tokenizer, 0.5)
    for reduction, expected in {"mean": k3, "sum": 2 * k3, "none": [k3, k3]}.items():
        output = DistillationLoss(model, tiny_tokenizer, reduction=reduction, distill_coeff=3.0)(given)
        assert isinstance(output, DistillationLossOutput)
        assert output.loss.tolist() == pytest.approx((3 * torch.tensor(expected)).tolist(), rel=1e-6)
        assert output.kl_to_teacher.item() == pytest.approx(k3)
    summed = DistillationLoss(model, tiny_tokenizer, reduction="none", normalize_by_seq_length=False)(given)
    assert summed.loss_distill.tolist() == pytest.approx([count * k3 for count in TRAINED])
    assert summed.sum().item() == pytest.approx(8 * k3)


def test_a_model_that_is_its_own_teacher_has_a_loss_of_zero(model: Any, tiny_tokenizer: Any) -> None:
    output = DistillationLoss(model, tiny_tokenizer)(batch(model, tiny_tokenizer, 0.0))
    assert output.loss_distill.item() == pytest.approx(0.0, abs=1e-12)


def test_log_probs_that_are_missing_or_do_not_fit_are_named(model: Any, tiny_tokenizer: Any) -> None:
    loss, given = DistillationLoss(model, tiny_tokenizer), batch(model, tiny_tokenizer, 0.5)
    with pytest.raises(KeyError, match="teacher_log_probs"):
        loss(given.exclude("next"))
    given["next", "teacher_log_probs", "full"] = ragged([torch.zeros(3), torch.zeros(4)])
    with pytest.raises(DataError, match="rows of \\[3, 4\\] values"):
        loss(given)
