"""The report of `rlpost data report`: the form of the rows, their repeated prompts, lengths and faults."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlpost.data.datasets import LocatedRows, first_row, located_rows
from rlpost.data.encoding import Encoder, PairEncoder, RowEncoder, counted_in
from rlpost.data.faults import SHOWN, BadRows, FormatError
from rlpost.data.formats import ANSWER, CHOSEN, PAIR_COLUMNS, RowReader, Wanted, chosen_column, is_preference, not_used
from rlpost.data.rendering import template_name
from rlpost.data.rows import Row
from rlpost.envs.row_checks import PromptRows
from rlpost.errors import DataError
from rlpost.settings import OwnRowsSettings
from rlpost.text import counted

TOKENISED = 2000  # rows whose lengths are counted in tokens, spread over the file
SHOWN_DUPLICATES = 5


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
