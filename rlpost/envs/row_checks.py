"""Checks of the rows that environments read: without torch, so that a bad row is reported before anything heavy loads.

A check returns the field of a row and its fault, or None.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rlpost.data.datasets import examined, local_sources
from rlpost.data.formats import ANSWER_COLUMNS, RowReader, Wanted
from rlpost.data.rows import Complaint, Complaints, PackedRows, Row, kind_of, missing, text_complaint
from rlpost.errors import DataError
from rlpost.files import paths_in
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.gsm8k import split_solution
from rlpost.settings import DatasetSettings, EnvSettings, GSM8KSettings, IFEvalSettings, MathSettings

QUESTIONS = ("problem", "question")  # columns of MATH; the first that a row has is used
MOST_ROWS = 50_000  # examined in a split
MOST_BYTES = 8 << 20  # of a file that is read whole; only the first row of a larger one is examined
Check = Callable[[Row], Complaint | None]


def look_at_rows(
    settings: EnvSettings,
    splits: Sequence[str],
    *,
    demonstrated: bool,
    paired: bool = False,
    max_bad_share: float | None = None,
) -> Look:
    """Look at the rows that `settings` name.

    `demonstrated` is whether the rows are learned from as they are: as demonstrations, or as pairs if `paired`.
    Rows on the hub are not downloaded. Raises DataError with file, row and field of the bad rows if there are more
    than `max_bad_share` (None: any), as reading them for `splits` would.
    """
    path = getattr(settings, "path", None)
    if not isinstance(path, str):
        return Look()
    columns: dict[str, None] = {}
    whole = True
    unused: Counter[str] = Counter()
    for split in splits:
        reader = None
        if isinstance(settings, DatasetSettings):
            reader = reader_of(settings, demonstrated=demonstrated, paired=paired)
        check = reader.complaint if reader else check_of(settings)
        found = check and _look(settings, path, split, check, max_bad_share)
        whole = whole and found is not None
        columns |= dict.fromkeys(found or ())
        if reader and split == settings.split:
            unused = reader.unused
    return Look(list(columns) if whole else None, unused)


@dataclass(frozen=True)
class Look:
    """The findings of a look at rows: their columns, and how many say what nothing reads."""

    columns: list[str] | None = None  # None: not all rows were examined
    unused: Mapping[str, int] = field(default_factory=dict)


def check_of(settings: EnvSettings) -> Check | None:
    """The check of the rows that an environment with rows of its own form names; None for any other."""
    match settings:
        case GSM8KSettings():
            return lambda row: text_complaint(row, ("question",)) or gsm8k_complaint(row)
        case MathSettings():
            return math_complaint
        case IFEvalSettings():  # the environment checks each instruction, with its extra installed
            return lambda row: text_complaint(row, ("prompt",)) or _absent(row, "instruction_id_list")
    return None


def reader_of(settings: DatasetSettings, *, demonstrated: bool, paired: bool, **roles: str) -> RowReader:
    """The reader of rows of one's own; for `demonstrated` and `paired` see `look_at_rows`."""
    if not demonstrated:
        return PromptRows(settings, **roles)
    return RowReader(settings, Wanted.pair if paired else Wanted.demonstration, **roles)


def gsm8k_complaint(row: Row) -> Complaint | None:
    """No answer, or one that does not end in "#### " and a number."""
    if complaint := text_complaint(row, ("answer",)):
        return complaint
    try:
        split_solution(row["answer"])
    except ValueError as error:
        return "answer", str(error)
    return None


def math_complaint(row: Row) -> Complaint | None:
    """No problem, or no right answer that can be compared."""
    from rlpost.rewards.math_answers import MAX_CHARACTERS

    name = next((name for name in QUESTIONS if isinstance(row, Mapping) and name in row), QUESTIONS[0])
    if complaint := text_complaint(row, (name,)):
        return complaint
    answer = math_answer(row)
    if answer is None:
        field = "answer" if "answer" in row else "solution"
        no_answer = "has no right answer: no text in answer, and no \\boxed{} at the end of solution"
        return _absent(row, field) or (field, no_answer)
    if len(answer) > MAX_CHARACTERS:
        return "answer", f"has {len(answer)} characters: at most {MAX_CHARACTERS} are compared"
    return None


def math_question(row: Mapping[str, Any]) -> str:
    """The problem of a row of MATH or its like."""
    return next(str(row[name]) for name in QUESTIONS if name in row)


