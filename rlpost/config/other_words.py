"""Words of other tools (TRL, verl, torchtune, prime-rl, OpenRLHF, axolotl), and the same in words of rlpost."""

from __future__ import annotations

from functools import cache
from pathlib import Path

NOT_HERE = "not here: "  # begins an answer that says why rlpost has nothing of the kind


@cache
def answers(kind: str) -> dict[str, str]:
    """Word of another tool -> what rlpost says to it: a section of other_words.yaml, which explains them."""
    from rlpost.config.schema import read_yaml

    section = read_yaml(Path(__file__).with_suffix(".yaml"))[kind]
    return {word: meant for meant, words in section.items() for word in words.split()}
