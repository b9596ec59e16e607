"""`rlpost env`: lists environments, shows their settings, proves that their rewards are right, and begins a new one.

A starter is a copy of a file in rlpost/starters with the user's own names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import keyword
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rlpost
from rlpost.catalog import EVAL, TRAIN_GRPO
from rlpost.cli.completion import complete_env, complete_env_settings
from rlpost.cli.terminal import output_width, paragraph, print_json, print_lines, stdout_on_stderr
from rlpost.cli.usage import App, AsJson
from rlpost.cli.views import table
from rlpost.config.schema import as_text, class_of, describe, options
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded
from rlpost.settings import EnvSettings
from rlpost.settings.base import MISSING
from rlpost.text import printable, width_of

if TYPE_CHECKING:
    from rlpost.envs.proof import Proof

FAILED = 3
SPLITS = ("train", "test")
NEEDED = "(needed)"  # in place of a default, for a key that has none
TEST_EXAMPLES = """\
  rlpost env test arithmetic
  rlpost env test gsm8k env.path=data/gsm8k
  rlpost env test my_env plugin=./my_env.py
"""
NEW_EXAMPLES = """\
  rlpost env new my_env
  rlpost env new maze --out envs/maze.py
"""
SHOW_EXAMPLES = """\
  rlpost env show gsm8k
  rlpost env show my_env plugin=./my_env.py
"""
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="An environment that rlpost env list prints.", autocompletion=complete_env)
]
Plugins = Annotated[list[str] | None, typer.Argument(metavar="[plugin=FILE]...", help="Files that add environments.")]
app = App(help="List, show, test and write environments.")


@app.command("list", epilog="Example: rlpost env list plugin=./my_env.py")
def list_envs(words: Plugins = None, as_json: AsJson = False) -> None:
    """List the environments."""
    _take_plugins(words or [], "list")
    rows = [(name, describe("env", name)) for name in options("env")]
    if as_json:
        print_json([{"name": name, "description": about} for name, about in rows])
    else:
        print_lines(table(rows))


@app.command("show", examples=SHOW_EXAMPLES)
def show(name: Name, words: Plugins = None, as_json: AsJson = False) -> None:
    """Print what an environment is and its settings: type, default, meaning."""
    from rlpost.config.compose import merge_all
    from rlpost.config.explain import value_of

    _take_plugins(words or [], "show")
    merged = merge_all(TRAIN_GRPO, [f"env={name}"])
    keys = [key for key in merged.keys if key.name.startswith("env.")]
    values = {key.name: value_of(merged, key.name) for key in keys}
    about = inspect.getdoc(class_of("env", name)) or ""
    meanings = {key.name: key.doc for key in keys}
    if as_json:
        described = [
            {
                "key": key.name,
                "type": key.type_name,
                "needed": values[key.name] == MISSING,
                "default": None if values[key.name] in (None, MISSING) else as_text(values[key.name]),
                "meaning": meanings[key.name],
            }
            for key in keys
        ]
        print_json({"name": name, "description": about, "keys": described})
    else:
        rows = [(k.name, k.type_name, NEEDED if values[k.name] == MISSING else as_text(values[k.name])) for k in keys]
        print(printable("\n".join([f"{name}: {about}", "", *key_lines(rows, list(meanings.values()))])))


@app.command("test", examples=TEST_EXAMPLES, short_help="Check rewards with gold and wrong answers.")
def test(
    name: Name,
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

    Raises ConfigError for a name that Python or rlpost cannot use and for a file that exists, DataError if the
    file cannot be written.
    """
    _check_name(kind, name)
    file = Path(f"{name}.py") if out is None else expanded(out)
    template = (Path(rlpost.__file__).parent / "starters" / f"{kind}.py").read_text(encoding="utf-8")
    shown = str(file) if len(file.parts) > 1 else f"./{file}"
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    names = {
        f"./my_{kind}.py": shlex.quote(shown),
        f"python my_{kind}.py": f"python {shlex.quote(str(file))}",
        f"my_{kind}": name,
        f"My{kind.capitalize()}": camel,
    }
    text = re.sub("|".join(map(re.escape, names)), lambda found: names[found.group()], template)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already: give another name, or --out FILE") from None
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}; give --out FILE") from error
    return shlex.quote(shown)


def tell_starter(file: str, commands: Mapping[str, str], *, as_json: bool) -> None:
    """Print the path that `write_starter` returned, and the commands that use the file."""
    if as_json:
        named = {what.partition(" ")[0]: command for what, command in commands.items()}
        print_json({"file": shlex.split(file)[0], **named})
        return
    lines = [f"wrote {file}", *(f"{what}:  {command}" for what, command in commands.items())]
    print("\n".join(printable(line) for line in lines))


def _take_plugins(words: list[str], verb: str) -> None:
    """Load the plugins that `words` name. Raises ConfigError for any other word."""
    from rlpost.config.plugins import without_plugins

    if wrong := without_plugins(words):
        raise ConfigError(f"{wrong[0]} is not a plugin: rlpost env {verb} takes plugin=FILE only")


def env_to_test(name: str, overrides: list[str]) -> tuple[EnvSettings, tuple[str, ...]]:
    """The environment's settings and the splits to test, with its rewards imported.

    Raises ConfigError for a reward that is missing, or cannot be imported.
    """
    from rlpost.config.compose import compose, environments_of
    from rlpost.rewards.functions import load_rewards

    settings = compose(EVAL, [*overrides, f"env={name}"]).settings.env
    for each in environments_of(settings):
        if not each.scores:
            raise ConfigError("env.reward has no value: give env.reward=...; it takes FILE.py:FUNCTION, or a name")
        load_rewards(each)
    names_split = any(word.startswith("env.split=") for word in overrides)
    return settings, (settings.split,) if names_split else SPLITS


def key_lines(rows: Sequence[tuple[str, str, str]], meanings: Sequence[str]) -> list[str]:
    """Key, type and default as columns, with the meaning beside them, or below them on a narrow screen."""
    header = ("key", "type", "default")
    wide = table([(*header, ""), *((*row, meaning) for row, meaning in zip(rows, meanings, strict=True))], indent=2)
    width = output_width(0)
    if not width or max(map(width_of, wide)) <= width:
        return wide
    first, *narrow = table([header, *rows], indent=2)
    lines = [first]
    for line, meaning in zip(narrow, meanings, strict=True):
        lines += [line, *(f"      {part}" for part in paragraph(meaning, width - 6))]
    return lines


def _check_name(kind: str, name: str) -> None:
    """Raise ConfigError for a name that is not a Python name, or that would hide a module."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, flags=re.ASCII) or keyword.iskeyword(name):
        fitting = re.sub(r"\W+", "_", name.removesuffix(".py"), flags=re.ASCII).strip("_").lower() or kind
        fitting = fitting if fitting[0].isalpha() and not keyword.iskeyword(fitting) else f"my_{fitting}"
        raise ConfigError(f"{name!r} is not a Python name, which the file and its code need; write {fitting}")
    installed = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    if installed and not Path(f"{name}.py").exists():
        raise ConfigError(f"{name} is a Python module already, which {name}.py would hide; write my_{name}")
