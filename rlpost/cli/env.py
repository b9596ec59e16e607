"""`rlpost env`: the environments, their settings, and the proof that their rewards are right."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.starter_file import write_starter
from rlpost.cli.terminal import fitted, print_json, table
from rlpost.cli.usage import JSON_HELP, Verbs
from rlpost.config.keys import as_text, docs_of
from rlpost.config.registry import EVAL, TRAIN_GRPO, describe, options
from rlpost.errors import ConfigError
from rlpost.settings import EnvSettings
from rlpost.settings.checks import MISSING
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.envs.proof import Proof

FAILED = 3
SPLITS = ("train", "test")
NEEDED = "(needed)"  # in place of a default, for a key that has none

TEST_EXAMPLES = """\b
Examples:
  rlpost env test arithmetic
  rlpost env test gsm8k env.path=data/gsm8k
  rlpost env test my_env plugin=./my_env.py
"""
SHOW_EXAMPLES = """\b
Examples:
  rlpost env show gsm8k
  rlpost env show my_env plugin=./my_env.py
"""

app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="List, show, test and begin environments.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="As rlpost env list prints it.")]
Plugins = Annotated[list[str] | None, typer.Argument(metavar="[plugin=FILE]", help="Files that add environments.")]
AsJson = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.command("list")
def list_envs(words: Plugins = None, as_json: AsJson = False) -> None:
    """List the environments."""
    load_plugins_of(words or [], "list")
    rows = [(name, describe("env", name)) for name in options("env")]
    if as_json:
        print_json(dict(rows))
    else:
        print("\n".join(fitted(printable(line)) for line in table(rows, indent="")))


@app.command("show", epilog=SHOW_EXAMPLES)
def show(name: Name, words: Plugins = None, as_json: AsJson = False) -> None:
    """Print what an environment is and its settings: type, default, meaning."""
    from rlpost.config.compose import merge_all
    from rlpost.config.provenance import owner_of, value_of

    load_plugins_of(words or [], "show")
    merged = merge_all(TRAIN_GRPO, [f"env={name}"])
    keys = [key for key in merged.keys if key.name.startswith("env.")]
    settings = owner_of(merged, keys[0].name)
    docs = docs_of(settings)
    about = inspect.getdoc(settings) or ""
    if as_json:
        print_json(
            {
                "name": name,
                "description": about,
                "keys": [
                    {"key": k.name, "type": k.type_name, "default": _default(value_of(merged, k.name)), "meaning": meaning}
                    for k in keys
                    for meaning in [docs.get(k.name.removeprefix("env."), "")]
                ],
            }
        )
        return
    print(printable(f"{name}: {about}\n"))
    rows = [("key", "type", "default", "")]
    for key in keys:
        value = _default(value_of(merged, key.name))
        meaning = docs.get(key.name.removeprefix("env."), "")
        rows.append((key.name, key.type_name, NEEDED if value is None and _is_needed(merged, key.name) else "", meaning))
    print("\n".join(fitted(printable(line)) for line in table(rows)))
