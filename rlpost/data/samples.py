"""Demonstrations become samples: token ids, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlpost.data.chat_mask import ChatMask
from rlpost.data.demonstrations import BadRows, Demonstration, Sample


class Encoder:
    """Turns demonstrations into samples with one tokenizer; longer than `max_tokens` (None: any) is cut.

    Raises ConfigError for a tokenizer that cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.chat = ChatMask(tokenizer)

    def encode(self, demonstration: Demonstration) -> Sample:
        """The sample of one demonstration; what is wrong with it is told by its `fault`, never raised."""
        raise NotImplementedError


def encode_all(
    demonstrations: Iterable[Demonstration],
    encoder: Encoder,
    *,
    max_bad_share: float = 1.0,
) -> tuple[list[Sample], BadRows]:
    """The samples that can be trained on, those that were cut among them, and the count of bad rows.

    Raises DataError where more than `max_bad_share` of the rows are bad, or none is left.
    """
    raise NotImplementedError
