"""GRPOLoss on models that a packed row would change: the loss of the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from model_families import WORDS, own_log_probs, tiny_model
from tensordict import TensorDict
from transformers import PreTrainedModel

from rlpost.data.ragged import ragged
from rlpost.model.logprobs import verdict_of
from rlpost.model.packing import Row
from rlpost.objectives import GRPOLoss
from rlpost.policies import TransformersWrapper
from rlpost.settings import SamplingSettings

KINDS = ["lfm2", "qwen3_5_text"]  # between their tokens is a convolution, and linear attention
ADVANTAGES = [1.0, -0.5, 0.25, -2.0]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = tiny_model(request.param)
    assert not verdict_of(model).reads_packed
    return model


def completions() -> list[Row]:
    """Three completions of one prompt, which a packed row would hold once, and one of another."""
    generator = torch.Generator().manual_seed(5)

    def drawn(length: int) -> torch.Tensor:
        return torch.randint(0, WORDS, (length,), generator=generator)

    asked = [drawn(9)] * 3 + [drawn(4)]
    rows = []
    for prompt, length, advantage in zip(asked, (3, 12, 7, 8), ADVANTAGES, strict=True):
        rows.append(Row(prompt, drawn(length), torch.ones(length, dtype=torch.bool), torch.zeros(length), advantage))
    return rows


def as_batch(rows: Sequence[Row], old: Sequence[torch.Tensor]) -> TensorDict:
    """The rows as collectors leave them; `old` are log-probs of the completions, prompts have nonsense there."""
    full = [torch.cat([row.prompt, row.response]) for row in rows]
    log_probs = [
        torch.cat([torch.full((row.prompt.numel(),), -77.0), each]) for row, each in zip(rows, old, strict=True)
    ]
    fields = {
        "tokens": {"full": ragged(full), "prompt": ragged([row.prompt for row in rows])},
        "masks": {"all_attention_mask": ragged([torch.ones(len(ids), dtype=torch.bool) for ids in full])},
        "log_probs": {"full": ragged(log_probs)},
        "advantage": torch.tensor(ADVANTAGES),
    }
    return TensorDict(fields, batch_size=[len(rows)])


def gradient(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([(torch.zeros_like(p) if each is None else each).flatten() for p, each in pairs])


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_grpo_loss_is_that_of_the_model_s_own_forward(
    model: PreTrainedModel, temperature: float, tiny_tokenizer: Any
) -> None:
    rows = completions()
    log_probs, entropies = zip(*(own_log_probs(model, row, temperature) for row in rows), strict=True)
    generator = torch.Generator().manual_seed(6)
    old = [each.detach() + 0.3 * torch.randn(each.shape, generator=generator) for each in log_probs]
    ratio = (torch.cat(log_probs) - torch.cat(old)).exp()
    advantage = torch.tensor(ADVANTAGES).repeat_interleave(torch.tensor([len(row.response) for row in rows]))
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    expected = -clipped.mean() - 0.1 * torch.cat(entropies).mean()

    batch = as_batch(rows, old)
    actor = TransformersWrapper(model, tiny_tokenizer)
    actor.sampling = SamplingSettings(temperature=temperature)
    output = GRPOLoss(actor if temperature != 1.0 else model, entropy_coeff=0.1)(batch)
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-6)
    own, right = gradient(model, output.loss), gradient(model, expected)
    assert right.norm() > 0
    assert (own - right).norm() / right.norm() < 1e-4
    assert output.kl_approx.item() == pytest.approx((torch.cat(old) - torch.cat(log_probs)).mean().item(), abs=1e-5)
