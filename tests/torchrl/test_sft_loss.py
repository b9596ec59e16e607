"""SFTLoss on conversations: values by hand, what it reads, what it refuses."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from chats import CHATS, answers, batch, shifted
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from rlpost.data import History
from rlpost.objectives import SFTLoss, SFTLossOutput


@pytest.fixture(scope="module")
def model(tiny_tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), num_attention_heads=2, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_that_of_the_answers_and_their_ends(
    model: LlamaForCausalLM, tiny_tokenizer: Any, reduction: str, normalise: bool
) -> None:
    _, log_probs = answers(model, tiny_tokenizer)
    each = torch.stack([-(row.mean() if normalise else row.sum()) for row in log_probs])
    expected = {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]
    out = SFTLoss(model, tiny_tokenizer, reduction=reduction, normalize_by_seq_length=normalise)(batch())
    assert torch.allclose(out.loss_sft, expected, atol=1e-6)
    assert torch.equal(out.loss, out.loss_sft)
    assert out.kl_to_ref is None
    assert out.sum(reduce=True).shape == ()


def test_the_gradient_is_that_of_the_plain_forward(model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    weight = model.lm_head.weight
    loss = SFTLoss(actor_network=model, tokenizer=tiny_tokenizer)(batch()).loss
    [own] = torch.autograd.grad(loss, weight)
    _, log_probs = answers(model, tiny_tokenizer)
    [plain] = torch.autograd.grad(-torch.stack([row.mean() for row in log_probs]).mean(), weight)
    assert torch.allclose(own, plain, atol=1e-8)


def test_the_kl_term_is_k3_over_all_trained_tokens(model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    given = batch(ref_log_probs=shifted(model, tiny_tokenizer, 0.1))
    out: Any = SFTLoss(model, tiny_tokenizer, kl_to_ref_coeff=2.0)(given)
    k3 = exp(0.1) - 0.1 - 1
    assert out.kl_to_ref.item() == pytest.approx(k3, abs=1e-6)
    assert out.loss_kl_to_ref.item() == pytest.approx(2 * k3, abs=1e-6)
    assert out.loss.item() == pytest.approx(out.loss_sft.item() + 2 * k3, abs=1e-6)
    each = SFTLossOutput(torch.tensor([1.0, 2.0]), torch.tensor(0.5))
    assert (each.sum(reduce=True).item(), each.sum(reduce=False).tolist()) == (3.5, [1.5, 2.5])


@pytest.mark.parametrize(
    ("normalise", "margins", "first"), [(True, [1.0, 1.0], 0.644397), (False, [2.0, 6.0], 0.598139)]
)
def test_minor_sft_compares_with_the_reference(
    model: LlamaForCausalLM, tiny_tokenizer: Any, normalise: bool, margins: list[float], first: float
) -> None:
    given = batch(ref_log_probs=shifted(model, tiny_tokenizer, -1.0))
    options: dict[str, Any] = {"loss_function": "minor_sft", "reduction": "none", "beta": 0.1}
    out = SFTLoss(model, tiny_tokenizer, normalize_by_seq_length=normalise, **options)(given)
    expected = [log(1 + exp(-0.1 * margin)) for margin in margins]  # -log sigmoid(0.1 * margin)
    assert out.loss_sft.tolist() == pytest.approx(expected, abs=1e-6)
    assert out.loss_sft[0].item() == pytest.approx(first, abs=1e-6)
    with pytest.warns(UserWarning, match="kl_to_ref_coeff"):
        loss = SFTLoss(model, tiny_tokenizer, kl_to_ref_coeff=0.5, **options)
    assert loss(given).loss_kl_to_ref is None


def test_what_cannot_be_read_is_refused_by_name(model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"'men'.* mean[?]"):
        SFTLoss(model, tiny_tokenizer, reduction="men")
    with pytest.raises(ValueError, match=r"'sftt'.* sft[?]"):
        SFTLoss(model, tiny_tokenizer, loss_function="sftt")
    asked = TensorDict({"history": {"full": History.from_chats([CHATS[0][:1]])}}, batch_size=[1])
    with pytest.raises(ValueError, match="conversation 0 "):
        SFTLoss(model, tiny_tokenizer)(asked)
