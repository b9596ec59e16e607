from __future__ import annotations

from typing import Any

import pytest

from rlpost.data.demonstrations import Demonstration, Sample
from rlpost.data.encoding import Encoder, encode_all
from rlpost.data.faults import Fault
from rlpost.errors import DataError
from tests.chat_templates import FAMILIES, bytes_tokenizer
from tests.says import Says

GOOD = Demonstration("row 1", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
EMPTY = Demonstration("row 2", [{"role": "user", "content": "Hi"}])
FORBIDDEN = Demonstration("row 3", [{"role": "system", "content": "S"}, *(GOOD.messages or [])])


@pytest.fixture(scope="module")
def gemma() -> Any:
    return bytes_tokenizer(FAMILIES["gemma"])


def test_all_of_a_text_is_trained_but_its_first_token_and_then_its_end(gemma: Any, tiny_tokenizer: Any) -> None:
    with_bos = Encoder(gemma).encode(Demonstration("row 1", text="ab"))
    assert gemma.convert_ids_to_tokens(with_bos.ids) == ["<bos>", "a", "b", "<eos>"]
    assert with_bos.mask == [False, True, True, True]
    assert Encoder(gemma).encode(Demonstration("row 1", text="<bos>ab<eos>")).ids == with_bos.ids  # none a second time
    without = Encoder(tiny_tokenizer).encode(Demonstration("row 1", text="ab"))
    assert tiny_tokenizer.convert_ids_to_tokens(without.ids) == ["a", "b", "<|im_end|>"]
    assert without.mask == [False, True, True]


def test_an_empty_text_teaches_nothing(gemma: Any) -> None:
    sample = Encoder(gemma).encode(Demonstration("row 1", text=" \n"))
    assert (sample.fault, sample.num_trained) == (Fault.empty, 0)


def test_a_text_that_is_cut_has_no_end(gemma: Any) -> None:
    sample = Encoder(gemma, max_tokens=3).encode(Demonstration("row 1", text="abcd"))
    assert gemma.convert_ids_to_tokens(sample.ids) == ["<bos>", "a", "b"]
    assert (sample.fault, sample.num_trained) == (Fault.cut, 2)


def test_a_sample_says_where_training_begins(tiny_tokenizer: Any) -> None:
    sample = Encoder(tiny_tokenizer).encode(GOOD)
    assert tiny_tokenizer.decode(sample.ids[sample.prompt_length :]) == "Ho<|im_end|>\n"
    assert sample.num_trained == 3
    assert Sample("row 1", [1, 2], [False, False]).prompt_length == 2


def test_a_row_that_is_cut_counts_as_bad_and_is_trained_on_all_the_same(tiny_tokenizer: Any) -> None:
    size = len(Encoder(tiny_tokenizer).encode(GOOD).ids)
    samples, bad = encode_all([GOOD, GOOD], Encoder(tiny_tokenizer, size - 2))  # without "\n" and the end of turn
    assert [sample.num_trained for sample in samples] == [2, 2]
    assert [each.fault for each in bad.found] == [Fault.cut] * 2


def test_more_bad_rows_than_allowed_are_an_error(gemma: Any, says: Says) -> None:
    with says.refused("data", DataError, "row 2"):
        encode_all([GOOD, EMPTY, GOOD, GOOD], Encoder(gemma), max_bad_share=0.24)
    assert encode_all([GOOD, EMPTY, GOOD, GOOD], Encoder(gemma), max_bad_share=0.25)[1].count == 1
    with pytest.raises(DataError, match="2 of 2 rows"):  # whatever share is allowed
        encode_all([EMPTY, FORBIDDEN], Encoder(gemma), max_bad_share=1.0)