def math_answer(row: Mapping[str, Any]) -> str | None:
    r"""The right answer of a row: `answer` (what follows its "####") or a last `\boxed{}`; None without one."""
    from rlpost.rewards.math_answers import last_box

    told = str(row.get("answer", "")).rpartition("####")[2].strip()
    if not told or "\\boxed" in told:
        told = last_box(told or str(row.get("solution", ""))) or ""
    return told or None


class PromptRows(RowReader):
    """A user's rows as prompts, with the right answers that rewards compare with."""

    def __init__(self, settings: DatasetSettings, **roles: str) -> None:
        super().__init__(settings, Wanted.prompt, **roles)
        self.answer_column = settings.answer_column or ANSWER_COLUMNS[0]
        self.answered = False  # whether the first row has an answer
        self.built_in = [name for name in BUILT_IN if name in (*settings.reward, settings.accuracy)]

    def look(self, first_row: Mapping[str, Any]) -> None:
        """See `RowReader.look`; without `env.answer_column` the first row says where answers are."""
        if not self._looked and self.settings.answer_column is None:
            self.answer_column = next((name for name in ANSWER_COLUMNS if name in first_row), ANSWER_COLUMNS[0])
        if not self._looked:
            self.answered = value_at(first_row, self.answer_column) is not None
        super().look(first_row)
        self.read_columns |= {self.answer_column.partition(".")[0], self.answer_column}

    def complaint(self, row: Mapping[str, Any]) -> Complaint | None:
        """See `RowReader.complaint`; built-in rewards need an answer in each row, a named column has to exist."""
        return super().complaint(row) or self._answer_complaint(row)

    def answers(self, row: Mapping[str, Any]) -> list[str]:
        """The right answers of a row: each of them is right; none without its column."""
        value = value_at(row, self.answer_column)
        return [text for each in (value if isinstance(value, list) else [value]) if (text := as_answer(each))]

    def _answer_complaint(self, row: Mapping[str, Any]) -> Complaint | None:
        column, named = self.answer_column, self.settings.answer_column
        if not self.built_in and named is None:
            return None
        value = value_at(row, column)
        if value is None and column not in row:
            return column, missing(column, row) + ("" if named else "; name one of them with env.answer_column")
        if not self.built_in:
            return None
        answers = self.answers(row)
        if not any(map(str.strip, answers)):
            what = f"the number {value}" if isinstance(value, float) else kind_of(value)  # NaN, or infinite
            empty = isinstance(value, str) or value == []
            return column, "is empty" if empty else f"must be text or a finite number, and is {what}"
        wrong = [BUILT_IN[name].complaint(answer) for name in self.built_in for answer in answers]
        return next(((column, each) for each in wrong if each), None)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of an entry of objects in it, as `reward_model.ground_truth`; None without it."""
    if column in row or "." not in column:
        return row.get(column)
    first, _, rest = column.partition(".")
    inner = row.get(first)
    return value_at(inner, rest) if isinstance(inner, Mapping) else None


def as_answer(value: Any) -> str | None:
    """An answer as text: numbers in full, without an exponent; None unless it is text or a finite number."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) else format(Decimal(repr(value)), "f")


def answer_text(value: Any) -> str:
    """An answer as the model would write it: an object as JSON, messages as the last one's text; "" for none.

    Of several right answers it is the first.
    """
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and "content" in m for m in value):
        value = value[-1]["content"]
    elif isinstance(value, list) and value:
        value = value[0]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else as_answer(value) or ""


def _absent(row: Any, field: str, advice: str = "") -> Complaint | None:
    """The complaint about a row without `field`."""
    return None if field in row else (field, missing(field, row) + advice)


def _look(settings: EnvSettings, path: str, split: str, check: Check, max_bad_share: float | None) -> list[str] | None:
    """The columns of one split."""
    test_path = getattr(settings, "test_path", None) if split == "test" else None
    key = "env.test_path" if test_path else "env.path"
    sources = [s for each in paths_in(test_path or path) for s in local_sources(each, split, key, MOST_BYTES)]
    columns: dict[str, None] = {}
    partial = any(source.partial for source in sources)
    for source in sources:
        divided = source.shared and getattr(settings, "test_path", None) is None
        limit = settings.limit if split == settings.split and not divided else None
        complaints, kept = Complaints(source.name), PackedRows()
        for _, row in examined(source, complaints, kept, min(limit or MOST_ROWS, MOST_ROWS), check=check):
            columns |= dict.fromkeys(map(str, row))
        if complaints.count > (max_bad_share or 0.0) * complaints.rows:
            raise complaints.error(max_bad_share)
        partial = partial or complaints.rows == MOST_ROWS
        if not complaints.rows and not source.partial:
            raise DataError(f"{source.name} holds no rows: give a file with one JSON object a line")
    return list(columns) if sources and not partial else None
