"""The GRPO objective over a microbatch of trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlpost.batching import Microbatch, Row
from rlpost.logprobs import token_log_probs
from rlpost.objectives.functional import clipped_policy_loss, effective_sample_size, k3


@dataclass(slots=True)
class GRPOLossOutput:
    """A microbatch's share of the minibatch loss, and what it says of each trained token (M,).

    Shares of one minibatch add up to its loss: Σ over its tokens / normaliser. Everything but `loss`
    is detached.
    """

    loss: torch.Tensor
    loss_objective: torch.Tensor
    loss_kl_to_ref: torch.Tensor
    log_ratio: torch.Tensor  # log π_θ − log π_old
    clipped: torch.Tensor  # bool: the clip took this token's gradient
    sampler_difference: torch.Tensor  # log π_θ − log µ
    kl_to_ref: torch.Tensor | None
    entropy: torch.Tensor


class GRPOLoss:
    """Clipped policy loss and KL to a frozen reference, averaged over all tokens of a minibatch.

    `normaliser` is the minibatch's number of sampled tokens, whichever microbatch or rank they are
    in and whether or not they are read, so the gradient does not depend on how it is split.
    """

    def __init__(
        self, *, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0, temperature: float = 1.0
    ) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.kl_coef = kl_coef
        self.temperature = temperature

    def normaliser(self, rows: Sequence[Row]) -> int:
        """Sampled tokens of a minibatch; at least 1."""
        return max(1, sum(row.num_trained for row in rows))

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient: without a KL term an advantage of 0 cannot."""
        return row.num_trained > 0 and (row.advantage != 0 or self.kl_coef > 0)

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: int) -> GRPOLossOutput:
        """The microbatch's share of the loss. π_old is the trainer's own where the microbatch has none."""
        log_probs, entropy = token_log_probs(model, microbatch, self.temperature)
        old = log_probs.detach() if microbatch.old_log_probs is None else microbatch.old_log_probs
        log_ratio = log_probs - old
        policy_loss = clipped_policy_loss(log_ratio, microbatch.advantage, self.clip_low, self.clip_high)
        loss_objective = policy_loss.sum() / normaliser
        loss_kl, kl = torch.zeros_like(loss_objective), None
        if microbatch.ref_log_probs is not None:
            kl = k3(log_probs, microbatch.ref_log_probs)
            loss_kl = self.kl_coef * kl.sum() / normaliser
        with torch.no_grad():
            ratio = log_ratio.exp()
            outside = torch.where(microbatch.advantage > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        return GRPOLossOutput(
            loss=loss_objective + loss_kl,
            loss_objective=loss_objective.detach(),
            loss_kl_to_ref=loss_kl.detach(),
            log_ratio=log_ratio.detach(),
            clipped=outside & (microbatch.advantage != 0),
            sampler_difference=log_probs.detach() - microbatch.sampler_log_probs,
            kl_to_ref=None if kl is None else kl.detach(),
            entropy=entropy.detach(),
        )


def token_metrics(outputs: Sequence[GRPOLossOutput]) -> dict[str, float]:
    """Means over every token of `outputs`, under the names of metrics.jsonl; losses are summed shares.

    With no output every mean is NaN: nothing was trained on, which is not the same as 0.
    """
    if not outputs:
        nan = float("nan")
        return {"loss/policy": 0.0, "ratio/clip_fraction": nan, "ess": nan, "entropy": nan}
    log_ratio = torch.cat([o.log_ratio for o in outputs])
    difference = torch.cat([o.sampler_difference for o in outputs])
    metrics = {
        "loss/policy": sum(o.loss_objective.item() for o in outputs),
        "ratio/clip_fraction": torch.cat([o.clipped for o in outputs]).float().mean().item(),
        "ess": effective_sample_size(log_ratio).item(),
        "entropy": torch.cat([o.entropy for o in outputs]).mean().item(),
        "sampler/logprob_gap": difference.abs().mean().item(),
        "kl/sampler": (torch.expm1(difference) - difference).mean().item(),
    }
    kls = [o.kl_to_ref for o in outputs if o.kl_to_ref is not None]
    if kls:
        metrics["loss/kl"] = sum(o.loss_kl_to_ref.item() for o in outputs)
        metrics["kl/ref"] = torch.cat(kls).mean().item()
    return metrics
