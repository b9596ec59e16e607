import pytest
import torch
from tensordict import TensorDict

from rlpost.envs.transforms import as_nested_tensor, as_padded_tensor
from rlpost.errors import DataError

ELEMENTS = [
    {"tokens": torch.tensor([4, 5]), "text": "a", "level": 1, "of": {"weights": torch.tensor([0.5])}},
    {"tokens": torch.tensor([6, 7, 8, 9]), "text": "b", "level": 2, "of": {"weights": torch.tensor([1.5, 2.5])}},
]


def test_rows_of_different_lengths_become_ragged() -> None:
    batch = as_nested_tensor(ELEMENTS)
    assert batch.batch_size == torch.Size([2])
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[4, 5], [6, 7, 8, 9]]
    assert [row.tolist() for row in batch["of", "weights"].unbind()] == [[0.5], [1.5, 2.5]]
    assert batch["text"] == ["a", "b"]
    assert batch["level"].tolist() == [1, 2]


def test_rows_are_padded_on_the_left_with_zeros() -> None:
    batch = as_padded_tensor(ELEMENTS)
    assert batch["tokens"].tolist() == [[0, 0, 4, 5], [6, 7, 8, 9]]
    assert batch["of", "weights"].tolist() == [[0.0, 0.5], [1.5, 2.5]]
    assert batch["text"] == ["a", "b"]


def test_tensordicts_are_elements_too() -> None:
    elements = [TensorDict({**element}, batch_size=[]) for element in ELEMENTS]
    assert as_padded_tensor(elements)["tokens"].tolist() == as_padded_tensor(ELEMENTS)["tokens"].tolist()
    assert as_nested_tensor(elements)["text"] == ["a", "b"]


def test_single_numbers_in_tensors_are_stacked() -> None:
    elements = [{"x": torch.tensor(1.5)}, {"x": torch.tensor(2.5)}]
    assert as_nested_tensor(elements)["x"].tolist() == as_padded_tensor(elements)["x"].tolist() == [1.5, 2.5]


def test_elements_with_other_fields_are_refused() -> None:
    with pytest.raises(DataError, match="element 1 has the fields tokens, and element 0 text"):
        as_padded_tensor([{"text": "a"}, {"tokens": torch.ones(1)}])
