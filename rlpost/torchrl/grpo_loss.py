"""GRPOLoss: a policy loss that reads a TensorDict, as the collectors and `MCAdvantage` leave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from rlpost.data.ragged import padded
from rlpost.errors import DataError
from rlpost.objectives.aggregation import AGGREGATIONS, aggregate, check_choice, keep, masked_mean
from rlpost.objectives.policy_loss import PolicyTerms, policy_metrics, policy_terms
from rlpost.objectives.variants import VARIANTS
from rlpost.torchrl.actor import model_and_temperature, read_sequences
from rlpost.torchrl.token_sequences import REF_LOG_PROBS, Sequences

CLIPPING = tuple(name for name, variant in VARIANTS.items() if "clip_low" in variant.coefficients)
ALSO_CALLED = {"prompt_mean": "sequence_mean"}
LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")


@dataclass(slots=True)
class GRPOLossOutput:
    """What `GRPOLoss` says of a batch: scalars, or one value a token (B, T) for losses with aggregation="none".

    Losses carry gradient and their coefficients, all else is a detached mean over the tokens of the
    mask. What was not asked for is None.
    """

    loss_objective: torch.Tensor
    clip_fraction: torch.Tensor  # share of tokens whose ratio a bound cut
    kl_approx: torch.Tensor  # log π_old − log π_θ
    ESS: torch.Tensor  # effective sample size of the ratios, in (0, 1]
    entropy: torch.Tensor | None = None
    loss_entropy: torch.Tensor | None = None
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    loss_kl_to_inference: torch.Tensor | None = None
    kl_to_inference: torch.Tensor | None = None

    @property
    def loss(self) -> torch.Tensor:
        """What to minimise: the sum of the loss terms that there are, and of nothing else."""
        present = [value for name in LOSSES if (value := getattr(self, name)) is not None]
        return torch.stack(present).sum(0)


class GRPOLoss(nn.Module):
    """The clipped policy loss with an entropy bonus and KL terms (GRPO, arXiv:2402.03300).

    `actor_network` is the causal LM of transformers that is trained, or a `TransformersWrapper` around it.
    Log-probs are taken at `temperature`: the wrapper's own where None, else 1. Logits exist for a
    chunk of tokens at a time.

    Reads `("tokens", "full")`, `advantage`, `("log_probs", "full")` and the masks; with
    `kl_to_ref_coeff` also `("next", "ref_log_probs", "full")`. Fields are ragged (B, *), or padded
    (B, T) where `("masks", "all_attention_mask")` tells the ids from the pads. The advantage is (B,),
    (B, 1), or one a token.

    `masking_strategy` says which tokens are trained: "sft" all but those of `("tokens", "prompt")`,
    or those of the assistant mask where there are no prompt tokens; "rlhf" those of
    `("masks", "all_assistant_mask")`; "generic" all. A sequence's first id, which nothing predicts, never is.
    `aggregation` is token_mean, sequence_mean (also called prompt_mean), constant_length (B·T) or none;
    None: the variant's own, which for "grpo" is token_mean.
    A sequence with `valid` False, where the batch says so, is in no term and no average.
    `kl_mask_threshold` leaves out tokens with (log π_θ − log µ)² / 2 above it. `variant` is another
    loss of `functional.VARIANTS` that clips; its remaining coefficients are its paper's.

    Raises ConfigError (a ValueError) for an unknown word, ValueError for impossible clip bounds.

    >>> import torch
    >>> from rlpost.models import load_model, locate_model
    >>> from rlpost.objectives import GRPOLoss
    >>> from tensordict import TensorDict
    >>> model = load_model(locate_model("builtin:tiny"))
    >>> batch = TensorDict(
    ...     {
    ...         "tokens": {"full": torch.tensor([[5, 6, 7], [5, 6, 8]])},
    ...         "masks": {"all_attention_mask": torch.ones(2, 3, dtype=torch.bool)},
    ...         "log_probs": {"full": torch.full((2, 3), -5.0)},
    ...         "advantage": torch.tensor([1.0, -1.0]),
    ...     },
    ...     batch_size=[2],
    ... )
    >>> GRPOLoss(model, masking_strategy="generic")(batch).loss.backward()
    """

    def __init__(
        self,
        actor_network: Any,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: str | None = None,
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        masking_strategy: str = "sft",
        variant: str = "grpo",
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("clipping loss", variant, CLIPPING)
        check_choice("masking strategy", masking_strategy, ("sft", "rlhf", "generic"))
        aggregation = (
            VARIANTS[variant].aggregation if aggregation is None else ALSO_CALLED.get(aggregation, aggregation)
        )
        check_choice("aggregation", aggregation, (*AGGREGATIONS, "none"))
        self.actor_network, self.temperature = model_and_temperature(actor_network, temperature)
        self.clip_low, self.clip_high = clip_bounds(clip_epsilon)
        self.kl_mask_threshold = kl_mask_threshold
        self.aggregation = aggregation
        self.entropy_bonus = entropy_bonus
        self.entropy_coeff = entropy_coeff
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_to_inference_coeff = kl_to_inference_coeff
        self.masking_strategy = masking_strategy
        self.variant = variant

    def forward(self, batch: TensorDictBase) -> GRPOLossOutput:
        """The loss of `batch` (B,).

        Raises ValueError for a batch without tokens or advantage, for shapes that do not fit and for
        masks that are all empty; KeyError where log-probs are missing that a term needs; RuntimeError
        for old log-probs that require a gradient.
        """
        sequences = Sequences.of(batch, needs_mask=False)
        advantage = sequences.field_or_expanded(batch, "advantage", "MCAdvantage writes it")
        old = sequences.field(batch, ("log_probs", "full"), missing=KeyError)
        if any(row.requires_grad for row in old):
            raise RuntimeError("('log_probs', 'full') require a gradient: they are those of sampling; detach them")
        wants_ref = self.kl_to_ref_coeff is not None and self.kl_to_ref_coeff > 0
        ref = sequences.field(batch, REF_LOG_PROBS, missing=KeyError) if wants_ref else None
        counts = torch.ones(len(sequences.ids), dtype=torch.bool)
        if (valid := batch.get("valid", None)) is not None:
            counts = valid.reshape(-1).bool().cpu()
        trained = [
            row if counted else torch.zeros_like(row)
            for row, counted in zip(self._trained(batch, sequences), counts, strict=True)
        ]
        log_probs, entropy = read_sequences(self.actor_network, sequences.ids, trained, self.temperature)
        device, dtype = log_probs.device, log_probs.dtype
        mask = padded(trained).to(device)
        old_padded = keep(padded(old).to(device, dtype), mask)
        if self.kl_mask_threshold is not None:
            mask = mask & ((log_probs.detach() - old_padded).square() / 2 <= self.kl_mask_threshold)
        terms = policy_terms(
            self.variant,
            log_probs,
            old_padded,
            padded(advantage).to(device),
            mask,
            sampler_log_probs=old_padded,
            ref_log_probs=None if ref is None else padded(ref).to(device, dtype),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        longest = max(row.numel() for row, counted in zip(sequences.ids, counts, strict=True) if counted)
        return self._output(terms, entropy, counts.to(device), longest)

    def _trained(self, batch: TensorDictBase, sequences: Sequences) -> list[torch.Tensor]:
        """Which ids are trained, bool; never a sequence's first, which nothing predicts."""
        prompts = batch.get(("tokens", "prompt"), None)
        if self.masking_strategy != "sft" or prompts is None:
            return sequences.masks(batch, assistant_only=self.masking_strategy != "generic")
        masks = []
        for row, prompt in zip(sequences.ids, prompts.unbind(), strict=True):
            if not torch.equal(row[: prompt.numel()], prompt):
                raise DataError(
                    "('tokens', 'full') does not begin with ('tokens', 'prompt'): give the prompts ragged, without "
                    "pads, or masking_strategy='rlhf' and an assistant mask"
                )
            masks.append(torch.arange(row.numel(), device=row.device) >= max(prompt.numel(), 1))
        return masks

    def _output(self, terms: PolicyTerms, entropy: torch.Tensor, counts: torch.Tensor, longest: int) -> GRPOLossOutput:
        def share(values: torch.Tensor) -> torch.Tensor:
            if self.aggregation == "none":
                return keep(values, terms.mask)
            return aggregate(values[counts, :longest], terms.mask[counts, :longest], self.aggregation)

        metrics = policy_metrics([terms])
        output = GRPOLossOutput(
            loss_objective=share(terms.loss),
            clip_fraction=metrics["clip_fraction"],
            kl_approx=metrics["kl_to_old"],
            ESS=metrics["ess"],
        )
        if self.entropy_bonus:
            output.entropy = masked_mean(entropy, terms.mask).detach()
            output.loss_entropy = -self.entropy_coeff * share(entropy)
        if terms.kl_to_ref is not None and self.kl_to_ref_coeff is not None:
            output.kl_to_ref = metrics["kl_to_ref"]
            output.loss_kl_to_ref = self.kl_to_ref_coeff * share(terms.kl_to_ref)
        if terms.kl_to_sampler is not None and self.kl_to_inference_coeff is not None:
            output.kl_to_inference = metrics["kl_to_sampler"]
            output.loss_kl_to_inference = self.kl_to_inference_coeff * share(terms.kl_to_sampler)
        return output


def clip_bounds(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    """(low, high) of one bound for both sides or of a pair. Raises ValueError for bounds that cannot be."""
    pair = tuple(clip_epsilon) if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
    if len(pair) != 2:
        raise ValueError(f"clip_epsilon={clip_epsilon} must be one number or (low, high)")
    low, high = (float(bound) for bound in pair)
    if low < 0 or high < 0:
        raise ValueError(f"clip_epsilon={clip_epsilon} must not be negative")
    if low >= 1:
        raise ValueError(f"clip_epsilon={clip_epsilon} allows a ratio of 0: its lower bound must be below 1")
    return low, high
