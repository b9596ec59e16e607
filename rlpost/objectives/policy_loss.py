"""The policy loss: a variant, weighted for the sampler, with its KL terms, and the metrics of its tokens.

`policy_loss` takes (B, T) tensors; `PolicyObjective` is the same over a microbatch of packed tokens, for loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from rlpost.catalog import CHOICES, option_of
from rlpost.errors import ConfigError
from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import Microbatch, Row, by_row
from rlpost.objectives.aggregation import (
    KL_ESTIMATORS,
    aggregate,
    check_choice,
    correction_bounds,
    keep,
    kl_divergence,
    sampler_weights,
    sequence_mean,
)
from rlpost.objectives.variants import Surrogate, Tokens
from rlpost.settings import PolicyLossSettings
from rlpost.settings.base import Choice
from rlpost.settings.loss import RatioTo
from rlpost.text import did_you_mean, nearest

PAPERS_MAX_RATIO = ("delta", "c")  # what the papers of two_sided and dual_clip call it


def coefficients_of(settings: PolicyLossSettings) -> dict[str, Any]:
    """The values of the keys that this loss alone has: the coefficients of its function."""
    shared = PolicyLossSettings.__dataclass_fields__
    return {own.name: getattr(settings, own.name) for own in fields(settings) if own.name not in shared}


@dataclass(frozen=True, slots=True)
class Variant:
    """A loss per token, how it is averaged unless another average is given, and its coefficients' defaults."""

    surrogate: Callable[..., Surrogate]  # (Tokens, **coefficients)
    aggregation: str
    coefficients: dict[str, Any]

    @classmethod
    def of(cls, row: Choice) -> Variant:
        """The variant of a row of `CHOICES["loss"]`."""
        settings: PolicyLossSettings = row.cls()
        return cls(row.build, settings.usual_aggregation.name, coefficients_of(settings))


# the variants that rlpost has
VARIANTS = {name: Variant.of(row) for name, row in CHOICES["loss"].items() if issubclass(row.cls, PolicyLossSettings)}


@dataclass(slots=True)
class PolicyTerms:
    """The terms of a policy loss per token; every tensor is (B, T), and 0 or False where `mask` is False.

    `loss`, `kl_to_ref` and `kl_to_sampler` carry gradient, the rest is constant. A field is None
    when the log-probabilities that it compares with were not given.
    """

    mask: torch.Tensor
    loss: torch.Tensor  # the variant's, times sampler_weight
    log_ratio: torch.Tensor  # log π_θ − log π_old
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    kl_to_ref: torch.Tensor | None = None
    kl_to_sampler: torch.Tensor | None = None
    sampler_log_ratio: torch.Tensor | None = None  # log π_old − log µ, so none of it is learned
    sampler_weight: torch.Tensor | None = None
    sampler_cut: torch.Tensor | None = None  # the weight was capped, or the token dropped


def policy_terms(
    name: str | Callable[..., Surrogate],
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    sampler_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    kl_estimator: str = "k3_k2grad",
    off_policy_mask: float | None = None,
    sampler_correction: str = "none",
    sampler_ratio_low: float | None = None,
    sampler_ratio_high: float | None = None,
    **coefficients: float,
) -> PolicyTerms:
    """The terms of `policy_loss` before they are averaged; arguments and errors as there.

    `name` may also be a function of `Tokens` and of all its coefficients, which are then passed on unchecked.
    """
    function: Callable[..., Surrogate]
    function, coefficients = _checked(name, coefficients) if isinstance(name, str) else (name, coefficients)
    check_choice("KL estimator", kl_estimator, KL_ESTIMATORS)
    if correction_bounds(sampler_correction, sampler_ratio_low, sampler_ratio_high) and sampler_log_probs is None:
        raise ConfigError(f"sampler_correction={sampler_correction} needs sampler_log_probs")
    log_probs, old = keep(log_probs, mask), keep(old_log_probs.detach(), mask)
    tokens = Tokens(log_probs, old, keep(_per_token(advantage, log_probs), mask), mask)
    surrogate = function(tokens, **coefficients)
    terms = PolicyTerms(
        mask=mask,
        loss=keep(surrogate.loss, mask),
        log_ratio=(log_probs - old).detach(),
        clipped_low=surrogate.low,
        clipped_high=surrogate.high,
    )
    if off_policy_mask is not None:
        drawn = old if sampler_log_probs is None else keep(sampler_log_probs.detach(), mask)
        fell = sequence_mean(drawn - log_probs.detach(), mask)[:, None] > off_policy_mask
        dropped = fell & (tokens.advantage < 0)
        terms.loss, terms.clipped_low = keep(terms.loss, ~dropped), terms.clipped_low | (dropped & mask)
    if ref_log_probs is not None:
        terms.kl_to_ref = kl_divergence(
            log_probs, keep(ref_log_probs.detach(), mask), kl_estimator, drawn_log_probs=old
        )
    if sampler_log_probs is not None:
        sampler = keep(sampler_log_probs.detach(), mask)
        terms.kl_to_sampler = kl_divergence(log_probs, sampler, kl_estimator, drawn_log_probs=old)
        terms.sampler_log_ratio = old - sampler
        weight, terms.sampler_cut = sampler_weights(
            old, sampler, mask, sampler_correction, low=sampler_ratio_low, high=sampler_ratio_high
        )
        terms.sampler_weight = keep(weight, mask)
        terms.loss = terms.loss * terms.sampler_weight
    return terms


