"""Losses that bring a model nearer to a teacher, on completions that it sampled itself.

log π is the model's, log q the teacher's and log µ the sampler's log-prob of a sampled token, all at the sampling
temperature. `opd` reads these alone; the divergence over the whole vocabulary is
`rlpost.model.divergence.chunked_divergence`. `DistillationObjective` averages either over the tokens of a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

import torch
from torch import nn

from rlpost.catalog import row_of
from rlpost.model.divergence import Compared, plain_states, plain_verdict
from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import Microbatch, Reference, Row, as_reference_reads, pack
from rlpost.objectives.policy_loss import effective_sample_size
from rlpost.objectives.variants import Surrogate, Tokens
from rlpost.settings import DistillationLossSettings

ONE_MICROBATCH = 1 << 62  # more tokens than any microbatch has


def opd(
    tokens: Tokens, *, drop_low: float | None = 0.2, drop_high: float | None = None, log_ratio_coef: float = 1e-3
) -> Surrogate:
    """−(π/µ)Â + log_ratio_coef · (log π − log µ)² per token, in any shape; the old log-probs are log µ.

    With Â = sg[log q − log π] the gradient of the first term is that of KL(π ‖ q), at the states that µ has visited. It
    is dropped where a token has moved away from its sampler too far: for Â < 0 if π − µ < −drop_low, for Â > 0 if
    π − µ > drop_high; None: never. After prime-rl, whose bounds are those of DPPO with total variation.
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
    low = (tokens.advantage < 0) & (moved < -(inf if drop_low is None else drop_low)) & tokens.mask
    high = (tokens.advantage > 0) & (moved > (inf if drop_high is None else drop_high)) & tokens.mask
    weight = log_ratio.masked_fill(low | high, -inf).exp()
    return Surrogate(-weight * tokens.advantage + log_ratio_coef * log_ratio.square(), low, high)


@dataclass(slots=True)
class DistillationOutput:
    """A microbatch's share of the minibatch loss, and its M tokens. All but `loss` is detached."""

    loss: torch.Tensor
    log_probs: torch.Tensor  # (M,) log π
    teacher_log_probs: torch.Tensor  # (M,) log q
    entropy: torch.Tensor  # (M,)
    log_ratio: torch.Tensor | None = None  # (M,) log π − log µ, if tokens are weighed by it
    low: torch.Tensor | None = None  # (M,) bool: dropped by the lower bound
    high: torch.Tensor | None = None  # and by the upper

    @property
    def num_tokens(self) -> int:
        """M, the tokens that were trained on."""
        return self.log_probs.numel()


class DistillationObjective:
    """The loss that `settings` describe, a mean over the trained tokens of a minibatch, however that is split.

    Rewards have no part in it, so a completion whose reward failed is trained on too.
    """

    def __init__(self, settings: DistillationLossSettings, *, temperature: float) -> None:
        self.temperature = temperature
        self.whole_vocabulary = settings.whole_vocabulary
        self._loss = row_of("loss", type(settings)).build
        self._coefficients = {field.name: getattr(settings, field.name) for field in fields(settings)}

    def check(self, model: nn.Module, reference: Reference | None) -> None:
        """Raise ConfigError if the loss needs a whole vocabulary that cannot be read of the model or its teacher."""
        if self.whole_vocabulary and reference is not None:
            plain_verdict(model)
            with reference() as teacher:
                plain_verdict(teacher)

    def normaliser(self, rows: Sequence[Row]) -> int:
        """The trained tokens of a minibatch."""
        return sum(row.num_trained for row in rows)

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient."""
        return row.num_trained > 0

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: float) -> DistillationOutput:
        """The microbatch's share; for the sampled tokens alone, its rows have the teacher's log-probs."""
        if not self.whole_vocabulary:
            return self._of_sampled(microbatch, normaliser, *token_log_probs(model, microbatch, self.temperature))
        assert microbatch.reference is not None, "a whole vocabulary is compared with a model"
        others = microbatch
        if any(row.ref_prompt is not None for row in microbatch.rows):
            [others] = pack(as_reference_reads(microbatch.rows), ONE_MICROBATCH, microbatch.target.device)
        with microbatch.reference() as teacher, torch.no_grad():
            of_teacher = plain_states(teacher, others)
        own = plain_states(model, microbatch)
        compared: Compared = self._loss(*own, *of_teacher, microbatch.target, self.temperature, **self._coefficients)
        loss = compared.divergence.sum() / normaliser
        return DistillationOutput(loss, compared.log_probs, compared.other_log_probs, compared.entropy)

    def _of_sampled(
        self, microbatch: Microbatch, normaliser: float, log_probs: torch.Tensor, entropy: torch.Tensor
    ) -> DistillationOutput:
        assert microbatch.ref_log_probs is not None, "the sampled tokens are compared by their log-probs"
        own = log_probs.detach()
        teacher, sampler = microbatch.ref_log_probs.to(own.dtype), microbatch.sampler_log_probs.to(own.dtype)
        tokens = Tokens(log_probs, sampler, teacher - own, torch.ones_like(own, dtype=torch.bool))
        each: Surrogate = self._loss(tokens, **self._coefficients)
        loss = each.loss.sum() / normaliser
        return DistillationOutput(loss, own, teacher, entropy.detach(), own - sampler, each.low, each.high)


def distillation_metrics(updates: Sequence[Sequence[DistillationOutput]]) -> dict[str, float]:
    """The metrics of a step's optimizer steps, each given by its microbatches' outputs, as in metrics.jsonl.

    The loss is a mean over optimizer steps, all else is over every token read; NaN where none was. `kl/teacher` is the
    mean of log π − log q, an estimate of the reverse KL. The weights π/µ give `ess` and what the bounds dropped.
    """
    outputs = [output for update in updates for output in update]
    read = [update for update in updates if update]
    shares = [sum(output.loss.item() for output in update) for update in read]

    def over_tokens(name: str) -> torch.Tensor:
        return torch.cat([torch.empty(0), *(getattr(output, name).float().cpu() for output in outputs)])

    metrics = {
        "loss/distill": sum(shares) / len(shares) if shares else 0.0,
        "kl/teacher": (over_tokens("log_probs") - over_tokens("teacher_log_probs")).mean().item(),
        "entropy": over_tokens("entropy").mean().item(),
        "tokens/trained": float(sum(output.num_tokens for output in outputs)),
    }
    if outputs and outputs[0].log_ratio is not None:
        low, high = (over_tokens(name).mean().item() for name in ("low", "high"))
        metrics |= {
            "ess": effective_sample_size(over_tokens("log_ratio")).item(),
            "ratio/clip_fraction": low + high,
            "ratio/clip_low": low,
            "ratio/clip_high": high,
        }
    return metrics
