"""Distributions over tokens: which positions count, and what their probabilities are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from rlpost.data import History
from rlpost.data.ragged import ragged
from rlpost.errors import DataError
from rlpost.model.load import load_model
from rlpost.policies import CategoricalSequential, TransformersWrapper

ROWS = [[5, 9, 80, 33, 7], [60, 61, 62]]
PROMPTS = [[5, 9], [60]]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PreTrainedModel:
    return load_model(tiny_folder)


def policy(model: PreTrainedModel, **kwargs: Any) -> TransformersWrapper:
    return TransformersWrapper(model, generate=False, generate_kwargs=kwargs)


def sequences(**more: Any) -> TensorDict:
    def column(rows: Any) -> torch.Tensor:
        return ragged([torch.tensor(row) for row in rows])

    tokens = {"full": column(ROWS), "prompt": column(PROMPTS)}
    return TensorDict({"tokens": tokens, **{k: column(v) for k, v in more.items()}}, batch_size=[2])


def by_hand(model: PreTrainedModel, temperature: float) -> list[torch.Tensor]:
    """log-softmax of what stands before each token, row by row: (T - 1, V)."""
    with torch.no_grad():
        return [(model(torch.tensor([row])).logits[0, :-1] / temperature).log_softmax(-1) for row in ROWS]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_distribution_is_the_one_a_token_was_drawn_from(model: PreTrainedModel, temperature: float) -> None:
    sampler = policy(model, temperature=temperature)
    assert isinstance(sampler, CategoricalSequential)
    dist = sampler.get_dist_with_attention_mask(sequences())
    assert dist.mask.tolist() == [[False, True, True, True, True], [False, True, True, False, False]]
    for row, expected in enumerate(by_hand(model, temperature)):
        torch.testing.assert_close(dist.logits[row, 1 : len(ROWS[row])], expected, atol=1e-5, rtol=0)
        entropy = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(dist.entropy()[row, 1 : len(ROWS[row])], entropy, atol=1e-4, rtol=0)
    assert dist.entropy()[~dist.mask].tolist() == [0.0] * 4


def test_masks_choose_which_tokens_count(model: PreTrainedModel) -> None:
    reading, data = policy(model), sequences()
    by_prompt = [[False, False, True, True, True], [False, True, True, False, False]]
    assert reading.get_dist_with_prompt_mask(data).mask.tolist() == by_prompt
    assert reading.get_dist(data).mask.tolist() == by_prompt
    assistant = [[False, False, True, False, True], [False, False, True]]
    data["masks"] = TensorDict({"all_assistant_mask": ragged([torch.tensor(row) for row in assistant])}, batch_size=[2])
    padded = [assistant[0], [*assistant[1], False, False]]
    assert reading.get_dist_with_assistant_mask(data).mask.tolist() == padded
    assert reading.get_dist(data).mask.tolist() == padded
    custom = torch.tensor([[True, True, False, False, False], [True, False, True, True, True]])
    assert reading.get_dist_with_custom_mask(data, custom).mask.tolist() == [
        [False, True, False, False, False],  # nothing predicts the first
        [False, False, True, False, False],  # and behind the row there is nothing
    ]


def test_messages_say_themselves_what_the_assistant_said(model: PreTrainedModel) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    data = TensorDict({"history": {"full": History.from_chats([chat])}}, batch_size=[1])
    dist = policy(model).get_dist(data)
    assert dist.mask.sum().item() == len("yes") + 1  # and the end of its turn


def test_log_prob_of_the_counted_tokens_carries_a_gradient(model: PreTrainedModel) -> None:
    reading = policy(model, temperature=2.0)
    log_probs = reading.log_prob(sequences())
    expected = torch.zeros(2, 5)
    for row, (ids, prompt, table) in enumerate(zip(ROWS, PROMPTS, by_hand(model, 2.0), strict=True)):
        for place in range(len(prompt), len(ids)):
            expected[row, place] = table[place - 1, ids[place]]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    log_probs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad(set_to_none=True)


def test_masks_that_cannot_be_are_named(model: PreTrainedModel) -> None:
    with pytest.raises(DataError, match="assistant"):
        policy(model).get_dist_with_assistant_mask(sequences())
