"""The TensorDict that leaves a collector, rows chosen from it, its JSON form, and the best completions of a group.

Keys (B rows; "ragged" is a jagged nested tensor of shape (B, *)):

    query, text.prompt                           str: the user's message, and the rendered first prompt
    text.response                                str: the model's last turn
    history                                      History (B, M): all messages, replies included
    tokens.prompt, tokens.response, tokens.full  int64, ragged; full = prompt + response always
    tokens.hinted_prompt                         int64, ragged: the prompt as the reference reads it, with the hint
                                                 (absent without one)
    tokens.restarts                              int64, ragged: the indices into response at which a whole new prompt
                                                 begins; from there on the model reads no id before it
    masks.all_attention_mask                     bool, ragged over full, all True
    masks.all_assistant_mask                     bool, ragged over full: True on every sampled id
    log_probs.response, log_probs.full           float32, ragged: the sampler's, 0 where not sampled
    policy_version                               int64 (B,): the oldest the row was sampled under
                                                 (str per row where versions are uuids)
    policy_version_max                           the newest, likewise
    token_versions                               int64, ragged over response: the version that each id was sampled
                                                 under, -1 where not sampled (absent where versions are uuids)
    group_id, sample                             int64 (B,)
    source                                       str: its source's name in a mix of environments, else ""
    turns                                        int64 (B,): the model's in this conversation
    tools.calls, tools.errors                    int64 (B,): calls that were run; calls that failed or were not run
    valid                                        bool (B,)
    finish_reason                                str
    next.reward                                  float32 (B, 1); NaN without one
    next.reward_parts.<name>                     float32 (B, 1); NaN in a row without this part
    next.part_weights.<name>                     float32 (B, 1), likewise: the part's weight in the reward
    next.accuracy_strict, next.accuracy_lenient  float32 (B, 1); NaN where the task has no measure
    next.done, next.terminated, next.truncated   bool (B, 1)

Taking a batch apart into groups and joining it again costs more than everything else that happens to it; rows
that wait for more rows, or for their turn, are therefore a `Selection`, which remembers their places.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean, median_low
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from rlpost.data.conversation import Conversation, Message
from rlpost.data.history import History
from rlpost.data.ragged import ATTENTION, Key, joined, one_each, ragged, ragged_rows, strings, token_fields, versions
from rlpost.data.rendering import ContentBase
from rlpost.errors import DataError

TOLERANCE = 1e-6  # relative: above the rounding error of equal rewards
_KIND, _VALUES, _DTYPE, _PART = "kind", "values", "dtype", "ContentBase"
log = logging.getLogger("rlpost")
L = TypeVar("L", bound=Hashable)
G = TypeVar("G")  # a waiting group: it has a length, and `+` adds members


# Batches


def batch_from_conversations(conversations: Sequence[Conversation]) -> TensorDict:
    """The batch described at the top of this module, of batch size (B,)."""
    size = len(conversations)
    prompts = [c.prompt_ids for c in conversations]
    tokens = token_fields(prompts, [c.response_ids for c in conversations], torch.int64)
    tokens["restarts"] = ragged([torch.tensor(c.restarts, dtype=torch.int64) for c in conversations])
    if any(c.hinted_ids for c in conversations):
        tokens["hinted_prompt"] = ragged([torch.tensor(c.hinted_ids, dtype=torch.int64) for c in conversations])
    unsampled = [[0.0] * len(ids) for ids in prompts]
    log_probs = token_fields(unsampled, [c.log_probs for c in conversations], torch.float32)

    token_versions = [c.token_versions() for c in conversations]
    known: dict[str, Any] = {}
    if all(isinstance(version, int) for row in token_versions for version in row):
        known["token_versions"] = ragged([torch.tensor(row, dtype=torch.int64) for row in token_versions])
    part_names = sorted({name for c in conversations for name in c.reward_parts})

    def by_part(column: str) -> dict[str, torch.Tensor]:
        return {name: one_each([getattr(c, column).get(name) for c in conversations]) for name in part_names}

    return TensorDict(
        {
            "query": strings([c.query for c in conversations]),
            "history": History.from_chats([c.messages for c in conversations]),
            "text": {
                "prompt": strings([c.prompt_text for c in conversations]),
                "response": strings([c.response_text for c in conversations]),
            },
            "tokens": tokens,
            "masks": {
                "all_attention_mask": torch.ones_like(tokens["full"], dtype=torch.bool),
                "all_assistant_mask": token_fields(unsampled, [c.mask for c in conversations], torch.bool)["full"],
            },
            "log_probs": {"response": log_probs["response"], "full": log_probs["full"]},
            # -1 before the model's first turn
            "policy_version": versions([(c.policy_versions or [-1])[0] for c in conversations]),
            "policy_version_max": versions([c.newest_version for c in conversations]),
            **known,
            "group_id": torch.tensor([c.group_id for c in conversations]),
            "sample": torch.tensor([c.sample for c in conversations]),
            "source": strings([c.source for c in conversations]),
            "turns": torch.tensor([c.turns for c in conversations]),
            "tools": {
                "calls": torch.tensor([c.tool_calls for c in conversations]),
                "errors": torch.tensor([c.tool_errors for c in conversations]),
            },
            "valid": torch.tensor([c.valid for c in conversations]),
            "finish_reason": strings([c.finish_reason for c in conversations]),
            "next": {
                "reward": one_each([c.reward for c in conversations]),
                "reward_parts": by_part("reward_parts"),
                "part_weights": by_part("part_weights"),
                "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
                "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
                "done": one_each([c.done for c in conversations], torch.bool),
                "terminated": one_each([c.terminated for c in conversations], torch.bool),
                "truncated": one_each([c.truncated for c in conversations], torch.bool),
            },
        },
        batch_size=[size],
    )


def select_rows(batch: TensorDictBase, indices: Sequence[int]) -> TensorDict:
    """The rows at `indices`, in that order; ragged fields included."""

    def pick(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                rows = ragged_rows(value)
                return ragged([rows[i] for i in indices])
            return value[list(indices)]
        if isinstance(value, History):
            chats = value.to_chats()
            return History.from_chats([chats[i] for i in indices])
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            return TensorDict({key: pick(field) for key, field in value.items()}, batch_size=[len(indices)])
        return strings([row_of(value, i) for i in indices])

    return pick(batch)


def concat_rows(batches: Sequence[TensorDictBase]) -> TensorDict:
    """All rows of `batches`, one after the other; a reward part that a batch lacks is NaN there.

    A ragged entry that a batch lacks is left out. Entries of different widths are padded with zeros on the right
    if an attention mask shows padding, and become ragged otherwise.
    """
    pads = any(_has_pads(batch) for batch in batches)
    size = sum(b.batch_size[0] for b in batches)

    def join(parts: list[Any], sizes: list[int]) -> Any:
        first = next(p for p in parts if p is not None)
        if isinstance(first, torch.Tensor):
            there = [
                p if p is not None else first.new_full((n, *first.shape[1:]), float("nan"))
                for p, n in zip(parts, sizes, strict=True)
            ]
            return joined(there, pads=pads)
        if isinstance(first, History):
            return History.from_chats([chat for p in parts for chat in p.to_chats()])
        if isinstance(first, TensorDictBase) and not isinstance(first, NonTensorStack):
            names = dict.fromkeys(k for p in parts if p is not None for k in p.keys())  # noqa: SIM118
            columns = {k: [None if p is None else p.get(k, None) for p in parts] for k in names}
            fields = {k: join(column, sizes) for k, column in columns.items() if not _ragged_in_some(column)}
            return TensorDict(fields, batch_size=[size])
        return strings([row_of(p, i) for p, n in zip(parts, sizes, strict=True) for i in range(n)])

    return join(list(batches), [b.batch_size[0] for b in batches])


def rows_in_line(batch: TensorDictBase) -> TensorDictBase:
    """A batch (B, T) as (B * T,): the T steps of the first row, then those of the next; (B,) stays as it is."""
    if batch.ndim < 2:
        return batch
    steps = batch.unbind(1)
    size = batch.batch_size[0]
    return select_rows(concat_rows(steps), [t * size + row for row in range(size) for t in range(len(steps))])


def row_of(value: Any, index: int) -> Any:
    """One row of an entry: a tensor, or a Python value."""
    item = value[index]
    return getattr(item, "data", item)


def _ragged_in_some(parts: Sequence[Any]) -> bool:
    """Whether an entry is ragged in some batch and missing in another."""
    return any(p is None for p in parts) and any(isinstance(p, torch.Tensor) and p.is_nested for p in parts)


def _has_pads(batch: TensorDictBase) -> bool:
    masks = [batch.get(key, None) for key in (ATTENTION, "attention_mask")]
    return any(mask is not None and not mask.is_nested and not mask.all() for mask in masks)


# JSON and back


def to_plain(batch: TensorDictBase) -> dict[str, Any]:
    """`batch` (B,), or a lazy stack, as JSON-compatible dicts and lists: how a checkpoint keeps rows. Lossless."""
    if isinstance(batch, LazyStackedTensorDict):
        return {_KIND: "stack", "dim": batch.stack_dim, _VALUES: [to_plain(each) for each in batch.tensordicts]}
    return {
        _KIND: "batch",
        "size": batch.batch_size[0],
        _VALUES: {key: _plain_value(value) for key, value in batch.items()},
    }


def from_plain(plain: dict[str, Any]) -> TensorDictBase:
    """The inverse of `to_plain`."""
    if plain[_KIND] == "stack":
        return LazyStackedTensorDict.lazy_stack([from_plain(each) for each in plain[_VALUES]], plain["dim"])
    values = {key: _value(value) for key, value in plain[_VALUES].items()}
    return TensorDict(values, batch_size=[plain["size"]])


def _plain_value(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        kind = "ragged" if value.is_nested else "tensor"
        values = [row.tolist() for row in value.unbind()] if value.is_nested else value.tolist()
        return {_KIND: kind, _DTYPE: str(value.dtype).removeprefix("torch."), _VALUES: values}
    if isinstance(value, History):
        return {_KIND: "history", _VALUES: [[_plain_message(m) for m in chat] for chat in value.to_chats()]}
    if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
        return to_plain(value)
    return {_KIND: "strings", _VALUES: list(value.tolist())}


def _value(plain: dict[str, Any]) -> Any:
    kind, values = plain[_KIND], plain[_VALUES]
    if kind == "batch":
        return from_plain(plain)
    if kind == "history":
        return History.from_chats([[_message(m) for m in chat] for chat in values])
    if kind == "strings":
        return strings(values)
    dtype = getattr(torch, plain[_DTYPE])
    if kind == "ragged":
        return ragged([torch.tensor(row, dtype=dtype) for row in values])
    return torch.tensor(values, dtype=dtype)


def _plain_message(message: Message) -> Message:
    """A message with its `ContentBase` parts as marked dicts."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": [{_PART: p.to_part()} if isinstance(p, ContentBase) else p for p in content]}


