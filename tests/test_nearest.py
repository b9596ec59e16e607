"""The suggestion for a misspelt word; over every word there is: test_typos.py."""

from __future__ import annotations

import pytest

from rlpost.text import edit_distance, nearest, nearest_key, one_edit_apart


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


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ("steps", "steps", True),
        ("steps", "stesp", True),
        ("steps", "step", True),
        ("steps", "sxteps", True),
        ("steps", "stopsy", False),
        ("abcd", "badc", False),
        ("a", "", True),
        ("ab", "", False),
        ("aab", "ab", True),
    ],
)
def test_one_edit_is_seen_without_counting(a: str, b: str, apart: bool) -> None:
    assert one_edit_apart(a, b) is apart
    assert one_edit_apart(b, a) is apart
    assert (edit_distance(a, b) <= 1) is apart


def test_a_word_in_the_wrong_case_is_nearer_than_a_typo() -> None:
    assert nearest("QWEN-3B", ["qwen-7b", "qwen-3b"]) == "qwen-3b"
