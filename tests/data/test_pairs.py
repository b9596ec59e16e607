"""Pairs of replies: the forms of rows, their faults, and the ids and masks that they become."""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.data.demonstrations import Demonstration, Pair
from rlpost.data.encoding import PairEncoder
from rlpost.data.faults import Fault, FormatError
from rlpost.data.formats import RowReader, Wanted
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings
from tests.chat_templates import FAMILIES, bytes_tokenizer
from tests.says import Says

ASK = {"role": "user", "content": "2 + 2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))
FORMS: list[dict[str, Any]] = [
    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    {"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]},
    {"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]},  # TRL's implicit prompt
    {"prompt": "2 + 2?", "chosen": [ASK, FOUR], "rejected": [ASK, FIVE], "messages": [ASK, FOUR]},  # UltraFeedback
]


def read(row: dict[str, Any], **settings: Any) -> Demonstration:
    return RowReader(DatasetSettings(path="x", reward=[], **settings), Wanted.pair).read("row 1", row)


@pytest.mark.parametrize("row", FORMS)
def test_every_form_of_a_row_is_the_same_pair(row: dict[str, Any], tiny_tokenizer: Any) -> None:
    shown = read(row)
    assert (shown.messages, shown.replies) == ([ASK], ([FOUR], [FIVE]))
    pair = PairEncoder(tiny_tokenizer, 100).encode(shown)
    prompt = tiny_tokenizer.apply_chat_template([ASK], add_generation_prompt=True, return_dict=False)
    end = tiny_tokenizer.eos_token_id
    ids = [[*prompt, *tiny_tokenizer.encode(text), end] for text in ("4", "5")]
    trained = [[each.ids[place] for place, kept in enumerate(each.mask) if kept] for each in pair.samples]
    assert trained == [each[len(prompt) :] for each in ids]
    assert [each.ids[: len(prompt)] for each in pair.samples] == [prompt, prompt]
    assert (pair.prompt_length, pair.num_trained, pair.fault) == (len(prompt), 4, None)


def test_earlier_answers_belong_to_the_prompt_and_are_not_trained(tiny_tokenizer: Any) -> None:
    shown = read({"chosen": [ASK, FOUR, ASK, FOUR], "rejected": [ASK, FOUR, ASK, FIVE]})
    assert shown.messages == [ASK, {**FOUR, "weight": 0}, ASK]
    assert PairEncoder(tiny_tokenizer, 200).encode(shown).num_trained == 4


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen"),
        ({"chosen": "b", "rejected": "c"}, "prompt"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "chosen"),
        ({"chosen": [ASK, FOUR], "rejected": [{**ASK, "content": "3?"}, FIVE]}, "chosen"),
        ({"chosen": [ASK, FOUR, ASK, FOUR], "rejected": [ASK, FOUR]}, "chosen"),
    ],
    ids=["one reply", "equal", "no prompt", "empty", "number", "two prompts", "no reply"],
)
def test_a_malformed_row_is_named_by_column_and_fault(row: dict[str, Any], column: str, says: Says) -> None:
    with says.refused("data", FormatError, f"field '{column}'"):
        read(row)


def test_a_pair_that_is_too_long_is_not_trained(tiny_tokenizer: Any, says: Says) -> None:
    row = {"prompt": "2 + 2?", "chosen": "4" * 50, "rejected": "5"}
    pair = PairEncoder(tiny_tokenizer, 60).encode(read(row))
    assert (pair.fault, pair.num_trained) == (Fault.cut, 0)
    says("data", pair.reason)


def sampled_row(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """A row as `rlpost data pairs` writes it. The tokenizer would give the chosen text other ids."""
    rendered = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    [nine] = tokenizer.encode("9")
    return {
        "chosen": [{"role": "assistant", "content": "99"}],
        "rejected": [FIVE],
        "rendered_prompt": rendered,
        "chosen_ids": [nine, nine],  # stopped by a stop string, without an end of turn
        "rejected_ids": [*tokenizer.encode("5"), tokenizer.eos_token_id],
        "rejected_mask": [False, True],
        **more,
    }


def test_sampled_ids_are_trained_as_they_are(tiny_tokenizer: Any) -> None:
    row = sampled_row(tiny_tokenizer, prompt=[ASK])
    pair: Pair = PairEncoder(tiny_tokenizer, 100).encode(read(row))
    prompt = tiny_tokenizer(row["rendered_prompt"], add_special_tokens=False)["input_ids"]
    assert pair.chosen.ids == [*prompt, *row["chosen_ids"]]
    assert pair.chosen.mask == [False] * len(prompt) + [True, True]
    assert pair.rejected.mask == [False] * len(prompt) + [False, True]
    assert pair.prompt_length == len(prompt)
    with pytest.raises(ConfigError, match=r"^env\.system_prompt"):
        read(row, system_prompt="Be brief.")


def test_ids_of_another_tokenizer_give_way_to_the_messages_or_are_a_fault(tiny_tokenizer: Any) -> None:
    encoder = PairEncoder(tiny_tokenizer, 100)
    foreign = {"chosen_ids": [1, 2, 3]}
    kept = encoder.encode(read(sampled_row(tiny_tokenizer, prompt=[ASK], **foreign)))
    assert kept.chosen.num_trained == 3  # 9, 9 and the end of the turn
    bare = encoder.encode(read(sampled_row(tiny_tokenizer, **foreign)))
    assert (bare.fault, bare.num_trained) == (Fault.foreign, 0)
    assert encoder.encode(read(sampled_row(tiny_tokenizer))).num_trained == 3


def test_replies_that_are_the_same_tokens_are_a_fault() -> None:
    trims = bytes_tokenizer(FAMILIES["llama3"])  # its template strips what stands around an answer
    pair = PairEncoder(trims, 1000).encode(read({"prompt": "2 + 2?", "chosen": "4", "rejected": "4\n"}))
    assert (pair.fault, pair.num_trained) == (Fault.equal, 0)
