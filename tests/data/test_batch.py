"""The batch: its keys, and rows taken out of it and put together again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, set_list_to_stack

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel
from rlpost.data.ragged import column
from rlpost.torchrl.batches import select_rows

Make = Callable[..., Conversation]


def lists(nested: torch.Tensor) -> list[list[Any]]:
    return [row.tolist() for row in nested.unbind()]


def two_turns() -> Conversation:
    """Prompt [1, 2, 3]; sampled [7, 8]; said by the environment [4]; sampled [9] under a later version."""
    return Conversation(
        task={},
        messages=[
            {"role": "user", "content": "start"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "two"},
        ],
        group_id=3,
        sample=1,
        prompt_ids=[1, 2, 3],
        response_ids=[7, 8, 4, 9],
        mask=[1, 1, 0, 1],
        log_probs=[-0.25, -0.5, 0.0, -1.0],
        policy_versions=[4, 6],
        prompt_text="<user>start",
        response_text="two",
        finish_reason="length",
        reward=0.75,
        reward_parts={"format": 0.25, "right": 0.5},
        accuracy_lenient=1.0,
        truncated=True,
    )


def test_every_key_of_a_conversation_of_two_turns() -> None:
    batch = batch_from_conversations([two_turns()])
    assert batch.batch_size == torch.Size([1])
    assert lists(batch["tokens", "prompt"]) == [[1, 2, 3]]
    assert lists(batch["tokens", "response"]) == [[7, 8, 4, 9]]
    assert lists(batch["tokens", "full"]) == [[1, 2, 3, 7, 8, 4, 9]]
    assert lists(batch["masks", "all_attention_mask"]) == [[True] * 7]
    assert lists(batch["masks", "all_assistant_mask"]) == [[False, False, False, True, True, False, True]]
    assert lists(batch["log_probs", "response"]) == [[-0.25, -0.5, 0.0, -1.0]]
    assert lists(batch["log_probs", "full"]) == [[0, 0, 0, -0.25, -0.5, 0.0, -1.0]]
    assert batch["policy_version"].tolist() == [4]
    assert batch["policy_version_max"].tolist() == [6]
    assert [batch[key].tolist() for key in ("group_id", "sample", "valid")] == [[3], [1], [True]]
    texts = [batch["query"], batch["text", "prompt"], batch["text", "response"], batch["finish_reason"]]
    assert texts == [["start"], ["<user>start"], ["two"], ["length"]]
    assert batch["history"].to_chats() == [two_turns().messages]
    after = batch["next"]
    assert [after[key].tolist() for key in ("reward", "accuracy_lenient")] == [[[0.75]], [[1.0]]]
    assert {name: value.tolist() for name, value in after["reward_parts"].items()} == {
        "format": [[0.25]],
        "right": [[0.5]],
    }
    assert math.isnan(after["accuracy_strict"])
    assert [after[key].tolist() for key in ("done", "terminated", "truncated")] == [[[True]], [[False]], [[True]]]


def test_types_are_those_the_module_promises() -> None:
    batch = batch_from_conversations([two_turns()])
    names = [("tokens", "full"), "group_id", "sample", "policy_version", "policy_version_max"]
    assert {batch[name].dtype for name in names} == {torch.int64}
    assert {batch[name].dtype for name in (("log_probs", "full"), ("next", "reward"))} == {torch.float32}
    flags = [("masks", "all_assistant_mask"), "valid", ("next", "done")]
    assert {batch[name].dtype for name in flags} == {torch.bool}


def test_a_reward_or_part_that_a_row_lacks_is_nan(conversation: Make) -> None:
    failed = conversation(reward=None, valid=False, reward_parts={"a": 1.0})
    batch = batch_from_conversations([failed, conversation(reward=1.0, reward_parts={"b": 2.0})])
    assert batch["valid"].tolist() == [False, True]
    after = batch["next"].flatten_keys()
    names = ("reward", "reward_parts.a", "reward_parts.b")
    assert [after[name].flatten().nan_to_num(-1).tolist() for name in names] == [[-1, 1], [1, -1], [-1, 2]]


def test_versions_that_are_uuids_stay_text(conversation: Make) -> None:
    batch = batch_from_conversations([conversation(version="3f2a"), conversation(version="9c1b")])
    assert list(batch["policy_version"]) == ["3f2a", "9c1b"]
    assert list(select_rows(batch, [1])["policy_version_max"]) == ["9c1b"]


def test_an_empty_reply_is_an_empty_row(conversation: Make) -> None:
    batch = batch_from_conversations([conversation(response_ids=[]), conversation(response_ids=[9])])
    assert lists(batch["tokens", "response"]) == [[], [9]]
    assert lists(batch["log_probs", "full"]) == [[0, 0], [0, 0, -0.5]]


def rows(batch: TensorDict) -> list[Any]:
    """Everything a batch says, one plain value a row."""
    parts = {n: v.squeeze(-1).nan_to_num(-1).tolist() for n, v in batch["next", "reward_parts"].items()}
    columns = [
        lists(batch["tokens", "full"]),
        lists(batch["masks", "all_assistant_mask"]),
        lists(batch["log_probs", "response"]),
        list(batch["query"]),
        list(batch["finish_reason"]),
        batch["history"].to_chats(),
        batch["group_id"].tolist(),
        batch["next", "reward"].tolist(),
        [{n: values[i] for n, values in parts.items()} for i in range(batch.batch_size[0])],
    ]
    return list(zip(*columns, strict=True))


@pytest.fixture(scope="session")
def mixed(conversation: Make) -> TensorDict:
    """Four rows that differ in every length."""
    return batch_from_conversations(
        [
            conversation(0, 0, prompt_ids=[1], response_ids=[2], query="a", reward=0.0, reward_parts={"x": 0.0}),
            conversation(0, 1, prompt_ids=[1], response_ids=[3, 4, 5], query="b", finish_reason="length"),
            conversation(1, 0, prompt_ids=[6, 7], response_ids=[], query="c", reward_parts={"y": 2.0}),
            two_turns(),
        ]
    )


@given(indices=st.lists(st.integers(0, 3), min_size=1, max_size=6))
@settings(deadline=None, max_examples=40)
def test_selected_rows_are_those_asked_for_in_that_order(mixed: TensorDict, indices: Sequence[int]) -> None:
    assert rows(select_rows(mixed, indices)) == [rows(mixed)[i] for i in indices]


def test_selected_rows_are_copies(mixed: TensorDict) -> None:
    picked = select_rows(mixed, [0])
    picked["next", "reward"] += 5
    assert mixed["next", "reward"][0].item() == 0.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_list_that_was_set_as_one_object_is_a_value_a_row() -> None:
    with set_list_to_stack(False):
        given = TensorDict({"text_response": ["one", "two"]}, batch_size=[2])
    assert column(given, "text_response") == ["one", "two"]


def spoken(*turns: tuple[int, PolicyVersionLabel, list[tuple[int, PolicyVersionLabel]]]) -> Conversation:
    """Turns of so many ids, each with the version it began under and later ones; two ids of a tool in between."""
    conversation = Conversation({}, [{"role": "user", "content": "q"}], prompt_ids=[1])
    for number, (length, version, changes) in enumerate(turns):
        if number:
            conversation.add_observation([8, 9])
        conversation.add_completion(Completion([3] * length, [-1.0] * length, "a", "stop", version, changes))
    return conversation


def test_every_sampled_id_has_the_version_it_was_sampled_under() -> None:
    changing = spoken((4, 5, [(1, 6), (3, 8)]), (2, 8, []), (2, 9, [(1, 10)]))
    assert changing.policy_versions == [5, 8, 9]
    plain = spoken((2, 7, []))
    batch = batch_from_conversations([changing, plain, Conversation({}, [])])
    assert [row.tolist() for row in batch["token_versions"].unbind()] == [
        [5, 6, 6, 8, -1, -1, 8, 8, -1, -1, 9, 10],
        [7, 7],
        [],
    ]
    assert batch["policy_version"].tolist() == [5, 7, -1]
    assert batch["policy_version_max"].tolist() == [10, 7, -1]
    assert "token_versions" not in batch_from_conversations([spoken((2, "a", [(1, "b")]))])


def test_a_saved_conversation_keeps_the_versions_it_knows() -> None:
    conversation = spoken((3, 5, [(1, 6)]), (1, 7, []))
    saved = json.loads(json.dumps(asdict(conversation)))
    assert Conversation(**saved).token_versions() == conversation.token_versions() == [5, 6, 6, -1, -1, 7]
    copied = conversation.copy()
    copied.add_completion(Completion([3], [-1.0], "a", "stop", 9))
    assert (conversation.newest_version, copied.newest_version) == (7, 9)
    del saved["version_changes"]
    old = Conversation(**saved)
    assert (old.token_versions(), old.newest_version) == ([-1] * 6, 7)
    one = spoken((2, 4, []))
    without = {name: value for name, value in asdict(one).items() if name != "version_changes"}
    assert Conversation(**without).token_versions() == [4, 4]
