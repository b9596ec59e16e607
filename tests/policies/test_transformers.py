"""Sampling with transformers: ids, log-probs, seeds and ends of completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlpost.data.conversation import Completion
from rlpost.errors import ConfigError
from rlpost.model.load import load_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import Policy, Request, TransformersWrapper
from rlpost.policies.transformers import draw
from rlpost.settings import SamplingSettings
from tests.says import Says

PROMPTS = [[5, 9, 80, 33], [7], [60, 61, 62, 63, 64, 65, 66, 67, 68]]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PreTrainedModel:
    return load_model(tiny_folder)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


def wrapper(model: PreTrainedModel, tokenizer: Any, **kwargs: Any) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer, sampling=SamplingSettings(), **kwargs)


def requests(max_tokens: int = 12) -> list[Request]:
    return [Request(ids, max_tokens, seed=100 + i) for i, ids in enumerate(PROMPTS)]


def remaining(logits: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """The probabilities (V,) that temperature and filters leave, one filter after the other, id by id."""
    probabilities = (logits.double() / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = [i for i in order if probabilities[i] >= sampling.min_p * probabilities[order[0]]]
    kept = kept[: sampling.top_k or None]
    whole, reached, within = sum(probabilities[i] for i in kept), 0.0, []
    for i in kept:
        if reached < sampling.top_p * whole:
            within.append(i)
        reached += probabilities[i]
    left = torch.zeros(len(probabilities), dtype=torch.float64)
    left[within] = torch.tensor([probabilities[i] for i in within], dtype=torch.float64)
    return left / left.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(),
        SamplingSettings(temperature=0.6),
        SamplingSettings(top_p=0.8),
        SamplingSettings(top_k=5),
        SamplingSettings(min_p=0.3),
        SamplingSettings(temperature=0.8, min_p=0.05, top_k=40, top_p=0.7),
    ],
    ids=str,
)
def test_log_probs_are_of_the_distribution_that_was_sampled(
    model: PreTrainedModel, tokenizer: Any, sampling: SamplingSettings
) -> None:
    for request, completion in zip(requests(), wrapper(model, tokenizer).generate(requests(), sampling), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + completion.token_ids])).logits[0]
        steps = logits[len(request.prompt_ids) - 1 : -1].float()
        for row, token, log_prob in zip(steps, completion.token_ids, completion.log_probs, strict=True):
            assert log_prob == pytest.approx(remaining(row, sampling)[token].log().item(), abs=2e-4)


def test_a_completion_depends_on_its_own_seed_alone(model: PreTrainedModel, tokenizer: Any) -> None:
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


def test_draw_keeps_to_the_likeliest_and_to_those_near_it() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.5, 0.7, 0.999])
    of_two, log_probs = draw(logits, SamplingSettings(top_k=2), uniforms)
    assert of_two.tolist() == [0, 0, 1, 1]
    assert log_probs.exp().tolist() == pytest.approx([4 / 7, 4 / 7, 3 / 7, 3 / 7])
    near, log_probs = draw(logits, SamplingSettings(min_p=0.45), uniforms)  # 0.2 is half as likely as 0.4
    assert near.tolist() == [0, 1, 1, 2]
    assert log_probs.exp().tolist() == pytest.approx([4 / 9, 1 / 3, 1 / 3, 2 / 9])
    together, _ = draw(logits, SamplingSettings(top_k=3, top_p=0.7), uniforms)  # of 9 tenths, 4 + 3 are enough
    assert together.tolist() == [0, 0, 1, 1]


def ends(tokenizer: Any, ids: list[int], stop: list[str]) -> int:
    """How many of `ids` there are up to the one that completes a stop text; all of them where none does."""
    texts = [tokenizer.decode(ids[:n], skip_special_tokens="<|" not in stop[0]) for n in range(len(ids) + 1)]
    return next((n for n, text in enumerate(texts) if any(end in text for end in stop)), len(ids))


def stops_in(completions: Sequence[Completion]) -> list[str]:
    """Two letters and one that stand behind each other in some of the texts, random as those are."""
    pairs = [c.text[i : i + 2] for c in completions for i in range(3, len(c.text) - 2)]
    plain = [pair for pair in pairs if pair.isascii() and pair.isprintable()]
    return [plain[0], plain[-1][0], "not there"]


def assert_stops_at(policy: Policy, requests: Sequence[Request], stop: list[str]) -> None:
    """Show that completions end with the id that completes a stop text, and are otherwise the same."""
    whole = policy.generate(requests, SamplingSettings())
    stopped = policy.generate(requests, SamplingSettings(stop=stop))
    lengths = [ends(policy.tokenizer, c.token_ids, stop) for c in whole]
    assert sum(n < len(c.token_ids) for c, n in zip(whole, lengths, strict=True)) > 1
    assert [c.token_ids for c in stopped] == [c.token_ids[:n] for c, n in zip(whole, lengths, strict=True)]
    for before, now in zip(whole, stopped, strict=True):
        # of fewer rows than before, which another kernel may multiply
        assert now.log_probs == pytest.approx(before.log_probs[: len(now.log_probs)], abs=1e-4)
        assert now.finish_reason == ("stop" if len(now.token_ids) < len(before.token_ids) else before.finish_reason)
        assert now.text == policy.tokenizer.decode(
            now.token_ids, skip_special_tokens=True
        )  # plain stop texts are in it


def test_a_stop_text_ends_a_completion_with_its_last_id(model: PreTrainedModel, tokenizer: Any) -> None:
    policy = wrapper(model, tokenizer)
    many = [Request([5, 9], 40, seed) for seed in range(20)]
    assert_stops_at(policy, many, stops_in(policy.generate(many, SamplingSettings())))
    assert_stops_at(policy, [Request([5, 9, 7], 40, seed) for seed in range(40)], ["<|im_start|>"])


def test_log_probs_of_whole_sequences_are_not_those_of_a_part(
    model: PreTrainedModel, tokenizer: Any, says: Says
) -> None:
    def read(sampling: SamplingSettings) -> list[torch.Tensor]:
        return wrapper(model, tokenizer).token_log_probs([[5, 6]], sampling)

    filtered = [SamplingSettings(top_k=3), SamplingSettings(min_p=0.1), SamplingSettings(top_p=0.5)]
    says.refusals("policies", ConfigError, read, filtered)
    assert read(SamplingSettings(temperature=0.0, top_k=3))