def _message(plain: Message) -> Message:
    content = plain["content"]
    if not isinstance(content, list):
        return plain
    return {**plain, "content": [ContentBase.from_part(p[_PART]) if _PART in p else p for p in content]}


# Rows of batches, copied only when they are read whole


@dataclass(frozen=True, slots=True)
class Selection:
    """L rows of one batch or of several, in an order of their own."""

    parts: tuple[tuple[TensorDictBase, tuple[int, ...]], ...]  # a batch (B,), and places in it

    @classmethod
    def of(cls, batch: TensorDictBase, places: Iterable[int]) -> Selection:
        """The rows of `batch` at `places`."""
        return cls(((batch, tuple(places)),))

    @classmethod
    def whole(cls, batch: TensorDictBase) -> Selection:
        """Every row of `batch`."""
        return cls.of(batch, range(batch.batch_size[0]))

    @classmethod
    def joined(cls, selections: Sequence[Selection]) -> Selection:
        """The rows of all `selections`, one selection after the other."""
        parts: list[tuple[TensorDictBase, list[int]]] = []
        for batch, places in (part for selection in selections for part in selection.parts):
            if not parts or parts[-1][0] is not batch:
                parts.append((batch, []))
            parts[-1][1].extend(places)
        return cls(tuple((batch, tuple(places)) for batch, places in parts))

    def __len__(self) -> int:
        return sum(len(places) for _, places in self.parts)

    def __add__(self, more: Selection) -> Selection:
        """The rows of this selection and then those of `more`."""
        return Selection.joined([self, more])

    def pick(self, which: Iterable[int]) -> Selection:
        """The rows at `which`, counted within this selection, in that order."""
        rows = [(batch, place) for batch, places in self.parts for place in places]
        return Selection.joined([Selection.of(batch, [place]) for batch, place in (rows[i] for i in which)])

    def has(self, key: Key) -> bool:
        """Whether every row has an entry `key`."""
        return all(batch.get(key, None) is not None for batch, _ in self.parts)

    def column(self, key: Key) -> torch.Tensor:
        """One entry of the rows, (L, ...) or ragged (L, *).

        Raises KeyError if a batch lacks it.
        """
        columns = [(batch.get(key, None), places) for batch, places in self.parts]
        for (values, _), (batch, _) in zip(columns, self.parts, strict=True):
            if values is None:
                raise KeyError(f"a batch has no entry {key!r}: it has {', '.join(map(str, batch.keys()))}")
        return joined(
            [
                ragged([rows[i] for rows in [ragged_rows(values)] for i in places])
                if values.is_nested
                else values[list(places)]
                for values, places in columns
            ]
        )

    def first(self, key: Key) -> Any:
        """The entry `key` of the first row as a Python value; None if its batch lacks it."""
        batch, places = self.parts[0]
        values = batch.get(key, None)
        return None if values is None else row_of(values, places[0])

    def measures(self) -> TensorDict:
        """The dense tensors of the rows (L,), without texts and ragged entries, which cost the most to copy."""
        parts = [select_rows(_dense(batch), places) for batch, places in self.parts]
        return parts[0] if len(parts) == 1 else concat_rows(parts)

    def copied(self) -> TensorDict:
        """The rows as a batch (L,), which may share tensors with the one they come from."""

        def is_whole(batch: TensorDictBase, places: Sequence[int]) -> bool:
            return isinstance(batch, TensorDict) and tuple(places) == tuple(range(batch.batch_size[0]))

        rows = [batch if is_whole(batch, places) else select_rows(batch, places) for batch, places in self.parts]
        return rows[0].copy() if len(rows) == 1 else concat_rows(rows)


