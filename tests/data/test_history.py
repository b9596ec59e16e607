import pickle
from typing import Any

import pytest
import torch

from rlpost.data import History
from rlpost.data.batch import batch_from_conversations, concat_rows, select_rows
from rlpost.data.conversation import Completion, Conversation
from rlpost.models import tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def test_chats_come_back_as_they_went_in() -> None:
    chats = [[SYSTEM, USER, ASSISTANT], [USER]]
    history = History.from_chats(chats)
    assert history.batch_size == torch.Size([2, 3])
    assert history.to_chats() == chats
    assert history[1].role == ["user", "<none>", "<none>"]


def test_tool_entries_and_unfinished_messages_are_kept() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    cut = {"role": "assistant", "content": "Hel", "is_complete": False}
    history = History.from_chats([[USER, call], [USER, cut]])
    assert history.to_chats() == [[USER, call], [USER, cut]]
    assert history.is_complete.tolist() == [[True, True], [True, False]]
    assert history.tool_responses is None


def test_padding_is_not_rendered() -> None:
    texts = History.from_chats([[SYSTEM, USER, ASSISTANT], [USER]]).apply_chat_template(tiny_tokenizer())
    assert texts == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_one_chat_renders_as_one_text_or_its_ids() -> None:
    tokenizer = tiny_tokenizer()
    chat = History.from_chats([[USER, ASSISTANT]])[0]
    text = chat.apply_chat_template(tokenizer, add_generation_prompt=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    ids = chat.apply_chat_template(tokenizer, add_generation_prompt=False, tokenize=True)
    assert tokenizer.decode(ids) == text
    bare = chat.apply_chat_template(tokenizer, chat_template="{{ messages | length }}")
    assert bare == "2"


def test_append_and_extend_leave_the_original_alone() -> None:
    history = History.from_chats([[SYSTEM, USER], [USER]])
    longer = history.append(History.from_chats([[ASSISTANT], [ASSISTANT]])[:, 0])
    assert longer.to_chats() == [[SYSTEM, USER, ASSISTANT], [USER, ASSISTANT]]
    assert history.to_chats() == [[SYSTEM, USER], [USER]]
    assert history.extend(history).to_chats() == [[SYSTEM, USER, SYSTEM, USER], [USER, USER]]
    assert history[0].append(History(role="user", content="More")).to_chats()[0][-1]["content"] == "More"


def test_extending_by_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        History.from_chats([[USER]]).extend(History.from_chats([[USER], [USER]]))


def test_messages_without_content_and_no_chats_are_refused() -> None:
    with pytest.raises(ValueError, match="message 0 of chat 1 lacks role or content"):
        History.from_chats([[USER], [{"role": "user"}]])
    with pytest.raises(ValueError, match="no chats"):
        History.from_chats([])


def test_a_history_stacks_indexes_and_pickles() -> None:
    history = History.from_chats([[USER, ASSISTANT], [USER], [SYSTEM, USER]])
    assert history[[2, 0]].to_chats() == [[SYSTEM, USER], [USER, ASSISTANT]]
    stacked: Any = torch.stack([history[0], history[2]])  # type: ignore[arg-type]
    assert stacked.to_chats() == [[USER, ASSISTANT], [SYSTEM, USER]]
    assert pickle.loads(pickle.dumps(history)).to_chats() == history.to_chats()


def test_a_batch_carries_the_messages_replies_included() -> None:
    first, second = (Conversation(task={}, messages=[SYSTEM, USER]), Conversation(task={}, messages=[USER]))
    for conversation in (first, second):
        conversation.prompt_ids = [1]
        conversation.add_completion(Completion([2], [-0.5], "Hello", "stop", 0))
    batch = batch_from_conversations([first, second])
    assert batch["history"].to_chats() == [[SYSTEM, USER, ASSISTANT], [USER, ASSISTANT]]
    short = select_rows(batch, [1])
    assert short["history"].to_chats() == [[USER, ASSISTANT]]
    assert concat_rows([short, batch])["history"].to_chats() == [
        [USER, ASSISTANT],
        [SYSTEM, USER, ASSISTANT],
        [USER, ASSISTANT],
    ]
