"""The report of `rlpost data report`: the form of the rows, their repeated prompts, lengths and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlpost.data.datasets import LocatedRows, first_row, located_rows
from rlpost.data.demonstrations import BadRows, Demonstration, Fault, Sample
from rlpost.data.encoding import Encoder
from rlpost.data.formats import PREFERENCE_COLUMNS, chosen_column, is_preference
from rlpost.data.rows import Row
from rlpost.envs.row_checks import DemonstrationRows, PromptRows, asked
from rlpost.errors import DataError
from rlpost.settings import DatasetSettings
from rlpost.text import counted

TOKENISED = 2000  # rows whose lengths are counted in tokens, spread over the file
SHOWN_DUPLICATES = 5


def report_rows(settings: DatasetSettings, tokenizer: Any) -> RowReport:
    """Read both splits of `settings`; raises DataError for a path that holds none."""
    encoder = Encoder(tokenizer)
    bad = BadRows()
    splits: dict[str, SplitReport] = {}
    prompts: dict[str, set[str]] = {}
    form = ""
    for split in dict.fromkeys((settings.split, "test")):
        shown: PromptRows | DemonstrationRows = _demonstrated(settings)
        try:
            rows = _read(settings, split, shown, bad)
        except DataError:
            if split == settings.split:
                raise
            continue  # no row is held out
        form = form or _form_of(shown)
        identities = [shown.identity(row) for row in rows]
        prompts[split] = set(identities)
        splits[split] = _split_report(rows, identities, shown, encoder)
    shared = len(prompts.get("test", set()) & prompts[settings.split]) if settings.split != "test" else 0
    return RowReport(form, splits, shared, bad, encoder.chat.template)


@dataclass(frozen=True)
class RowReport:
    """The report on the rows of a dataset."""

    form: str
    splits: dict[str, SplitReport]
    shared: int  # prompts that are in both test and train
    bad: BadRows
    template: str

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
        return lines + [f"             {line}" for causes in self.bad.causes.values() for line in causes.lines()]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {
            "form": self.form,
            "template": self.template,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "shared": self.shared,
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


def _demonstrated(settings: DatasetSettings) -> PromptRows | DemonstrationRows:
    """How the rows are read: as demonstrations if the first one is one, or a preference, else as prompts."""
    first = first_row(settings.path, settings.split, settings.config)
    prompts = PromptRows(replace(settings, reward=[], reward_weights=None))
    if first is None:
        return DemonstrationRows(settings)
    demonstrations = DemonstrationRows(settings)
    if complaint := demonstrations.complaint(first):
        if complaint[0] != PREFERENCE_COLUMNS[0] or not is_preference(first):
            return prompts
        demonstrations = DemonstrationRows(replace(settings, **{chosen_column(first): PREFERENCE_COLUMNS[0]}))
        return prompts if demonstrations.complaint(first) else demonstrations
    messages = demonstrations.demonstration("", first).messages
    return prompts if messages and messages[-1]["role"] == "user" else demonstrations


def _read(settings: DatasetSettings, split: str, shown: PromptRows | DemonstrationRows, bad: BadRows) -> LocatedRows:
    rows = located_rows(
        settings.path,
        split,
        (),
        settings.limit if split == settings.split else None,
        config=settings.config,
        check=shown.complaint,
        prepare=shown.prepared if isinstance(shown, PromptRows) else dict,
        held_out=settings.held_out,
        test_path=settings.test_path,
        prompt=shown.identity,
        malformed=lambda where, wrong: bad.add(Sample(where, fault=Fault.malformed, reason=wrong)),
    )
    bad.total += len(rows)
    return rows


def _split_report(
    rows: LocatedRows, identities: Sequence[str], shown: PromptRows | DemonstrationRows, encoder: Encoder
) -> SplitReport:
    first: dict[str, int] = {}
    repeated = [(n, first[prompt]) for n, prompt in enumerate(identities) if first.setdefault(prompt, n) != n]
    chosen = list(enumerate(identities))[:: max(1, len(rows) // TOKENISED)]
    samples = [encoder.encode(_demonstration(shown, rows[n], prompt, rows.where(n))) for n, prompt in chosen]
    lengths = sorted(len(sample.ids) for sample in samples)
    faults = BadRows()
    for sample in samples if isinstance(shown, DemonstrationRows) else ():
        faults.add(sample)
    shares = {"median": 0.5, "95% up to": 0.95, "longest": 1.0} if lengths else {}  # every row may be bad
    return SplitReport(
        rows=len(rows),
        repeated=len(repeated),
        examples=[
            f"{rows.where(n)} repeats {_beside(rows.where(n), rows.where(earlier))}"
            for n, earlier in repeated[:SHOWN_DUPLICATES]
        ],
        tokenised=len(lengths),
        faults=faults.lines(),
        lengths={name: lengths[min(int(share * len(lengths)), len(lengths) - 1)] for name, share in shares.items()},
    )


def _demonstration(shown: PromptRows | DemonstrationRows, row: Row, prompt: str, where: str) -> Demonstration:
    """The row as the model reads it: a demonstration, or the prompt alone."""
    if isinstance(shown, DemonstrationRows):
        return shown.demonstration(where, row)
    return Demonstration(where, asked(row[shown.key]) if shown.of_messages else [{"role": "user", "content": prompt}])


def _form_of(shown: PromptRows | DemonstrationRows) -> str:
    if isinstance(shown, PromptRows):
        messages = " of messages" if shown.of_messages else ""
        answer = f", answers in {shown.answer_column}" if shown.answered else ""
        return f"prompts{messages} in {shown.column}{answer}: for rlpost train grpo"
    for setting in ("prompt_column", "completion_column"):
        if getattr(shown.settings, setting) == PREFERENCE_COLUMNS[0]:
            word = f"env.{setting}={PREFERENCE_COLUMNS[0]}"
            return f"preferences ({', '.join(PREFERENCE_COLUMNS)}): for rlpost train dpo, or rlpost train sft {word}"
    also = ", or with env.reward for rlpost train grpo" if shown.answers else ""
    return f"demonstrations, {shown.form}: for rlpost train sft{also}"


def _repeating(rows: int) -> str:
    return f"{rows:,} {'repeats' if rows == 1 else 'repeat'} a prompt"


def _beside(where: str, earlier: str) -> str:
    """The place `earlier`, without its file where that is the file of `where`."""
    file, _, row = earlier.rpartition(", ")
    return row if where.rpartition(", ")[0] == file else earlier
