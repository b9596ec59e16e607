"""`rlpost train`: one verb a training loop, all with the same flags."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.catalog import COMMANDS, Command, S
from rlpost.cli.completion import complete_training
from rlpost.cli.plan import compose_and_check, plan
from rlpost.cli.run_folder import choose_folder, run_to_resume
from rlpost.cli.terminal import StatusLine, print_error, print_json, saying_stopped, stdout_on_stderr
from rlpost.cli.usage import MULTIRUN_HELP, OVERRIDES_HELP, App, AsJson
from rlpost.config.paths import PAGE
from rlpost.errors import ConfigError, RlpostError
from rlpost.estimate.machine import ranks_started
from rlpost.runs.kept import check_kept, kept_settings
from rlpost.runs.reader import read_run
from rlpost.settings.commands import RunRequest
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed


RESUME_HELP = (
    "Go on with a run and its settings: from its latest checkpoint (auto begins where there is none), or from PATH."
)

app = App(help="Train a model.", epilog="Begin with: rlpost train grpo")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_training),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder itself.")]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run; its folder is runs/NAME.")]
Resume = Annotated[str | None, typer.Option(metavar="auto|latest|PATH", help=RESUME_HELP)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the settings, say what would run, stop.")]
Multirun = Annotated[bool, typer.Option("--multirun", "-m", help=MULTIRUN_HELP)]
Plain = Annotated[bool, typer.Option("--plain", help="Print one line per step instead of a live screen.")]


def add_verb(command: Command[Any]) -> None:
    """Make `rlpost train NAME` run the loop of `command`."""
    examples = "".join(f"  {example}\n" for example in command.examples)

    @app.command(command.verb.removeprefix("train "), examples=examples, short_help=command.short, help=command.doc)
    def train(
        context: typer.Context,
        overrides: Overrides = None,
        out: Out = None,
        name: Name = None,
        resume: Resume = None,
        dry_run: DryRun = False,
        multirun: Multirun = False,
        as_json: AsJson = False,
        plain: Plain = False,
    ) -> None:
        if ranks_started() > 1 and os.environ.get("RANK", "0") != "0":  # rank 0 has the settings and the terminal
            if multirun or dry_run:
                raise typer.Exit
            from rlpost.train.several_ranks import follow

            raise typer.Exit(follow())
        words, typed = overrides or [], ["rlpost", *context.obj]
        if multirun:
            from rlpost.cli.sweep import SweepOptions, sweep

            options = SweepOptions(out, name, resume, dry_run, as_json)
            raise typer.Exit(sweep(command, words, typed, options))
        composed, folder = resolve(command, words, typed, out, name, resume, as_json=as_json)
        if dry_run:
            planned = plan(composed, folder, resume)
            print_json(planned.as_dict()) if as_json else print("\n".join(planned.lines()))
            return
        request = RunRequest(folder, resume, composed.overrides, typed, composed.yaml, plain, composed.kept)
        if as_json:
            raise typer.Exit(train_and_print_json(command, composed.settings, request))
        raise typer.Exit(load_training(command)(composed.settings, request))


def offer_verbs(arguments: Sequence[str]) -> None:
    """Make the verbs of `rlpost train` those of `COMMANDS`, plugins included.

    Loads the plugins that a command line names where its verb is unknown. Raises what `without_plugins` raises.
    """
    named = [f"train {verb}" for word, verb in pairwise(arguments) if word == "train"]
    unknown = [verb for verb in named if verb not in (command.verb for command in COMMANDS)]
    if unknown and any(word.startswith("plugin=") for word in arguments):
        from rlpost.config.plugins import without_plugins

        without_plugins(arguments)
    app.registered_commands.clear()
    for command in COMMANDS:
        if command.verb.startswith("train "):
            add_verb(command)


def resolve(
    command: Command[Any],
    words: list[str],
    typed: list[str],
    out: Path | None,
    name: str | None,
    resume: str | None,
    *,
    as_json: bool,
) -> tuple[Composed[Any], Path]:
    """The settings, including the kept ones of a resumed run, and the folder of the run."""
    run = named = kept = None
    if resume is not None:
        run = run_to_resume(out, name, resume)
        if run is None:  # the settings given now say which run is meant
            stem = compose_and_check(command, words, as_json=as_json, typed=typed).stem
            run = named = choose_folder(None, None, resume, stem)
        kept = kept_settings(command, run, resume, words)
    composed = compose_and_check(command, words, kept, as_json=as_json, run=run if kept else None, typed=typed)
    if composed.environment_note:
        print(printable(composed.environment_note), file=sys.stderr)
    if changed := check_kept(composed, run, kept):
        print(printable(f"going on with other settings: {'; '.join(changed)}"), file=sys.stderr)
    return composed, named or choose_folder(out, name, resume, composed.stem)


def load_training(command: Command[S]) -> Callable[[S, RunRequest], int]:
    """The loop of `command`, imported: three seconds in which nothing else could say so. A report follows its end."""
    with saying_stopped("stopped before the training began"), StatusLine("loading torch"):
        loop = command.train

    def train(settings: Any, request: RunRequest) -> int:
        exit_code = loop(settings, request)
        if exit_code == 0 and settings.report.enabled:
            report(request.folder)
        return exit_code

    return train


def report(folder: Path) -> None:
    """Write the report of a finished run into its folder; a disk that refuses it is a warning."""
    from rlpost.report.report import write_report

    file = folder / PAGE
    try:
        write_report([folder], file)
    except ConfigError as error:
        print_error(f"the report was not written: {error}")
    else:
        print(printable(f"look at it:   {file}"))


def train_and_print_json(command: Command[S], settings: S, request: RunRequest) -> int:
    """Train with everything on stderr and the result on stdout; returns the exit code.

    Any other error than one of the settings is in the result too, and then raised.
    """
    started, error, exit_code = time.monotonic(), None, 0
    with stdout_on_stderr():
        train = load_training(command)
        try:
            exit_code = train(settings, request)
        except ConfigError:
            raise
        except RlpostError as raised:
            error, exit_code = raised, raised.exit_code
    seconds = time.monotonic() - started
    print_json(run_result(request.folder, exit_code, seconds, str(error) if error is not None else None))
    if error is not None:
        raise error
    return exit_code


offer_verbs(())


def run_result(folder: Path, exit_code: int, seconds: float, error: str | None = None) -> dict[str, Any]:
    """How a run ended, from its metrics.jsonl, under the names used there.

    `metrics` are those of the last step, `evaluation_before` and `evaluation_after` the held-out
    figures before the first step and of the latest evaluation; each is None where there is none.
    `seconds` is the time of this attempt, set-up included.
    """
    record = read_run(folder)
    steps = [row for row in record.metrics if row["step"] > 0]
    return {
        "folder": str(folder),
        "exit_code": exit_code,
        "error": error,
        "steps": record.steps_done,
        "seconds": round(seconds, 1),
        "metrics": _part(steps[-1], evaluation=False) if steps else None,
        "evaluation_before": _part(record.evaluation(before=True), evaluation=True),
        "evaluation_after": _part(record.evaluation(before=False), evaluation=True),
    }


def _part(row: dict[str, Any] | None, *, evaluation: bool) -> dict[str, Any] | None:
    """The evaluation's figures of a metrics row, or all the others."""
    if row is None:
        return None
    return {key: value for key, value in row.items() if key != "step" and key.startswith("eval/") == evaluation}
