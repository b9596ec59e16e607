"""Encoding demonstrations as samples, and pairs of replies as pairs of them: token ids, and which are trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlpost.data import faults
from rlpost.data.chat import ChatMask, MaskError
from rlpost.data.demonstrations import Demonstration, E, Encoded, Pair, Sample
from rlpost.data.faults import BadRow, BadRows, Fault
from rlpost.data.formats import IDS, MASK, PAIR_COLUMNS, RENDERED, RESTARTS
from rlpost.data.habits import reply_text
from rlpost.data.messages import messages_in
from rlpost.data.rendering import text_ids
from rlpost.data.template_choice import not_read

if TYPE_CHECKING:
    from rlpost.data.datasets import ShownRows

E_co = TypeVar("E_co", bound=Encoded, covariant=True)


class Encoder:
    """Turns demonstrations into samples with one tokenizer; longer pieces are cut at `max_tokens` (None: never).

    Raises ConfigError for a tokenizer without character offsets.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.chat = ChatMask(tokenizer)
        self._chats: dict[str, tuple[ChatMask, list[str]]] = {"": (self.chat, [])}  # by the variables that rows bring

    def encode(self, demonstration: Demonstration) -> Sample:
        """The sample of one demonstration; a bad one has a `fault`, nothing is raised."""
        where = demonstration.where
        if demonstration.wrong:
            return Sample(where, fault=Fault.malformed, reason=demonstration.wrong)
        try:
            chat, notes = self._chat(demonstration.variables)
            if demonstration.messages is None:
                pieces = [self._text(demonstration.text or "")]
            else:
                shown, more = chat.pieces(demonstration.messages, demonstration.tools)
                notes = [*notes, *more]
                pieces = [(piece.ids, piece.mask) for piece in shown]
        except MaskError as error:
            return Sample(where, fault=error.fault, reason=str(error))
        if len(pieces) > 1:
            notes = [*notes, f"read in several pieces, since {self.chat.template} changes earlier turns"]
        if not any(any(mask) for _, mask in pieces):
            ids, mask = pieces[0]
            return Sample(where, ids, mask, fault=Fault.empty, reason=_untrained(demonstration))
        return self._cut(where, pieces, tuple(dict.fromkeys(notes)))

    def _chat(self, variables: Mapping[str, Any] | None) -> tuple[ChatMask, list[str]]:
        """Masks made with a row's template variables, and a note for each variable that the template does not read."""
        key = json.dumps(variables, sort_keys=True) if variables else ""
        if key not in self._chats:
            self._chats[key] = ChatMask(self.tokenizer, variables=variables), not_read(self.tokenizer, variables)
        return self._chats[key]

    def _text(self, text: str) -> tuple[list[int], list[bool]]:
        """Plain text, with the tokenizer's bos token, if any, and its eos token.

        All but the first token, which nothing predicts, is trained. Raises MaskError without an eos token.
        """
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise MaskError("the tokenizer has no eos_token to end a text with: give it one", Fault.endless)
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
        remaining = f"{left} of its {before} trained are left" if left else "no trained one is left"
        reason = f"{longest:,} tokens, more than max_tokens={limit}: {remaining}"
        return replace(sample, fault=Fault.cut, reason=reason)


def _untrained(demonstration: Demonstration) -> str:
    if demonstration.messages is None:
        return "its text is empty"
    reason = "no message of the assistant is trained"
    if demonstration.messages[-1]["role"] == "user":
        reason += "; it ends with the user's: a prompt, for rlpost train grpo"
    return reason


