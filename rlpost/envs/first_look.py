"""Mistakes that a file of rows shows by itself, told before a model or anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from rlpost.data.datasets import Complaint, Row, local_source
from rlpost.errors import DataError
from rlpost.settings import EnvSettings

MOST_BYTES = 8 << 20  # of a file that is read to its end; of a larger one the first row is looked at
Check = Callable[[Row], Complaint | None]


def look_at_rows(settings: EnvSettings, splits: Sequence[str], *, demonstrated: bool) -> list[str] | None:
    """The columns of the rows that `settings` name; None where not all were looked at.

    `demonstrated` is whether they are learnt from as they are. A hub's rows are not fetched. Raises DataError
    naming file, row and field, as reading them for `splits` would.
    """
    path = getattr(settings, "path", None)
    if not isinstance(path, str):
        return None
    from rlpost.envs.row_checks import check_of

    columns: dict[str, None] = {}
    whole = True
    for split in splits:
        check = check_of(settings, demonstrated=demonstrated)
        found = check and _look(settings, path, split, check)
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
