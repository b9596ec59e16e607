"""Entries of a TensorDict, one Python value a row."""

from __future__ import annotations

import pytest
from tensordict import TensorDict, set_list_to_stack

from rlpost.data.ragged import column


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_list_that_was_set_as_one_object_is_a_value_a_row() -> None:
    with set_list_to_stack(False):
        given = TensorDict({"text_response": ["one", "two"]}, batch_size=[2])
    assert column(given, "text_response") == ["one", "two"]
