"""Sampling with transformers: ids, log-probs, seeds and ends of completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlpost.model.load import load_model, load_tokenizer
from rlpost.policies import Request, TransformersWrapper
from rlpost.policies.transformers import draw
from rlpost.settings import ModelSettings, SamplingSettings

PROMPTS = [[5, 9, 80, 33], [7], [60, 61, 62, 63, 64, 65, 66, 67, 68]]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PreTrainedModel:
    return load_model(tiny_folder, ModelSettings(path=str(tiny_folder)))


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


def wrapper(model: PreTrainedModel, tokenizer: Any, **kwargs: Any) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer, sampling=SamplingSettings(), **kwargs)


def requests(max_tokens: int = 12) -> list[Request]:
    return [Request(ids, max_tokens, seed=100 + i) for i, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(), SamplingSettings(temperature=0.6), SamplingSettings(top_p=0.8)]
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled(
    model: PreTrainedModel, tokenizer: Any, sampling: SamplingSettings
) -> None:
    for request, completion in zip(requests(), wrapper(model, tokenizer).generate(requests(), sampling), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + completion.token_ids])).logits[0]
        steps = logits[len(request.prompt_ids) - 1 : -1].float()
        for row, token, log_prob in zip(steps, completion.token_ids, completion.log_probs, strict=True):
            probabilities = (row / sampling.temperature).softmax(-1)
            if sampling.top_p < 1:
                ordered = probabilities.sort(descending=True).values
                kept = ordered[: int((ordered.cumsum(0) < sampling.top_p).sum()) + 1]
                probabilities = torch.where(probabilities >= kept[-1], probabilities, 0.0) / kept.sum()
            assert log_prob == pytest.approx(probabilities[token].log().item(), abs=2e-4)


def test_a_completion_depends_on_its_own_seed_and_not_on_its_neighbours(model: PreTrainedModel, tokenizer: Any) -> None:
    together = wrapper(model, tokenizer).generate(requests(), SamplingSettings())
    alone = [wrapper(model, tokenizer).generate([r], SamplingSettings())[0] for r in requests()]
    in_pairs = wrapper(model, tokenizer, max_num_seqs=2).generate(requests(), SamplingSettings())
    assert [c.token_ids for c in together] == [c.token_ids for c in alone] == [c.token_ids for c in in_pairs]
    other = [Request(r.prompt_ids, r.max_tokens, r.seed + 1) for r in requests()]
    assert [c.token_ids for c in wrapper(model, tokenizer).generate(other, SamplingSettings())] != [
        c.token_ids for c in together
    ]


def test_temperature_zero_takes_the_likeliest_token(model: PreTrainedModel, tokenizer: Any) -> None:
    [completion] = wrapper(model, tokenizer).generate([Request(PROMPTS[0], 5, 1)], SamplingSettings(temperature=0.0))
    ids = list(PROMPTS[0])
    for token in completion.token_ids:
        assert token == model(torch.tensor([ids])).logits[0, -1].argmax().item()
        ids.append(token)


def test_a_stopped_completion_ends_with_the_end_of_turn_id(model: PreTrainedModel, tokenizer: Any) -> None:
    many = [Request([5, 9], 40, seed) for seed in range(60)]
    completions = wrapper(model, tokenizer).generate(many, SamplingSettings())
    eos = tokenizer.eos_token_id
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert stopped
    assert cut
    assert all(c.token_ids[-1] == eos and eos not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 40 and eos not in c.token_ids for c in cut)
    assert all("<|im_end|>" not in c.text for c in completions)


def test_each_request_has_its_own_length_limit(model: PreTrainedModel, tokenizer: Any) -> None:
    asked = [Request([5, 9], limit, 3) for limit in (1, 4, 9)]
    lengths = [len(c.token_ids) for c in wrapper(model, tokenizer).generate(asked, SamplingSettings())]
    assert all(length <= limit for length, limit in zip(lengths, (1, 4, 9), strict=True))
    assert lengths[0] == 1


def test_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().repeat(4, 1)
    chosen, log_probs = draw(logits, SamplingSettings(), torch.tensor([0.0, 0.49, 0.51, 0.99]))
    assert chosen.tolist() == [0, 0, 1, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25])


def test_draw_keeps_to_the_nucleus() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(3, 1)
    chosen, log_probs = draw(logits, SamplingSettings(top_p=0.7), torch.tensor([0.1, 0.7, 0.999]))
    assert chosen.tolist() == [0, 1, 1]  # 0.5 + 0.3 reaches 0.7; the third is out
    assert log_probs.exp().tolist() == pytest.approx([0.625, 0.375, 0.375])
