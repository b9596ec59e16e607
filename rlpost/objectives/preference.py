"""Losses on pairs of replies: the chosen one is to become likelier than the rejected one, compared with a reference.

h is the log-ratio log π − log π_ref of the chosen reply minus that of the rejected one. β times a log-ratio is the
implicit reward of a reply (arXiv:2305.18290, section 4).

`pair_terms` and `pair_loss` take (2P, T) tensors in which the rows 2i and 2i + 1 are the chosen and the rejected reply
of pair i; `PreferenceObjective` is the same over a microbatch of packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from rlpost.catalog import CHOICES, option_of
from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import Microbatch, Row, by_row
from rlpost.objectives.aggregation import sequence_mean, sequence_sum
from rlpost.settings import PairLossSettings

BY_TOKEN = ("dpo_norm", "ipo")  # the losses that read log-ratios averaged over a reply's tokens, not summed


def dpo(h: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """−(1 − ε) log σ(βh) − ε log σ(−βh) of each pair, (P,).

    Eq. 7 of DPO (arXiv:2305.18290); ε, `label_smoothing`, is the share of pairs assumed to be the wrong way round
    (conservative DPO, https://ericmitchell.ai/cdpo.pdf, eq. 3).
    """
    return -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)


def ipo(h: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """(h − 1 / (2β))² of each pair, (P,): eq. 17 of IPO (arXiv:2310.12036), whose τ is β.

    The paper sums log-ratios over a reply's tokens; here, as in TRL's `ipo`, h is of their means.
    """
    return (h - 1 / (2 * beta)).square()


@dataclass(slots=True)
class PairTerms:
    """Terms and implicit rewards of P pairs, each (P,); `chosen` and `rejected` are without gradient."""

    loss: torch.Tensor
    sft: torch.Tensor  # −log π per token of the chosen reply
    chosen: torch.Tensor  # implicit reward: β times the log-ratio, as the loss reads it
    rejected: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        """βh: by how much the chosen reply's implicit reward is the higher one."""
        return self.chosen - self.rejected

    @property
    def right(self) -> torch.Tensor:
        """1 where the chosen reply's implicit reward is the higher one, 1/2 where both are equal, as at the start."""
        return (1 + self.margin.sign()) / 2


def pair_terms(
    name: str, log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor, *, beta: float, **more: float
) -> PairTerms:
    """The terms of the loss `name` (dpo, dpo_norm, ipo); `more` are its other coefficients.

    `log_probs` and `ref_log_probs` are (2P, T), `mask` (2P, T) bool: the tokens of the replies. What the others hold is
    never read, and `ref_log_probs` is a constant. dpo reads log-ratios summed over a reply's tokens, dpo_norm
    (arXiv:2411.15124, eq. 5) and ipo their means.
    """
    of_reply = sequence_mean if name in BY_TOKEN else sequence_sum
    ratios = of_reply(log_probs - ref_log_probs.detach(), mask)
    function: Callable[..., torch.Tensor] = CHOICES["loss"][name].build
    rewards = beta * ratios.detach()
    return PairTerms(
        loss=function(ratios[::2] - ratios[1::2], beta=beta, **more),
        sft=-sequence_mean(log_probs[::2], mask[::2]),
        chosen=rewards[::2],
        rejected=rewards[1::2],
    )


def pair_loss(
    name: str,
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    sft_coef: float = 0.0,
    normaliser: float | None = None,
    **more: float,
) -> tuple[torch.Tensor, PairTerms]:
    """(loss, terms): the mean over pairs of the loss `name`, plus `sft_coef` times that of the chosen reply's loss.

    The latter is −log π of the chosen reply divided by its length (RPO, arXiv:2404.19733, eq. 1). `normaliser` is what
    the sum over pairs is divided by; None: P, and one part of a minibatch is given the count of the whole. Other
    arguments are `pair_terms`'s.
    """
    terms = pair_terms(name, log_probs, ref_log_probs, mask, beta=beta, **more)
    total = (terms.loss + sft_coef * terms.sft).sum()
    return total / (normaliser or max(1, len(terms.loss))), terms


@dataclass(slots=True)
class PairOutput:
    """A microbatch's share of the minibatch loss, and the terms of its pairs; all but `loss` is detached."""

    loss: torch.Tensor
    terms: PairTerms
    log_probs: torch.Tensor  # (M,), of the tokens that were trained on


class PreferenceObjective:
    """The loss that `settings` describe; a minibatch can be split anywhere but between the two rows of a pair."""

    rows_together = 2  # neighbouring rows that one microbatch has to hold

    def __init__(self, settings: PairLossSettings) -> None:
        self.name = option_of("loss", type(settings))
        self.coefficients: dict[str, float] = {each.name: getattr(settings, each.name) for each in fields(settings)}
        self.sft_coef = settings.sft_coef

    def normaliser(self, rows: Sequence[Row]) -> int:
        """The divisor of the sum over a minibatch: its pairs."""
        return len(rows) // 2

    def needs(self, row: Row) -> bool:
        """Whether reading `row` can change the gradient: each half of a pair can."""
        return True

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: float) -> PairOutput:
        """The microbatch's share of the loss."""
        log_probs, _ = token_log_probs(model, microbatch, temperature=1.0)
        return self.of(microbatch, normaliser, log_probs)

    def of(self, microbatch: Microbatch, normaliser: float, log_probs: torch.Tensor) -> PairOutput:
        """The share from the tokens' `log_probs` (M,), which carry the gradient."""
        mask = microbatch.mask()  # (2P, T)
        assert microbatch.ref_log_probs is not None
        reference = by_row(microbatch.ref_log_probs.to(log_probs.dtype), mask)
        loss, terms = pair_loss(
            self.name, by_row(log_probs, mask), reference, mask, normaliser=normaliser, **self.coefficients
        )
        terms.loss, terms.sft = terms.loss.detach(), terms.sft.detach()
        return PairOutput(loss, terms, log_probs.detach())

    def metrics(self, terms: Sequence[PairTerms]) -> dict[str, float]:
        """Means over all pairs, under the names of metrics.jsonl; the losses add up to the one that is minimised."""

        def mean(name: str) -> float:
            values = [getattr(each, name).double().cpu() for each in terms]
            return torch.cat(values).mean().item() if values else 0.0

        return {
            "loss/dpo": mean("loss"),
            **({"loss/sft": self.sft_coef * mean("sft")} if self.sft_coef else {}),
            "rewards/chosen": mean("chosen"),
            "rewards/rejected": mean("rejected"),
            "reward_margin": mean("margin"),
            "pair_accuracy": mean("right"),
        }
