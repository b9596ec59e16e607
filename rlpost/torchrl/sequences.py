"""The token sequences of a batch, in any layout, and a model's log-probs of them, for transforms and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn

from rlpost.data.chat import ChatMask
from rlpost.data.history import History
from rlpost.data.ragged import ASSISTANT, ATTENTION, Key, padded, ragged, ragged_rows
from rlpost.errors import DataError
from rlpost.model.logprobs import microbatches_of, token_log_probs
from rlpost.model.packing import Row, by_row
from rlpost.torchrl.batches import concat_rows

TOKENS, HISTORY = ("tokens", "full"), ("history", "full")
RESTARTS = ("tokens", "restarts")
REF_LOG_PROBS: Key = ("next", "ref_log_probs", "full")
LOG_PROBS: Key = ("log_probs", "full")
MASKS: tuple[Key, ...] = (ATTENTION, "attention_mask")
LogProbModel = nn.Module | Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True, slots=True)
class Sequences:
    """B token sequences of a batch, with one value an id as (B, T): each begins on the left, T is the longest.

    `ids` are int64; `attention`, bool, is False on the padding behind shorter sequences. `places` (B, P) is the batch's
    own attention mask if its fields are padded; None: they are ragged. All but `places` are on the CPU.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    places: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: TensorDictBase) -> Sequences:
        """The sequences under `("tokens", "full")`: ragged, or padded; without an attention mask nothing is padding.

        Raises DataError for none, and for conversations whose context begins anew.
        """
        restarts = batch.get(RESTARTS, None)
        if restarts is not None and restarts.numel():
            raise DataError(
                f"{RESTARTS}: the prompts of later turns were rendered anew, and {TOKENS} is read as one sequence: "
                "give the environment history=keep, or train with rlpost train"
            )
        rows = rows_of(batch, TOKENS)
        if rows is None:
            raise DataError(
                f"the batch has no {TOKENS}: log-probs are those of ids, which the policy has to write there"
            )
        if batch[TOKENS].is_nested:
            return cls.of_rows(rows)
        mask = batch.get(ATTENTION, None)
        return cls.of_rows(rows, torch.ones_like(batch[TOKENS]).bool() if mask is None else mask.bool())

    @classmethod
    def of_history(cls, history: History, tokenizer: ChatMask) -> tuple[Sequences, torch.Tensor]:
        """The conversations as `tokenizer` writes them, and which ids are the assistant's, (B, T) bool.

        Raises DataError for a conversation that the template refuses.
        """
        encoded = [tokenizer.encode(chat) for chat in history.to_chats()]
        sequences = cls.of_rows([torch.tensor(ids) for ids, _ in encoded])
        return sequences, padded([torch.tensor(mask, dtype=torch.bool) for _, mask in encoded])

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor], places: torch.Tensor | None = None) -> Sequences:
        """The sequences of the ids `rows`, without padding."""
        return cls(padded(rows), padded([torch.ones_like(row, dtype=torch.bool) for row in rows]), places)

    def field(
        self, batch: TensorDictBase, key: Key, hint: str = "", missing: type[Exception] = DataError
    ) -> torch.Tensor:
        """A field with one value an id, (B, T), detached.

        Raises `missing` where there is none, DataError for rows of other lengths than the ids have.
        """
        rows = rows_of(batch, key)
        if rows is None:
            raise missing(f"the batch has no {key}{hint and ': '}{hint}")
        lengths, wanted = [row.shape[0] for row in rows], self.attention.sum(-1).tolist()
        if lengths != wanted or rows[0].ndim > 1:
            raise DataError(f"{key} has rows of {lengths} values for sequences of {wanted} ids")
        return padded(rows).detach()

    def field_or_expanded(self, batch: TensorDictBase, key: Key, hint: str) -> torch.Tensor:
        """A field of one value an id, or one a row, (B,) or (B, 1), which then counts for each id."""
        values, size = batch.get(key, None), len(self.ids)
        if values is not None and not values.is_nested and tuple(values.shape) in ((size,), (size, 1), (size, 1, 1)):
            return values.detach().cpu().reshape(size, 1).expand(self.ids.shape)
        return self.field(batch, key, hint)

    def laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """One value an id, as a field of the batch: ragged (B, *), or (B, P) with 0 at the pads."""
        if self.places is None:
            return ragged([row[there] for row, there in zip(values, self.attention, strict=True)])
        return by_row(values[self.attention].to(self.places.device), self.places)

    def mask(self, batch: TensorDictBase, *, assistant_only: bool) -> torch.Tensor:
        """The ids that count, (B, T) bool: the assistant's, or all but a sequence's first, which has no log-prob.

        Raises DataError for a batch without an assistant mask where only those count.
        """
        chosen = self.attention.clone()
        if assistant_only:
            hint = "let the policy write it, or read every token (assistant_only=False, masking_strategy='generic')"
            chosen = self.field(batch, ASSISTANT, hint).bool()
        chosen[:, 0] = False
        return chosen


