import pytest
import torch
from tensordict import TensorDict

from rlpost.envs.transforms import as_nested_tensor, as_padded_tensor
from rlpost.errors import DataError

ELEMENTS = [
    {"tokens": torch.tensor([4, 5]), "text": "a", "level": torch.tensor(1.5), "of": {"weights": torch.tensor([0.5])}},
    {"tokens": torch.tensor([6, 7, 8, 9]), "text": "b", "level": 2.5, "of": {"weights": torch.tensor([1.5, 2.5])}},
]


@pytest.mark.parametrize("as_tensordicts", [False, True])
def test_rows_of_different_lengths_become_ragged_or_padded(as_tensordicts: bool) -> None:
    elements = [TensorDict({**element}) if as_tensordicts else element for element in ELEMENTS]
    ragged, padded = as_nested_tensor(elements), as_padded_tensor(elements)
    assert [row.tolist() for row in ragged["tokens"].unbind()] == [[4, 5], [6, 7, 8, 9]]
    assert [row.tolist() for row in ragged["of", "weights"].unbind()] == [[0.5], [1.5, 2.5]]
    assert padded["tokens"].tolist() == [[0, 0, 4, 5], [6, 7, 8, 9]]
    assert padded["of", "weights"].tolist() == [[0.0, 0.5], [1.5, 2.5]]
    for batch in (ragged, padded):
        assert (batch.batch_size, batch["text"], batch["level"].tolist()) == ((2,), ["a", "b"], [1.5, 2.5])


def test_elements_with_other_fields_are_refused() -> None:
    with pytest.raises(DataError, match="element 1"):
        as_padded_tensor([{"text": "a"}, {"tokens": torch.ones(1)}])
