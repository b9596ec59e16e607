import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack

from rlpost.data import LLMData
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.data.ragged import ragged_rows


@pytest.fixture(params=[True, False], ids=["lists stack", "lists are kept"])
def lists(request: pytest.FixtureRequest) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with set_list_to_stack(request.param):
            yield


@pytest.fixture
def two(conversation: Callable[..., Conversation]) -> TensorDict:
    first = conversation(prompt_ids=[1, 2, 3], response_ids=[4], log_probs=[-0.5], text="4", query="a")
    second = conversation(prompt_ids=[5], response_ids=[6, 7], log_probs=[-1.0, -2.0], text="67", query="b")
    return batch_from_conversations([first, second])


def test_a_batch_is_read_under_the_flat_names(two: TensorDict, lists: None) -> None:
    flat: Any = LLMData.from_batch(two, pad_id=9)
    assert flat.batch_size == torch.Size([2])
    assert flat.tokens.tolist() == [[1, 2, 3], [9, 9, 5]]
    assert flat.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert flat.tokens_response.tolist() == [[4, 9], [6, 7]]
    assert flat.log_probs.tolist() == [[-0.5, 0.0], [-1.0, -2.0]]
    assert flat.token_list == [[1, 2, 3], [5]]
    assert flat.tokens_response_list == [[4], [6, 7]]
    assert flat.text == ["<user>a", "<user>b"]
    assert flat.text_response == ["4", "67"]
    assert flat.logits is None
    assert (flat[1].token_list, flat[1].text_response) == ([5], "67")


def test_and_goes_back_to_the_nested_keys(two: TensorDict) -> None:
    back = LLMData.from_batch(two, pad_id=9).to_batch()
    keys = [("tokens", "prompt"), ("tokens", "response"), ("tokens", "full"), ("log_probs", "response")]
    for key in [*keys, ("masks", "all_attention_mask")]:
        rows, expected = ragged_rows(back[key]), ragged_rows(two[key])
        assert [row.tolist() for row in rows] == [row.tolist() for row in expected]
    assert list(back["text", "prompt"]) == ["<user>a", "<user>b"]
    assert list(back["text", "response"]) == ["4", "67"]


def test_the_attention_mask_says_where_prompts_are_padded() -> None:
    flat = LLMData(tokens=torch.tensor([[0, 1], [2, 3]]), attention_mask=torch.tensor([[0, 1], [1, 1]]), batch_size=[2])
    assert [row.tolist() for row in ragged_rows(flat.to_batch()["tokens", "prompt"])] == [[1], [2, 3]]


def test_lists_of_ids_stay_lists(lists: None) -> None:
    flat: Any = LLMData(token_list=[[1], [2, 3]], text=["a", "b"], batch_size=[2])
    assert flat.token_list == [[1], [2, 3]]
    assert (flat[1].token_list, flat[1].text) == ([2, 3], "b")
    assert [row.tolist() for row in ragged_rows(flat.to_batch()["tokens", "prompt"])] == [[1], [2, 3]]
