"""Mistakes that a file of rows shows by itself, told before a model or anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlpost.data.complaints import Complaint, Complaints
from rlpost.data.datasets import examined
from rlpost.data.row_store import PackedRows, Row
from rlpost.data.sources import local_sources
from rlpost.errors import DataError
from rlpost.home import paths_in
from rlpost.settings import EnvSettings

MOST_ROWS = 50_000  # that are looked at
MOST_BYTES = 8 << 20  # of a file that is read to its end; of a larger one the first row is looked at
Check = Callable[[Row], Complaint | None]


def look_at_rows(
    settings: EnvSettings, splits: Sequence[str], *, demonstrated: bool, max_bad_share: float | None = None
) -> list[str] | None:
    """The columns of the rows that `settings` name; None where not all were looked at.

    `demonstrated` is whether they are learnt from as they are. A hub's rows are not fetched. Raises DataError
    with file, row and field of the bad rows where they are more than `max_bad_share` (None: where there are any), as
    reading them for `splits` would.
    """
    path = getattr(settings, "path", None)
    if not isinstance(path, str):
        return None
    from rlpost.envs.row_checks import check_of

    columns: dict[str, None] = {}
    whole = True
    for split in splits:
        check = check_of(settings, demonstrated=demonstrated)
        found = check and _look(settings, path, split, check, max_bad_share)
        whole = whole and found is not None
        columns |= dict.fromkeys(found or ())
    return list(columns) if whole else None


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
