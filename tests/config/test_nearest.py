"""The suggestion for a misspelt word, over every key there is."""

from __future__ import annotations

import string

import pytest

from rlpost.config.nearest import edit_distance, nearest, nearest_key
from rlpost.config.registry import TRAIN_GRPO, all_keys


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("steps", "steps", 0),
        ("steps", "step", 1),
        ("steps", "stepps", 1),
        ("steps", "staps", 1),
        ("steps", "setps", 1),  # a swap of neighbours is one edit
        ("lr", "", 2),
        ("kitten", "sitting", 3),
        ("ca", "abc", 3),  # optimal string alignment; the unrestricted distance would be 2
    ],
)
def test_edit_distance_counts_edits_and_swaps(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance
    assert edit_distance(b, a) == distance


def test_a_distant_word_gets_no_suggestion() -> None:
    assert nearest("bananas", ["vllm", "auto"]) is None
    assert nearest_key("hydra.run.dir", ["optim.lr", "steps"]) is None


def test_the_last_part_of_a_key_is_enough() -> None:
    keys = ["steps", "optim.lr", "sampling.temperature", "loss.clip_low"]
    assert nearest_key("lr", keys) == "optim.lr"
    assert nearest_key("temprature", keys) == "sampling.temperature"
    assert nearest_key("optimizer.lr", keys) == "optim.lr"
    assert nearest_key("loss.temperature", keys) == "sampling.temperature"


def one_letter_edits(word: str) -> set[str]:
    """Every deletion, swap, and a fixed choice of replacements and insertions."""
    letters = string.ascii_lowercase[::5]
    edits = {word[:i] + word[i + 1 :] for i in range(len(word))}
    edits |= {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    edits |= {word[:i] + c + word[i + 1 :] for i in range(len(word)) for c in letters}
    edits |= {word[:i] + c + word[i:] for i in range(len(word) + 1) for c in letters}
    return {edit for edit in edits if edit}


def test_a_typing_mistake_in_any_key_leads_back_to_it() -> None:
    keys = list(all_keys(TRAIN_GRPO))
    every = [(typo, key) for key in keys for typo in sorted(one_letter_edits(key)) if typo not in keys]
    typos = every[::11]  # enough of each key: all of them take a minute
    right = sum(nearest_key(typo, keys) == key for typo, key in typos)
    assert {key for _, key in typos} == set(keys)
    assert right / len(typos) >= 0.95
