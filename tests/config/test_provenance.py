"""Who set a value: the layers of every key, and the last of them is what composing gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import CHOICES, COMMANDS, TRAIN_GRPO, Command
from rlpost.config.explain import provenance, value_of
from rlpost.config.overrides import parse_value
from rlpost.config.recipes import command_of
from rlpost.config.schema import as_text, options, recipes
from rlpost.settings.base import MISSING
from tests.says import Says

pytestmark = pytest.mark.thorough

NEEDED = {"dataset": ["env.path=someone/rows", "env.reward=exact"]}  # option -> words that it does not compose without
CHOSEN = [
    (command, [f"{g}={o}", *NEEDED.get(command.choices.get("env", "") if g != "env" else o, [])])
    for command in COMMANDS
    for g in CHOICES
    for o in options(g, command)
]
LINES: list[tuple[Command, list[str]]] = [
    *((command, words) for command, words in CHOSEN if words[0].partition("=")[0] in command.settings.__annotations__),
    *((command_of(name), [f"recipe={name}"]) for name in recipes()),
    (TRAIN_GRPO, ["recipe=gsm8k-qwen0.5b-gpu", "env=arithmetic", "steps=7", "optim.lr=2e-5", "model=me/mine"]),
]


@pytest.mark.parametrize(("command", "words"), LINES, ids=[f"{c.name}-{'-'.join(w)}" for c, w in LINES])
def test_the_layer_that_wins_is_what_composing_gives(command: Command, words: list[str]) -> None:
    told = provenance(command, words)
    assert set(told.layers) == {key.name for key in told.merged.keys} | {*told.merged.choices}
    for key in told.merged.keys:
        value, winner = value_of(told.merged, key.name), told.winner(key.name)
        if winner is None:
            assert value == MISSING
        else:
            assert as_text(parse_value(key, winner.text)) == as_text(value), key.name
    assert {group: told.layers[group][-1].text for group in told.merged.choices} == told.merged.choices


def test_every_layer_stands_in_order(tmp_path: Path, says: Says) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("command: train grpo\nenv: gsm8k\nenv.limit: 5\nenv.eval_limit: 9\noptim.lr: 1e-6\n")
    told = provenance(TRAIN_GRPO, [f"recipe={recipe}", "env=arithmetic", "optim.lr=2e-6", "env.eval_limit=3"])
    assert [layer.text for layer in told.layers["optim.lr"]] == ["null", "1e-06", "2e-6"]
    assert [layer.text for layer in told.layers["env"]] == ["arithmetic", "gsm8k", "arithmetic"]
    assert (told.layers["env.limit"][-1].text, told.layers["env.limit"][-1].effective) == ("5", False)
    assert (winner := told.winner("env.limit")) is not None
    assert winner.text == "null"
    for key in ("optim.lr", "env.limit", "env"):
        says("config", "\n".join(f"{key}: {layer.text} by {layer.where}" for layer in told.layers[key]))
