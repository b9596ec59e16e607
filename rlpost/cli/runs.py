"""`rlpost runs`: the runs on this machine, how they went, and how the one under way is going."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlpost.cli.completion import complete_run
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import App
from rlpost.config.paths import RUNS

LIST_EXAMPLES = """\b
Examples:
  rlpost runs list
  rlpost runs list experiments --json
"""
SHOW_EXAMPLES = """\b
Examples:
  rlpost runs show                   the newest
  rlpost runs show my-run
  rlpost runs show runs/my-run --json
"""
TAIL_EXAMPLES = """\b
Examples:
  rlpost runs tail -f                the newest, until it ends
  rlpost runs tail my-run --lines 50
"""
DIAGNOSE_EXAMPLES = """\b
Examples:
  rlpost runs diagnose               the newest
  rlpost runs diagnose my-run --json
"""
GC_EXAMPLES = """\b
Examples:
  rlpost runs gc                     what could go, and how much that is
  rlpost runs gc --yes
  rlpost runs gc --keep-state --keep-rollouts 7 --yes
"""
RUN_HELP = "A run's name or folder; the newest in runs/ where it is left out."

Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help=RUN_HELP, autocompletion=complete_run)]

app = App(help="List, show, follow, diagnose and clear away runs.")


@app.command("list", epilog=LIST_EXAMPLES, short_help="List runs, the newest first.")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder they lie in.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs: state, steps, last reward, held-out accuracy before and after; the newest first."""
    from rlpost.cli.run_report import list_lines, summary
    from rlpost.runs.reader import find_runs, read_run

    found = [] if folder == RUNS and not folder.exists() else find_runs(folder)
    records = [read_run(run) for run in found]
    if as_json:
        print_json([summary(record) for record in records])
    elif records:
        print("\n".join(list_lines(records, folder)))
    else:
        print(f"no runs in {folder}/ yet: rlpost train grpo begins one", file=sys.stderr)


@app.command("show", epilog=SHOW_EXAMPLES, short_help="Show what a run was asked and how it went.")
def show(
    run: Run = None, as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False
) -> None:
    """Show what was asked, versions, progress, curves, evaluations, checkpoints and size of a run."""
    from rlpost.cli.run_report import details, show_lines
    from rlpost.runs.reader import find_run, read_run

    record = read_run(find_run(run))
    if as_json:
        print_json(details(record))
    else:
        print("\n".join(show_lines(record)))


@app.command("tail", epilog=TAIL_EXAMPLES, short_help="Print a run's last steps, and follow it.")
def tail(
    run: Run = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends; Ctrl-C leaves.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", min=0, help="Steps to begin with.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the steps as in metrics.jsonl.")] = False,
) -> None:
    """Print the last steps of a run as training prints them; the run itself is not touched."""
    from rlpost.cli.run_tail import print_tail
    from rlpost.runs.reader import find_run

    print_tail(find_run(run), lines=lines, follow=follow, as_json=as_json)


@app.command("diagnose", epilog=DIAGNOSE_EXAMPLES, short_help="Say what a run's figures show to be wrong.")
def diagnose(
    run: Run = None, as_json: Annotated[bool, typer.Option("--json", help="Print the symptoms as JSON.")] = False
) -> None:
    """Say what is wrong with a run by its own figures and texts: each with its steps, the evidence and one fix.

    A training says the same when it first shows; diagnosis.on_alarm=checkpoint|stop makes it do something.
    """
    from rlpost.cli.run_report import diagnosis_lines, symptoms
    from rlpost.runs.reader import find_run, read_run

    folder = find_run(run)
    record = read_run(folder)
    found, steps = symptoms(folder)
    if as_json:
        told = [{"name": s.name, "steps": list(s.steps), "evidence": s.evidence, "fix": s.fix} for s in found]
        ended = {"state": record.state.value, "error": record.error or None}
        print_json({"run": str(folder), **ended, "steps": steps, "symptoms": told})
    else:
        print("\n".join(diagnosis_lines(record, found, steps)))


@app.command("gc", epilog=GC_EXAMPLES, short_help="Remove what runs no longer need; says first what that is.")
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without this it is only said what would go.")] = False,
    keep_unstarted: Annotated[bool, typer.Option(help="Keep runs that never trained a step.")] = False,
    keep_checkpoints: Annotated[bool, typer.Option(help="Keep checkpoints other than the last and the best.")] = False,
    keep_state: Annotated[bool, typer.Option(help="Keep what finished runs need to go on with more steps.")] = False,
    keep_rollouts: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Keep the rollouts of so many days.", show_default=True)
    ] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Remove from runs/, by rule, what is no longer needed: runs that never trained a step, checkpoints other than

    the last and the best, what finished runs would need to go on, and old rollouts. A run in use is left alone.
    """
    from rlpost.cli.runs_gc import collect
    from rlpost.runs.gc import Rule

    kept = {Rule.unstarted: keep_unstarted, Rule.checkpoint: keep_checkpoints, Rule.state: keep_state}
    rules = frozenset(rule for rule in Rule if not kept.get(rule, False))
    collect(rules, keep_rollouts, do_it=yes, as_json=as_json)
