"""What enters the gradient of a step: no completion whose reward failed, none that was cut, and stale ones weighed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.estimate.machine import Device
from rlpost.model.packing import Row, rows_of
from rlpost.objectives.advantage import mask_overlong
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.settings import GRPOSettings
from rlpost.settings.loss import ESTIMATORS, Aggregation
from rlpost.torchrl.batches import concat_rows
from rlpost.train.assemble import GRPOParts, assemble_grpo
from rlpost.train.grpo import fill_advantages, minibatches
from rlpost.train.progress import loss_metrics
from rlpost.train.ranks import Ranks
from rlpost.train.resolve import resolve
from rlpost.train.rules import MaskOverlong
from rlpost.train.step import Step
from tests.says import Says
from tests.train.test_split import LONGEST, TEMPERATURE, difference, padded, plain, small_model, stepped

Batch = Callable[..., TensorDict]


def settings_of(*words: str) -> GRPOSettings:
    small = ["model=tiny", "model.autocast=none", "prompts_per_step=2", "group_size=4", "eval.enabled=false"]
    return compose(TRAIN_GRPO, [*small, "policy=transformers", "env.max_completion_tokens=12", *words]).settings


# Rewards that failed


REWARDS = [1.0, None, 0.0, 3.0, 2.0, 2.5, None, 0.5]  # of two groups; the failed ones are the longest


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model(torch.float64)


def sampled(batch: Batch, without_failed: bool) -> tuple[TensorDict, list[Row]]:
    generator = torch.Generator().manual_seed(3)
    pieces, rows = [], []
    for i, reward in enumerate(REWARDS):
        length = 12 if reward is None else 3 + i
        ids = torch.randint(0, 53, (length,), generator=generator).tolist()
        noise = 0.3 * torch.randn(3, length, generator=generator) - 3.0
        if reward is None and without_failed:
            continue
        fields: dict[str, Any] = {"prompt_ids": [5, 6 + i // 4], "response_ids": ids, "log_probs": noise[0].tolist()}
        piece = batch(size=1, first=i // 4, reward=reward, valid=reward is not None, **fields)
        [row] = rows_of(piece)
        row.old_log_probs, row.ref_log_probs = noise[1], noise[2]
        pieces.append(piece)
        rows.append(row)
    return concat_rows(pieces), rows


TERMS = ["loss.kl_coef=0.3", "loss.sampler_kl_coef=0.2", "loss.entropy_coef=0.1"]
IN_REWARD = ["loss.kl_coef=0.3", "loss.kl_in=reward", "loss.kl_estimator=k1"]
OF_SEQUENCES = ["loss=gspo", "loss.clip_low=0.2", "loss.clip_high=0.2", "loss.sampler_correction=tis_sequence"]


OF_TOKENS = ["loss=dr_grpo", "loss.sampler_correction=icepop", "loss.entropy_coef=0.1"]
PLAIN = [(None, "grpo")]
CASES = {  # words -> averages and estimators
    "every term": (TERMS, [*((a, "grpo") for a in Aggregation), *((None, e) for e in ESTIMATORS)]),
    "kl in the reward": (IN_REWARD, [(None, estimator) for estimator in ESTIMATORS if estimator != "gdpo"]),
    "gspo": (OF_SEQUENCES, PLAIN),
    "dr_grpo": (OF_TOKENS, PLAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_completion_whose_reward_failed_leaves_no_trace(model: PreTrainedModel, batch: Batch, name: str) -> None:
    words, choices = CASES[name]
    chosen = settings_of(*words)
    for aggregation, estimator in choices:
        loss = replace(chosen.loss, aggregation=aggregation)
        settings = replace(chosen, loss=loss, advantage=replace(chosen.advantage, estimator=estimator))
        objective = PolicyObjective(loss.corrected(stale=False), temperature=TEMPERATURE, max_completion_tokens=LONGEST)
        gradients, figures = [], []
        for without_failed in (True, False):
            step, rows = sampled(batch, without_failed)
            given = fill_advantages(step, rows, settings.advantage, settings.loss, settings.seed)
            [minibatch] = minibatches(rows, settings.minibatch_size, settings.passes)
            gradient, done = stepped(model, objective, minibatch)
            assert done.stepped
            gradients.append(gradient)
            figures.append(loss_metrics([done.outputs], corrected=True) | given)
        alone, together = gradients
        assert alone.norm() > 1e-3
        assert difference(together, alone) < 1e-6, (aggregation, estimator)
        assert figures[1] == pytest.approx(figures[0], rel=1e-6), (aggregation, estimator)


# Completions that were truncated


@pytest.mark.parametrize(
    ("reasons", "lengths", "masked"),
    [(("context", "stop"), (12, 12), 1), (("length", "length"), (12, 12), 2), (("length", "length"), (12, 5), 2)],
    ids=["one", "all at the limit", "all, one by the context"],  # 5 tokens are below the limit of 12
)
def test_truncated_completions_are_left_out_and_explained(
    reasons: tuple[str, ...], lengths: tuple[int, ...], masked: int, batch: Batch, says: Says
) -> None:
    pieces = zip(reasons, lengths, strict=True)
    truncated = concat_rows([batch(size=1, response_ids=[7] * n, finish_reason=reason) for reason, n in pieces])
    rows, step = rows_of(truncated), Step(1, 1, Ranks())
    assert [row.num_trained for row in mask_overlong(truncated, rows)].count(0) == masked
    MaskOverlong(12, context=40).before_updates(step, truncated, rows)
    assert step.metrics["completion/masked_overlong"] == masked
    says("train", "\n".join(f"{what}{more}" for what, more in step.notes.items()))


# Stale completions


def stale_step(*words: str) -> tuple[GRPOSettings, GRPOParts, list[Row]]:
    """Two groups sampled one push before the weights that are to learn from them, which are far from the sampler's."""
    settings, _ = resolve(settings_of("max_policy_lag=1", *words), Device(), None)
    parts = assemble_grpo(settings)
    parts.collector.fill(settings.prompts_per_step)
    batch = parts.buffer.take(settings.prompts_per_step)
    generator = torch.Generator().manual_seed(0)
    parts.model.double()
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    parts.collector.update_policy_weights_(parts.model)
    batch["next", "reward"] = torch.arange(8.0)[:, None]
    rows = rows_of(batch)
    fill_advantages(batch, rows, settings.advantage, settings.loss, settings.seed)
    return settings, parts, rows


