"""Losses on TensorDicts: GRPOLoss on a batch of collectors; SFTLoss and DistillationLoss on conversations."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from rlpost.data.chat import ChatMask
from rlpost.data.ragged import Key
from rlpost.errors import DataError
from rlpost.objectives.aggregation import (
    AGGREGATIONS,
    aggregate,
    check_choice,
    keep,
    kl_divergence,
    masked_mean,
    sequence_mean,
    sequence_sum,
)
from rlpost.objectives.policy_loss import VARIANTS, PolicyTerms, policy_metrics, policy_terms
from rlpost.objectives.supervised import minor_sft_terms, sft_terms
from rlpost.torchrl.sequences import (
    HISTORY,
    LOG_PROBS,
    REF_LOG_PROBS,
    Sequences,
    model_and_temperature,
    read,
    rows_of,
)

CLIPPING = tuple(name for name, variant in VARIANTS.items() if "clip_low" in variant.coefficients)
ALSO_CALLED = {"prompt_mean": "sequence_mean"}
REDUCTIONS = ("mean", "sum", "none")
TEACHER_LOG_PROBS = ("next", "teacher_log_probs", "full")
LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")


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

    Raises ConfigError (a ValueError) for an unknown word.

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
        both = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
        self.clip_low, self.clip_high = map(float, both)
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
        masks that are all empty; KeyError where log-probs are missing that a term needs.
        """
        sequences = Sequences.of(batch)
        advantage = sequences.field_or_expanded(batch, "advantage", "MCAdvantage writes it")
        old = sequences.field(batch, LOG_PROBS, missing=KeyError)
        ref = sequences.field(batch, REF_LOG_PROBS, missing=KeyError) if (self.kl_to_ref_coeff or 0) > 0 else None
        valid = batch.get("valid", None)
        counts = torch.ones(len(old), dtype=torch.bool) if valid is None else valid.reshape(-1).bool().cpu()
        mask = self._trained(batch, sequences) & counts[:, None]
        log_probs, entropy = read(self.actor_network, sequences, mask, self.temperature)
        mask, old = mask.to(log_probs.device), old.to(log_probs)
        if self.kl_mask_threshold is not None:
            mask = mask & ((log_probs.detach() - old).square() / 2 <= self.kl_mask_threshold)
        terms = policy_terms(
            self.variant,
            log_probs,
            old,
            advantage.to(log_probs),
            mask,
            sampler_log_probs=old,
            ref_log_probs=None if ref is None else ref.to(log_probs),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        longest = int(sequences.attention[counts].sum(-1).max())
        return self._output(terms, entropy, counts.to(mask.device), longest)

    def _trained(self, batch: TensorDictBase, sequences: Sequences) -> torch.Tensor:
        """The mask of trained ids, (B, T) bool; never a sequence's first, which nothing predicts."""
        prompts = rows_of(batch, ("tokens", "prompt"))
        if self.masking_strategy != "sft" or prompts is None:
            return sequences.mask(batch, assistant_only=self.masking_strategy != "generic")
        mask = sequences.mask(batch, assistant_only=False)
        for ids, prompt, trained in zip(sequences.ids, prompts, mask, strict=True):
            if not torch.equal(ids[: prompt.numel()], prompt):
                raise DataError(
                    "('tokens', 'full') does not begin with ('tokens', 'prompt'): give the prompts ragged, without "
                    "pads, or masking_strategy='rlhf' and an assistant mask"
                )
            trained[: prompt.numel()] = False
        return mask

    def _output(self, terms: PolicyTerms, entropy: torch.Tensor, counts: torch.Tensor, longest: int) -> GRPOLossOutput:
        def share(values: torch.Tensor) -> torch.Tensor:
            if self.aggregation == "none":
                return keep(values, terms.mask)
            return aggregate(values[counts, :longest], terms.mask[counts, :longest], self.aggregation)

        metrics = policy_metrics([terms])
        output = GRPOLossOutput(share(terms.loss), metrics["clip_fraction"], metrics["kl_to_old"], metrics["ess"])
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


@dataclass(slots=True)
class GRPOLossOutput:
    """The result of `GRPOLoss`: scalars, or one value a token (B, T) for losses with aggregation="none".

    Losses carry gradient and their coefficients, all else is a detached mean over the tokens of the
    mask. Terms that are switched off are None.
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
        """The sum of all loss terms, to minimise."""
        present = [value for name in LOSSES if (value := getattr(self, name)) is not None]
        return torch.stack(present).sum(0)


class _ConversationLoss(nn.Module):
    """A loss of the assistant's tokens in conversations."""

    def __init__(self, actor_network: Any, tokenizer: Any, reduction: str, normalize_by_seq_length: bool) -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        tokenizer = getattr(actor_network, "tokenizer", None) if tokenizer is None else tokenizer
        self.actor_network, self.temperature = model_and_temperature(actor_network, temperature=1.0)
        self.reduction = reduction
        self.normalize_by_seq_length = normalize_by_seq_length
        self._mask = ChatMask(tokenizer)

    def _read(
        self, batch: TensorDictBase, key: Key, hint: str = "", *, needed: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The log-probs of the trained tokens (B, T), the other model's under `key` if `needed`, and the mask."""
        history: Any = batch[HISTORY]
        sequences, trained = Sequences.of_history(history, self._mask)
        for number, own in enumerate(trained):
            if not own.any():
                raise ValueError(f"conversation {number} has no assistant mask: no message of the assistant is in it")
        other = sequences.field(batch, key, hint, missing=KeyError) if needed else None
        log_probs, _ = read(self.actor_network, sequences, trained, self.temperature)
        return log_probs, None if other is None else other.to(log_probs), trained.to(log_probs.device)

    def _summed(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean, or the sum, of the tokens of each conversation (B,)."""
        return (sequence_mean if self.normalize_by_seq_length else sequence_sum)(values, mask)

    def _reduced(self, each: torch.Tensor) -> torch.Tensor:
        return {"none": each, "mean": each.mean(), "sum": each.sum()}[self.reduction]


class SFTLoss(_ConversationLoss):
    """Cross entropy of the assistant's tokens, or MinorSFT (arXiv:2408.10642), with an optional KL to a reference.

    `actor_network` is the causal LM of transformers that is trained, or a `TransformersWrapper` around it;
    `tokenizer` the one whose chat template writes the conversations. Trained are the assistant's
    tokens with the end of each of its turns.

    Reads `("history", "full")`, a `History` (B, M), and where a term needs them the reference's
    log-probs `("next", "ref_log_probs", "full")`, one an id of each conversation: ragged (B, *), or padded
    (B, T) behind an attention mask.

    A conversation counts the sum of its tokens' log-probs s, or their mean if `normalize_by_seq_length`:
    "sft" costs −s, "minor_sft" −log σ(beta (s − s_ref)). `reduction` over conversations is mean, sum
    or none. `kl_to_ref_coeff` weighs the mean over all trained tokens of k3, to which "minor_sft"
    adds nothing: it compares with the reference already, so there the coefficient is 0, with a warning.

    Raises ConfigError (a ValueError) for an unknown word.

    >>> from rlpost.data import History
    >>> from rlpost.models import load_model, load_tokenizer, locate_model
    >>> from rlpost.objectives import SFTLoss
    >>> from rlpost.settings import ModelSettings
    >>> from tensordict import TensorDict
    >>> folder = locate_model("builtin:tiny")
    >>> model, tokenizer = load_model(folder), load_tokenizer(folder)
    >>> chats = History.from_chats([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]])
    >>> batch = TensorDict({"history": {"full": chats}}, batch_size=[1])
    >>> SFTLoss(model, tokenizer)(batch).loss_sft.backward()
    """

    def __init__(
        self,
        actor_network: Any,
        tokenizer: Any = None,
        *,
        reduction: str = "mean",
        normalize_by_seq_length: bool = True,
        kl_to_ref_coeff: float | None = None,
        loss_function: str = "sft",
        beta: float = 0.1,
    ) -> None:
        super().__init__(actor_network, tokenizer, reduction, normalize_by_seq_length)
        check_choice("loss function", loss_function, ("sft", "minor_sft"))
        if loss_function == "minor_sft" and kl_to_ref_coeff:
            warnings.warn("minor_sft compares with the reference already: kl_to_ref_coeff is taken as 0", stacklevel=2)
            kl_to_ref_coeff = None
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.loss_function = loss_function
        self.beta = beta

    def forward(self, batch: TensorDictBase) -> SFTLossOutput:
        """The loss of `batch` (B,).

        Raises KeyError without a history, or without the reference's log-probs where a term needs
        them; ValueError where those do not fit and for a conversation without a token to train;
        DataError for one that the chat template does not take.
        """
        wants_ref = self.loss_function == "minor_sft" or bool(self.kl_to_ref_coeff)
        log_probs, ref, mask = self._read(batch, REF_LOG_PROBS, needed=wants_ref)
        if self.loss_function == "minor_sft":
            assert ref is not None
            normalise = self.normalize_by_seq_length
            terms = minor_sft_terms(log_probs, ref, mask, beta=self.beta, normalise_by_length=normalise)
            each = sequence_mean(terms, mask)  # of one conversation all terms are equal
        else:
            each = self._summed(sft_terms(log_probs, mask), mask)
        output = SFTLossOutput(loss_sft=self._reduced(each))
        if ref is not None:
            kl = masked_mean(kl_divergence(log_probs, ref, "k3", mask), mask)
            output.kl_to_ref = kl.detach()
            if self.kl_to_ref_coeff:
                output.loss_kl_to_ref = self.kl_to_ref_coeff * kl
        return output


@dataclass(slots=True)
class SFTLossOutput:
    """The result of `SFTLoss` for B conversations. Losses carry gradient and their coefficients.

    Terms that are switched off are None.
    """

    loss_sft: torch.Tensor  # a scalar, or (B,) with reduction="none"
    loss_kl_to_ref: torch.Tensor | None = None  # a scalar
    kl_to_ref: torch.Tensor | None = None  # a scalar: the mean over trained tokens, detached

    @property
    def loss(self) -> torch.Tensor:
        """The sum of all loss terms, to minimise; a scalar, or (B,) as `loss_sft` is."""
        return self.loss_sft if self.loss_kl_to_ref is None else self.loss_sft + self.loss_kl_to_ref

    def sum(self, *, reduce: bool = True) -> torch.Tensor:
        """The sum; with `reduce` a scalar even where `loss_sft` is (B,), each of them counted once."""
        return replace(self, loss_sft=self.loss_sft.sum()).loss if reduce else self.loss


class DistillationLoss(_ConversationLoss):
    """Distillation on the tokens that the student sampled: k3 of its log-probs and a teacher's.

    `actor_network` is the student that is trained, a causal LM of transformers or a `TransformersWrapper` around it;
    `tokenizer` the one whose chat template writes the conversations. Trained are the assistant's tokens with the end of
    each of its turns.

    Reads `("history", "full")`, a `History` (B, M), and the teacher's log-probs
    `("next", "teacher_log_probs", "full")`, one an id of each conversation: ragged (B, *), or padded (B, T) behind an
    attention mask.

    A token costs k3 = exp(Δ) − 1 − Δ with Δ = log π_T − log π; a conversation the mean of its tokens, or their sum with
    `normalize_by_seq_length=False`. `reduction` over conversations is mean, sum or none, and `distill_coeff` scales the
    result. On samples of π the value estimates the reverse KL(π ‖ π_T). Its gradient, (1 − π_T/π) ∇log π, leaves out
    that the samples depend on π, and is on average that of the forward KL(π_T ‖ π). For the gradient of the reverse KL
    take `rlpost train distill loss=opd`, or loss=jsd.

    Raises ConfigError (a ValueError) for an unknown word.

    >>> import torch
    >>> from rlpost.data import History
    >>> from rlpost.data.ragged import ragged
    >>> from rlpost.models import load_model, load_tokenizer, locate_model
    >>> from rlpost.objectives import DistillationLoss
    >>> from tensordict import TensorDict
    >>> folder = locate_model("builtin:tiny")
    >>> model, tokenizer = load_model(folder), load_tokenizer(folder)
    >>> chats = History.from_chats([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]])
    >>> ids = 28  # of the conversation as the template writes it
    >>> teacher = {"teacher_log_probs": {"full": ragged([torch.full((ids,), -5.0)])}}
    >>> batch = TensorDict({"history": {"full": chats}, "next": teacher}, batch_size=[1])
    >>> DistillationLoss(model, tokenizer)(batch).loss_distill.backward()
    """

    def __init__(
        self,
        actor_network: Any,
        tokenizer: Any = None,
        *,
        distill_coeff: float = 1.0,
        reduction: str = "mean",
        normalize_by_seq_length: bool = True,
    ) -> None:
        super().__init__(actor_network, tokenizer, reduction, normalize_by_seq_length)
        self.distill_coeff = distill_coeff

    def forward(self, batch: TensorDictBase) -> DistillationLossOutput:
        """The loss of `batch` (B,).

        Raises KeyError without a history or the teacher's log-probs; ValueError where those do not fit and for a
        conversation without a token to train; DataError for one that the chat template does not take.
        """
        log_probs, teacher, mask = self._read(batch, TEACHER_LOG_PROBS, "RetrieveLogProb writes them")
        assert teacher is not None
        kl = kl_divergence(log_probs, teacher, "k3", mask)
        loss = self.distill_coeff * self._reduced(self._summed(kl, mask))
        return DistillationLossOutput(loss, sequence_mean(kl, mask).mean().detach())


@dataclass(slots=True)
class DistillationLossOutput:
    """The result of `DistillationLoss` for B conversations."""

    loss_distill: torch.Tensor  # a scalar, or (B,) with reduction="none"; carries the gradient and the coefficient
    kl_to_teacher: torch.Tensor  # a scalar: the mean over conversations of their tokens' mean k3, detached

    @property
    def loss(self) -> torch.Tensor:
        """The loss to minimise."""
        return self.loss_distill

    def sum(self, *, reduce: bool = True) -> torch.Tensor:
        """The loss; with `reduce` a scalar even where it is (B,)."""
        return self.loss_distill.sum() if reduce else self.loss_distill
