"""Saved evaluations: a folder with `result.json` and `samples.parquet`, one row a completion."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpost.config import paths
from rlpost.data.conversation import Conversation
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.files import expanded, json_in, replaced
from rlpost.record import ACCURACY, LOSS, REWARD, STRICT, Interval, interval
from rlpost.runs.reader import places, read_run
from rlpost.text import did_you_mean, first_line, nearest

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),  # of the task alone: independent of the model and of the prompt's wording
        ("prompt_number", pa.int64()),
        ("sample", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("accuracy_strict", pa.float64()),
        ("accuracy_lenient", pa.float64()),
        ("answer", pa.string()),  # the answer read from the completion
        ("task", pa.string()),  # JSON
        ("valid", pa.bool_()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int64()),
        ("token_ids", pa.list_(pa.int64())),
        ("loss", pa.float64()),  # nats per token of a demonstrated completion; null for a sampled one
        ("prompt_messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)
LATER = ("task", "prompt_messages", "loss")  # columns that older tables lack
Row = dict[str, Any]
MOST_NAMED = 8  # most evaluations that a hint lists


@dataclass(frozen=True)
class SavedEvaluation:
    """An evaluation read back: the completions of its table, and the `result.json` beside it.

    `record` is empty for a table without one, as a run's held-out evaluations are. `samples` have the names of
    `SCHEMA`, without ids; `reward_parts` is a dict and `task` the task itself, empty in a table without tasks.
    """

    name: str
    record: dict[str, Any]
    samples: list[Row]


def write_evaluation(
    folder: Path, record: Mapping[str, Any], played: Sequence[Conversation], demonstrated: Sequence[Row] = ()
) -> None:
    """Write both files, each whole or not at all, `result.json` last.

    `demonstrated` are the rows of an evaluation that measured the loss of demonstrations: see `demonstration_row`.
    Raises CheckpointError if the disk refuses them.
    """
    try:
        write_rows(folder / paths.SAMPLES, [*sample_rows(played), *demonstrated])
        with replaced(folder / paths.RESULT) as making:
            making.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write a table of `SCHEMA`; the file appears only when complete. Raises OSError if the disk refuses it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as making:
        pq.write_table(pa.Table.from_pylist([*rows], schema=SCHEMA), making, compression="zstd")


def sample_rows(played: Sequence[Conversation]) -> list[dict[str, Any]]:
    """One dict a completion, under the names of `SCHEMA`.

    `prompt` is the rendered first prompt, `completion` the text of the model's last turn; `tokens` counts the sampled
    tokens, `token_ids` are all ids after the first prompt, which is made of `prompt_messages`.
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
            "task": _as_json(c.task),
            "valid": c.valid,
            "error": c.error,
            "finish_reason": c.finish_reason,
            "tokens": sum(c.mask),
            "token_ids": c.response_ids,
            "prompt_messages": [{"role": m["role"], "content": str(m["content"])} for m in c.messages[: c.opening]],
        }
        for c in played
    ]


def demonstration_row(number: int, task: Mapping[str, Any], text: tuple[str, str], loss: float, tokens: int) -> Row:
    """The demonstration `task` under the names of `SCHEMA`, with the `text` of prompt and reply and its `loss`."""
    prompt, completion = text
    found = {"prompt_id": prompt_id(task), "prompt_number": number, "sample": 0, "task": _as_json(task)}
    return found | {"prompt": prompt, "completion": completion, "valid": True, "tokens": tokens, "loss": loss}


