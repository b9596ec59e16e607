"""Small stand-ins for a user's data, shipped so that examples and tests need nothing else."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import Any

import torch


class DummyStrDataLoader:
    """An endless source of meaningless prompts: `{"text": ...}`, ten random lower-case letters each.

    With `batch_size` 0 an element is one prompt, otherwise a list of `batch_size` prompts. Each iteration starts
    again with the first prompt of `seed`.
    """

    def __init__(self, batch_size: int = 0, *, seed: int = 0) -> None:
        self.batch_size = batch_size
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        letters = random.Random(self.seed)
        while True:
            texts = ["".join(letters.choices(string.ascii_lowercase, k=10)) for _ in _rows(self)]
            yield {"text": texts if self.batch_size else texts[0]}


class DummyTensorDataLoader:
    """An endless source of prompts of random ids: `{"tokens": ..., "attention_mask": ...}`, both int64.

    A prompt has 1 to `max_length` ids below `vocab_size`. With `batch_size` 0 an element is one
    prompt (T,); otherwise it is `batch_size` of them, ragged lists of (T,), or with `padding` one tensor
    (B, max_length), padded on the left with 0. Each iteration starts again with the first prompt of `seed`.
    """

    def __init__(
        self,
        batch_size: int = 0,
        *,
        max_length: int = 10,
        vocab_size: int = 256,
        padding: bool = False,
        seed: int = 0,
    ) -> None:
        self.batch_size = batch_size
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.padding = padding
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            rows = [self._prompt(generator) for _ in _rows(self)]
            masks = [torch.ones_like(row) for row in rows]
            if self.padding:
                rows, masks = (
                    [torch.nn.functional.pad(row, (self.max_length - row.numel(), 0)) for row in column]
                    for column in (rows, masks)
                )
            if not self.batch_size:
                yield {"tokens": rows[0], "attention_mask": masks[0]}
            elif self.padding:
                yield {"tokens": torch.stack(rows), "attention_mask": torch.stack(masks)}
            else:
                yield {"tokens": rows, "attention_mask": masks}

    def _prompt(self, generator: torch.Generator) -> torch.Tensor:
        length = int(torch.randint(1, self.max_length + 1, (), generator=generator))
        return torch.randint(self.vocab_size, (length,), generator=generator)


def _rows(loader: DummyStrDataLoader | DummyTensorDataLoader) -> range:
    return range(max(1, loader.batch_size))
