"""Mistakes that a file of rows shows by itself, told before a model or anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from string import Formatter
from typing import Any

from rlpost.data.datasets import Complaint, Row, local_source, missing, text_complaint
from rlpost.data.formats import FormatError, RowFormat
from rlpost.errors import DataError
from rlpost.rewards.gsm8k import split_solution
from rlpost.settings import DatasetSettings, EnvSettings, GSM8KSettings, IFEvalSettings, MathSettings
from rlpost.settings.registered import BUILT_IN_REWARDS

MOST_BYTES = 8 << 20  # of a file that is read to its end; of a larger one the first row is looked at
PROMPT_COLUMNS = ("prompt", "messages", "question")

Check = Callable[[Row], Complaint | None]


def look_at_rows(settings: EnvSettings, splits: Sequence[str], *, demonstrated: bool) -> list[str] | None:
    """The columns of the rows that `settings` name; None where not all were looked at.

    `demonstrated` is whether they are learnt from as they are. A hub's rows are not fetched. Raises DataError
    naming file, row and field, as reading them for `splits` would.
    """
    path = getattr(settings, "path", None)
    make_check = next((make for kind, make in _CHECKS.items() if isinstance(settings, kind)), None)
    if not isinstance(path, str) or make_check is None:
        return None
    columns: dict[str, None] = {}
    whole = True
    for split in splits:
        found = _look(settings, path, split, make_check(settings, demonstrated))
        whole = whole and found is not None
        columns |= dict.fromkeys(found or ())
    return list(columns) if whole else None


def _look(settings: EnvSettings, path: str, split: str, check: Check) -> list[str] | None:
    """The columns of one split."""
    test_path = getattr(settings, "test_path", None) if split == "test" else None
    source = local_source(test_path or path, split, "env.test_path" if test_path else "env.path", MOST_BYTES)
    if source is None:
        return None
    divided = source.shared and getattr(settings, "test_path", None) is None
    limit = settings.limit if split == settings.split and not divided else None
    columns: dict[str, None] = {}
    rows = 0
    for number, row in islice(source.numbered, limit):
        rows += 1
        if complaint := check(row):
            raise DataError(f"{source.name}, row {number}, field {complaint[0]!r}: {complaint[1]}")
        columns |= dict.fromkeys(map(str, row))
    if not rows and not source.partial:
        raise DataError(f"{source.name} holds no rows: give a file with one JSON object a line")
    return None if source.partial else list(columns)


def _gsm8k(settings: EnvSettings, demonstrated: bool) -> Check:
    def check(row: Row) -> Complaint | None:
        if complaint := text_complaint(row, ("question", "answer")):
            return complaint
        try:
            split_solution(row["answer"])
        except ValueError as error:
            return "answer", str(error)
        return None

    return check


def _math(settings: EnvSettings, demonstrated: bool) -> Check:
    return lambda row: _one_of(row, ("problem", "question")) or _one_of(row, ("answer", "solution"))


def _instructed(settings: EnvSettings, demonstrated: bool) -> Check:
    return lambda row: text_complaint(row, ("prompt",)) or _one_of(row, ("instruction_id_list",))


def _dataset(settings: EnvSettings, demonstrated: bool) -> Check:
    assert isinstance(settings, DatasetSettings)
    return _Demonstrations(settings) if demonstrated else _Prompts(settings)


class _Demonstrations:
    """Whether the first row shows something to learn; rows after it may be bad up to a share."""

    def __init__(self, settings: DatasetSettings) -> None:
        self.settings = settings
        self.looked = False

    def __call__(self, row: Row) -> Complaint | None:
        if self.looked or not isinstance(row, Mapping):
            return None if self.looked else _no_object(row, "messages")
        self.looked = True
        templated = self.settings.prompt_template is not None
        try:
            told = RowFormat(row, self.settings.prompt_column, self.settings.completion_column, templated=templated)
            if told.text is not None:
                told.plain_text(row)
            elif told.chat is not None:
                told.messages(row)
            else:
                told.answer(row)
                if told.prompt is not None and not templated:
                    told.asked(row)
        except FormatError as error:
            return error.complaint
        return _template_field(self.settings, row)


class _Prompts:
    """Whether each row has a prompt, and an answer where a built-in reward needs one."""

    def __init__(self, settings: DatasetSettings) -> None:
        self.settings = settings
        self.prompt: str | None = settings.prompt_column
        judged = any(reward in BUILT_IN_REWARDS for reward in (*settings.reward, settings.accuracy))
        self.answer = settings.answer_column or ("answer" if judged else None)

    def __call__(self, row: Row) -> Complaint | None:
        settings = self.settings
        if not isinstance(row, Mapping):
            return _no_object(row, "prompt")
        if self.prompt is None and (settings.prompt_template is None or any(name in row for name in PROMPT_COLUMNS)):
            self.prompt = next((name for name in PROMPT_COLUMNS if name in row), PROMPT_COLUMNS[0])
        wanted = ((self.prompt, settings.prompt_column, "prompt"), (self.answer, settings.answer_column, "answer"))
        for column, named, what in wanted:
            if (
                column is not None
                and column not in row
                and (named or what == "answer" or settings.prompt_template is None)
            ):
                return column, missing(column, row) + ("" if named else f"; name one of them with env.{what}_column")
        return _template_field(settings, row)


_CHECKS: dict[type[EnvSettings], Callable[[EnvSettings, bool], Check]] = {
    GSM8KSettings: _gsm8k,
    MathSettings: _math,
    IFEvalSettings: _instructed,
    DatasetSettings: _dataset,
}


def _one_of(row: Row, names: Sequence[str]) -> Complaint | None:
    if not isinstance(row, Mapping):
        return _no_object(row, names[0])
    return None if any(name in row for name in names) else (names[0], missing(names[0], row))


def _template_field(settings: EnvSettings, row: Row) -> Complaint | None:
    """A field of the template that the row has not."""
    named = [field for _, field, _, _ in Formatter().parse(settings.prompt_template or "") if field]
    plain = [field.partition(".")[0].partition("[")[0] for field in named]
    return next(((field, missing(field, row)) for field in plain if field.isidentifier() and field not in row), None)


def _no_object(row: Any, column: str) -> Complaint:
    return column, f"the row is no object of named fields but {type(row).__name__}"
