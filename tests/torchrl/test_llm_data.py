import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from tensordict import set_list_to_stack

from rlpost.data import LLMData


@pytest.fixture(params=[True, False], ids=["lists stack", "lists are kept"])
def lists(request: pytest.FixtureRequest) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with set_list_to_stack(request.param):
            yield


def test_lists_of_ids_stay_lists(lists: None) -> None:
    flat: Any = LLMData(token_list=[[1], [2, 3]], text=["a", "b"], batch_size=[2])
    assert flat.token_list == [[1], [2, 3]]
    assert (flat[1].token_list, flat[1].text) == ([2, 3], "b")