def in_one_dimension(batch: TensorDictBase) -> TensorDictBase:
    """The rows of `batch`, of any shape, as a TensorDict (N,), the last dimension fastest."""
    if batch.ndim == 0:
        return batch.unsqueeze(0)
    if batch.ndim == 1 and not isinstance(batch, LazyStackedTensorDict):
        return batch
    return concat_rows([in_one_dimension(part) for part in batch.unbind(0)])


def rows_of(batch: TensorDictBase, key: Key, *, last: bool = False) -> list[torch.Tensor] | None:
    """The rows of a field of the batch, on the CPU and without padding; None if there is no such field.

    The attention mask of a padded batch covers the field with its first places, or with its `last` ones, as those of
    prompts and responses cover a part of it.
    """
    values = batch.get(key, None)
    if values is None:
        return None
    values = values.cpu()
    if values.is_nested:
        return ragged_rows(values)
    values = values.squeeze(-1) if values.ndim == 3 else values
    width = values.shape[-1]
    for name in MASKS:
        mask = batch.get(name, None)
        if mask is not None and not mask.is_nested and values.ndim == 2 and width <= mask.shape[-1]:
            there = (mask[:, mask.shape[-1] - width :] if last else mask[:, :width]).bool().cpu()
            return [row[kept] for row, kept in zip(values, there, strict=True)]
    return list(values.unbind())


def read(
    model: nn.Module, sequences: Sequences, mask: torch.Tensor, temperature: float, tokens_at_once: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and the entropy of the ids where `mask` is True, both (B, T) and 0 elsewhere.

    `model` reads `tokens_at_once`, or all. Raises ValueError where no id is asked for.
    """
    rows = []
    for ids, there, trained in zip(sequences.ids, sequences.attention, mask, strict=True):
        if trained.any():
            first = int(trained.int().argmax())  # what comes before is read once for neighbours that share it
            rest, chosen = ids[there][first:], trained[there][first:]
            rows.append(Row(ids[:first], rest, chosen, torch.zeros(rest.numel())))
    if not rows:
        raise ValueError("no token of the batch is trained: all masks are empty")
    size = tokens_at_once or sequences.ids.numel()
    device = next(model.parameters()).device
    parts = [token_log_probs(model, part, temperature) for part in microbatches_of(model, rows, size, device)]
    log_probs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    return by_row(log_probs, mask.to(device)), by_row(entropy, mask.to(device))


def model_and_temperature(actor: Any, temperature: float | None) -> tuple[nn.Module, float]:
    """The model of a causal LM or of a wrapper around one, and its temperature (1 for a model)."""
    model = actor if isinstance(actor, nn.Module) else actor.model
    sampling = None if model is actor else getattr(actor, "sampling", None)
    chosen = temperature if temperature is not None else 1.0 if sampling is None else float(sampling.temperature)
    return model, chosen
