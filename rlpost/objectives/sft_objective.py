"""A loss on demonstrations over a microbatch of packed tokens, for training loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlpost.errors import ConfigError
from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import Microbatch, Row, by_row
from rlpost.objectives.supervised import minor_sft_loss, sft_loss
from rlpost.settings import DemonstrationLossSettings, MinorSFTLossSettings, SFTLossSettings


@dataclass(slots=True)
class SFTOutput:
    """A microbatch's share of the minibatch loss. Shares of one minibatch add up; all but `loss` is detached."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]  # loss_sft and loss_kl_to_ref: shares; kl_to_ref: mean over the M tokens
    num_tokens: int  # M, the tokens that were trained on


class SFTObjective:
    """The loss that `settings` describe; the gradient does not depend on how a minibatch is split.

    Raises ConfigError for settings of another kind.
    """

    def __init__(self, settings: DemonstrationLossSettings) -> None:
        if not isinstance(settings, (SFTLossSettings, MinorSFTLossSettings)):
            raise ConfigError(f"loss {type(settings).__name__} has no objective in rlpost/objectives/sft_objective.py")
        self.settings = settings

    @property
    def needs_reference(self) -> bool:
        """Whether rows have to carry the reference's log-probs."""
        return self.settings.needs_reference

    def normaliser(self, rows: Sequence[Row]) -> int:
        """What the sum over a minibatch is divided by: its trained tokens, or its samples."""
        if isinstance(self.settings, SFTLossSettings) and self.settings.aggregation.name == "token_mean":
            return sum(row.num_trained for row in rows)
        return len(rows)

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient."""
        return row.num_trained > 0

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: float) -> SFTOutput:
        """The microbatch's share of the loss."""
        log_probs, _ = token_log_probs(model, microbatch, temperature=1.0)
        mask = microbatch.mask()  # (R, T)
        own, reference = by_row(log_probs, mask), None
        if microbatch.ref_log_probs is not None:
            reference = by_row(microbatch.ref_log_probs.to(log_probs.dtype), mask)
        settings = self.settings
        if isinstance(settings, MinorSFTLossSettings):
            assert reference is not None, "minor_sft compares with the reference's log-probs"
            loss, metrics = minor_sft_loss(own, reference, mask, beta=settings.beta, normaliser=normaliser)
        else:
            loss, metrics = sft_loss(
                own,
                mask,
                ref_log_probs=reference,
                aggregation=settings.aggregation.name,
                normaliser=normaliser,
                kl_coef=settings.kl_coef,
            )
        return SFTOutput(loss, metrics, log_probs.numel())


def sft_metrics(outputs: Sequence[SFTOutput]) -> dict[str, float]:
    """What an optimizer step says, under the names of metrics.jsonl; `kl/ref` is a mean over its trained tokens."""

    def total(name: str) -> float:
        return sum(output.metrics[name].item() for output in outputs)

    num_tokens = sum(output.num_tokens for output in outputs)
    metrics = {"loss/sft": total("loss_sft"), "tokens/trained": float(num_tokens)}
    if outputs and "loss_kl_to_ref" in outputs[0].metrics:
        metrics["loss/kl"] = total("loss_kl_to_ref")
    if outputs and "kl_to_ref" in outputs[0].metrics:
        metrics["kl/ref"] = sum(o.metrics["kl_to_ref"].item() * o.num_tokens for o in outputs) / num_tokens
    return metrics