def places_of_each(labels: Iterable[L]) -> dict[L, list[int]]:
    """The places of each label; labels in the order of their first place."""
    places: dict[L, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    return places


def _dense(batch: TensorDictBase) -> TensorDict:
    kept = {}
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            kept[key] = _dense(value)
        elif isinstance(value, torch.Tensor) and not value.is_nested:
            kept[key] = value
    return TensorDict(kept, batch_size=batch.batch_size)


# Groups that wait for members


class Waiting(dict[L, G]):
    """Groups that lack some of their `size` members, the one that has longest gained none first.

    More than `most` never wait.
    """

    def __init__(self, most: int, size: int | None, members: str) -> None:
        super().__init__()
        self.most = most
        self.size = size
        self.members = members  # their name in the log
        self.num_evicted = 0

    def with_more(self, key: L, new: G) -> G:
        """The waiting members of the group `key` and then `new`; the waiting ones stay."""
        waiting: Any = self.get(key)
        return new if waiting is None else waiting + new

    def hold(self, key: L, group: G) -> None:
        """Add `group` at the end of the queue."""
        self.pop(key, None)
        self[key] = group

    def evict(self) -> None:
        """Discard the groups that have waited longest for another member; logs and counts them."""
        while len(self) > self.most:
            group: Any = self.pop(next(iter(self)))
            self.num_evicted += 1
            log.warning(
                "gave up a group with %d of %s %s, since %d others wait (max_waiting); %d given up so far",
                len(group),
                self.size,
                self.members,
                self.most,
                self.num_evicted,
            )


class HoldsGroups:
    """A transform that holds groups back in `_waiting` until they are complete."""

    _waiting: Waiting[Any, Any]

    @property
    def num_incomplete(self) -> int:
        """Groups that still wait for members."""
        return len(self._waiting)

    @property
    def num_evicted(self) -> int:
        """Groups that were discarded since too many waited."""
        return self._waiting.num_evicted


def check_one_group(number: int, waiting: Selection, new: Selection) -> None:
    """Raise DataError if the `new` rows have another prompt or source than the waiting ones."""
    for key in ("query", "source"):
        first, second = waiting.first(key), new.first(key)
        if None not in (first, second) and first != second:
            raise DataError(
                f"group {number} would hold rows of two prompts ({key} {str(first)[:40]!r} and {str(second)[:40]!r}): "
                "two collectors number their draws alike, so give each a buffer of its own"
            )


# The best of each group


def best_of_groups(batch: TensorDictBase, count: int, minimum: float | None) -> list[int]:
    """The places of each group's `best` in a batch (B,) of complete groups, one row a completion, group by group."""
    worth = [mean_worth([reward]) for reward in worth_of(Selection.whole(batch), ("next", "reward"))]
    groups = places_of_each(batch["group_id"].tolist()).values()
    return [places[i] for places in groups for i in best([worth[place] for place in places], count, minimum)]


def worth_of(rows: Selection, rewards_key: Key) -> list[float | None]:
    """The reward of each row, the mean if it has several: NaN without one, None if it failed."""
    column = rows.column(rewards_key)
    each = ragged_rows(column) if column.is_nested else column.reshape(len(rows), -1)
    rewards = [row.double().mean().item() for row in each]
    valid = rows.column("valid").flatten().tolist() if rows.has("valid") else [True] * len(rewards)
    return [reward if counts else None for reward, counts in zip(rewards, valid, strict=True)]


def mean_worth(rewards: Sequence[float | None]) -> float:
    """The mean reward over the rows of a trajectory that have one; NaN if none has, or one failed."""
    finite = [reward for reward in rewards if reward is not None and isfinite(reward)]
    return fmean(finite) if finite and None not in rewards else nan


def best(worth: Sequence[float], count: int, minimum: float | None) -> list[int]:
    """The places of the `count` greatest candidates, greatest first; NaN is never one.

    Candidates are at least `minimum`; if it is None, strictly above the lower median of all that are not NaN,
    up to rounding.
    """
    known = [value for value in worth if value == value]
    if not known:
        return []
    bar = median_low(known) + TOLERANCE * max(1.0, *map(abs, known)) if minimum is None else minimum
    candidates = [i for i, value in enumerate(worth) if (value > bar if minimum is None else value >= bar)]
    return sorted(candidates, key=lambda i: -worth[i])[:count]
