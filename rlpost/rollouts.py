"""Every completion of a step as one Parquet file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tensordict import TensorDictBase


def write_rollouts(path: Path, step: int, batch: TensorDictBase) -> None:
    """Write the batch's completions, one a row; the file appears only when complete.

    `prompt` is the rendered first prompt and `completion` the text of the model's last turn;
    `token_ids`, `log_probs` and `mask` are of everything after the first prompt. `reward_parts` is
    a map. Policy versions are text, since they may be uuids. Raises OSError, leaving no file behind,
    when the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_suffix(".incomplete")
    try:
        pq.write_table(pa.Table.from_pylist(rollout_rows(step, batch), schema=SCHEMA), making)
        os.replace(making, path)
    finally:
        making.unlink(missing_ok=True)


SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("accuracy_strict", pa.float64()),
        ("accuracy_lenient", pa.float64()),
        ("advantage", pa.float64()),
        ("valid", pa.bool_()),
        ("finish_reason", pa.string()),
        ("policy_version_min", pa.string()),
        ("policy_version_max", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("log_probs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.bool_())),
    ]
)


def rollout_rows(step: int, batch: TensorDictBase) -> list[dict[str, Any]]:
    """One dict a completion, under the names of `SCHEMA`."""
    after = batch["next"]

    def column(name: str) -> list[float | None]:
        return [None if value != value else value for value in after[name].squeeze(-1).tolist()]

    parts = {name: values.squeeze(-1).tolist() for name, values in after["reward_parts"].items()}
    prompts = batch["tokens", "prompt"].unbind()
    assistant = batch["masks", "all_assistant_mask"].unbind()
    columns = {
        "group": batch["group_id"].tolist(),
        "sample": batch["sample"].tolist(),
        "prompt": list(batch["text", "prompt"]),
        "completion": list(batch["text", "response"]),
        "reward": column("reward"),
        "reward_parts": [
            [(name, values[i]) for name, values in parts.items() if values[i] == values[i]]
            for i in range(batch.batch_size[0])
        ],
        "accuracy_strict": column("accuracy_strict"),
        "accuracy_lenient": column("accuracy_lenient"),
        "advantage": batch["advantage"].tolist() if "advantage" in batch else [None] * batch.batch_size[0],
        "valid": batch["valid"].tolist(),
        "finish_reason": list(batch["finish_reason"]),
        "policy_version_min": [str(v) for v in _values(batch["policy_version"])],
        "policy_version_max": [str(v) for v in _values(batch["policy_version_max"])],
        "token_ids": [row.tolist() for row in batch["tokens", "response"].unbind()],
        "log_probs": [row.tolist() for row in batch["log_probs", "response"].unbind()],
        "mask": [row[p.numel() :].tolist() for row, p in zip(assistant, prompts, strict=True)],
    }
    names = list(columns)
    return [{"step": step, **dict(zip(names, row, strict=True))} for row in zip(*columns.values(), strict=True)]


def _values(column: Any) -> list[Any]:
    return column.tolist() if hasattr(column, "tolist") else list(column)
