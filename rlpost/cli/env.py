"""`rlpost env`: the environments, their settings, and the proof that their rewards are right."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated

import typer

from rlpost.cli.terminal import table
from rlpost.cli.usage import Verbs
from rlpost.config.keys import docs_of
from rlpost.config.registry import EVAL, TRAIN_GRPO, description, options
from rlpost.errors import ConfigError
from rlpost.settings import EnvSettings
from rlpost.text import printable

FAILED = 3
SPLITS = ("train", "test")

TEST_EXAMPLES = """\b
Examples:
  rlpost env test arithmetic
  rlpost env test gsm8k env.path=data/gsm8k
"""

app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="List, show and test environments.")


@app.command("list")
def list_envs() -> None:
    """List the environments."""
    print("\n".join(table([(name, description(file)) for name, file in options("env").items()], indent="")))


@app.command("show", epilog="Example: rlpost env show gsm8k")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="As rlpost env list prints it.")]) -> None:
    """Print what an environment is and its settings: type, default, meaning."""
    from rlpost.config.compose import compose
    from rlpost.config.overrides import as_text

    composed = compose(TRAIN_GRPO, [f"env={name}"])
    env = composed.settings.env
    docs = docs_of(type(env))
    print(f"{name}: {inspect.getdoc(type(env))}\n")
    rows = [("key", "type", "default", "")]
    for key in composed.keys:
        if key.name.startswith("env."):
            field = key.name.removeprefix("env.")
            rows.append((key.name, key.type_name, as_text(getattr(env, field)), docs.get(field, "")))
    print("\n".join(table(rows)))


@app.command("test", epilog=TEST_EXAMPLES, short_help="Prove that the rewards are right.")
def test(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As rlpost env list prints it.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="env.KEY=VALUE", help="Settings of the environment.")
    ] = None,
) -> None:
    """Prove that every gold answer earns full marks and corrupted ones do not; exit 3 if not so.

    Both splits are tested unless env.split names one.
    """
    settings, splits = env_to_test(name, overrides or [])
    from rlpost.envs.build import build_env
    from rlpost.envs.proof import prove

    failed = False
    for split in splits:
        env = build_env(dataclasses.replace(settings, split=split), num_prompts=1, group_size=1, seed=0)
        proof = prove(env)
        failed = failed or bool(proof.failures)
        print(f"{name}, {split} split")
        print("\n".join(f"  {printable(line)}" for line in proof.lines()))
    if failed:
        raise typer.Exit(FAILED)


def env_to_test(name: str, overrides: list[str]) -> tuple[EnvSettings, tuple[str, ...]]:
    """The environment's settings and the splits to test. Raises ConfigError for a setting of something else."""
    from rlpost.config.compose import compose

    for word in overrides:
        if "=" in word and not word.startswith("env."):
            raise ConfigError(f"{word} is no setting of an environment: rlpost env test takes env.KEY=VALUE only")
    settings = compose(EVAL, [*overrides, f"env={name}"]).settings.env
    asked = any(word.startswith("env.split=") for word in overrides)
    return settings, (settings.split,) if asked else SPLITS
