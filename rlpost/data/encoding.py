"""Encoding demonstrations as samples: token ids, and which of them are trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlpost.data import rows
from rlpost.data.chat import ChatMask, MaskError
from rlpost.data.demonstrations import BadRows, Demonstration, E, Encoded, Fault, Sample
from rlpost.data.rendering import text_ids
from rlpost.data.rows import OR_MORE, Causes

if TYPE_CHECKING:
    from rlpost.data.datasets import DemonstratedRows

E_co = TypeVar("E_co", bound=Encoded, covariant=True)


class Encoder:
    """Turns demonstrations into samples with one tokenizer; longer pieces are cut at `max_tokens` (None: never).

    Raises ConfigError for a tokenizer without character offsets.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.chat = ChatMask(tokenizer)
        self._chats = {"": self.chat}  # by the variables that rows bring

    def encode(self, demonstration: Demonstration) -> Sample:
        """The sample of one demonstration; a bad one has a `fault`, nothing is raised."""
        where = demonstration.where
        if demonstration.wrong:
            return Sample(where, fault=Fault.malformed, reason=demonstration.wrong)
        notes: list[str] = []
        try:
            if demonstration.messages is None:
                pieces = [self._text(demonstration.text or "")]
            else:
                shown, notes = self._chat(demonstration).pieces(demonstration.messages, demonstration.tools)
                pieces = [(piece.ids, piece.mask) for piece in shown]
        except MaskError as error:
            return Sample(where, fault=error.fault, reason=str(error))
        if len(pieces) > 1:
            notes.append(f"read in several pieces, since {self.chat.template} changes earlier turns")
        if not any(any(mask) for _, mask in pieces):
            ids, mask = pieces[0]
            return Sample(where, ids, mask, fault=Fault.empty, reason=_untrained(demonstration))
        return self._cut(where, pieces, tuple(dict.fromkeys(notes)))

    def _chat(self, demonstration: Demonstration) -> ChatMask:
        """The masks of the chat template with the variables of a row."""
        variables = demonstration.variables
        key = json.dumps(variables, sort_keys=True) if variables else ""
        if key not in self._chats:
            self._chats[key] = ChatMask(self.tokenizer, variables=variables)
        return self._chats[key]

    def _text(self, text: str) -> tuple[list[int], list[bool]]:
        """Plain text, with the tokenizer's bos token, if any, and its eos token.

        All but the first token, which nothing predicts, is trained. Raises MaskError without an eos token.
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

    def _cut(self, where: str, pieces: list[tuple[list[int], list[bool]]], notes: tuple[str, ...]) -> Sample:
        """The sample of `pieces`, each within `max_tokens`.

        It is a fault where an answer loses something, its end-of-turn token included.
        """
        limit = self.max_tokens
        ids, mask, restarts = [], [], []
        for own, trained in pieces:
            if ids:
                restarts.append(len(ids))
            ids += own[:limit]
            mask += trained[:limit]
        sample = Sample(where, ids, mask, restarts=restarts, notes=notes)
        before, left = sum(sum(trained) for _, trained in pieces), sample.num_trained
        if left == before:  # at most what follows the last answer went
            return sample
        longest = max(len(own) for own, _ in pieces)
        told = f"{left} of its {before} trained are left" if left else "no trained one is left"
        reason = f"{longest:,} tokens, more than max_tokens={limit}: {told}"
        return replace(sample, fault=Fault.cut, reason=reason)


def _untrained(demonstration: Demonstration) -> str:
    if demonstration.messages is None:
        return "its text is empty"
    reason = "no message of the assistant is trained"
    if demonstration.messages[-1]["role"] == "user":
        reason += "; it ends with the user's: a prompt, for rlpost train grpo"
    return reason


class RowEncoder(Protocol[E_co]):
    """An `Encoder`, or that of pairs."""

    def encode(self, demonstration: Any, /) -> E_co:
        """The row as it is trained on; a bad one has a `fault`, nothing is raised."""
        ...


def encode_all(
    demonstrations: Iterable[Any], encoder: RowEncoder[E], *, max_bad_share: float = 1.0
) -> tuple[list[E], BadRows]:
    """The samples that can be trained on, cut ones included, and the count of bad rows.

    Raises DataError if more than `max_bad_share` of the rows are bad, or none can be trained on.
    """
    bad = BadRows()
    samples: list[E] = []
    for demonstration in demonstrations:
        sample = encoder.encode(demonstration)
        bad.add(sample)
        if sample.num_trained:
            samples.append(sample)
    if bad.count and (not samples or bad.count > max_bad_share * bad.total):
        if not samples:
            raise bad.error("none can be trained on")
        raise bad.error(f"more than the {max_bad_share:.0%} allowed", OR_MORE)
    return samples, bad


class LazySamples(Sequence[E]):
    """Samples of many rows, each encoded when it is read.

    Every `apart`-th row is examined in the beginning, at most `rows.SAMPLE`, each other one when `meet` reads it:
    `bad` counts both. Raises DataError if more than `max_bad_share` are bad (of the examined rows, and of all rows
    for malformed ones), or if none of the examined ones can be trained on.
    """

    def __init__(self, shown: DemonstratedRows[Any], encoder: RowEncoder[E], *, max_bad_share: float = 1.0) -> None:
        self.shown, self.encoder, self.max_bad_share = shown, encoder, max_bad_share
        self.digests = shown.digests  # one number a row
        self.malformed, self.bad = BadRows(total=len(shown)), BadRows()
        self.skipped = 0  # untrainable rows that were drawn, over all passes
        self.num_read = self.num_trained = 0  # tokens of the samples examined in the beginning
        for each in shown.wrong:
            self.malformed.add(encoder.encode(each))
        self.met = 0  # bad rows found when they were drawn
        self.apart = -(-len(shown) // rows.SAMPLE)
        for number in range(0, len(shown), self.apart):
            sample = self[number]
            self.bad.add(sample)
            self.num_read += sample.num_read
            self.num_trained += sample.num_trained
        self.looked_at = self.bad.total
        self._check("none of those looked at can be trained on" if not self.num_trained else "")

    def __len__(self) -> int:
        return len(self.shown)

    def __getitem__(self, number: Any) -> Any:
        """The sample of a row, bad or not."""
        return self.encoder.encode(self.shown[number])

    def meet(self, number: int, *, first_pass: bool) -> tuple[E, bool]:
        """The sample of a row that is drawn, and whether it was found bad just now. Raises DataError as above."""
        sample = self[number]
        self.skipped += not sample.num_trained
        if not first_pass or number % self.apart == 0:
            return sample, False
        self.bad.add(sample)
        if sample.fault is None:
            return sample, False
        self.met += 1
        self._check()
        return sample, True

    def _check(self, none_left: str = "") -> None:
        if none_left or self.malformed.share + self.bad.share > self.max_bad_share:
            worst = self.bad if self.bad.count else self.malformed
            also = f"with {self.malformed.count:,} malformed " if self.bad.count and self.malformed.count else ""
            if none_left:
                raise worst.error(none_left)
            raise worst.error(f"{also}more than the {self.max_bad_share:.0%} allowed", OR_MORE)

    # Resuming

    def fingerprint(self, numbers: Iterable[int]) -> str:
        """A hash of the ids and masks of these rows: changes with the tokenizer, template or limit."""
        written = repr([sample.content for sample in map(self.__getitem__, numbers)])
        return hashlib.blake2b(written.encode(), digest_size=4).hexdigest()

    def state(self) -> dict[str, Any]:
        """The counts so far, as JSON-compatible values."""
        found = {fault.name: causes.state() for fault, causes in self.bad.causes.items()}
        return {"skipped": self.skipped, "met": self.met, "total": self.bad.total, "bad": found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.skipped, self.met = state["skipped"], state["met"]
        causes = {Fault[name]: Causes.of(found) for name, found in state["bad"].items()}
        self.bad = BadRows(state["total"], causes)
