"""`rlpost env`: proves that the rewards of an environment are right, and begins a new environment."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_env, complete_env_settings
from rlpost.cli.terminal import print_json, stdout_on_stderr
from rlpost.cli.usage import App, AsJson
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.envs.proof import Proof

FAILED = 3
TEST_EXAMPLES = """\
  rlpost env test arithmetic
  rlpost env test gsm8k env.path=data/gsm8k
  rlpost env test my_env plugin=./my_env.py
"""
NEW_EXAMPLES = """\
  rlpost env new my_env
  rlpost env new maze --out envs/maze.py
"""
app = App(help="Test and write environments.")


@app.command("test", examples=TEST_EXAMPLES, short_help="Check rewards with gold and wrong answers.")
def test(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="An environment of rlpost config list env.", autocompletion=complete_env),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[env.KEY=VALUE]...",
            help="Settings of the environment, and plugin=FILE.",
            autocompletion=complete_env_settings,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that every gold answer earns full marks and corrupted ones do not; exit 3 if not so.

    Both splits are tested unless env.split names one.
    """
    from rlpost.config.compose import check_scored, compose, environments_of
    from rlpost.rewards.functions import load_rewards

    settings = compose(EVAL, [*(overrides or []), f"env={name}"]).settings.env
    check_scored(settings)
    for each in environments_of(settings):
        load_rewards(each)  # what cannot be imported is an error before the rows are read
    from rlpost.envs.build import build_env
    from rlpost.envs.proof import prove

    names_split = any(word.startswith("env.split=") for word in overrides or [])
    splits = [settings.split] if names_split else ["train", "test"]
    proofs: dict[str, Proof] = {}
    rehearsed: dict[str, list[str]] = {}  # of environments without gold answers
    for split in splits:
        env = build_env(dataclasses.replace(settings, split=split), num_prompts=1, group_size=1, seed=0)
        for part in env.parts:
            key = f"{split}/{part.source_name}" if part.source_name else split
            with closing(part), stdout_on_stderr():  # games and users' code may print
                if (lines := part.rehearse()) is None:
                    proofs[key] = prove(part)
                    lines = proofs[key].lines()
                else:
                    rehearsed[key] = lines = [*lines, *part.notes]
            if not as_json:
                print(f"{part.source_name or name}, {split} split")
                print("\n".join(f"  {printable(line)}" for line in lines))
    if as_json:
        proved = {split: dataclasses.asdict(proof) for split, proof in proofs.items()}
        print_json({**proved, **{split: {"found": lines} for split, lines in rehearsed.items()}})
    if any(proof.failures or not proof.tells_apart for proof in proofs.values()):
        raise typer.Exit(FAILED)


@app.command("new", examples=NEW_EXAMPLES)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment and of its file, NAME.py.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write this file instead of NAME.py.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented environment that works at once."""
    from rlpost.starters import write_starter

    file = write_starter("env", name, out)
    commands = {
        "prove it": f"rlpost env test {name} plugin={file}",
        "train it": f"rlpost train grpo env={name} plugin={file}",
    }
    tell_starter(file, commands, as_json=as_json)


def tell_starter(file: str, commands: Mapping[str, str], *, as_json: bool) -> None:
    """Print the path that `write_starter` returned, and the commands that use the file."""
    if as_json:
        named = {what.partition(" ")[0]: command for what, command in commands.items()}
        print_json({"file": shlex.split(file)[0], **named})
        return
    lines = [f"wrote {file}", *(f"{what}:  {command}" for what, command in commands.items())]
    print("\n".join(printable(line) for line in lines))
