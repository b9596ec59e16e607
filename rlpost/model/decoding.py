"""Sampling token by token from a model, in the ways of `DECODINGS`.

`Padded` is the fast way: prompts of any length together, pads at their left, rows that end dropped. It is right if
all layers are attention over keys that a mask can hide. A layer that carries a state from token to token also reads
the pads, and its rows cannot be dropped: `Alike` puts only prompts of one length together, drops nothing and keeps
the model's own cache; `Anew` keeps no cache and reads every sequence again for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from rlpost.data.ragged import padded

CACHES = ("past_key_values", "cache_params")  # names of the cache in models' arguments and outputs


class Padded:
    """All rows in one batch, with a mask over the pads and a cache of keys and values.

    `cache` may hold the first ids of a single prompt, at most all but one of them.
    """

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], cache: DynamicCache | None = None) -> None:
        self._model = model
        self._cache = DynamicCache() if cache is None else cache
        device = next(model.parameters()).device
        rows = [torch.tensor(ids, dtype=torch.int64) for ids in prompts]
        self._mask = padded([torch.ones_like(row) for row in rows], left=True).to(device)  # (B, T)
        self._tokens = padded(rows, left=True).to(device)[:, self._cache.get_seq_length() :]

    def next_logits(self) -> torch.Tensor:
        """(rows, V), of the token that follows each row."""
        positions = (self._mask.cumsum(-1) - 1).clamp_(min=0)[:, -self._tokens.shape[1] :]
        return self._model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def go_on(self, chosen: torch.Tensor, going: torch.Tensor) -> None:
        """Append a token (rows,) to each row, and keep the rows where `going` (rows,) is True."""
        if not going.all():
            self._cache.batch_select_indices(going.nonzero().squeeze(-1))
            chosen, self._mask = chosen[going], self._mask[going]
        self._tokens = chosen[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(chosen), 1)], -1)


class Alike:
    """Rows of equal length together, in the model's own cache; none is dropped before all have ended."""

    cached = True

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], cache: DynamicCache | None = None) -> None:
        assert cache is None  # the model's own is kept, if any
        device = next(model.parameters()).device
        lengths = sorted({len(ids) for ids in prompts})
        places = [[place for place, ids in enumerate(prompts) if len(ids) == length] for length in lengths]
        self._parts = [
            _SameLength(model, torch.tensor([list(prompts[place]) for place in part], device=device), self.cached)
            for part in places
        ]
        # each row's part, and its row in that part
        where = {place: (number, row) for number, part in enumerate(places) for row, place in enumerate(part)}
        self._where = [where[place] for place in range(len(prompts))]

    def next_logits(self) -> torch.Tensor:
        """(rows, V), of the token that follows each row."""
        logits = {number: self._parts[number].next_logits() for number in {number for number, _ in self._where}}
        return torch.stack([logits[number][row] for number, row in self._where])

    def go_on(self, chosen: torch.Tensor, going: torch.Tensor) -> None:
        """Append a token (rows,) to each row, and keep the rows where `going` (rows,) is True."""
        for (number, row), token in zip(self._where, chosen, strict=True):
            self._parts[number].following[row] = token
        self._where = [where for where, goes in zip(self._where, going.tolist(), strict=True) if goes]
        for number in {number for number, _ in self._where}:
            self._parts[number].go_on()


class Anew(Alike):
    """Like `Alike`, without a cache."""

    cached = False


class _SameLength:
    """Rows of one length."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor, cached: bool) -> None:
        self._model, self._tokens, self._cached = model, tokens, cached  # (rows, T)
        self._cache: dict[str, Any] = {}
        self._last_alone = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        self.following = tokens[:, -1].clone()  # the next tokens; any token will do for a row that has ended

    def next_logits(self) -> torch.Tensor:
        output = self._model(input_ids=self._tokens, use_cache=self._cached, **self._cache, **self._last_alone)
        self._cache = {name: output[name] for name in CACHES if self._cached and output.get(name) is not None}
        return output.logits[:, -1]

    def go_on(self) -> None:
        new = self.following[:, None]
        self._tokens = new if self._cached else torch.cat([self._tokens, new], -1)


DECODINGS: dict[str, type[Padded | Alike]] = {"padded": Padded, "alike": Alike, "anew": Anew}  # fastest first


def takes(model: nn.Module, name: str) -> bool:
    """Whether the forward of `model` has an argument `name`."""
    return name in inspect.signature(model.forward).parameters
