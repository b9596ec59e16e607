"""The report of `rlpost data report`: the form of the rows, their repeated prompts, lengths and faults."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlpost.data.datasets import LocatedRows, first_row, located_rows
from rlpost.data.demonstrations import BadRows, Demonstration, Fault, Sample
from rlpost.data.encoding import Encoder, RowEncoder
from rlpost.data.formats import (
    ANSWER,
    CHOSEN,
    PAIR_COLUMNS,
    RowReader,
    Wanted,
    chosen_column,
    demonstration,
    is_preference,
    not_used,
)
from rlpost.data.pairs import PairEncoder, Preference, preference
from rlpost.data.rendering import template_name
from rlpost.data.rows import Row, same_prompt
from rlpost.envs.row_checks import PromptRows
from rlpost.errors import DataError
from rlpost.settings import DatasetSettings
from rlpost.text import counted

TOKENISED = 2000  # rows whose lengths are counted in tokens, spread over the file
SHOWN_DUPLICATES = 5


def report_rows(settings: DatasetSettings, tokenizer: Any) -> RowReport:
    """Read both splits of `settings`; raises DataError for a path that holds none."""
    reader = _reader(settings)
    encoder = PairEncoder(tokenizer, sys.maxsize) if reader.wanted is Wanted.pair else Encoder(tokenizer)
    bad = BadRows()
    splits: dict[str, SplitReport] = {}
    prompts: dict[str, set[str]] = {}
    form = ""
    unused: Counter[str] = Counter()
    for split in dict.fromkeys((settings.split, "test")):
        reader.unused = Counter()
        try:
            rows = _read(settings, split, reader, bad)
        except DataError:
            if split == settings.split:
                raise
            continue  # no row is held out
        unused |= reader.unused  # one file has both splits
        identities = [same_prompt(reader.identity(row)) for row in rows]
        prompts[split] = set(identities)
        splits[split] = _split_report(rows, identities, reader, encoder)
        form = form or (len(rows) > 0 and _form_of(reader, rows[0])) or ""
    shared = len(prompts.get("test", set()) & prompts[settings.split]) if settings.split != "test" else 0
    return RowReport(form or reader.form, splits, shared, bad, template_name(tokenizer), dict(unused))


@dataclass(frozen=True)
class RowReport:
    """The report on the rows of a dataset."""

    form: str
    splits: dict[str, SplitReport]
    shared: int  # prompts that are in both test and train
    bad: BadRows
    template: str
    unused: dict[str, int]  # columns and entries that nothing reads -> in how many rows

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"form       {self.form}", f"template   {self.template}"]
        for name, split in self.splits.items():
            lines.append(f"{name:<10} {counted(split.rows, 'row')}, {_repeating(split.repeated)}")
            lines += [f"             {example}" for example in split.examples]
            if split.tokenised:
                of = "" if split.tokenised == split.rows else f" (of {split.tokenised:,} rows)"
                told = ", ".join(f"{name} {length:,}" for name, length in split.lengths.items())
                lines.append(f"             tokens: {told}{of}")
            lines += [f"             {fault}" for fault in split.faults]
        are = "is" if self.shared == 1 else "are"
        lines.append(f"overlap    {counted(self.shared, 'prompt')} of test {are} in train too")
        lines.append(f"bad rows   {self.bad.count:,} of {self.bad.total:,}")
        lines += [f"             {line}" for causes in self.bad.causes.values() for line in causes.lines()]
        return lines + (["not used  " + not_used(self.unused).removeprefix("not used:")] if self.unused else [])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {
            "form": self.form,
            "template": self.template,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "shared": self.shared,
            "not_used": self.unused,
            "bad": {
                "rows": self.bad.total,
                "bad": self.bad.count,
                "first": [{"row": sample.where, "reason": sample.reason} for sample in self.bad.first],
            },
        }


@dataclass(frozen=True)
class SplitReport:
    """The rows of one split: their number, repeated prompts, and lengths in tokens."""

    rows: int
    repeated: int  # rows whose prompt an earlier row has
    examples: list[str]  # the first such rows, with the place of the earlier one
    tokenised: int
    faults: list[str]  # why tokenised rows cannot be trained on
    lengths: dict[str, int]  # tokens at shares of the rows: median, 95%, longest; of prompts or of demonstrations


def _reader(settings: DatasetSettings) -> RowReader:
    """How the rows are read: as pairs or demonstrations if the first one is one, else as prompts."""
    first = first_row(settings.path, settings.split, settings.config)
    if first is not None and is_preference(first):
        return RowReader(settings, Wanted.pair)
    reader = RowReader(settings, Wanted.demonstration)
    if first is None:
        return reader
    if reader.complaint(first) is None and (reader.read(first).replies or reader.text):
        return RowReader(settings, Wanted.demonstration)
    return PromptRows(replace(settings, reward=[], reward_weights=None))


def _read(settings: DatasetSettings, split: str, reader: RowReader, bad: BadRows) -> LocatedRows:
    rows = located_rows(
        settings.path,
        split,
        (),
        settings.limit if split == settings.split else None,
        config=settings.config,
        check=reader.complaint,
        held_out=settings.held_out,
        test_path=settings.test_path,
        prompt=reader.identity,
        malformed=lambda where, wrong: bad.add(Sample(where, fault=Fault.malformed, reason=wrong)),
    )
    bad.total += len(rows)
    return rows


def _split_report(
    rows: LocatedRows, identities: Sequence[str], reader: RowReader, encoder: RowEncoder[Any]
) -> SplitReport:
    first: dict[str, int] = {}
    repeated = [(n, first[prompt]) for n, prompt in enumerate(identities) if first.setdefault(prompt, n) != n]
    chosen = range(0, len(rows), max(1, len(rows) // TOKENISED))
    encoded = [encoder.encode(_shown(reader, rows[n], rows.where(n))) for n in chosen]
    lengths = sorted(len(sample.ids) for each in encoded for sample in each.samples)
    faults = BadRows()
    for each in encoded if reader.wanted is not Wanted.prompt else ():
        faults.add(each)
    shares = {"median": 0.5, "95% up to": 0.95, "longest": 1.0} if lengths else {}  # every row may be bad
    return SplitReport(
        rows=len(rows),
        repeated=len(repeated),
        examples=[
            f"{rows.where(n)} repeats {_beside(rows.where(n), rows.where(earlier))}"
            for n, earlier in repeated[:SHOWN_DUPLICATES]
        ],
        tokenised=len(encoded),
        faults=faults.lines(),
        lengths={name: lengths[min(int(share * len(lengths)), len(lengths) - 1)] for name, share in shares.items()},
    )


def _shown(reader: RowReader, row: Row, where: str) -> Demonstration | Preference:
    """The row as the model reads it."""
    return (preference if reader.wanted is Wanted.pair else demonstration)(where, row, reader)


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


def _repeating(rows: int) -> str:
    return f"{rows:,} {'repeats' if rows == 1 else 'repeat'} a prompt"


def _beside(where: str, earlier: str) -> str:
    """The place `earlier`, without its file where that is the file of `where`."""
    file, _, row = earlier.rpartition(", ")
    return row if where.rpartition(", ")[0] == file else earlier
