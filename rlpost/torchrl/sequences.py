"""A model's log-probs of the token sequences of a batch, for transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from tensordict import TensorDictBase
from torch import nn

from rlpost.data.chat_mask import ChatMask
from rlpost.data.history import History
from rlpost.data.ragged import Key
from rlpost.errors import ConfigError, DataError
from rlpost.torchrl.token_sequences import HISTORY, TOKENS, Sequences, read

LogProbModel = nn.Module | Callable[[TensorDictBase], TensorDictBase]

LOG_PROBS: Key = ("log_probs", "full")
TOKENS_A_PASS = 8192  # of a batch that a model reads at once


def rendered(batch: TensorDictBase, tokenizer: Any) -> tuple[Sequences, list[torch.Tensor]]:
    """The conversations under `("history", "full")` as the tokenizer's template writes them, and their assistant masks.

    Raises DataError where there is no history, or no tokenizer to write it with.
    """
    history = batch.get(HISTORY, None)
    if not isinstance(history, History):
        raise DataError(f"the batch has neither {TOKENS} nor a History under {HISTORY}")
    if tokenizer is None:
        raise DataError(f"the batch has {HISTORY} and no {TOKENS}: give tokenizer=, to write the conversations with")
    return Sequences.of_history(history, ChatMask(tokenizer))


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
    counts = [int(mask.sum()) for mask in masks]
    if not any(counts):
        return [torch.zeros(mask.numel()) for mask in masks]
    with torch.no_grad(), _evaluating(model):
        log_probs, _ = read(model, sequences.ids, masks, temperature, TOKENS_A_PASS)
    pairs = zip(masks, log_probs.float().cpu().split(counts), strict=True)
    return [torch.zeros(mask.numel()).masked_scatter(mask.cpu(), own) for mask, own in pairs]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, which would make log-probs random."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