def plain_gradient(parts: GRPOParts, rows: list[Row], cap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of -mean over tokens of min(π / µ, cap) Â π_θ / π, and the weights; `cap` None: of weights that are all 1."""
    own, _ = plain(parts.model, rows, parts.policy.sampling.temperature)
    mask, sampler = (padded([getattr(row, name) for row in rows]) for name in ("sampled", "sampler_log_probs"))
    weights = (own.detach() - sampler).exp()
    used = torch.ones_like(weights) if cap is None else weights.clamp(max=cap)
    advantages = torch.tensor([[row.mean_advantage] for row in rows])
    loss = -(used * advantages * (own - own.detach()).exp())[mask].mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(parts.model.parameters()))])
    return gradient, weights[mask]


@pytest.mark.parametrize(
    ("words", "cap"),
    [((), 2.0), (("loss.sampler_ratio_high=1.2",), 1.2), (("loss.sampler_correction=none",), None)],
    ids=["as it is", "another cap", "off"],
)
def test_stale_token_weighs_what_its_probability_has_become(words: tuple[str, ...], cap: float | None) -> None:
    settings, parts, rows = stale_step(*words)
    [minibatch] = minibatches(rows, settings.minibatch_size, settings.passes)
    expected, weights = plain_gradient(parts, rows, cap)
    gradient, done = stepped(parts.model, parts.objective, minibatch)
    metrics = loss_metrics([done.outputs], corrected=True)
    assert difference(gradient, expected) < 1e-5
    assert metrics["ratio/clip_fraction"] == 0.0  # of one update a step: π_old is the trainer's own
    assert weights.max() > 2 > 0.5 > weights.min()
    if cap is not None:
        assert metrics["sampler/weight_mean"] == pytest.approx(weights.clamp(max=cap).mean().item(), rel=1e-5)
        assert metrics["sampler/cut"] == pytest.approx((weights > cap).double().mean().item())
        uncorrected, _ = plain_gradient(parts, rows, None)
        assert difference(uncorrected, expected) > 0.05
