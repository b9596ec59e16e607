"""Who set a value: the layers of every key, and the last of them is what composing gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import CHOICES, COMMANDS, TRAIN_GRPO, Command
from rlpost.config.compose import command_of
from rlpost.config.explain import COMMAND_LINE, Layer, provenance, value_of
from rlpost.config.overrides import parse_value
from rlpost.config.schema import as_text, options, recipes
from rlpost.settings.base import MISSING

NEEDED = {"dataset": ["env.path=someone/rows", "env.reward=exact"]}  # option -> words that it does not compose without
CHOSEN = [
    (command, [f"{g}={o}", *NEEDED.get(o, [])]) for command in COMMANDS for g in CHOICES for o in options(g, command)
]
LINES: list[tuple[Command, list[str]]] = [
    *((command, words) for command, words in CHOSEN if words[0].partition("=")[0] in command.settings.__annotations__),
    *((command_of(name), [f"recipe={name}"]) for name in recipes()),
    (TRAIN_GRPO, ["recipe=gsm8k-qwen0.5b-gpu", "env=arithmetic", "steps=7", "optim.lr=2e-5", "model=me/mine"]),
]


@pytest.mark.parametrize(("command", "words"), LINES, ids=[f"{c.name}-{'-'.join(w)}" for c, w in LINES])
def test_the_layer_that_wins_is_what_composing_gives(command: Command, words: list[str]) -> None:
    told = provenance(command, words)
    assert set(told.keys) == {key.name for key in told.merged.keys}
    for key in told.merged.keys:
        value, winner = value_of(told.merged, key.name), told.winner(key.name)
        if winner is None:
            assert value == MISSING
        else:
            assert as_text(parse_value(key, winner.text)) == as_text(value), key.name
    assert {group: layers[-1].text for group, layers in told.groups.items()} == told.merged.choices


def test_every_layer_stands_in_order(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("command: train grpo\nenv: gsm8k\nenv.limit: 5\nenv.eval_limit: 9\noptim.lr: 1e-6\n")
    told = provenance(TRAIN_GRPO, [f"recipe={recipe}", "env=arithmetic", "optim.lr=2e-6", "env.eval_limit=3"])
    assert told.keys["optim.lr"] == [
        Layer("null", "OptimSettings in rlpost/settings/training.py"),
        Layer("1e-06", f"{recipe}, line 5"),
        Layer("2e-6", COMMAND_LINE),
    ]
    assert told.keys["env.limit"][-1] == Layer("5", f"{recipe}, line 3", effective=False)
    assert told.winner("env.limit") == Layer("null", "EnvSettings in rlpost/settings/env.py")
    assert told.groups["env"] == [
        Layer("arithmetic", "train grpo in rlpost/catalog.py"),
        Layer("gsm8k", f"{recipe}, line 2"),
        Layer("arithmetic", COMMAND_LINE),
    ]


def test_files_of_conf_and_the_commands_own_values_are_layers() -> None:
    command = next(c for c in COMMANDS if c.name == "eval")
    told = provenance(command, ["env=gsm8k"])
    assert told.keys["env.split"] == [
        Layer("train", "EnvSettings in rlpost/settings/env.py"),
        Layer("test", "conf/eval.yaml, line 9"),
    ]
    assert [layer.text for layer in told.keys["sampling.temperature"]] == ["null"]
    assert told.keys["model.path"][-1].where == "conf/model/smollm2.yaml, line 5"
    assert told.keys["env.max_prompt_tokens"] == [Layer("2048", "GSM8KSettings in rlpost/settings/env.py")]


def test_a_users_own_file_of_a_command_says_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    defaults = "".join(f"  - {g}: {o}\n" for g, o in {**TRAIN_GRPO.choices, "model": "tiny"}.items())
    (tmp_path / "conf" / "grpo.yaml").write_text(f"defaults:\n  - grpo_schema\n{defaults}  - _self_\nsteps: 9\n")
    told = provenance(TRAIN_GRPO)
    assert told.groups["model"] == [Layer("tiny", "conf/grpo.yaml, line 3")]
    assert told.winner("steps") == Layer("9", "conf/grpo.yaml, line 12")
    assert value_of(told.merged, "model.path") == "builtin:tiny"


def test_a_users_own_file_of_conf_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "optim").mkdir(parents=True)
    (tmp_path / "conf" / "optim" / "mine.yaml").write_text("defaults: [adamw_schema, _self_]\nlr: 3e-6\n")
    told = provenance(TRAIN_GRPO, ["optim=mine"])
    assert told.winner("optim.lr") == Layer("3e-06", "conf/optim/mine.yaml, line 2")
