"""`rlpost env`: proves that the rewards of an environment are right, and begins a new environment.

A starter is a copy of a file in rlpost/starters with the user's own names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rlpost
from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_env, complete_env_settings
from rlpost.cli.terminal import print_json, stdout_on_stderr
from rlpost.cli.usage import App, AsJson
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.settings import EnvSettings
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.envs.proof import Proof

FAILED = 3
SPLITS = ("train", "test")
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
    settings, splits = env_to_test(name, overrides or [])
    from rlpost.envs.build import build_env
    from rlpost.envs.proof import prove

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
    file = write_starter("env", name, out)
    commands = {
        "prove it": f"rlpost env test {name} plugin={file}",
        "train it": f"rlpost train grpo env={name} plugin={file}",
    }
    tell_starter(file, commands, as_json=as_json)


def write_starter(kind: str, name: str, out: Path | None) -> str:
    """Write the starter `kind` (env or reward) to `out`, else to NAME.py here; returns the path quoted for a command.

    Raises ConfigError for a name that Python or rlpost cannot use, and for a file that exists or cannot be written.
    """
    _check_name(kind, name)
    file = Path(f"{name}.py") if out is None else expanded(out)
    template = (Path(rlpost.__file__).parent / "starters" / f"{kind}.py").read_text(encoding="utf-8")
    shown = str(file) if len(file.parts) > 1 else f"./{file}"
    names = {
        f"./my_{kind}.py": shlex.quote(shown),
        f"my_{kind}": name,
        f"My{kind.capitalize()}": name.title().replace("_", ""),
    }
    text = re.sub("|".join(map(re.escape, names)), lambda found: names[found.group()], template)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; give another name, or --out FILE") from error
    return shlex.quote(shown)


def tell_starter(file: str, commands: Mapping[str, str], *, as_json: bool) -> None:
    """Print the path that `write_starter` returned, and the commands that use the file."""
    if as_json:
        named = {what.partition(" ")[0]: command for what, command in commands.items()}
        print_json({"file": shlex.split(file)[0], **named})
        return
    lines = [f"wrote {file}", *(f"{what}:  {command}" for what, command in commands.items())]
    print("\n".join(printable(line) for line in lines))


def env_to_test(name: str, overrides: list[str]) -> tuple[EnvSettings, tuple[str, ...]]:
    """The environment's settings and the splits to test, with its rewards imported.

    Raises ConfigError for a reward that is missing, or cannot be imported.
    """
    from rlpost.config.compose import check_scored, compose, environments_of
    from rlpost.rewards.functions import load_rewards

    settings = compose(EVAL, [*overrides, f"env={name}"]).settings.env
    check_scored(settings)
    for each in environments_of(settings):
        load_rewards(each)
    names_split = any(word.startswith("env.split=") for word in overrides)
    return settings, (settings.split,) if names_split else SPLITS


def _check_name(kind: str, name: str) -> None:
    """Raise ConfigError for a name that is not a Python name, or that would hide a module."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a Python name, which the file and its code need: use letters, digits and _")
    installed = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    if installed and not Path(f"{name}.py").exists():
        raise ConfigError(f"{name} is a Python module already, which {name}.py would hide; write my_{name}")
