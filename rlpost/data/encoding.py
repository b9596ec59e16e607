"""Demonstrations become samples: token ids, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlpost.data.chat_mask import ChatMask, MaskError
from rlpost.data.demonstrations import BadRows, Demonstration, Fault, Sample
from rlpost.data.rendering import text_ids


class Encoder:
    """Turns demonstrations into samples with one tokenizer; what is longer than `max_tokens` is cut (None: nothing).

    Raises ConfigError for a tokenizer that cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.chat = ChatMask(tokenizer)

    def encode(self, demonstration: Demonstration) -> Sample:
        """The sample of one demonstration; what is wrong with it is told by its `fault`, never raised."""
        where = demonstration.where
        if demonstration.wrong:
            return Sample(where, fault=Fault.malformed, reason=demonstration.wrong)
        try:
            if demonstration.messages is None:
                ids, mask = self._text(demonstration.text or "")
            else:
                ids, mask = self.chat.encode(demonstration.messages, demonstration.tools)
        except MaskError as error:
            return Sample(where, fault=error.fault, reason=str(error))
        if not any(mask):
            reason = "its text is empty" if demonstration.messages is None else "no message of the assistant is trained"
            return Sample(where, ids, mask, Fault.empty, reason)
        return self._cut(Sample(where, ids, mask))

    def _text(self, text: str) -> tuple[list[int], list[bool]]:
        """Plain text, begun as the tokenizer begins any and ended with its end-of-sequence token.

        All is trained but the first token, which nothing predicts. Raises MaskError without an end.
        """
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise MaskError(Fault.endless, "the tokenizer has no eos_token to end a text with: give it one")
        if not text.strip():
            return [], []
        ids = list(text_ids(tokenizer, text))
        if ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        return ids, [False] + [True] * (len(ids) - 1)

    def _cut(self, sample: Sample) -> Sample:
        """The sample within `max_tokens`: a fault where an answer loses something, its end-of-turn token included."""
        limit, size = self.max_tokens, len(sample.ids)
        if limit is None or size <= limit:
            return sample
        ids, mask = sample.ids[:limit], sample.mask[:limit]
        if sum(mask) == sample.num_trained:  # only what follows the last answer went
            return Sample(sample.where, ids, mask)
        left = f"{sum(mask)} of its {sample.num_trained} trained are left" if any(mask) else "no trained one is left"
        return Sample(sample.where, ids, mask, Fault.cut, f"{size:,} tokens, more than max_tokens={limit}: {left}")


def encode_all(
    demonstrations: Iterable[Demonstration], encoder: Encoder, *, max_bad_share: float = 1.0
) -> tuple[list[Sample], BadRows]:
    """The samples that can be trained on, those that were cut among them, and the count of bad rows.

    Raises DataError where more than `max_bad_share` of the rows are bad, or none can be trained on.
    """
    bad = BadRows()
    samples = []
    for demonstration in demonstrations:
        sample = encoder.encode(demonstration)
        bad.add(sample)
        if sample.num_trained:
            samples.append(sample)
    if bad.count and (not samples or bad.count > max_bad_share * bad.total):
        allowed = "none can be trained on" if not samples else f"more than the {max_bad_share:.0%} allowed"
        raise bad.error(allowed)
    return samples, bad
