"""The token sequences of a batch, in any layout, and a model's log-probs of them, for transforms and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from rlpost.data.chat import ChatMask
from rlpost.data.history import History
from rlpost.data.ragged import ASSISTANT, ATTENTION, Key, padded, ragged, ragged_rows
from rlpost.errors import DataError
from rlpost.model.logprobs import microbatches_of, token_log_probs
from rlpost.model.packing import Row

TOKENS, HISTORY = ("tokens", "full"), ("history", "full")
RESTARTS = ("tokens", "restarts")
REF_LOG_PROBS: Key = ("next", "ref_log_probs", "full")
LOG_PROBS: Key = ("log_probs", "full")
TOKENS_A_PASS = 8192  # of a batch that a model reads at once
LogProbModel = nn.Module | Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True, slots=True)
class Sequences:
    """B token sequences of a batch.

    `ids` holds each without pads, (T_b,). `attention` (B, T) bool tells ids from pads where the batch
    is padded; None: no field has pads.
    """

    ids: list[torch.Tensor]
    attention: torch.Tensor | None

    @classmethod
    def of(cls, batch: TensorDictBase, *, needs_mask: bool = True) -> Sequences:
        """The sequences under `("tokens", "full")`: ragged, or padded with an attention mask.

        Without a mask a padded tensor has no pads, unless `needs_mask`. Raises DataError for none, where
        the mask is missing, and for conversations whose context begins anew.
        """
        tokens, restarts = batch.get(TOKENS, None), batch.get(RESTARTS, None)
        if restarts is not None and restarts.numel():
            raise DataError(
                f"{RESTARTS}: the prompts of later turns were rendered anew, and {TOKENS} is read as one sequence: "
                "give the environment history=keep, or train with rlpost train"
            )
        if tokens is None:
            raise DataError(
                f"the batch has no {TOKENS}: log-probs are those of ids, which the policy has to write there"
            )
        if tokens.is_nested:
            return cls(ragged_rows(tokens), None)
        attention = batch.get(ATTENTION, None)
        if not needs_mask and (attention is None or attention.is_nested):
            return cls(list(tokens.unbind()), None)
        return cls([row[kept] for row, kept in zip(tokens, attention.bool(), strict=True)], attention.bool())

    @classmethod
    def of_history(
        cls, history: History, tokenizer: ChatMask, attention: torch.Tensor | None = None
    ) -> tuple[Sequences, list[torch.Tensor]]:
        """The conversations as `tokenizer` writes them, and which ids are the assistant's, bool.

        `attention` is of fields that are padded. Raises DataError for a conversation that the template refuses.
        """
        encoded = [tokenizer.encode(chat) for chat in history.to_chats()]
        masks = [torch.tensor(mask, dtype=torch.bool) for _, mask in encoded]
        return cls([torch.tensor(ids) for ids, _ in encoded], attention), masks

    def field(
        self, batch: TensorDictBase, key: Key, hint: str = "", missing: type[Exception] = DataError
    ) -> list[torch.Tensor]:
        """A field with one value an id, row by row. Raises `missing` where there is none, else as `rows`."""
        values = batch.get(key, None)
        if values is None:
            raise missing(f"the batch has no {key}{hint and ': '}{hint}")
        return self.rows(values, key)

    def field_or_expanded(self, batch: TensorDictBase, key: Key, hint: str) -> list[torch.Tensor]:
        """A field of one value an id, or one a row, (B,) or (B, 1), which then counts for each id."""
        values, size = batch.get(key, None), len(self.ids)
        if values is not None and not values.is_nested and tuple(values.shape) in ((size,), (size, 1), (size, 1, 1)):
            return [row.expand(ids.numel()) for row, ids in zip(values.reshape(size, 1), self.ids, strict=True)]
        return self.field(batch, key, hint)

    def rows(self, values: torch.Tensor, name: Key) -> list[torch.Tensor]:
        """`values`, one an id and laid out as the ids are, row by row. Raises DataError where they are not."""
        if values.is_nested:
            rows = ragged_rows(values)
        else:
            values = values.squeeze(-1) if values.ndim == 3 else values
            if values.ndim != 2 or (self.attention is not None and values.shape != self.attention.shape):
                tokens = "ragged tokens" if self.attention is None else f"tokens of {tuple(self.attention.shape)}"
                raise DataError(f"{name} has shape {tuple(values.shape)} for {tokens}: give both the same pad_output")
            kept = torch.ones_like(values, dtype=torch.bool) if self.attention is None else self.attention
            rows = [row[mask] for row, mask in zip(values, kept, strict=True)]
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
        """The mask of the ids that count, bool: the assistant's, or all but a sequence's first, which has no log-prob.

        Raises DataError for a batch without an assistant mask where only those count.
        """
        if assistant_only:
            hint = "let the policy write it, or read every token (assistant_only=False, masking_strategy='generic')"
            chosen = [row.bool().clone() for row in self.field(batch, ASSISTANT, hint)]
        else:
            chosen = [torch.ones_like(row, dtype=torch.bool) for row in self.ids]
        for row in chosen:
            row[:1] = False
        return chosen


def read(
    model: nn.Module,
    ids: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    temperature: float,
    tokens_at_once: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and the entropy of the ids where `masks` is True, both (M,), sequence by sequence.

    `model` reads `tokens_at_once`, or all. Raises ValueError where no id is asked for.
    """
    rows = []
    for row, mask in zip(ids, masks, strict=True):
        if mask.any():
            first = int(mask.int().argmax())  # what comes before is read once for neighbours that share it
            rest = row[first:].cpu()
            rows.append(Row(row[:first].cpu(), rest, mask[first:].cpu(), torch.zeros(rest.numel())))
    if not rows:
        raise ValueError("no token of the batch is trained: all masks are empty")
    size = tokens_at_once or sum(row.prompt.numel() + row.response.numel() for row in rows)
    device = next(model.parameters()).device
    parts = [token_log_probs(model, part, temperature) for part in microbatches_of(model, rows, size, device)]
    return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropy for _, entropy in parts])


# A model's log-probs, for transforms


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
    if isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings"):  # a language model
        counts = [int(mask.sum()) for mask in masks]
        with torch.no_grad(), _evaluating(model):
            known = read(model, sequences.ids, masks, temperature, TOKENS_A_PASS)[0] if any(counts) else torch.zeros(0)
        pairs = zip(masks, known.float().cpu().split(counts), strict=True)
        return [torch.zeros(mask.numel()).masked_scatter(mask.cpu(), own) for mask, own in pairs]
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


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, which would make log-probs random."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# A model that is trained, for the public losses


def model_and_temperature(actor: Any, temperature: float | None) -> tuple[nn.Module, float]:
    """The model of a causal LM or of a wrapper around one, and its temperature (1 for a model)."""
    model = actor if isinstance(actor, nn.Module) else actor.model
    sampling = None if model is actor else getattr(actor, "sampling", None)
    chosen = temperature if temperature is not None else 1.0 if sampling is None else float(sampling.temperature)
    return model, chosen


def read_sequences(
    model: nn.Module, ids: Sequence[torch.Tensor], trained: Sequence[torch.Tensor], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_θ and the entropy of the trained tokens, both (B, T) in the places of their ids, 0 elsewhere.

    Raises ValueError where no token is trained.
    """
    values = read(model, ids, trained, temperature)
    places = padded(trained).to(values[0].device)
    log_probs, entropy = (each.new_zeros(places.shape).masked_scatter(places, each) for each in values)
    return log_probs, entropy
