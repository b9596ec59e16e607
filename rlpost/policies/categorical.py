"""Distributions over tokens: of every position of a batch, with a mask that says which positions count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch.distributions import Categorical

from rlpost.data.ragged import padded, padding_id
from rlpost.errors import DataError
from rlpost.policies.sampling import check_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlpost.torchrl.reading import Reader


class MaskedCategorical(Categorical):
    """One categorical distribution a token, (B, T); where `mask` is False, log-probs and entropies are 0."""

    def __init__(self, logits: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)
        self.mask = mask

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """log π of the tokens `value` (B, T)."""
        return super().log_prob(value).masked_fill(~self.mask, 0.0)

    def entropy(self) -> torch.Tensor:
        """(B, T), in nats."""
        return super().entropy().masked_fill(~self.mask, 0.0)


class CategoricalSequential(ABC):
    """What a policy is whose distributions can be had: a model of which the logits are known.

    Each method reads the sequences of a TensorDict as `policy(tensordict)` with `generate=False`
    does, `("tokens", "full")` if it is there, and pads them on the right: T is the longest. The
    distribution at position t is the one that the token at t was drawn from, given those before it,
    at the sampling temperature; position 0, which nothing predicts, is never in the mask. Logits of
    every position are T times the vocabulary: `policy.token_log_probs` needs none of them.
    """

    face: Any
    sampling: Any
    tokenizer: Any

    @abstractmethod
    def token_logits(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, T, V) float32 logits that follow each of `tokens` (B, T), where `attention_mask` (B, T) is True."""

    def get_dist(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """The distributions of what the model said, or of every token where nothing says what that is.

        It is what `("masks", "all_assistant_mask")` or the messages mark, else what stands behind
        `("tokens", "prompt")`.
        """
        sequences = self._reader().sequences(tensordict)
        if all(sequence.sampled is not None for sequence in sequences):
            return self.get_dist_with_assistant_mask(tensordict)
        if ("tokens", "prompt") in tensordict.keys(include_nested=True):
            return self.get_dist_with_prompt_mask(tensordict)
        return self.get_dist_with_attention_mask(tensordict)

    def get_dist_with_prompt_mask(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """Of everything behind `("tokens", "prompt")`. Raises DataError where a sequence does not begin with it."""
        reader = self._reader()
        sequences = reader.sequences(tensordict)
        prompts = reader.ids(tensordict, ("tokens", "prompt"))
        for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            if sequence.ids[: len(prompt)] != prompt:
                raise DataError(f"row {row}: the sequence does not begin with its ('tokens', 'prompt')")
        masks = [
            [place >= len(prompt) for place in range(len(sequence.ids))]
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        return self._dist([sequence.ids for sequence in sequences], masks)

    def get_dist_with_assistant_mask(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """Of the assistant's tokens. Raises DataError where the batch does not say which those are."""
        sequences = self._reader().sequences(tensordict)
        masks = [sequence.sampled for sequence in sequences if sequence.sampled is not None]
        if len(masks) < len(sequences):
            raise DataError(
                "nothing says which tokens are the assistant's: give ('masks', 'all_assistant_mask'), or messages "
                "with input_mode='history'"
            )
        return self._dist([sequence.ids for sequence in sequences], masks)

    def get_dist_with_attention_mask(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """Of every token but the first, which nothing predicts."""
        sequences = self._reader().sequences(tensordict)
        ids = [sequence.ids for sequence in sequences]
        return self._dist(ids, [[True] * len(row) for row in ids])

    def get_dist_with_custom_mask(self, tensordict: TensorDictBase, mask: torch.Tensor) -> MaskedCategorical:
        """Of the tokens where `mask`, ragged or (B, T), is True. Raises DataError where it is too short."""
        sequences = self._reader().sequences(tensordict)
        rows = list(mask.unbind())
        ids = [sequence.ids for sequence in sequences]
        if len(rows) != len(ids) or any(m.numel() < len(row) for m, row in zip(rows, ids, strict=True)):
            raise DataError(f"a mask of {tuple(mask.shape)} does not cover the {len(ids)} sequences: give one a token")
        return self._dist(ids, [m[: len(row)].tolist() for m, row in zip(rows, ids, strict=True)])

    def log_prob(self, tensordict: TensorDictBase) -> torch.Tensor:
        """(B, T) log π of the tokens, 0 where `get_dist`'s mask is False."""
        ids = [torch.tensor(sequence.ids) for sequence in self._reader().sequences(tensordict)]
        dist = self.get_dist(tensordict)
        return dist.log_prob(padded(ids, padding_id(self.tokenizer)).to(dist.mask.device))

    def _reader(self) -> Reader:
        from rlpost.torchrl.reading import Reader

        return Reader(self)  # type: ignore[arg-type]

    def _dist(self, ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> MaskedCategorical:
        check_whole(self.sampling)
        temperature = self.sampling.temperature or 1.0
        tokens = padded([torch.tensor(row) for row in ids], padding_id(self.tokenizer))
        there = padded([torch.ones(len(row), dtype=torch.bool) for row in ids], 0)
        counted = padded([torch.tensor(row, dtype=torch.bool) for row in masks], 0)
        logits = self.token_logits(tokens, there) / temperature
        # the logits that follow a token are the distribution of the next; of the first there is none
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        counted[:, 0] = False
        return MaskedCategorical(shifted, counted.to(logits.device))
