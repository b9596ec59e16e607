"""The token sequences of a batch, however it lays them out, and a model's log-probs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from tensordict import TensorDictBase
from torch import nn

from rlpost.data.chat_mask import ChatMask
from rlpost.data.history import History
from rlpost.data.ragged import ASSISTANT, ATTENTION, Key, ragged, ragged_rows
from rlpost.errors import ConfigError, DataError
from rlpost.model.logprobs import microbatches_of, token_log_probs
from rlpost.model.packing import Row

LogProbModel = nn.Module | Callable[[TensorDictBase], TensorDictBase]

TOKENS, HISTORY, LOG_PROBS = ("tokens", "full"), ("history", "full"), ("log_probs", "full")
TOKENS_A_PASS = 8192  # of a batch that a model reads at once


@dataclass(frozen=True, slots=True)
class Sequences:
    """B token sequences of a batch.

    `ids` holds each without pads, (T_b,). `attention` (B, T) bool tells ids from pads where the batch
    is padded; None: its fields are ragged.
    """

    ids: list[torch.Tensor]
    attention: torch.Tensor | None

    @classmethod
    def of(cls, batch: TensorDictBase) -> Sequences:
        """Those under `("tokens", "full")`, ragged or, beside an attention mask, padded. Raises DataError for none."""
        tokens = batch.get(TOKENS, None)
        if tokens is None:
            raise DataError(
                f"the batch has no {TOKENS}: log-probs are those of ids, which the policy has to write there"
            )
        if tokens.is_nested:
            return cls(ragged_rows(tokens), None)
        attention = batch.get(ATTENTION, None)
        if attention is None or attention.is_nested or attention.shape != tokens.shape:
            raise DataError(
                f"{TOKENS} is padded, {tuple(tokens.shape)}, and has no mask of that shape under {ATTENTION}"
            )
        return cls([row[kept] for row, kept in zip(tokens, attention.bool(), strict=True)], attention.bool())

    def rows(self, values: torch.Tensor, name: Key) -> list[torch.Tensor]:
        """`values`, one an id and laid out as the ids are, row by row. Raises DataError where they are not."""
        if values.is_nested != (self.attention is None):
            kinds = ("ragged", "padded") if values.is_nested else ("padded", "ragged")
            raise DataError(
                f"{name} is {kinds[0]} and the batch's tokens are {kinds[1]}: give both the same pad_output"
            )
        if self.attention is None:
            rows = ragged_rows(values)
        else:
            values = values.squeeze(-1) if values.ndim == 3 else values
            if values.shape != self.attention.shape:
                raise DataError(f"{name} has shape {tuple(values.shape)} for tokens of {tuple(self.attention.shape)}")
            rows = [row[kept] for row, kept in zip(values, self.attention, strict=True)]
        lengths, wanted = [row.shape[0] for row in rows], [row.numel() for row in self.ids]
        if lengths != wanted:
            raise DataError(f"{name} has rows of {lengths} values for sequences of {wanted} ids")
        return rows

    def laid_out(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """One value an id, as a field of the batch: ragged (B, *), or (B, T) with 0 at the pads."""
        if self.attention is None:
            return ragged(rows)
        flat = torch.cat(list(rows)).to(self.attention.device)
        return flat.new_zeros(self.attention.shape).masked_scatter(self.attention, flat)

    def masks(self, batch: TensorDictBase, *, assistant_only: bool) -> list[torch.Tensor]:
        """Which ids count, bool: the assistant's, or all; never a sequence's first, which nothing predicts.

        Raises DataError for a batch without an assistant mask where only those count.
        """
        if assistant_only:
            mask = batch.get(ASSISTANT, None)
            if mask is None:
                raise DataError(f"the batch has no {ASSISTANT}: let the policy write it, or give assistant_only=False")
            chosen = [row.bool().clone() for row in self.rows(mask, ASSISTANT)]
        else:
            chosen = [torch.ones_like(row, dtype=torch.bool) for row in self.ids]
        for row in chosen:
            row[:1] = False
        return chosen


def rendered(batch: TensorDictBase, tokenizer: Any) -> tuple[Sequences, list[torch.Tensor]]:
    """The conversations under `("history", "full")` as the tokenizer's template writes them, and their assistant masks.

    Raises DataError where there is no history, or no tokenizer to write it with.
    """
    history = batch.get(HISTORY, None)
    if not isinstance(history, History):
        raise DataError(f"the batch has neither {TOKENS} nor a History under {HISTORY}")
    if tokenizer is None:
        raise DataError(f"the batch has {HISTORY} and no {TOKENS}: give tokenizer=, to write the conversations with")
    encoder = ChatMask(tokenizer)
    encoded = [encoder.encode(chat) for chat in history.to_chats()]
    masks = [torch.tensor(mask, dtype=torch.bool) for _, mask in encoded]
    return Sequences([torch.tensor(ids) for ids, _ in encoded], None), masks


def check_model(model: Any, temperature: float | None) -> None:
    """Raise TypeError for what gives no log-probs, ConfigError for a policy that samples, or given a temperature."""
    if not callable(model):
        raise TypeError(f"{type(model).__name__} gives no log-probs: give a causal LM of transformers, or a policy")
    face = getattr(model, "face", None)
    if getattr(face, "generate", False):
        raise ConfigError("the model given for log-probs is a policy that samples: make it with generate=False")
    if temperature is not None and not _is_language_model(model):
        raise ConfigError(
            f"temperature={temperature:g} is for a causal LM: give the {type(model).__name__} its own and leave it out"
        )


def log_probs_of(
    model: LogProbModel,
    batch: TensorDictBase,
    sequences: Sequences,
    masks: Sequence[torch.Tensor],
    temperature: float,
) -> list[torch.Tensor]:
    """The model's log-probs of the ids where `masks` is True, 0 elsewhere; float32, one 1-D tensor a row.

    A causal LM of transformers reads the ids here, at `temperature`; anything else is called on the
    batch without its log-probs and `next`, and has to write `("log_probs", "full")`. Raises DataError
    where it does not.
    """
    if _is_language_model(model):
        rows = _read(model, sequences, masks, temperature)
    else:
        # a model that wrote into the batch itself would replace the sampler's log-probs by its own
        seen = batch.exclude("log_probs", "next").clone(recurse=False)
        with torch.no_grad():
            written = model(seen).get(LOG_PROBS, None)
        if written is None:
            raise DataError(
                f"the {type(model).__name__} wrote no {LOG_PROBS}: it has to give the log-probs of {TOKENS} there"
            )
        rows = sequences.rows(written.detach(), LOG_PROBS)
    zero = torch.zeros((), dtype=torch.float32)
    return [torch.where(mask.cpu(), row.float().cpu(), zero) for row, mask in zip(rows, masks, strict=True)]


def _is_language_model(model: Any) -> TypeGuard[nn.Module]:
    return isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings")


def _read(
    model: nn.Module, sequences: Sequences, masks: Sequence[torch.Tensor], temperature: float
) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    pairs = list(zip(sequences.ids, masks, strict=True))
    rows = []
    for ids, mask in pairs:
        if mask.any():
            first = int(mask.int().argmax())  # what comes before is read once for neighbours that share it
            rest = ids[first:].cpu()
            rows.append(Row(ids[:first].cpu(), rest, mask[first:].cpu(), torch.zeros(rest.numel()), 0.0))
    read: list[torch.Tensor] = []
    with torch.no_grad(), _evaluating(model):
        for microbatch in microbatches_of(model, rows, TOKENS_A_PASS, device):
            log_probs, _ = token_log_probs(model, microbatch, temperature)
            read += log_probs.float().cpu().split([row.num_trained for row in microbatch.rows])
    in_order = iter(read)
    return [
        torch.zeros(ids.numel()).masked_scatter(mask.cpu(), next(in_order) if mask.any() else torch.zeros(0))
        for ids, mask in pairs
    ]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, which would make log-probs random."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
