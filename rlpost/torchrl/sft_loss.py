"""SFTLoss: a loss on demonstrations that reads a TensorDict of conversations."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from rlpost.data.chat_mask import ChatMask
from rlpost.data.history import History
from rlpost.data.ragged import ATTENTION, padded
from rlpost.objectives.aggregation import check_choice, masked_mean, sequence_mean, sequence_sum
from rlpost.objectives.kl import kl_divergence
from rlpost.objectives.supervised import minor_sft_terms, sft_terms
from rlpost.torchrl.actor import model_and_temperature, read_sequences
from rlpost.torchrl.token_sequences import HISTORY, REF_LOG_PROBS, Sequences


@dataclass(slots=True)
class SFTLossOutput:
    """What `SFTLoss` says of a batch of B conversations. Losses carry gradient and their coefficients.

    What was not asked for is None.
    """

    loss_sft: torch.Tensor  # a scalar, or (B,) with reduction="none"
    loss_kl_to_ref: torch.Tensor | None = None  # a scalar
    kl_to_ref: torch.Tensor | None = None  # a scalar: the mean over trained tokens, detached

    @property
    def loss(self) -> torch.Tensor:
        """What to minimise: the sum of the loss terms that there are; a scalar, or (B,) as `loss_sft` is."""
        return self.loss_sft if self.loss_kl_to_ref is None else self.loss_sft + self.loss_kl_to_ref

    def sum(self, *, reduce: bool = True) -> torch.Tensor:
        """The same sum; with `reduce` a scalar even where `loss_sft` is (B,), each of them counted once."""
        if not reduce:
            return self.loss
        return self.loss_sft.sum() if self.loss_kl_to_ref is None else self.loss_sft.sum() + self.loss_kl_to_ref


class SFTLoss(nn.Module):
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

    Raises ConfigError (a ValueError) for an unknown word, ValueError without a tokenizer.

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
        super().__init__()
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        check_choice("loss function", loss_function, ("sft", "minor_sft"))
        tokenizer = getattr(actor_network, "tokenizer", None) if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError("SFTLoss has no tokenizer to write conversations with: give it one")
        if loss_function == "minor_sft" and kl_to_ref_coeff:
            warnings.warn("minor_sft compares with the reference already: kl_to_ref_coeff is taken as 0", stacklevel=2)
            kl_to_ref_coeff = None
        self.actor_network, self.temperature = model_and_temperature(actor_network, temperature=1.0)
        self.reduction = reduction
        self.normalize_by_seq_length = normalize_by_seq_length
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.loss_function = loss_function
        self.beta = beta
        self._mask = ChatMask(tokenizer)

    def forward(self, batch: TensorDictBase) -> SFTLossOutput:
        """The loss of `batch` (B,).

        Raises KeyError without a history, or without the reference's log-probs where a term needs
        them; ValueError where those do not fit and for a conversation without a token to train;
        DataError for one that the chat template does not take.
        """
        sequences, trained = self._tokens(batch)
        wants_ref = self.loss_function == "minor_sft" or bool(self.kl_to_ref_coeff)
        given = sequences.field(batch, REF_LOG_PROBS, missing=KeyError) if wants_ref else None
        log_probs, _ = read_sequences(self.actor_network, sequences.ids, trained, self.temperature)
        mask = padded(trained).to(log_probs.device)
        ref = None if given is None else padded(given).to(log_probs)
        if self.loss_function == "minor_sft":
            assert ref is not None
            normalise = self.normalize_by_seq_length
            terms = minor_sft_terms(log_probs, ref, mask, beta=self.beta, normalise_by_length=normalise)
            each = sequence_mean(terms, mask)  # of one conversation all terms are equal
        else:
            of_sequence = sequence_mean if self.normalize_by_seq_length else sequence_sum
            each = of_sequence(sft_terms(log_probs, mask), mask)
        output = SFTLossOutput(loss_sft=self._reduced(each))
        if ref is not None:
            kl = masked_mean(kl_divergence(log_probs, ref, "k3", mask), mask)
            output.kl_to_ref = kl.detach()
            if self.kl_to_ref_coeff:
                output.loss_kl_to_ref = self.kl_to_ref_coeff * kl
        return output

    def _tokens(self, batch: TensorDictBase) -> tuple[Sequences, list[torch.Tensor]]:
        """The ids of each conversation, and which are trained."""
        history = batch.get(HISTORY, None)
        if not isinstance(history, History):
            raise KeyError(f"the batch has no History under {HISTORY}")
        reference = batch.get(REF_LOG_PROBS, None)
        padded_reference = reference is not None and not reference.is_nested
        attention = batch.get(ATTENTION, None) if padded_reference else None
        sequences, masks = Sequences.of_history(history, self._mask, None if attention is None else attention.bool())
        for number, mask in enumerate(masks):
            if not mask.any():
                raise ValueError(f"conversation {number} has no assistant mask: no message of the assistant is in it")
        return sequences, masks

    def _reduced(self, each: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return each
        return each.mean() if self.reduction == "mean" else each.sum()
