"""Words of other tools (TRL, verl, torchtune, prime-rl, OpenRLHF, axolotl), and the same in words of rlpost."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rlpost.config.schema import read_yaml

NOT_HERE = "not here: "  # begins an answer that says why rlpost has nothing of the kind


@cache
def answers(kind: str) -> dict[str, str]:
    """Word of another tool -> what rlpost says to it: a section of other_words.yaml, which explains them."""
    section = read_yaml(Path(__file__).with_suffix(".yaml"))[kind]
    return {word: meant for meant, words in section.items() for word in words.split()}


def meant_by(key: str) -> str | None:
    """The answer to a key of another tool: by its longest known end, else by a part that rlpost has nothing for."""
    known = answers("settings")
    by_end = next((known[end] for end in ends_of(key) if end in known), None)
    return by_end or next((known[p] for p in key.lower().split(".") if known.get(p, "").startswith(NOT_HERE)), None)


def ends_of(key: str) -> list[str]:
    """`data.train_files` and `train_files`, of a key in upper or lower case, with - or _."""
    parts = key.lower().replace("-", "_").split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
