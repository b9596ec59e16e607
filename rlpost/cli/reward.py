"""`rlpost reward`: what scores the replies to rows of one's own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from rlpost.cli.completion import complete_env
from rlpost.cli.starter_file import tell_starter, write_starter
from rlpost.cli.terminal import print_json, print_lines, table
from rlpost.cli.usage import App, AsJson

NEW_EXAMPLES = """\b
Examples:
  rlpost reward new my_reward
  rlpost reward new politeness --out rewards/politeness.py
"""

TEST_EXAMPLES = """\b
Examples:
  rlpost reward test ./my_reward.py:my_reward
  rlpost reward test ./my_reward.py:my_reward env.path=rows.jsonl
  rlpost reward test number --env gsm8k env.path=data/gsm8k
"""
FAULTS = 3

app = App(help="List, begin and attack rewards.")


@app.command("list", epilog="Example: rlpost train grpo env=dataset env.path=FILE env.reward=number")
def list_rewards(as_json: AsJson = False) -> None:
    """List the rewards that need no file, for env.reward of env=dataset."""
    from rlpost.rewards.builtin import BUILT_IN

    rewards = [(name, r.judge is not None, inspect.getdoc(r.function) or "") for name, r in BUILT_IN.items()]
    if as_json:
        print_json([{"name": n, "accuracy": accuracy, "description": doc} for n, accuracy, doc in rewards])
        return
    rows = [(name, "reward, accuracy" if accuracy else "reward", doc) for name, accuracy, doc in rewards]
    print_lines(table([("name", "gives", ""), *rows], indent=""))
    print("\nthe answer is the column env.answer_column; for a reward of your own: rlpost reward new NAME")


@app.command("new", epilog=NEW_EXAMPLES)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the function, and of the file NAME.py.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write this file instead of NAME.py.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented reward function that works at once."""
    file = write_starter("reward", name, out)
    use = f"rlpost train grpo env=dataset env.path=FILE env.reward={file}:{name}"
    tell_starter(file, {"try it": f"python {file}", "use it": use}, as_json=as_json)


@app.command("test", epilog=TEST_EXAMPLES, short_help="Attack a reward before it is trained on.")
def attack(
    name: Annotated[
        str, typer.Argument(metavar="REWARD", help="FILE.py:FUNCTION, or as rlpost reward list prints it.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[env.KEY=VALUE]...", help="Whose rows to attack with, and plugin=FILE."),
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The same as env=NAME.", autocompletion=complete_env)
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Rows to attack with, the first ones.", min=1)] = 8,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for a call.", min=0.01)] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Attack a reward with replies that should not pay, and with what breaks functions; exit 3 if it has a fault.

    Without rows of yours (env.path=FILE, or --env NAME) it is attacked with a few sums.
    """
    from rlpost.cli.reward_attack import attack_and_tell

    if not attack_and_tell(name, words or [], env, rows, timeout, as_json=as_json):
        raise typer.Exit(FAULTS)