class PairEncoder:
    """Turns pairs of replies into pairs of samples with one tokenizer; one longer than `max_tokens` is a fault.

    Raises ConfigError for a tokenizer without character offsets.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._encoder = Encoder(tokenizer)

    def encode(self, shown: Demonstration) -> Pair:
        """The pair of samples; a bad one has a `fault`, nothing is raised.

        Sampled ids are taken as they are where they are this tokenizer's, else the messages are tokenised.
        """
        where, prompt = shown.where, shown.messages or []
        nothing = Sample(where)
        if shown.wrong:
            return Pair(where, nothing, nothing, Fault.malformed, shown.wrong)
        if shown.sampled:
            if (sampled := self._as_sampled(where, shown.sampled)) is not None:
                return self._pair(where, *sampled)
            if not prompt:
                reason = "its ids are those of another tokenizer, and it has no messages"
                return Pair(where, nothing, nothing, Fault.foreign, reason)
        whole = [replace(shown, messages=[*prompt, *reply], replies=()) for reply in shown.replies]
        return self._pair(where, *map(self._encoder.encode, whole))

    def _pair(self, where: str, chosen: Sample, rejected: Sample) -> Pair:
        for name, sample in zip(PAIR_COLUMNS, (chosen, rejected), strict=True):
            if sample.fault is not None:
                return Pair(where, chosen, rejected, sample.fault, f"{name}: {sample.reason}")
            if (size := sample.longest) > self.max_tokens:
                reason = f"{name} has {size:,} tokens with its prompt, more than max_tokens={self.max_tokens}"
                return Pair(where, chosen, rejected, Fault.cut, reason)
        if chosen.content == rejected.content:
            reason = "chosen and rejected are the same tokens, as the chat template writes them"
            return Pair(where, chosen, rejected, Fault.equal, reason)
        return Pair(where, chosen, rejected)

    def _as_sampled(self, where: str, row: Mapping[str, Any]) -> list[Sample] | None:
        """The samples with a row's own ids; None if those are another tokenizer's.

        A sampled prompt was this text, tokenised once: its ids are found the same way again.
        """
        prompt = list(self.tokenizer(row[RENDERED], add_special_tokens=False)["input_ids"])
        samples = []
        for name in PAIR_COLUMNS:
            ids = row[name + IDS]
            messages = messages_in(row[name]) or [{"role": "assistant", "content": row[name]}]
            last = next((str(each["content"]) for each in reversed(messages) if each["role"] == "assistant"), "")
            if last not in reply_text(self.tokenizer, ids):
                return None
            mask = [*[False] * len(prompt), *(row.get(name + MASK) or [True] * len(ids))]
            restarts = [len(prompt) + each for each in row.get(name + RESTARTS) or []]
            samples.append(Sample(where, [*prompt, *ids], mask, restarts=restarts))
        return samples


class RowEncoder(Protocol[E_co]):
    """An `Encoder`, or that of pairs."""

    def encode(self, demonstration: Demonstration, /) -> E_co:
        """The row as it is trained on; a bad one has a `fault`, nothing is raised."""
        ...


def counted_in(bad: BadRows, sample: E) -> E:
    """The sample, counted in `bad` with its fault and its notes."""
    bad.total += 1
    bad.notes.update({note for each in sample.samples for note in each.notes})
    if sample.fault is not None:
        bad.add(sample.where, sample.reason, sample.fault)
    return sample


def encode_all(
    demonstrations: Iterable[Demonstration], encoder: RowEncoder[E], *, max_bad_share: float = 1.0
) -> tuple[list[E], BadRows]:
    """The samples that can be trained on, cut ones included, and the bad rows.

    Raises DataError if more than `max_bad_share` of the rows are bad, or none can be trained on.
    """
    bad = BadRows()
    encoded = (counted_in(bad, encoder.encode(each)) for each in demonstrations)
    samples = [sample for sample in encoded if sample.num_trained]
    if bad.count and (not samples or bad.share > max_bad_share):
        raise bad.error(allowed=max_bad_share)
    return samples, bad


class LazySamples(Sequence[E]):
    """Samples of many rows, each encoded when it is read.

    Every `apart`-th row is examined in the beginning, at most `faults.SAMPLE`, each other one when `meet` reads it:
    `bad` has those of both. Raises DataError if more than `max_bad_share` are bad (of the examined rows, and of all
    rows for malformed ones), or if none of the examined ones can be trained on.
    """

    def __init__(self, shown: ShownRows, encoder: RowEncoder[E], *, max_bad_share: float = 1.0) -> None:
        self.shown, self.encoder, self.max_bad_share = shown, encoder, max_bad_share
        self.digests = shown.digests  # one number a row
        self.malformed = BadRows(len(shown) + len(shown.wrong), shown.rows.bad.found)
        self.bad = BadRows()
        self.skipped = 0  # untrainable rows that were drawn, over all passes
        self.num_read = self.num_trained = 0  # tokens of the samples examined in the beginning
        self.met = 0  # bad rows found when they were drawn
        self.apart = -(-len(shown) // faults.SAMPLE)
        for number in range(0, len(shown), self.apart):
            sample = counted_in(self.bad, self[number])
            self.num_read += sample.num_read
            self.num_trained += sample.num_trained
        self.looked_at = self.bad.total
        self._check()

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
        counted_in(self.bad, sample)
        if sample.fault is None:
            return sample, False
        self.met += 1
        self._check()
        return sample, True

    def _check(self) -> None:
        if not self.num_trained or self.malformed.share + self.bad.share > self.max_bad_share:
            also = f"with {self.malformed.count:,} malformed " if self.bad.count and self.malformed.count else ""
            raise (self.bad if self.bad.count else self.malformed).error(allowed=self.max_bad_share, also=also)

    # Resuming

    def fingerprint(self, numbers: Iterable[int]) -> str:
        """A hash of the ids and masks of these rows: changes with the tokenizer, template or limit."""
        written = repr([sample.content for sample in map(self.__getitem__, numbers)])
        return hashlib.blake2b(written.encode(), digest_size=4).hexdigest()

    def state(self) -> dict[str, Any]:
        """The counts so far, as JSON-compatible values."""
        found = [[bad.where, bad.reason, bad.fault.name] for bad in self.bad.found]
        return {"skipped": self.skipped, "met": self.met, "total": self.bad.total, "bad": found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.skipped, self.met = state["skipped"], state["met"]
        found = [BadRow(where, reason, Fault[name]) for where, reason, name in state["bad"]]
        self.bad = BadRows(state["total"], found)
