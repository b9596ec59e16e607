"""The form of rows, their repeated prompts, lengths and faults, for `rlpost data report`; and a preview of them."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

from rlpost.data.datasets import LocatedRows, first_row, located_rows
from rlpost.data.demonstrations import Demonstration, Sample
from rlpost.data.encoding import Encoder, PairEncoder, RowEncoder, counted_in
from rlpost.data.faults import SHOWN, BadRows, FormatError
from rlpost.data.formats import ANSWER, CHOSEN, PAIR_COLUMNS, RowReader, Wanted, chosen_column, is_preference, not_used
from rlpost.data.rendering import template_name
from rlpost.data.rows import Row
from rlpost.envs.row_checks import PromptRows
from rlpost.errors import ConfigError, DataError
from rlpost.settings import ModelSettings, OwnRowsSettings, SFTSettings
from rlpost.text import counted

TOKENISED = 2000  # rows whose lengths are counted in tokens, spread over the file
SHOWN_DUPLICATES = 5


def tokenizer_of(model: ModelSettings) -> Any:
    """The tokenizer of a model, opened the quick way where that gives the same one."""
    from rlpost.model.tokenizer import load_tokenizer, tokenizer_from_file

    if (tokenizer := tokenizer_from_file(model)) is not None:
        return tokenizer
    from rlpost.model.locate import locate_tokenizer

    return load_tokenizer(locate_tokenizer(model.path, model.revision), model)


def report_rows(settings: OwnRowsSettings, tokenizer: Any) -> RowReport:
    """Read both splits of `settings`; raises DataError for a path that holds none."""
    reader = _reader(settings)
    encoder = PairEncoder(tokenizer, sys.maxsize) if reader.wanted is Wanted.pair else Encoder(tokenizer)
    report = RowReport("", {}, 0, BadRows(), template_name(tokenizer), Counter())
    prompts: dict[str, set[int]] = {}
    for split in dict.fromkeys((settings.split, "test")):
        try:
            rows = located_rows(
                settings.path,
                split,
                reader,
                config=settings.config,
                held_out=settings.held_out,
                test_path=settings.test_path,
                max_bad_share=1.0,
            )
        except DataError:
            if split == settings.split:
                raise
            continue  # no row is held out
        if split == settings.split:
            report.unused = Counter(reader.unused)
            rows = rows.only(range(len(rows))[: settings.limit])
        report.bad.total += rows.bad.total
        report.bad.found += rows.bad.found
        prompts[split] = set(rows.prompts)
        report.splits[split] = _split_report(rows, reader, encoder)
        if len(rows) and not report.form:
            report.form = _form_of(reader, rows[0])
    report.form = report.form or reader.form
    report.shared = len(prompts.get("test", set()) & prompts[settings.split]) if settings.split != "test" else 0
    return report


@dataclass
class RowReport:
    """The report on the rows of a dataset."""

    form: str
    splits: dict[str, SplitReport]
    shared: int  # prompts that are in both test and train
    bad: BadRows
    template: str
    unused: Counter[str]  # columns and entries that nothing reads -> in how many rows

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"form       {self.form}", f"template   {self.template}"]
        for name, split in self.splits.items():
            repeat = "repeats" if split.repeated == 1 else "repeat"
            lines.append(f"{name:<10} {counted(split.rows, 'row')}, {split.repeated:,} {repeat} a prompt")
            lines += [f"             {example}" for example in split.examples]
            if split.tokenised:
                of = "" if split.tokenised == split.rows else f" (of {split.tokenised:,} rows)"
                lengths = ", ".join(f"{name} {length:,}" for name, length in split.lengths.items())
                lines.append(f"             tokens: {lengths}{of}")
            lines += [f"             {fault}" for fault in split.faults]
        are = "is" if self.shared == 1 else "are"
        lines.append(f"overlap    {counted(self.shared, 'prompt')} of test {are} in train too")
        lines.append(f"bad rows   {self.bad.count:,} of {self.bad.total:,}")
        lines += [f"             {line}" for line in self.bad.lines()]
        return lines + (["not used  " + not_used(self.unused).removeprefix("not used:")] if self.unused else [])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {
            "form": self.form,
            "template": self.template,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "shared": self.shared,
            "not_used": dict(sorted(self.unused.items())),
            "bad": {
                "rows": self.bad.total,
                "bad": self.bad.count,
                "first": [{"row": bad.where, "reason": bad.reason} for bad in self.bad.found[:SHOWN]],
            },
        }


@dataclass(frozen=True)
class SplitReport:
    """The rows of one split: their number, repeated prompts, and lengths in tokens."""

    rows: int
    repeated: int  # rows whose prompt an earlier row has
    examples: list[str]  # the first such rows, with the place of the earlier one
    tokenised: int
    faults: list[str]  # why tokenised rows cannot be trained on, and what else is worth a note
    lengths: dict[str, int]  # tokens at shares of the rows: median, 95%, longest; of prompts or of demonstrations


def _reader(settings: OwnRowsSettings) -> RowReader:
    """How the rows are read: as pairs or demonstrations if the first one is one, else as prompts."""
    first = first_row(settings.path, settings.split, settings.config)
    if first is not None and is_preference(first):
        return RowReader(settings, Wanted.pair)
    reader = RowReader(settings, Wanted.demonstration)
    if first is None:
        return reader
    with suppress(FormatError):
        shown = reader.read("", first)
        if shown.messages is None or shown.messages[-1]["role"] == "assistant":
            return reader
    return PromptRows(replace(settings, reward=[], reward_weights=None))


def _split_report(rows: LocatedRows, reader: RowReader, encoder: RowEncoder[Any]) -> SplitReport:
    first: dict[int, int] = {}
    repeated = [(n, first[prompt]) for n, prompt in enumerate(rows.prompts) if first.setdefault(prompt, n) != n]
    chosen = range(0, len(rows), max(1, len(rows) // TOKENISED))
    bad = BadRows()
    encoded = [counted_in(bad, encoder.encode(reader.read(rows.where(n), rows[n]))) for n in chosen]
    lengths = sorted(len(sample.ids) for each in encoded for sample in each.samples)
    shares = {"median": 0.5, "95% up to": 0.95, "longest": 1.0} if lengths else {}  # every row may be bad
    return SplitReport(
        rows=len(rows),
        repeated=len(repeated),
        examples=[
            f"{rows.where(n)} repeats {_beside(rows.where(n), rows.where(earlier))}"
            for n, earlier in repeated[:SHOWN_DUPLICATES]
        ],
        tokenised=len(encoded),
        faults=bad.noted() if reader.wanted is Wanted.prompt else [*bad.lines(), *bad.noted()],
        lengths={name: lengths[min(int(share * len(lengths)), len(lengths) - 1)] for name, share in shares.items()},
    )


def _form_of(reader: RowReader, row: Row) -> str:
    if isinstance(reader, PromptRows):
        messages = " of messages" if reader.chat else ""
        answer = f", answers in {reader.answer_column}" if reader.answered else ""
        return f"prompts{messages} in {reader.chat or reader.prompt}{answer}: for rlpost train grpo"
    if reader.wanted is Wanted.pair:
        word = f"env.{chosen_column(row)}={CHOSEN}"
        return f"preferences ({', '.join(PAIR_COLUMNS)}): for rlpost train dpo, or rlpost train sft {word}"
    also = ", or with env.reward for rlpost train grpo" if reader.reply == ANSWER else ""
    return f"demonstrations, {reader.form}: for rlpost train sft{also}"


def _beside(where: str, earlier: str) -> str:
    """The place `earlier`, without its file where that is the file of `where`."""
    file, _, row = earlier.rpartition(", ")
    return row if where.rpartition(", ")[0] == file else earlier


# A preview: one demonstration as the model reads it, and a summary of the first ones


class Piece(NamedTuple):
    """Neighbouring tokens of one kind, as text."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True)
