"""Which tokens of a rendered conversation are the assistant's, for any chat template."""

from __future__ import annotations

from typing import Any

from rlpost.data.demonstrations import Fault


class MaskError(Exception):
    """A conversation whose mask cannot be found; `fault` says of which kind the reason is."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


class ChatMask:
    """Renders conversations with a tokenizer's chat template and finds the assistant's tokens in them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
