import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack

from rlpost.data import ContentBase, History
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.model.conversion import tiny_tokenizer
from rlpost.torchrl.batches import concat_rows, select_rows

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def test_chats_come_back_as_they_went_in() -> None:
    chats = [[SYSTEM, USER, ASSISTANT], [USER]]
    history = History.from_chats(chats)
    assert history.batch_size == torch.Size([2, 3])
    assert history.to_chats() == chats
    assert history[1].role == ["user", "<none>", "<none>"]
    one = History.from_chats([USER, ASSISTANT])
    assert (one.batch_size, one.to_chats()) == ((2,), [[USER, ASSISTANT]])


def test_one_chat_renders_as_one_text_or_its_ids() -> None:
    tokenizer = tiny_tokenizer()
    chat = History.from_chats([[USER, ASSISTANT]])[0]
    text = chat.apply_chat_template(tokenizer, add_generation_prompt=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    ids = chat.apply_chat_template(tokenizer, add_generation_prompt=False, tokenize=True)
    assert tokenizer.decode(ids) == text
    bare = chat.apply_chat_template(tokenizer, chat_template="{{ messages | length }}")
    assert bare == "2"


def test_messages_without_content_are_refused() -> None:
    with pytest.raises(ValueError, match="chat 1 "):
        History.from_chats([[USER], [{"role": "user"}]])


def test_a_history_stacks_indexes_and_pickles() -> None:
    history = History.from_chats([[USER, ASSISTANT], [USER], [SYSTEM, USER]])
    assert history[[2, 0]].to_chats() == [[SYSTEM, USER], [USER, ASSISTANT]]
    stacked: Any = torch.stack([history[0], history[2]])  # type: ignore[arg-type]
    assert stacked.to_chats() == [[USER, ASSISTANT], [SYSTEM, USER]]
    assert pickle.loads(pickle.dumps(history)).to_chats() == history.to_chats()
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}  # needs a column more
    joined: Any = torch.cat([History.from_chats([[USER]]), History.from_chats([[call]])])  # type: ignore[arg-type]
    assert joined.to_chats() == [[USER], [call]]


def test_histories_of_uneven_lengths_that_are_stacked_lazily_are_read() -> None:
    rows = [
        TensorDict({"history": History.from_chats([chat])[0]}, batch_size=[]) for chat in ([USER, ASSISTANT], [USER])
    ]
    history = lazy_stack(rows)["history"]
    assert history.to_chats() == [[USER, ASSISTANT], [USER]]
    replies = History.from_chats([[USER], [ASSISTANT]])
    assert history.extend(replies).to_chats() == [[USER, ASSISTANT, USER], [USER, ASSISTANT]]


@pytest.fixture(params=[True, False], ids=["lists stack", "lists are kept"])
def lists(request: pytest.FixtureRequest) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with set_list_to_stack(request.param):
            yield


def test_parts_stay_together_whatever_tensordict_makes_of_lists(lists: None) -> None:
    parts = [ContentBase("text", text="What is it?"), ContentBase("image", url="cat.png")]
    one = History(role="user", content=parts)
    assert one.content == parts
    two = History(role=["user", "user"], content=[parts, parts[:1]], batch_size=[2])
    asked = [{"role": "user", "content": parts}, {"role": "user", "content": parts[:1]}]
    assert two.to_chats() == [asked]
    chats = [asked, [{"role": "user", "content": [{"type": "text", "text": "as a dict"}]}]]
    history = History.from_chats(chats)
    assert history.to_chats() == chats
    assert history[0, 1].content == parts[:1]
    assert History.from_chats([asked[:1]]).extend(history[:1]).to_chats() == [[asked[0], *asked]]


def test_in_place_only_when_asked() -> None:
    history = History.from_chats([[SYSTEM, USER], [USER]])
    replies = History.from_chats([[ASSISTANT], [ASSISTANT]])
    batch = TensorDict({"history": history}, batch_size=[2])
    assert history.append(replies[:, 0]) is not history
    assert history.extend(replies) is not history
    assert history.batch_size == torch.Size([2, 2])
    assert history.extend(replies, inplace=True) is history
    assert history.append(replies[:, 0], inplace=True) is history
    expected = [[SYSTEM, USER, ASSISTANT, ASSISTANT], [USER, ASSISTANT, ASSISTANT]]
    assert history.batch_size == torch.Size([2, 4])
    assert history.to_chats() == batch["history"].to_chats() == expected
    assert replies.to_chats() == [[ASSISTANT], [ASSISTANT]]
    row = History.from_chats([[USER]])[0]
    assert row.append(History(role="assistant", content="Hello"), inplace=True).to_chats() == [[USER, ASSISTANT]]
    assert row.batch_size == torch.Size([2])


def test_uneven_replies_are_filled_up_with_none() -> None:
    prompts = History.from_chats([[USER], [USER]])
    thinking = {"role": "assistant", "content": "Well"}
    replies = History.from_chats([[thinking, ASSISTANT], [ASSISTANT]])
    full = prompts.extend(replies)
    assert full.role == [["user", "assistant", "assistant"], ["user", "assistant", "<none>"]]
    assert full.to_chats() == [[USER, thinking, ASSISTANT], [USER, ASSISTANT]]


def test_a_batch_carries_the_messages_replies_included(conversation: Callable[..., Conversation]) -> None:
    replies = [USER, ASSISTANT]
    first, second = conversation(query="Hi", text="Hello"), conversation(query="Hi", text="Hello")
    first.messages.insert(0, SYSTEM)
    batch = batch_from_conversations([first, second])
    assert batch["history"].to_chats() == [[SYSTEM, *replies], replies]
    short = select_rows(batch, [1])
    assert short["history"].to_chats() == [replies]
    assert concat_rows([short, batch])["history"].to_chats() == [replies, [SYSTEM, *replies], replies]