class Preview:
    """One demonstration in full, and the totals of the first ones, bad ones included."""

    sample: Sample
    pieces: list[Piece]
    text: str  # as in the row
    tokens: int
    trained: int
    longest: int
    bad: BadRows
    not_used: str  # columns that nothing reads, in words

    def as_dict(self) -> dict[str, Any]:
        """The preview as JSON-compatible values."""
        sample = self.sample
        by_fault = {
            fault.name: {
                "rows": len(self.bad.of(fault)),
                "first": [{"row": each.where, "reason": each.reason} for each in self.bad.of(fault)[:SHOWN]],
            }
            for fault in dict.fromkeys(each.fault for each in self.bad.found)
        }
        return {
            "row": {
                "where": sample.where,
                "tokens": len(sample.ids),
                "trained": sample.num_trained,
                "fault": sample.fault.name if sample.fault else None,
                "reason": sample.reason or None,
                "ids": sample.ids,
                "mask": [int(trained) for trained in sample.mask],
                "pieces": [piece._asdict() for piece in self.pieces],
            },
            "rows": self.bad.total,
            "tokens": self.tokens,
            "trained": self.trained,
            "longest": self.longest,
            "bad": by_fault,
            "not_used": self.not_used,
        }


def preview_rows(settings: SFTSettings, tokenizer: Any, count: int, row: int | None) -> Preview:
    """The preview of the first `count` rows, and of the row number `row` or the first that can be used.

    Raises ConfigError if no row has that number.
    """
    from rlpost.envs.build import build_env  # it imports torch, which the report does without

    env = build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)
    rows = env.demonstrated()
    stream = env.demonstrations() if rows is None else rows.in_turn()
    first = list(islice(stream, count))
    if row is None:
        shown = next((each for each in first if not each.wrong), first[0])
    else:
        shown = next((each for each in chain(first, stream) if each.where.endswith(f" {row}")), None)
    if shown is None:
        split = settings.env.split
        also = "; it may be held out: add env.split=test eval.enabled=false" if split == "train" else ""
        raise ConfigError(f"--row {row}: the split {split} has no such row{also}")
    return preview_of(first, shown, Encoder(tokenizer, settings.max_tokens), rows.not_used if rows else "")


def preview_of(first: list[Demonstration], shown: Demonstration, encoder: Encoder, not_used: str = "") -> Preview:
    """The preview of the rows `first`, with `shown` in full."""
    bad, sample = BadRows(), encoder.encode(shown)
    samples = [counted_in(bad, encoder.encode(each)) for each in first]
    lengths, trained = [len(each.ids) for each in samples], sum(each.num_trained for each in samples)
    text = "\n".join(f"{message['role']}: {message['content']}" for message in shown.messages or ()) or shown.text or ""
    return Preview(sample, pieces_of(sample, encoder), text, sum(lengths), trained, max(lengths), bad, not_used)


def pieces_of(sample: Sample, encoder: Encoder) -> list[Piece]:
    """The sample as text, split where training begins or ends and around special tokens."""
    pieces, begin, given = [], 0, 0
    kinds = zip(sample.mask, (token in encoder.chat.special for token in sample.ids), strict=True)
    for (trained, special), tokens in groupby(kinds):
        begin += len(list(tokens))
        # decode from the beginning: a tokenizer may decode the same token differently at the start of a text
        text = encoder.tokenizer.decode(
            sample.ids[:begin], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces.append(Piece(text[given:], trained, special))
        given = len(text)
    return pieces
