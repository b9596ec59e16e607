# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack

from rlpost.data import LLMData
from rlpost.data.history import History
from rlpost.data.ragged import strings
from rlpost.envs.transforms import TemplateTransform, Tokenizer, as_nested_tensor, as_padded_tensor
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer

CHATS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi."}],
]
TEXTS = [
    "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n",
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n",
]

ELEMENTS = [
    {"tokens": torch.tensor([4, 5]), "text": "a", "level": torch.tensor(1.5), "of": {"weights": torch.tensor([0.5])}},
    {"tokens": torch.tensor([6, 7, 8, 9]), "text": "b", "level": 2.5, "of": {"weights": torch.tensor([1.5, 2.5])}},
]

tokenizer = tiny_tokenizer()


def histories() -> TensorDict:
    return TensorDict({"history": History.from_chats(CHATS)}, batch_size=[2])


def ids_of(text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_messages_become_the_text_of_the_template_and_back() -> None:
    transform = TemplateTransform(tokenizer, add_generation_prompt=False)
    written = transform(histories())
    assert written["text", "prompt"] == TEXTS
    assert transform.inverse(written.exclude("history"))["history"].to_chats() == CHATS
    asked = TemplateTransform(tokenizer, out_key="text")(histories())
    assert asked["text"] == [text + "<|im_start|>assistant\n" for text in TEXTS]


def test_another_template_can_be_named_or_given() -> None:
    named = TemplateTransform(tokenizer, chat_template_name="llama3", add_generation_prompt=False)(histories())
    assert "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>" in named["text", "prompt"][0]
    back = TemplateTransform(tokenizer, chat_template_name="llama3", in_key="read").inverse(named)
    assert back["read"].to_chats() == CHATS
    template = "{% for m in messages %}{{ who[m.role] }}: {{ m.content }} {% endfor %}"
    names = {"user": "U", "assistant": "A", "system": "S"}
    own = TemplateTransform(tokenizer, chat_template=template, template_kwargs={"who": names})
    assert own(histories())["text", "prompt"] == ["U: 2 + 2? A: 4 ", "S: Be kind. U: Hi. "]


@pytest.mark.parametrize("from_folder", [False, True])
def test_text_becomes_ids_with_a_mask_and_ids_text(tiny_folder: Path, from_folder: bool) -> None:
    transform = Tokenizer(str(tiny_folder) if from_folder else tokenizer, in_key="text", out_key="tokens")
    written = transform(TensorDict({"text": strings(["ab", "cde<|im_end|>"])}, batch_size=[2]))
    assert [row.tolist() for row in written["tokens"].unbind()] == [ids_of("ab"), ids_of("cde<|im_end|>")]
    assert [row.tolist() for row in written["attention_mask"].unbind()] == [[1, 1], [1, 1, 1, 1]]
    assert written["attention_mask"].dtype == torch.int64
    assert transform.inverse(written.exclude("text"))["text"] == ["ab", "cde<|im_end|>"]
    bare = Tokenizer(tokenizer, in_key="text", out_key="tokens", skip_special_tokens=True)
    assert bare.inverse(written)["text"] == ["ab", "cde"]


def test_pads_stand_on_the_left_and_are_left_out_again() -> None:
    transform = Tokenizer(tokenizer, padding=True)
    written = transform(TensorDict({"text": {"prompt": strings(["ab", "cde"])}}, batch_size=[2]))
    assert written["tokens", "prompt"].tolist() == [[tokenizer.pad_token_id, *ids_of("ab")], ids_of("cde")]
    assert written["tokens", "attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert transform.inverse(written.exclude("text"))["text", "prompt"] == ["ab", "cde"]
    with pytest.raises(DataError, match=r"\('tokens', 'attention_mask'\)"):
        transform.inverse(written.exclude(("tokens", "attention_mask")))
    with pytest.raises(DataError, match=r"\('text', 'prompt'\)"):
        Tokenizer(tokenizer)(TensorDict({"other": torch.zeros(1)}, batch_size=[1]))


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
