"""Evaluations on disk: a folder with `result.json` and, one row a completion, `samples.parquet`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpost.config.paths import (
    EVALS,
    RESULT,
    RUNS,
    SAMPLES,
    SWEEP_FILE,
    as_model,
    evaluation_names,
    is_evaluation_folder,
    is_run_folder,
)
from rlpost.data.conversation import Conversation
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.files import json_in, replaced
from rlpost.home import expanded
from rlpost.nearest import did_you_mean, nearest
from rlpost.text import first_line

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),  # of the task itself: the same whatever the model and the prompt's wording
        ("prompt_number", pa.int64()),
        ("sample", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("accuracy_strict", pa.float64()),
        ("accuracy_lenient", pa.float64()),
        ("answer", pa.string()),
        ("valid", pa.bool_()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int64()),
        ("token_ids", pa.list_(pa.int64())),
    ]
)
MOST_NAMED = 8  # evaluations in a hint
COMPARED = ("prompt_id", "prompt_number", "reward", "accuracy_strict", "accuracy_lenient", "valid")


@dataclass(frozen=True)
class SavedEvaluation:
    """An evaluation read back: what `result.json` says, and the columns of `samples.parquet` that are compared.

    `record` is empty for a table that lies somewhere without its `result.json`.
    """

    name: str
    record: dict[str, Any]
    samples: list[dict[str, Any]]


def sample_rows(played: Sequence[Conversation]) -> list[dict[str, Any]]:
    """One dict a completion, under the names of `SCHEMA`.

    `prompt` is the rendered first prompt, `completion` the text of the model's last turn; `tokens`
    counts the sampled ones, `token_ids` are all after the first prompt.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(c.group_id for c in played), start=1)}
    return [
        {
            "prompt_id": prompt_id(c.task),
            "prompt_number": numbers[c.group_id],
            "sample": c.sample,
            "prompt": c.prompt_text,
            "completion": c.response_text,
            "reward": c.reward,
            "reward_parts": list(c.reward_parts.items()),
            "accuracy_strict": c.accuracy_strict,
            "accuracy_lenient": c.accuracy_lenient,
            "answer": c.answer,
            "valid": c.valid,
            "error": c.error,
            "finish_reason": c.finish_reason,
            "tokens": sum(c.mask),
            "token_ids": c.response_ids,
        }
        for c in played
    ]


def prompt_id(task: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that are equal for equal tasks, on every machine."""
    text = json.dumps(dict(task), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write_evaluation(folder: Path, record: Mapping[str, Any], played: Sequence[Conversation]) -> None:
    """Write both files, each whole or not at all, `result.json` last.

    Raises CheckpointError when the disk does not take them.
    """
    table = pa.Table.from_pylist(sample_rows(played), schema=SCHEMA)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / SAMPLES) as making:
            pq.write_table(table, making)
        with replaced(folder / RESULT) as making:
            making.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error


def find_evaluation(name: str) -> Path:
    """The table of samples that is meant by a name, the path of a folder, or of the table itself.

    Raises ConfigError, with what was meant, where there is no evaluation.
    """
    path = expanded(name)
    if path.is_file() and path.suffix == ".parquet":
        return path
    is_path = "/" in name or name.startswith((".", "~"))
    for folder in (path, EVALS / name) if is_path else (EVALS / name, path):
        if is_evaluation_folder(folder):
            return folder / SAMPLES
    runs = (path,) if is_path else (path, RUNS / name)
    if run := next((folder for folder in runs if is_run_folder(folder)), None):
        raise ConfigError(f"{name} is a run, no evaluation: make one with rlpost eval model={as_model(run)}")
    if (path / SWEEP_FILE).is_file():
        jobs = ", ".join(str(path / job) for job in evaluation_names(path)) or "of which it has none"
        raise ConfigError(f"{name} is a sweep: name two of its evaluations, {jobs}")
    if path.exists():
        raise ConfigError(
            f"{name} is no evaluation: there is no {RESULT} with a {SAMPLES} in it; rlpost eval makes one"
        )
    names = evaluation_names(path.parent if is_path else EVALS)
    near = nearest(path.name, names)
    meant = None if near is None else str(path.parent / near) if is_path else near
    known = f"there are {', '.join(names[:MOST_NAMED])}" if names else "rlpost eval makes one"
    raise ConfigError(f"there is no evaluation {name}{did_you_mean(meant, known)}")


def read_evaluation(samples: Path) -> SavedEvaluation:
    """What a table of samples, and the `result.json` beside it, hold.

    Raises DataError for files that cannot be read or lack a column.
    """
    result = samples.with_name(RESULT)
    its_own = samples.name == SAMPLES and result.is_file()
    try:
        record = json_in(result) if its_own else {}
        missing = [name for name in COMPARED if name not in pq.read_schema(samples).names]
        rows = [] if missing else pq.read_table(samples, columns=list(COMPARED)).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{samples} cannot be read ({first_line(error)}): evaluate again") from error
    _check_shape(result, record)
    if missing:
        raise DataError(f"{samples} has no column {', '.join(missing)}: it is no table that rlpost eval wrote")
    return SavedEvaluation(samples.parent.name if its_own else str(samples), record, rows)


def _check_shape(file: Path, record: Any) -> None:
    """Raise DataError unless the record, and those of its parts that a comparison looks into, are mappings."""
    if not isinstance(record, dict):
        raise DataError(f"{file} holds no mapping: evaluate again")
    for name in ("choices", "settings", "result"):
        if not isinstance(record.get(name, {}), dict):
            raise DataError(f"{file} has a {name} that is no mapping: evaluate again")
