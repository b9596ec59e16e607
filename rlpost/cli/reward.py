"""`rlpost reward`: lists rewards, writes one to begin with, and attacks one before it is trained on."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_env
from rlpost.cli.env import tell_starter, write_starter
from rlpost.cli.terminal import GREEN, RED, YELLOW, painted, print_json, print_lines
from rlpost.cli.usage import App, AsJson
from rlpost.cli.views import table
from rlpost.errors import ConfigError
from rlpost.settings import EnvSettings, OwnRowsSettings
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.rewards.attacks import Attack, Check
    from rlpost.rewards.functions import WorkerReward

NEW_EXAMPLES = """\
  rlpost reward new my_reward
  rlpost reward new politeness --out rewards/politeness.py
"""
TEST_EXAMPLES = """\
  rlpost reward test ./my_reward.py:my_reward
  rlpost reward test ./my_reward.py:my_reward env.path=rows.jsonl
  rlpost reward test number --env gsm8k env.path=data/gsm8k
"""
FAULTS = 3
REPLY_SHOWN = 60  # characters
NO_GOLD = "if no reply is right or wrong (length, style), leave out what compares with a right one: add env.gold=false"
NO_ANSWERS = "the rows have no answer; if they have, name its column with env.answer_column"
STYLES = {"ok": GREEN, "weak": YELLOW, "fault": RED}
app = App(help="List, write and attack rewards.")


@app.command("list", epilog="Example: rlpost train grpo env=dataset env.path=FILE env.reward=number")
def list_rewards(as_json: AsJson = False) -> None:
    """List the rewards that need no file, for env.reward of env=dataset."""
    from rlpost.rewards.builtin import BUILT_IN

    rewards = [(name, r.measures_accuracy, inspect.getdoc(r.function) or "") for name, r in BUILT_IN.items()]
    if as_json:
        print_json([{"name": n, "accuracy": accuracy, "description": doc} for n, accuracy, doc in rewards])
        return
    rows = [(name, "reward, accuracy" if accuracy else "reward", doc) for name, accuracy, doc in rewards]
    print_lines(table([("name", "gives", ""), *rows]))
    print("\nthe answer is the column env.answer_column; for a reward of your own: rlpost reward new NAME")


@app.command("new", examples=NEW_EXAMPLES)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the function and of its file, NAME.py.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write this file instead of NAME.py.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented reward function that works at once."""
    file = write_starter("reward", name, out)
    use = f"rlpost train grpo env=dataset env.path=FILE env.reward={file}:{name}"
    tell_starter(file, {"try it": f"python {file}", "use it": use}, as_json=as_json)


