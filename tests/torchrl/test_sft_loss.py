"""SFTLoss on conversations: values by hand, what it reads, what it refuses."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from rlpost.data import History
from rlpost.data.ragged import ragged
from rlpost.objectives import SFTLoss, SFTLossOutput

CHATS = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
]
TRAINED = [2, 6]  # a byte is a token, and the end of the turn is one


@pytest.fixture(scope="module")
def model(tiny_tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), num_attention_heads=2, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config).double().eval()


def answers(model: LlamaForCausalLM, tokenizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The ids of each chat, and log π of its answer's tokens by the plain forward of that chat alone."""
    all_ids, log_probs = [], []
    for chat, count in zip(CHATS, TRAINED, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        end = len(ids) - 1  # the template ends in a line break, which nobody is to learn
        log_p = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        all_ids.append(ids)
        log_probs.append(log_p[end - 1 - count : end - 1])  # the log-prob at i is of the id at i + 1
    return all_ids, log_probs


def batch(refs: list[torch.Tensor] | None = None) -> TensorDict:
    fields: dict[str, Any] = {"history": {"full": History.from_chats(CHATS)}}
    if refs is not None:
        fields["next"] = {"ref_log_probs": {"full": ragged(refs)}}
    return TensorDict(fields, batch_size=[2])


def references(ids: list[torch.Tensor], log_probs: list[torch.Tensor], shift: float) -> list[torch.Tensor]:
    """The model's own log-probs plus `shift` at the answers, and nonsense at every other id."""
    refs = []
    for row, values in zip(ids, log_probs, strict=True):
        ref = torch.full((row.numel(),), -77.0, dtype=torch.float64)
        end = row.numel() - 1
        ref[end - values.numel() : end] = values.detach() + shift
        refs.append(ref)
    return refs


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_that_of_the_answers_and_their_ends(
    model: LlamaForCausalLM, tiny_tokenizer: Any, reduction: str, normalise: bool
) -> None:
    ids, log_probs = answers(model, tiny_tokenizer)
    assert [tiny_tokenizer.decode(row[-1 - n : -1]) for row, n in zip(ids, TRAINED, strict=True)] == [
        "4<|im_end|>",
        "hello<|im_end|>",
    ]
    each = torch.stack([-(row.mean() if normalise else row.sum()) for row in log_probs])
    expected = {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]
    loss = SFTLoss(model, tiny_tokenizer, reduction=reduction, normalize_by_seq_length=normalise)
    out = loss(batch())
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
    refs = references(*answers(model, tiny_tokenizer), shift=0.1)
    out = SFTLoss(model, tiny_tokenizer, kl_to_ref_coeff=2.0)(batch(refs))
    k3 = exp(0.1) - 0.1 - 1
    assert out.kl_to_ref is not None
    assert out.kl_to_ref.item() == pytest.approx(k3, abs=1e-6)
    assert out.loss_kl_to_ref is not None
    assert out.loss_kl_to_ref.item() == pytest.approx(2 * k3, abs=1e-6)
    assert out.loss.item() == pytest.approx(out.loss_sft.item() + 2 * k3, abs=1e-6)
    each = SFTLossOutput(torch.tensor([1.0, 2.0]), torch.tensor(0.5))
    assert (each.sum(reduce=True).item(), each.sum(reduce=False).tolist()) == (3.5, [1.5, 2.5])


@pytest.mark.parametrize(("normalise", "margins"), [(True, [1.0, 1.0]), (False, [2.0, 6.0])])
def test_minor_sft_compares_with_the_reference(
    model: LlamaForCausalLM, tiny_tokenizer: Any, normalise: bool, margins: list[float]
) -> None:
    refs = references(*answers(model, tiny_tokenizer), shift=-1.0)
    loss = SFTLoss(
        model, tiny_tokenizer, reduction="none", loss_function="minor_sft", normalize_by_seq_length=normalise, beta=0.1
    )
    expected = [log(1 + exp(-0.1 * margin)) for margin in margins]  # -log sigmoid(0.1 * margin)
    assert loss(batch(refs)).loss_sft.tolist() == pytest.approx(expected, abs=1e-6)
    assert expected[0] == pytest.approx(0.644397 if normalise else 0.598139, abs=1e-6)


def test_minor_sft_takes_no_kl_term(model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    with pytest.warns(UserWarning, match="taken as 0"):
        loss = SFTLoss(model, tiny_tokenizer, loss_function="minor_sft", kl_to_ref_coeff=0.5)
    refs = references(*answers(model, tiny_tokenizer), shift=-1.0)
    assert loss(batch(refs)).loss_kl_to_ref is None


def test_what_cannot_be_read_is_refused_by_name(model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="there is no reduction 'men'; did you mean mean"):
        SFTLoss(model, tiny_tokenizer, reduction="men")
    with pytest.raises(ValueError, match="did you mean sft"):
        SFTLoss(model, tiny_tokenizer, loss_function="sftt")
    asked = TensorDict({"history": {"full": History.from_chats([CHATS[0][:1]])}}, batch_size=[1])
    with pytest.raises(ValueError, match="conversation 0 has no assistant mask"):
        SFTLoss(model, tiny_tokenizer)(asked)
