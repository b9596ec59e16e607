"""`rlpost eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.cli.checks import compose_and_check
from rlpost.cli.completion import complete_eval
from rlpost.cli.sweep import sweep
from rlpost.cli.sweep_jobs import SweepOptions
from rlpost.cli.terminal import print_json, show_status, stdout_on_stderr
from rlpost.cli.usage import JSON_HELP, MULTIRUN_HELP, OVERRIDES_HELP
from rlpost.errors import ConfigError
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.evaluate import EvalResult
    from rlpost.settings import EvalSettings

EXAMPLES = """\b
Examples:
  rlpost eval
  rlpost eval model=runs/my-run env=gsm8k env.limit=64
  rlpost eval model=runs/my-run --json > result.json
  rlpost eval -m model=smollm2,runs/my-run
"""


def evaluate(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_eval),
    ] = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help=MULTIRUN_HELP)] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With -m: the folder of the sweep itself.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="With -m: that folder is runs/NAME.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto", help="With -m: leave out the jobs that are done there already.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With -m: check and list the jobs, stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Score a model on an environment's held-out prompts, greedily unless sampling.temperature says."""
    from rlpost.config.registry import EVAL

    words = overrides or []
    if multirun:
        options = SweepOptions(out, name, resume, dry_run=dry_run, as_json=as_json)
        raise typer.Exit(sweep(EVAL, words, ["rlpost", *context.obj], options))
    for flag, given in (("--out", out), ("--name", name), ("--resume", resume), ("--dry-run", dry_run or None)):
        if given is not None:
            raise ConfigError(f"{flag} belongs to a sweep of several evaluations: add -m, or leave it out")
    settings = compose_and_check(EVAL, words, as_json=as_json).settings
    if as_json:
        with stdout_on_stderr():
            result = score(settings)
        print_json(result.as_dict())
    else:
        print("\n".join(printable(line) for line in score(settings).lines()))


def score(settings: EvalSettings) -> EvalResult:
    """The evaluation, with its progress on stderr where a person is looking."""
    show_status(f"loading {settings.model.path} ...")
    try:
        from rlpost.assemble import evaluate_command

        return evaluate_command(settings, lambda done, total: show_status(f"evaluating: {done} of {total} prompts"))
    finally:
        show_status("")
