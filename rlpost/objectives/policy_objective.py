"""A policy loss over a microbatch of packed tokens, for training loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import Microbatch, Row, by_row
from rlpost.objectives.aggregation import aggregate
from rlpost.objectives.policy_loss import PolicyTerms, policy_terms
from rlpost.objectives.variants import VARIANTS
from rlpost.settings import KLPlace, PolicyLossSettings


@dataclass(slots=True)
class PolicyOutput:
    """A microbatch's share of the minibatch loss, and what it says of each of its tokens.

    Shares of one minibatch add up to its loss. Everything but `loss` is detached.
    """

    loss: torch.Tensor  # the sum of `losses`
    losses: dict[str, torch.Tensor]  # each term by its name in metrics.jsonl
    terms: PolicyTerms  # per token (R, T), one completion a row
    entropy: torch.Tensor  # (M,)

    @property
    def num_tokens(self) -> int:
        """M, the tokens that were trained on."""
        return self.entropy.numel()


class PolicyObjective:
    """The loss that `settings` describe, on log-probs at the sampling `temperature`.

    What each microbatch adds is a sum divided by the count of the whole minibatch, whichever
    microbatch or rank its completions are in and whether or not they are read, so the gradient does
    not depend on how it is split. A completion is never split, so ratios of whole completions are exact.
    """

    def __init__(self, settings: PolicyLossSettings, *, temperature: float, max_completion_tokens: int) -> None:
        self.variant = settings.variant
        self.aggregation = settings.aggregation.name if settings.aggregation else VARIANTS[self.variant].aggregation
        self.kl_coef = settings.kl_coef if settings.kl_in is KLPlace.loss else 0.0
        self.sampler_kl_coef = settings.sampler_kl_coef
        self.entropy_coef = settings.entropy_coef
        self.kl_estimator = settings.kl_estimator.name
        self.sampler_correction = settings.sampler_correction.name if settings.sampler_correction else "none"
        self.sampler_ratio = (settings.sampler_ratio_low, settings.sampler_ratio_high)
        shared = {field.name for field in fields(PolicyLossSettings)}
        self.coefficients: dict[str, float] = {
            field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in shared
        }
        self.temperature = temperature
        self.max_completion_tokens = max_completion_tokens

    def normaliser(self, rows: Sequence[Row]) -> int:
        """What the sum over a minibatch is divided by: its tokens, completions, or completions x longest allowed.

        A completion whose mask was emptied counts as one that says nothing, and one whose reward failed does not.
        """
        rows = [row for row in rows if row.counts]
        if self.aggregation == "token_mean":
            return sum(row.num_trained for row in rows)
        return len(rows) * (self.max_completion_tokens if self.aggregation == "constant_length" else 1)

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient: where the loss is the policy's alone, no 0 advantage can."""
        if row.num_trained == 0 or not row.counts:
            return False
        if self.kl_coef or self.sampler_kl_coef or self.entropy_coef:
            return True
        if isinstance(row.advantage, torch.Tensor):
            return bool(row.advantage[row.sampled].any())
        return row.advantage != 0

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: float) -> PolicyOutput:
        """The microbatch's share of the loss. π_old is the trainer's own where the microbatch has none."""
        log_probs, entropy = token_log_probs(model, microbatch, self.temperature)
        mask = microbatch.mask()  # (R, T)

        def padded(values: torch.Tensor) -> torch.Tensor:
            return by_row(values.to(log_probs.dtype), mask)

        own = padded(log_probs)
        low, high = self.sampler_ratio
        terms = policy_terms(
            self.variant,
            own,
            own.detach() if microbatch.old_log_probs is None else padded(microbatch.old_log_probs),
            padded(microbatch.advantage),
            mask,
            sampler_log_probs=padded(microbatch.sampler_log_probs),
            ref_log_probs=None if microbatch.ref_log_probs is None else padded(microbatch.ref_log_probs),
            kl_estimator=self.kl_estimator,
            sampler_correction=self.sampler_correction,
            sampler_ratio_low=low,
            sampler_ratio_high=high,
            **self.coefficients,
        )
        assert terms.kl_to_ref is not None or not self.kl_coef, "a KL term needs the reference's log-probs"
        weighted = {  # by their names in metrics.jsonl
            "loss/policy": (1.0, terms.loss),
            "loss/kl": (self.kl_coef, terms.kl_to_ref),
            "loss/sampler_kl": (self.sampler_kl_coef, terms.kl_to_sampler),
            "loss/entropy": (-self.entropy_coef, padded(entropy)),
        }
        losses = {
            name: coef * aggregate(values, mask, self.aggregation, normaliser)
            for name, (coef, values) in weighted.items()
            if coef and values is not None
        }
        return PolicyOutput(
            loss=torch.stack(list(losses.values())).sum(),
            losses={name: share.detach() for name, share in losses.items()},
            terms=_detached(terms),
            entropy=entropy.detach(),
        )


def _detached(terms: PolicyTerms) -> PolicyTerms:
    """The same without the graph, which would keep a microbatch's memory."""
    tensors = {field.name: getattr(terms, field.name) for field in fields(terms)}
    return replace(terms, **{name: value.detach() for name, value in tensors.items() if value is not None})
