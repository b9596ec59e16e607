"""Rollouts as they are written: every completion of a step in one Parquet file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpost.files import replaced
from rlpost.text import with_calls

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlpost.model.packing import Row

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("source", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("turns", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
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
        ("prompt_ids", pa.list_(pa.int64())),
        ("trainer_log_probs", pa.list_(pa.float32())),
        ("token_versions", pa.list_(pa.int64())),
        ("prompt_messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("part_weights", pa.map_(pa.string(), pa.float64())),
        ("restarts", pa.list_(pa.int64())),
    ]
)


def write_rollouts(path: Path, step: int, batch: TensorDictBase, rows: Sequence[Row] = ()) -> None:
    """Write the batch's completions, one a row; the file appears only when complete.

    `prompt` is the rendered first prompt, made of `prompt_messages`; `completion` is the text of the model's last turn,
    and `turns` are all messages of the model and the environment after the prompt. `token_ids`, `log_probs` (the
    sampler's), `mask`, `trainer_log_probs` (at the step's first update) and `token_versions` (-1 on ids that were not
    sampled) cover everything after the first prompt, whose ids are `prompt_ids`. `advantage` and `trainer_log_probs`
    are those of the batch's `rows`, and null where these are not given; `trainer_log_probs` also where training did not
    read the completion, as with an advantage of 0. `token_versions` is null where versions are uuids. `restarts` are
    the indices into `token_ids` at which a whole new prompt begins, before which the model sees nothing from there on.
    `reward_parts` and `part_weights` are maps. Policy versions are text, since they may be uuids. Raises OSError,
    leaving no file behind, if the disk refuses it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as making:
        table = pa.Table.from_pylist(_rollout_rows(step, batch, rows), schema=SCHEMA)
        pq.write_table(table, making, compression="zstd")


def _rollout_rows(step: int, batch: TensorDictBase, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One dict a completion, under the names of `SCHEMA`."""
    after = batch["next"]

    def column(name: str) -> list[float | None]:
        return [None if value != value else value for value in after[name].squeeze(-1).tolist()]

    def by_part(column: str) -> list[list[tuple[str, float]]]:
        values = {name: each.squeeze(-1).tolist() for name, each in after.get(column, {}).items()}
        return [[(n, own[i]) for n, own in values.items() if own[i] == own[i]] for i in range(batch.batch_size[0])]

    prompts = batch["tokens", "prompt"].unbind()
    assistant = batch["masks", "all_assistant_mask"].unbind()
    none = [None] * batch.batch_size[0]
    openings, turns = _messages(batch)
    columns = {
        "group": batch["group_id"].tolist(),
        "sample": batch["sample"].tolist(),
        "source": list(batch["source"]),
        "prompt": list(batch["text", "prompt"]),
        "completion": list(batch["text", "response"]),
        "turns": turns,
        "reward": column("reward"),
        "reward_parts": by_part("reward_parts"),
        "accuracy_strict": column("accuracy_strict"),
        "accuracy_lenient": column("accuracy_lenient"),
        "advantage": [None if math.isnan(row.mean_advantage) else row.mean_advantage for row in rows] or none,
        "valid": batch["valid"].tolist(),
        "finish_reason": list(batch["finish_reason"]),
        "policy_version_min": [str(v) for v in _values(batch["policy_version"])],
        "policy_version_max": [str(v) for v in _values(batch["policy_version_max"])],
        "token_ids": [row.tolist() for row in batch["tokens", "response"].unbind()],
        "log_probs": [row.tolist() for row in batch["log_probs", "response"].unbind()],
        "mask": [row[p.numel() :].tolist() for row, p in zip(assistant, prompts, strict=True)],
        "prompt_ids": [prompt.tolist() for prompt in prompts],
        "trainer_log_probs": [None if row.trainer_log_probs is None else row.trainer_log_probs.tolist() for row in rows]
        or none,
        "token_versions": (
            [row.tolist() for row in batch["token_versions"].unbind()] if "token_versions" in batch else none
        ),
        "prompt_messages": openings,
        "part_weights": by_part("part_weights"),
        "restarts": _restarts(batch),
    }
    names = list(columns)
    return [{"step": step, **dict(zip(names, row, strict=True))} for row in zip(*columns.values(), strict=True)]


def _restarts(batch: TensorDictBase) -> list[list[int]]:
    found = batch.get(("tokens", "restarts"), None)
    return [[]] * batch.batch_size[0] if found is None else [row.tolist() for row in found.unbind()]


def _messages(batch: TensorDictBase) -> tuple[list[list[dict[str, str]]], list[list[dict[str, str]]]]:
    """The messages of each row's prompt, and those after it, from the first of the model's turns on."""
    prompts, after_prompts = [], []
    for chat, turns in zip(batch["history"].to_chats(), batch["turns"].tolist(), strict=True):
        replies = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
        first = replies[-turns] if turns else len(chat)
        plain = [{"role": str(m["role"]), "content": with_calls(m)} for m in chat]
        prompts.append(plain[:first])
        after_prompts.append(plain[first:])
    return prompts, after_prompts


def _values(column: Any) -> list[Any]:
    return column.tolist() if hasattr(column, "tolist") else list(column)
