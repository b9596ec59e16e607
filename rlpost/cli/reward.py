"""`rlpost reward`: writes a reward to begin with, and attacks one before it is trained on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import EVAL
from rlpost.cli.env import tell_starter
from rlpost.cli.terminal import print_json, print_lines, table
from rlpost.cli.usage import App, AsJson
from rlpost.settings import OwnRowsSettings
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.rewards.attacks import Attack, Check

NEW_EXAMPLES = """\
  rlpost reward new my_reward
  rlpost reward new politeness --out rewards/politeness.py
"""
TEST_EXAMPLES = """\
  rlpost reward test ./my_reward.py:my_reward
  rlpost reward test ./my_reward.py:my_reward env.path=rows.jsonl
  rlpost reward test number env=gsm8k env.path=data/gsm8k
"""
FAULTS = 3
TIMEOUT_SECONDS = 10.0  # of one reward call, by default
NO_GOLD = "if no reply is right or wrong (length, style), leave out what compares with a right one: add env.gold=false"
NO_ANSWERS = "the rows have no answer; if they have, name its column with env.answer_column"
STYLES = {"ok": "green", "weak": "yellow", "fault": "red"}
app = App(help="Write and attack rewards.")


@app.command("new", examples=NEW_EXAMPLES)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the function and of its file, NAME.py.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write this file instead of NAME.py.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented reward function that works at once."""
    from rlpost.starters import write_starter

    file = write_starter("reward", name, out)
    use = f"rlpost train grpo env=dataset env.path=FILE env.reward={file}:{name}"
    tell_starter(file, {"try it": f"python {file}", "use it": use}, as_json=as_json)


@app.command("test", examples=TEST_EXAMPLES, short_help="Attack a reward before you train on it.")
def attack(
    name: Annotated[
        str, typer.Argument(metavar="REWARD", help="FILE.py:FUNCTION, or a name of rlpost config list reward.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[env.KEY=VALUE]...", help="Environment with the rows to attack with, and plugin=FILE."),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Number of rows to attack with.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Attack a reward with replies that should not pay, and with what breaks functions; exit 3 if it has a fault.

    Without rows of yours (env.path=FILE, or env=NAME) it is attacked with a few sums.
    """
    from rlpost.rewards.attacks import NEED_GOLD, Verdict, attack_reward
    from rlpost.rewards.builtin import BUILT_IN

    words = words or []
    with _quiet():
        planned, source = _attack(name, words, rows)
        checks = attack_reward(planned)
    left_out = [] if planned.has_gold else NEED_GOLD
    counts = {kind: sum(check.verdict.value == kind for check in checks) for kind in STYLES}
    if as_json:
        results = [asdict(c) | {"verdict": c.verdict.value, "reply": c.short_reply} for c in checks]
        print_json({"reward": name, "rows": source, "checks": results, "left_out": left_out, **counts})
    else:
        print(printable(f"{name} on {source}\n"))
        print_lines(_lines(checks))
        if left_out:
            why = "env.gold=false" if "env.gold=false" in words else NO_ANSWERS
            print(f"\nleft out, since they compare with a right reply ({why}): {', '.join(left_out)}")
        elif name not in BUILT_IN and any(c.verdict is Verdict.fault and c.name in NEED_GOLD for c in checks):
            print(f"\n{NO_GOLD}")
        total = ", ".join(counted(n, kind) if kind == "fault" else f"{n} {kind}" for kind, n in counts.items())
        print(f"\n{total}")
    if counts["fault"]:
        raise typer.Exit(FAULTS)


def _attack(name: str, words: Sequence[str], rows: int) -> tuple[Attack, str]:
    """The attack on the reward, and a description of its rows.

    Raises ConfigError for an unknown reward, environment or setting, DataError for rows that cannot be
    used or that lack a column the reward takes.
    """
    from rlpost.config.compose import compose
    from rlpost.config.overrides import parse_value, parse_words
    from rlpost.config.plugins import without_plugins
    from rlpost.config.schema import Key
    from rlpost.envs.build import build_env
    from rlpost.envs.proof import attack_of
    from rlpost.rewards.attacks import COLUMNS, sample_attack
    from rlpost.rewards.builtin import BUILT_IN
    from rlpost.rewards.functions import WorkerReward, check_columns, load_reward

    given = {word.key: word.text for word in parse_words(without_plugins(words))}
    limit = Key("env.reward_timeout_seconds", float, False, TIMEOUT_SECONDS)
    seconds = parse_value(limit, given.get(limit.name, str(limit.default)))
    reward = WorkerReward(name, name) if name in BUILT_IN else load_reward(name)
    assert isinstance(reward, WorkerReward)  # a name that is not built in is FILE.py:FUNCTION
    if given.keys() <= {"env.gold", limit.name}:
        check_columns(reward, COLUMNS, "the sample rows")
        attack = sample_attack(reward, seconds=seconds)
        attack = replace(attack, has_gold=given.get("env.gold") != "false")
        return attack, f"{len(attack.cases)} sample sums; for rows of your own: env.path=FILE, or env=NAME"

    # what is chosen comes after what is left to choose
    own_rows = ["env=dataset", f"env.reward={name}"] if given.get("env", "dataset") == "dataset" else []
    settings = compose(EVAL, ["env.split=train", *own_rows, *words]).settings.env
    shown = settings.path if isinstance(settings, OwnRowsSettings) else given["env"]
    if isinstance(settings, OwnRowsSettings) and "env.held_out" not in given:
        settings.held_out = 0.0  # attack with all rows
    with contextlib.closing(build_env(settings, num_prompts=1, group_size=1, seed=0)) as env:
        attack = attack_of(reward, env, rows, seconds)
    if reward.reference not in BUILT_IN:
        check_columns(reward, attack.columns, shown)
    return attack, f"{counted(len(attack.cases), 'row')} of {shown}, {settings.split} split"


def _lines(checks: Sequence[Check]) -> list[str]:
    """Each check on a line, a failed one with its reply below."""
    from rich.text import Text

    rows: list[tuple[str | Text, str, str]] = []
    for check in checks:
        verdict = check.verdict.value
        rows.append((Text(verdict, STYLES[verdict]), check.name, printable(check.reason)))
        if verdict != "ok" and check.reply is not None:
            rows.append(("", "", f"reply: {check.short_reply}"))
    return table(rows, indent=2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep log messages about failing calls off the screen: the checks report them."""
    handler = logging.NullHandler()
    logging.getLogger("rlpost").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("rlpost").removeHandler(handler)
