"""Rows chosen from batches: which they are, and what is copied."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from rlpost.data.batch import Selection
from rlpost.data.ragged import ragged, strings


def batch(*values: int) -> TensorDict:
    return TensorDict(
        {
            "value": torch.tensor(values),
            "ids": ragged([torch.full((value,), value) for value in values]),
            "word": strings([f"w{value}" for value in values]),
            "next": {"reward": torch.tensor(values, dtype=torch.float32).unsqueeze(-1)},
        },
        batch_size=[len(values)],
    )


def test_a_column_is_read_without_the_rest() -> None:
    first, second = batch(1, 2), batch(3)
    chosen = Selection.joined([Selection.of(first, [1]), Selection.of(second, [0])])
    assert chosen.column(("next", "reward")).tolist() == [[2.0], [3.0]]
    assert [row.tolist() for row in chosen.column("ids").unbind()] == [[2, 2], [3, 3, 3]]


def test_the_measures_are_the_dense_tensors_alone() -> None:
    chosen = Selection.joined([Selection.of(batch(1, 2), [1]), Selection.of(batch(3), [0])])
    measures = chosen.measures()
    assert set(measures.keys()) == {"value", "next"}
    assert measures["next", "reward"].tolist() == [[2.0], [3.0]]


def test_neighbours_in_one_batch_are_one_part() -> None:
    own = batch(1, 2, 3, 4)
    assert Selection.joined([Selection.of(own, [0, 1]), Selection.of(own, [2, 3])]) == Selection.whole(own)


def test_an_entry_that_is_not_there_is_named() -> None:
    chosen = Selection.whole(batch(1))
    assert chosen.has(("next", "reward"))
    assert not chosen.has("valid")
