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


def test_rows_of_several_batches_keep_the_order_they_were_chosen_in() -> None:
    first, second = batch(1, 2, 3), batch(4, 5)
    chosen = Selection.joined([Selection.of(second, [1]), Selection.of(first, [2, 0]), Selection.whole(second)])
    assert len(chosen) == 5
    assert chosen.column("value").tolist() == [5, 3, 1, 4, 5]
    copied = chosen.pick([3, 0, 1]).copied()
    assert copied["value"].tolist() == [4, 5, 3]
    assert [row.tolist() for row in copied["ids"].unbind()] == [[4] * 4, [5] * 5, [3] * 3]
    assert copied["word"].tolist() == ["w4", "w5", "w3"]


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


def test_a_whole_batch_can_be_added_to_without_the_one_it_is_of() -> None:
    own = batch(1, 2)
    copied = Selection.whole(own).copied()
    copied["advantage"] = torch.zeros(2)
    copied["next", "done"] = torch.ones(2)
    assert "advantage" not in own
    assert "done" not in own["next"]


def test_an_entry_that_is_not_there_is_named() -> None:
    chosen = Selection.whole(batch(1))
    assert chosen.has(("next", "reward"))
    assert not chosen.has("valid")
