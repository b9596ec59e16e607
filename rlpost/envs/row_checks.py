"""Readers of the rows of each environment: without torch, so that a bad row is named before anything heavy loads.

Each is called with a row, returns its prompt as text, and raises FormatError for a bad one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rlpost.data.datasets import Reader, good_rows, local_sources, located_rows
from rlpost.data.faults import BadRows, FormatError
from rlpost.data.formats import ANSWER_COLUMNS, RowReader, Wanted
from rlpost.data.rows import Row, missing, present, text_in
from rlpost.files import paths_in
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.gsm8k import split_solution
from rlpost.settings import EnvSettings, GSM8KSettings, IFEvalSettings, MathSettings, OwnRowsSettings

QUESTIONS = ("problem", "question")  # columns of MATH; the first that a row has is used
MOST_BYTES = 8 << 20  # of files that are read whole; only the first row of each larger one is examined


@dataclass(frozen=True)
class Look:
    """The findings of a look at rows: their columns, and how many say what nothing reads."""

    columns: list[str] | None = None  # None: not all rows were examined
    unused: Mapping[str, int] = field(default_factory=Counter)
    counts: Mapping[str, int] = field(default_factory=dict)  # of the good rows of each split, where all were examined
    bad: int = 0


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
    path, test_path = getattr(settings, "path", None), getattr(settings, "test_path", None)
    reader = reader_of(settings, demonstrated=demonstrated, paired=paired)
    if not isinstance(path, str) or reader is None:
        return Look()
    columns: dict[str, None] = {}
    counts: dict[str, int] = {}
    unused: Counter[str] = Counter()
    whole, faults = True, 0

    def examined(row: Row) -> str:
        columns.update(dict.fromkeys(map(str, row)))
        return reader(row)

    for split in splits:
        given, key = (str(test_path), "env.test_path") if test_path and split == "test" else (path, "env.path")
        by_path = [local_sources(each, split, key) for each in paths_in(given)]
        sources = [source for found in by_path for source in found]
        if not all(by_path) or sum(source.size for source in sources) > MOST_BYTES:
            whole = False
            for source in sources:
                bad = BadRows()
                list(good_rows(source, examined, bad, 1))
                if bad.share > (max_bad_share or 0.0):
                    raise bad.error(source.name, max_bad_share)
            continue
        rows = located_rows(
            path,
            split,
            examined,
            settings.limit if split == settings.split else None,
            prepare=lambda _: {},  # only their number matters
            held_out=getattr(settings, "held_out", 0.0),
            test_path=test_path,
            max_bad_share=max_bad_share,
        )
        counts[split] = len(rows)
        if split == settings.split:
            faults = rows.bad.count
            unused = Counter(reader.unused) if isinstance(reader, RowReader) else Counter()
    return Look(list(columns) if whole else None, unused, counts if whole else {}, faults)


def reader_of(settings: EnvSettings, *, demonstrated: bool, paired: bool) -> Reader | None:
    """The reader of the rows that `settings` name, see `look_at_rows`; None where nothing is known of them."""
    if not isinstance(settings, OwnRowsSettings):
        return OWN_READERS.get(type(settings))
    if not demonstrated:
        return PromptRows(settings)
    return RowReader(settings, Wanted.pair if paired else Wanted.demonstration)


def read_gsm8k(row: Row) -> str:
    """The question of a row whose answer ends in "#### " and a number."""
    question, answer = text_in(row, "question"), text_in(row, "answer")
    try:
        split_solution(answer)
    except ValueError as error:
        raise FormatError("answer", str(error)) from error
    return question


def read_math(row: Row) -> str:
    """The problem of a row that has a right answer to compare with."""
    from rlpost.rewards.math_answers import MAX_CHARACTERS

    problem = text_in(row, question_column(row))
    answer = math_answer(row)
    if answer is None:
        column = "answer" if "answer" in row else "solution"
        present(row, column)
        raise FormatError(column, "has no right answer: no text in answer, and no \\boxed{} at the end of solution")
    if len(answer) > MAX_CHARACTERS:
        raise FormatError("answer", f"has {len(answer)} characters: at most {MAX_CHARACTERS} are compared")
    return problem


def question_column(row: Row) -> str:
    """The column with the problem of a row of MATH or its like."""
    return next((name for name in QUESTIONS if isinstance(row, Mapping) and name in row), QUESTIONS[0])


def read_ifeval(row: Row) -> str:
    """The prompt of a row with instructions; the environment checks each of these, with its extra installed."""
    prompt = text_in(row, "prompt")
    present(row, "instruction_id_list")
    return prompt


OWN_READERS: dict[type[EnvSettings], Reader] = {
    GSM8KSettings: read_gsm8k,
    MathSettings: read_math,
    IFEvalSettings: read_ifeval,
}


def math_answer(row: Mapping[str, Any]) -> str | None:
    r"""The right answer of a row: `answer` (what follows its "####") or a last `\boxed{}`; None without one."""
    from rlpost.rewards.math_answers import last_box

    answer = str(row.get("answer", "")).rpartition("####")[2].strip()
    if not answer or "\\boxed" in answer:
        answer = last_box(answer or str(row.get("solution", ""))) or ""
    return answer or None


class PromptRows(RowReader):
    """A user's rows as prompts, with the right answers that rewards compare with."""

    def __init__(self, settings: OwnRowsSettings, **roles: str) -> None:
        super().__init__(settings, Wanted.prompt, **roles)
        self.answer_column = settings.answer_column or ANSWER_COLUMNS[0]
        self.answered = False  # whether the first row has an answer
        self.built_in = [name for name in BUILT_IN if name in (*settings.reward, settings.accuracy)]

    def look(self, row: Row) -> None:
        """See `RowReader.look`; without `env.answer_column` the first row says where answers are."""
        if self.settings.answer_column is None:
            self.answer_column = next((name for name in ANSWER_COLUMNS if name in row), ANSWER_COLUMNS[0])
        self.answered = value_at(row, self.answer_column) is not None
        super().look(row)
        assert self.read_columns is not None
        self.read_columns |= {self.answer_column.partition(".")[0], self.answer_column}
        if self.settings.takes_whole_rows:
            self.read_columns |= set(row)

    def __call__(self, row: Row) -> str:
        """See `RowReader`; built-in rewards need an answer in each row, and a named column has to exist."""
        prompt = super().__call__(row)
        self._check_answer(row)
        return prompt

    def answers(self, row: Row) -> list[str]:
        """The right answers of a row: each of them is right; none without its column."""
        value = value_at(row, self.answer_column)
        return [text for each in (value if isinstance(value, list) else [value]) if (text := as_answer(each))]

    def _check_answer(self, row: Row) -> None:
        column, named = self.answer_column, self.settings.answer_column
        if not self.built_in and named is None:
            return
        value = value_at(row, column)
        if value is None and column not in row:
            advice = "" if named else "; name one of them with env.answer_column"
            raise FormatError(column, missing(column, row) + advice)
        if not self.built_in:
            return
        answers = self.answers(row)
        if not any(map(str.strip, answers)):
            raise FormatError(column, f"must be text or a finite number, and is {json.dumps(value, default=str):.40}")
        for wrong in (BUILT_IN[name].complaint(answer) for name in self.built_in for answer in answers):
            if wrong:
                raise FormatError(column, wrong)


def value_at(row: Row, column: str) -> Any:
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