def policy_loss(
    name: str,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    aggregation: str | None = None,
    normaliser: float | torch.Tensor | None = None,
    kl_coef: float = 0.0,
    sampler_kl_coef: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of the variant `name`; the loss is a scalar to minimise, the metrics are detached scalars.

    `log_probs` (log π_θ, which carries the gradient) and `old_log_probs` (log π_old) are (B, T),
    `advantage` is (B,) or (B, T), `mask` is (B, T) bool. What they hold where `mask` is False is
    never read, and everything but `log_probs` is a constant.

    `name` is a key of `VARIANTS`. `aggregation` is the variant's own where None, else token_mean,
    sequence_mean or constant_length. `normaliser` is what the sum over tokens is divided by; None
    counts these tensors alone (masked tokens, B, or B·T), and one part of a minibatch is given the
    count over the whole.

    `options` are the coefficients of the variant (`clip_low`, `clip_high`, `max_ratio`) and, as of
    `policy_terms`, `sampler_log_probs` (log µ) and `ref_log_probs`, (B, T); `kl_estimator` (a key of
    `KL_ESTIMATORS`; k3_k2grad where left out); `off_policy_mask`, above which the mean of log µ − log π_θ (of
    log π_old − log π_θ without log µ) drops a completion with a negative advantage (arXiv:2512.02556, section 3.1);
    `sampler_correction` (a key of `SAMPLER_CORRECTIONS`; see `sampler_weights`), `sampler_ratio_low` and
    `sampler_ratio_high`.

    The loss is the variant's, times the weights of the sampler correction, plus `kl_coef` times the
    divergence from the reference and `sampler_kl_coef` times that from the sampler, all averaged
    alike. A dropped token still counts in the normaliser.

    Raises ConfigError (a ValueError) for an unknown name and for missing log-probs that are needed, TypeError for an
    option that the variant does not have.
    """
    terms = policy_terms(name, log_probs, old_log_probs, advantage, mask, **options)
    aggregation = VARIANTS[name].aggregation if aggregation is None else aggregation
    losses = {"loss_policy": aggregate(terms.loss, mask, aggregation, normaliser)}
    for other, coef, setting in (("ref", kl_coef, "kl_coef"), ("sampler", sampler_kl_coef, "sampler_kl_coef")):
        if coef:
            kl: torch.Tensor | None = getattr(terms, f"kl_to_{other}")
            if kl is None:
                raise ConfigError(f"{setting}={coef:g} needs {other}_log_probs")
            losses[f"loss_kl_to_{other}"] = coef * aggregate(kl, mask, aggregation, normaliser)
    loss = torch.stack(list(losses.values())).sum()
    return loss, {key: value.detach() for key, value in losses.items()} | policy_metrics([terms])


def policy_metrics(parts: Sequence[PolicyTerms]) -> dict[str, torch.Tensor]:
    """Means over every masked token of all `parts`, detached scalars; NaN where there is no token.

    clip_fraction(_low, _high): share of tokens whose ratio a bound cut. ratio_mean and ess: of
    ρ = π_θ/π_old per token. kl_to_old: log π_old − log π_θ. kl_to_ref, kl_to_sampler: by the estimator
    of the loss. sampler_gap: |log π_old − log µ|; sampler_ess: the effective sample size of π_old/µ.
    sampler_weight_mean, and sampler_cut_fraction, the share of tokens whose weight was capped or dropped.
    """
    log_ratio = _masked(parts, "log_ratio")
    metrics = {
        "clip_fraction_low": _masked(parts, "clipped_low").mean(),
        "clip_fraction_high": _masked(parts, "clipped_high").mean(),
        "ratio_mean": log_ratio.exp().mean(),
        "ess": effective_sample_size(log_ratio),
        "kl_to_old": -log_ratio.mean(),
    }
    metrics["clip_fraction"] = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    optional = {
        "kl_to_ref": "kl_to_ref",
        "kl_to_sampler": "kl_to_sampler",
        "sampler_weight": "sampler_weight_mean",
        "sampler_cut": "sampler_cut_fraction",
    }
    present = [field for field in optional if parts and all(getattr(part, field) is not None for part in parts)]
    if parts and all(part.sampler_log_ratio is not None for part in parts):
        of_sampler = _masked(parts, "sampler_log_ratio")
        metrics |= {"sampler_gap": of_sampler.abs().mean(), "sampler_ess": effective_sample_size(of_sampler)}
    return metrics | {optional[field]: _masked(parts, field).mean() for field in present}


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    """(Σρ)² / (N Σρ²) over all elements, in (0, 1]; 1 when every weight is equal, NaN when there is none."""
    flat = log_ratio.flatten()
    numerator = 2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)
    return numerator.exp() / flat.numel() if flat.numel() else flat.new_tensor(torch.nan)


def _masked(parts: Sequence[PolicyTerms], field: str) -> torch.Tensor:
    """A field's values at the masked tokens of all parts, (M,)."""
    values = [getattr(part, field).detach()[part.mask] for part in parts]
    return torch.cat([value.to(parts[0].loss.dtype) for value in values]) if values else torch.empty(0)


def _checked(name: str, given: dict[str, float]) -> tuple[Callable[..., Surrogate], dict[str, float]]:
    """The function of the variant `name`, and all its coefficients, those `given` checked."""
    check_choice("policy loss", name, tuple(VARIANTS))
    own = VARIANTS[name].coefficients
    for option in given:
        if option not in own:
            known = [*own, *(policy_terms.__kwdefaults__ or {}), *(policy_loss.__kwdefaults__ or {})]
            meant = "max_ratio" if option in PAPERS_MAX_RATIO and "max_ratio" in own else nearest(option, known)
            hint = did_you_mean(meant, f"it reads {', '.join(known)}")
            raise TypeError(f"policy_loss {name!r} does not read {option}{hint}")
    return VARIANTS[name].surrogate, own | given


def _per_token(advantage: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """The advantage, (B,) or (B, T), as a constant (B, T)."""
    advantage = advantage.detach().to(log_probs.dtype)
    return advantage if advantage.ndim == 2 else advantage[:, None].expand_as(log_probs)


@dataclass(slots=True)
class PolicyOutput:
    """A microbatch's share of the minibatch loss, and the statistics of its tokens.

    Shares of one minibatch add up to its loss. Everything but `loss` is detached.
    """

    loss: torch.Tensor  # the sum of `losses`
    losses: dict[str, torch.Tensor]  # each term by its name in metrics.jsonl
    terms: PolicyTerms  # per token (R, T), one completion a row
    entropy: torch.Tensor  # (M,)
    log_probs: torch.Tensor  # (M,)

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
        self.variant = option_of("loss", type(settings))
        self.aggregation = (settings.aggregation or settings.usual_aggregation).name
        self.kl_coef = settings.kl_coef - settings.reward_kl_coef
        self.sampler_kl_coef = settings.sampler_kl_coef
        self.entropy_coef = settings.entropy_coef  # of the current step, see `adapt_entropy_coef`
        self.entropy_target, self.entropy_step = settings.entropy_target, settings.entropy_step
        self.right_nll_coef = settings.right_nll_coef
        self.ratio_to_sampler = settings.ratio_to is RatioTo.sampler
        self.sampler_correction = settings.sampler_correction.name if settings.sampler_correction else "none"
        self.coefficients = coefficients_of(settings)
        self.options = {  # further keyword arguments of `policy_terms`
            "kl_estimator": settings.kl_estimator.name,
            "off_policy_mask": settings.off_policy_mask,
            "sampler_ratio_low": settings.sampler_ratio_low,
            "sampler_ratio_high": settings.sampler_ratio_high,
        }
        self.temperature = temperature
        self.max_completion_tokens = max_completion_tokens

    def adapt_entropy_coef(self, adapted: float, entropy: float | None) -> float:
        """Set `entropy_coef` from `adapted`, its value so far, and the last step's `entropy`; returns the new value.

        Below the target it rises by `entropy_step`; above it falls, not below 0, and the bonus is off. The first step
        has no `entropy` to go by. Skywork-OR1 (arXiv:2505.22312).
        """
        assert self.entropy_target is not None
        is_low = entropy is None or entropy <= self.entropy_target
        if entropy is not None:
            adapted = max(0.0, adapted + (self.entropy_step if is_low else -self.entropy_step))
        self.entropy_coef = adapted if is_low else 0.0
        return adapted

    def normaliser(self, rows: Sequence[Row]) -> int:
        """The divisor of the sum over a minibatch: its tokens, completions, or completions x longest allowed.

        A completion whose mask was emptied counts as one that says nothing, and one whose reward failed does not.
        """
        rows = [row for row in rows if row.valid]
        if self.aggregation == "token_mean":
            return sum(row.num_trained for row in rows)
        return len(rows) * (self.max_completion_tokens if self.aggregation == "constant_length" else 1)

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient: where the loss is the policy's alone, no 0 advantage can."""
        if row.num_trained == 0 or not row.valid:
            return False
        if self.kl_coef or self.sampler_kl_coef or self.entropy_coef or (self.right_nll_coef and row.right):
            return True
        if isinstance(row.advantage, torch.Tensor):
            return bool(row.advantage[row.sampled].any())
        return row.advantage != 0

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: float) -> PolicyOutput:
        """The microbatch's share of the loss. π_old is the trainer's own where the microbatch has none."""
        return self.of(microbatch, normaliser, *token_log_probs(model, microbatch, self.temperature))

    def of(
        self, microbatch: Microbatch, normaliser: float, log_probs: torch.Tensor, entropy: torch.Tensor
    ) -> PolicyOutput:
        """The share from the tokens' `log_probs`, which carry the gradient, and their `entropy`, (M,)."""
        mask = microbatch.mask()  # (R, T)

        def padded(values: torch.Tensor) -> torch.Tensor:
            return by_row(values.to(log_probs.dtype), mask)

        own, sampler = padded(log_probs), padded(microbatch.sampler_log_probs)
        old = own.detach() if microbatch.old_log_probs is None else padded(microbatch.old_log_probs)
        terms = policy_terms(
            CHOICES["loss"][self.variant].build,
            own,
            sampler if self.ratio_to_sampler else old,
            padded(microbatch.advantage),
            mask,
            sampler_log_probs=sampler,
            ref_log_probs=None if microbatch.ref_log_probs is None else padded(microbatch.ref_log_probs),
            sampler_correction=self.sampler_correction,
            **self.options,
            **self.coefficients,
        )
        assert terms.kl_to_ref is not None or not self.kl_coef, "a KL term needs the reference's log-probs"
        terms.sampler_log_ratio = old - sampler  # measured whatever the ratio compares with
        right = torch.tensor([row.right for row in microbatch.rows], device=mask.device)[:, None]
        weighted = {  # by their names in metrics.jsonl
            "loss/policy": (1.0, terms.loss),
            "loss/kl": (self.kl_coef, terms.kl_to_ref),
            "loss/sampler_kl": (self.sampler_kl_coef, terms.kl_to_sampler),
            "loss/entropy": (-self.entropy_coef, padded(entropy)),
            "loss/right_nll": (self.right_nll_coef, keep(-own, mask & right)),
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
            log_probs=log_probs.detach(),
        )


def _detached(terms: PolicyTerms) -> PolicyTerms:
    """The result without the graph, which would keep a microbatch's memory."""
    tensors = {field.name: getattr(terms, field.name) for field in fields(terms)}
    return replace(terms, **{name: value.detach() for name, value in tensors.items() if value is not None})
