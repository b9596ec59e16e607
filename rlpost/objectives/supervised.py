"""Losses on demonstrations: the likelihood of their tokens, or how much likelier than a reference makes them.

`sft_loss` and `minor_sft_loss` take (B, T) tensors; `SFTObjective` is the same over a microbatch of packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from rlpost.catalog import row_of
from rlpost.errors import ConfigError
from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import Microbatch, Row, by_row
from rlpost.objectives.aggregation import (
    aggregate,
    keep,
    kl_divergence,
    masked_mean,
    sequence_mean,
    sequence_sum,
)
from rlpost.settings import DemonstrationLossSettings


def sft_terms(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """−log π per trained token, (B, T); 0 where `mask` is False."""
    return -keep(log_probs, mask)


def minor_sft_terms(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float = 0.1,
    normalise_by_length: bool = True,
) -> torch.Tensor:
    """−log σ(β(s − s_ref)) of each demonstration, given to each of its trained tokens, (B, T).

    s is the sum of a demonstration's log-probabilities, or their mean if `normalise_by_length`.
    After MinorSFT (arXiv:2408.10642).
    """
    of_sequence = sequence_mean if normalise_by_length else sequence_sum
    margin = of_sequence(log_probs - ref_log_probs.detach(), mask)
    return keep(-logsigmoid(beta * margin)[:, None].expand_as(log_probs), mask)


def sft_loss(
    log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    ref_log_probs: torch.Tensor | None = None,
    aggregation: str = "token_mean",
    normaliser: float | torch.Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of demonstrations: −log π of their trained tokens, and a divergence from a reference.

    `log_probs` and `ref_log_probs` are (B, T), `mask` (B, T) bool: the trained tokens. What the others
    hold is never read. `aggregation` and `normaliser` are `policy_loss`'s; a sum over a demonstration's
    tokens, averaged over demonstrations, is constant_length with normaliser=B.

    The loss is a scalar; metrics are detached scalars: loss_sft, and with a reference kl_to_ref, the
    mean over trained tokens, and loss_kl_to_ref. Raises ConfigError (a ValueError) for a `kl_coef` without
    `ref_log_probs` and for an unknown word.
    """
    if kl_coef and ref_log_probs is None:
        raise ConfigError(f"kl_coef={kl_coef:g} needs ref_log_probs")
    loss = aggregate(sft_terms(log_probs, mask), mask, aggregation, normaliser)
    metrics = {"loss_sft": loss.detach()}
    if ref_log_probs is not None:
        kl = kl_divergence(log_probs, ref_log_probs.detach(), kl_estimator, mask)
        metrics["kl_to_ref"] = masked_mean(kl, mask).detach()
        if kl_coef:
            loss_kl = kl_coef * aggregate(kl, mask, aggregation, normaliser)
            metrics["loss_kl_to_ref"] = loss_kl.detach()
            loss = loss + loss_kl
    return loss, metrics


def minor_sft_loss(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float = 0.1,
    normalise_by_length: bool = True,
    aggregation: str = "sequence_mean",
    normaliser: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of `minor_sft_terms`: tokens that are already likelier than under the reference weigh less.

    sequence_mean averages over demonstrations, token_mean weighs each by its trained tokens. Arguments
    and errors are otherwise `sft_loss`'s; metrics are loss_sft and kl_to_ref, the mean over trained
    tokens of k3.
    """
    terms = minor_sft_terms(log_probs, ref_log_probs, mask, beta=beta, normalise_by_length=normalise_by_length)
    loss = aggregate(terms, mask, aggregation, normaliser)
    kl = kl_divergence(log_probs, ref_log_probs, "k3", mask)
    return loss, {"loss_sft": loss.detach(), "kl_to_ref": masked_mean(kl, mask).detach()}


@dataclass(slots=True)
class SFTOutput:
    """A microbatch's share of the minibatch loss. Shares of one minibatch add up; all but `loss` is detached."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]  # loss_sft and loss_kl_to_ref: shares; kl_to_ref: mean over the M tokens
    log_probs: torch.Tensor  # (M,), of the tokens that were trained on

    @property
    def num_tokens(self) -> int:
        """M, the tokens that were trained on."""
        return self.log_probs.numel()


class SFTObjective:
    """The loss that `settings` describe; the gradient does not depend on how a minibatch is split.

    Its row in `CHOICES["loss"]` names a function as `sft_loss`, which is called with the settings' own values.
    """

    def __init__(self, settings: DemonstrationLossSettings) -> None:
        self._loss = row_of("loss", type(settings)).build
        values = {each.name: getattr(settings, each.name) for each in fields(settings)}
        self._coefficients = {n: v.name if isinstance(v, Enum) else v for n, v in values.items()}

    def normaliser(self, rows: Sequence[Row]) -> int:
        """The divisor of the sum over a minibatch: its trained tokens, or its samples."""
        by_token = self._coefficients.get("aggregation") == "token_mean"
        return sum(row.num_trained for row in rows) if by_token else len(rows)

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient."""
        return row.num_trained > 0

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: float) -> SFTOutput:
        """The microbatch's share of the loss."""
        log_probs, _ = token_log_probs(model, microbatch, temperature=1.0)
        return self.of(microbatch, normaliser, log_probs)

    def of(self, microbatch: Microbatch, normaliser: float, log_probs: torch.Tensor) -> SFTOutput:
        """The share from the tokens' `log_probs` (M,), which carry the gradient."""
        mask = microbatch.mask()  # (R, T)
        own, reference = by_row(log_probs, mask), None
        if microbatch.ref_log_probs is not None:
            reference = by_row(microbatch.ref_log_probs.to(log_probs.dtype), mask)
        loss, metrics = self._loss(
            log_probs=own, mask=mask, ref_log_probs=reference, normaliser=normaliser, **self._coefficients
        )
        return SFTOutput(loss, metrics, log_probs.detach())


def sft_metrics(outputs: Sequence[SFTOutput]) -> dict[str, float]:
    """The metrics of an optimizer step, under the names of metrics.jsonl; `kl/ref` is a mean over trained tokens."""

    def total(name: str) -> float:
        return sum(output.metrics[name].item() for output in outputs)

    num_tokens = sum(output.num_tokens for output in outputs)
    metrics = {"loss/sft": total("loss_sft"), "tokens/trained": float(num_tokens)}
    if outputs and "loss_kl_to_ref" in outputs[0].metrics:
        metrics["loss/kl"] = total("loss_kl_to_ref")
    if outputs and "kl_to_ref" in outputs[0].metrics:
        metrics["kl/ref"] = sum(o.metrics["kl_to_ref"].item() * o.num_tokens for o in outputs) / num_tokens
    return metrics