def prompt_id(task: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that are equal for equal tasks, on every machine."""
    return hashlib.blake2b(_as_json(task).encode(), digest_size=8).hexdigest()


def _as_json(task: Mapping[str, Any]) -> str:
    return json.dumps(dict(task), sort_keys=True, default=str)


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures in the `result` of a result.json, under the names of metrics.jsonl."""
    name, key = ("loss", LOSS) if "loss" in result else ("reward", REWARD)
    values = {key: result.get("loss", result.get("reward_mean"))}
    values |= {f"{key}_{end}": result.get(f"{name}_{end}") for end in ("low", "high")}
    values["eval/rows" if key == LOSS else "eval/prompts"] = result.get("num_prompts")
    shares = {f"accuracy_{reading}": result.get(f"accuracy_{reading}") for reading in ("lenient", "strict")}
    shares |= result.get("attempts", {})
    shares |= {f"instructions_{reading}": share for reading, share in result.get("instructions", {}).items()}
    for name, share in shares.items():
        if share is not None:
            values |= {f"eval/{name}": share["value"], **{f"eval/{name}_{end}": share[end] for end in ("low", "high")}}
            if share["prompts"] != result.get("num_prompts"):
                values[f"eval/{name}_prompts"] = share["prompts"]
    return {key: float(value) for key, value in values.items() if value is not None}


def figures_in(row: Mapping[str, Any]) -> dict[str, Interval]:
    """The figures of an evaluation, by title, in a row of metrics.jsonl."""
    keys = {"accuracy": ACCURACY, "strict": STRICT}
    several = [key for key in row if "_at_" in key and key.endswith("_lenient")]
    keys |= {key.removeprefix("eval/").removesuffix("_lenient").replace("_at_", "@"): key for key in several}
    keys |= {"reward": REWARD, "loss": LOSS}
    return {title: figure for title, key in keys.items() if (figure := interval(row, key)) is not None}


def figures_of(table: Path, saved: SavedEvaluation) -> dict[str, Interval]:
    """The figures, by title, of the evaluation `saved` in `table`; empty if none are recorded."""
    if saved.record:
        return figures_in(metrics_of(saved.record["result"]))
    rows = read_run(table.parents[1]).metrics if table.parent.name == paths.HELD_OUT else []
    return next((figures_in(row) for row in rows if held_out_table(table.parents[1], row["step"]) == table), {})


def find_evaluation(name: str, step: int | None = None) -> Path:
    """The table of samples of an evaluation, or of a run's held-out evaluation after `step`, by default the last.

    A run that kept no held-out completions has the newest evaluation of its model in evals/. `name` is a name, the
    path of a folder, or of the table itself. Raises ConfigError, with the nearest name, if there is no such evaluation.
    """
    path = expanded(name)
    if step is None:
        if path.is_file() and path.suffix == ".parquet":
            return path
        if folder := next(filter(paths.is_evaluation_folder, places(name, paths.EVALS)), None):
            return folder / paths.SAMPLES
    if run := next(filter(paths.is_run_folder, places(name)), None):
        return _held_out(run, step)
    if step is not None:
        raise ConfigError(f"--step {step} is for a run, and {name} is not one")
    if path.exists():
        inside = bool(paths.evaluation_names(path))
        advice = f"rlpost eval show {name} lists those in it" if inside else "rlpost eval makes one"
        raise ConfigError(f"{name} is not an evaluation, with {paths.RESULT} and {paths.SAMPLES}: {advice}")
    above = path.parent if "/" in name else paths.EVALS
    names = {str(path.parent / each): each for each in paths.evaluation_names(above)}
    known = f"there are {', '.join([*names.values()][:MOST_NAMED])}" if names else "rlpost eval makes one"
    raise ConfigError(f"there is no evaluation {name}{did_you_mean(nearest(str(path), names), known)}")


def _held_out(run: Path, step: int | None) -> Path:
    """The table of a run's held-out evaluation after `step`, or of the last. Raises ConfigError if there is none."""
    steps = held_out_steps(run)
    if step in steps or (steps and step is None):
        return held_out_table(run, steps[-1] if step is None else step)
    if steps:
        raise ConfigError(f"{run} holds no evaluation after step {step}: it has {', '.join(map(str, steps))}")
    if step is None and (table := evaluation_of(run)) is not None:
        return table
    raise ConfigError(f"{run} holds no held-out completions: make some with rlpost eval model={paths.as_model(run)}")


def read_evaluation(samples: Path, *, with_ids: bool = False) -> SavedEvaluation:
    """Read a table of samples and the `result.json` beside it.

    Raises DataError for files that cannot be read or lack a column.
    """
    result = samples.with_name(paths.RESULT)
    is_whole = samples.name == paths.SAMPLES and result.is_file()
    names = [name for name in SCHEMA.names if with_ids or name != "token_ids"]
    try:
        record = json_in(result) if is_whole else {}
        there = pq.read_schema(samples).names
        if missing := [name for name in names if name not in (*there, *LATER)]:
            raise DataError(f"{samples} has no column {', '.join(missing)}: it is not a table that rlpost eval wrote")
        rows = pq.read_table(samples, columns=[name for name in names if name in there]).to_pylist()
        for row in rows:
            row["reward_parts"] = dict(row["reward_parts"] or ())
            row["task"] = json.loads(row.get("task") or "{}")
            if row["reward"] is not None and not math.isfinite(row["reward"]):
                row["reward"] = None
    except (OSError, json.JSONDecodeError, pa.ArrowException) as error:
        raise DataError(f"{samples} cannot be read ({first_line(error)}): evaluate again") from error
    return SavedEvaluation(samples.parent.name if is_whole else str(samples), record, rows)


def is_evaluation(file: Path) -> bool:
    """Whether a Parquet file is a table of samples. Raises DataError if it cannot be read."""
    try:
        return "prompt_number" in pq.read_schema(file).names
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read ({first_line(error)}): give a Parquet file") from error


def read_sampled(samples: Path) -> list[dict[str, Any]]:
    """Every completion of a table of samples with its ids, under the names of `rlpost.runs.rollouts.SCHEMA`.

    A prompt is a group of step 0, and all ids are sampled; `mask` is None for a conversation of several turns, whose
    sampled ids are not recorded. Raises DataError for a file that cannot be read or lacks a column.
    """
    rows = read_evaluation(samples, with_ids=True).samples
    for row in rows:
        row |= {"step": 0, "group": row["prompt_number"]}
        row["turns"] = [{"role": "assistant", "content": row["completion"]}]
        row["mask"] = [True] * row["tokens"] if row["tokens"] == len(row["token_ids"]) else None
        row["restarts"] = []  # which only a conversation of several turns has
        row.setdefault("prompt_messages", None)
    return rows


# Held-out evaluations of a run: RUN/held-out/step-000000.parquet and further ones, tables of samples too


def held_out_steps(run: Path) -> list[int]:
    """The steps after which a run kept its held-out completions, in order; 0 is before training."""
    names = [path.stem.removeprefix("step-") for path in (run / paths.HELD_OUT).glob("step-*.parquet")]
    return sorted(int(name) for name in names if name.isdecimal())


def held_out_table(run: Path, step: int) -> Path:
    """The table of samples of a run's held-out evaluation after `step`."""
    return run / paths.HELD_OUT / f"step-{step:06d}.parquet"


def latest_held_out(run: Path) -> SavedEvaluation:
    """A run's last held-out evaluation after training, else the newest one of its model in evals/.

    Raises DataError if there is neither.
    """
    steps = [step for step in held_out_steps(run) if step > 0]
    table = held_out_table(run, steps[-1]) if steps else evaluation_of(run)
    if table is None:
        raise DataError(f"{run} holds no held-out completions after training")
    return read_evaluation(table)


def evaluation_of(run: Path) -> Path | None:
    """The table of the newest evaluation in evals/ of a model of `run`; None if there is none."""
    results = (each / paths.RESULT for each in paths.EVALS.glob("*/") if paths.is_evaluation_folder(each))
    newest = sorted(results, key=lambda file: file.stat().st_mtime, reverse=True)
    found = (f for f in newest if Path(str(json_in(f).get("model", ""))).is_relative_to(run.resolve()))
    return next((file.with_name(paths.SAMPLES) for file in found), None)