@app.command("test", examples=TEST_EXAMPLES, short_help="Attack a reward before you train on it.")
def attack(
    name: Annotated[
        str, typer.Argument(metavar="REWARD", help="FILE.py:FUNCTION, or a name that rlpost reward list prints.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[env.KEY=VALUE]...", help="Environment with the rows to attack with, and plugin=FILE."),
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The same as env=NAME.", autocompletion=complete_env)
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Number of rows to attack with.", min=1)] = 8,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Timeout of one reward call.", min=0.01)] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Attack a reward with replies that should not pay, and with what breaks functions; exit 3 if it has a fault.

    Without rows of yours (env.path=FILE, or --env NAME) it is attacked with a few sums.
    """
    from rlpost.rewards.attacks import NEED_GOLD, Verdict, attack_reward
    from rlpost.rewards.builtin import BUILT_IN

    words = words or []
    with _quiet():
        planned, source = _attack(name, words, env, rows, timeout)
        checks = attack_reward(planned)
    left_out = [] if planned.has_gold else list(NEED_GOLD)
    counts = {kind: sum(check.verdict.value == kind for check in checks) for kind in STYLES}
    if as_json:
        results = [{"name": c.name, "verdict": c.verdict.value, "reason": c.reason, "reply": _short(c)} for c in checks]
        print_json({"reward": name, "rows": source, "checks": results, "left_out": left_out, **counts})
    else:
        print(printable(f"{name} on {source}\n"))
        print("\n".join(_lines(checks)))
        if left_out:
            why = "env.gold=false" if "env.gold=false" in words else NO_ANSWERS
            print(f"\nleft out, since they compare with a right reply ({why}): {', '.join(left_out)}")
        elif name not in BUILT_IN and any(c.verdict is Verdict.fault and c.name in NEED_GOLD for c in checks):
            print(f"\n{NO_GOLD}")
        total = ", ".join(counted(n, kind) if kind == "fault" else f"{n} {kind}" for kind, n in counts.items())
        print(f"\n{total}")
    if counts["fault"]:
        raise typer.Exit(FAULTS)


def _attack(name: str, words: Sequence[str], env: str | None, rows: int, seconds: float) -> tuple[Attack, str]:
    """The attack on the reward, and a description of its rows.

    Raises ConfigError for an unknown reward, environment or setting, DataError for rows that cannot be
    used or that lack a column the reward takes.
    """
    from rlpost.config.compose import compose
    from rlpost.config.plugins import without_plugins
    from rlpost.rewards.attacks import COLUMNS, sample_attack
    from rlpost.rewards.functions import check_columns

    for word in words:
        if not word.startswith(("env=", "env.", "plugin=")):
            raise ConfigError(
                f"{word} is not a setting of an environment: write env=NAME, env.KEY=VALUE or plugin=FILE"
            )
    chosen = [*words, *([f"env={env}"] if env else [])]
    settings = [word for word in chosen if not word.startswith(("plugin=", "env.gold="))]
    without_plugins([word for word in chosen if word.startswith("plugin=")])
    reward = _in_a_process(name)
    if not settings:
        check_columns(reward, COLUMNS, "the sample rows")
        attack = sample_attack(reward, seconds=seconds)
        if "env.gold=false" in chosen:
            attack = replace(attack, has_gold=False)
        return attack, f"{len(attack.cases)} sample sums; for rows of your own: env.path=FILE, or --env NAME"
    if not any(word.startswith("env=") for word in settings):
        chosen.append("env=dataset")
    if "env=dataset" in chosen and not any(word.startswith("env.reward=") for word in settings):
        chosen.append(f"env.reward={name}")
    return _attack_with(reward, compose(EVAL, chosen).settings.env, chosen, rows, seconds)


def _attack_with(
    reward: WorkerReward, settings: EnvSettings, words: Sequence[str], rows: int, seconds: float
) -> tuple[Attack, str]:
    """The attack with rows of the environment of `settings`, which `words` chose, and a description of them."""
    from rlpost.envs.build import build_env
    from rlpost.envs.proof import cases_of
    from rlpost.rewards.attacks import Attack
    from rlpost.rewards.builtin import BUILT_IN
    from rlpost.rewards.functions import check_columns

    if not any(word.startswith("env.split=") for word in words):
        settings.split = "train"
    named = next(word.removeprefix("env=") for word in words if word.startswith("env="))
    if isinstance(settings, OwnRowsSettings):
        named = settings.path
        if not any(word.startswith("env.held_out=") for word in words):
            settings.held_out = 0.0  # attack with all rows
    with contextlib.closing(build_env(settings, num_prompts=1, group_size=1, seed=0)) as env:
        cases, has_gold = cases_of(env, rows), env.has_gold
    columns = list(dict.fromkeys(str(column) for case in cases for column in case.columns))
    if reward.reference not in BUILT_IN:
        check_columns(reward, columns, named)
    description = f"{counted(len(cases), 'row')} of {named}, {settings.split} split"
    return Attack(reward, cases, columns, seconds, has_gold), description


def _in_a_process(name: str) -> WorkerReward:
    """The reward in a process of its own, also a built-in one."""
    from rlpost.rewards.builtin import BUILT_IN
    from rlpost.rewards.functions import WorkerReward, load_reward

    reward = WorkerReward(name, name) if name in BUILT_IN else load_reward(name)
    assert isinstance(reward, WorkerReward)  # a name that is not built in is FILE.py:FUNCTION
    reward.limit = "--timeout"
    return reward


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    """Each check on a line, a failed one with its reply below; checks that fail alike share a line."""
    from rlpost.rewards.attacks import failing_alike

    checks = failing_alike(checks)
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = painted(check.verdict.value.ljust(5), STYLES[check.verdict.value], sys.stdout)
        yield f"  {verdict}  {check.name.ljust(width)}  {printable(check.reason)}"
        if check.verdict.value != "ok" and check.reply is not None:
            yield f"         {' ' * width}  reply: {_short(check)}"


def _short(check: Check) -> str | None:
    """The reply as a Python string, the middle of a long one left out."""
    reply = check.reply
    if reply is None:
        return None
    half = REPLY_SHOWN // 2
    cut = reply if len(reply) <= REPLY_SHOWN else f"{reply[:half]}...{reply[-half:]}"
    return f"{cut!a}" + (f" ({len(reply)} characters)" if len(reply) > REPLY_SHOWN else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep log messages about failing calls off the screen: the checks report them."""
    handler = logging.NullHandler()
    logging.getLogger("rlpost").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("rlpost").removeHandler(handler)
