"""`rlpost runs`: lists, shows and follows the runs on this machine, and removes what they no longer need."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.cli.completion import complete_run, complete_run_or_sweep
from rlpost.cli.terminal import output_width, print_json
from rlpost.cli.usage import App, AsJson
from rlpost.cli.views import StepText, candidate_lines, run_list, run_page, table
from rlpost.config.paths import RUNS
from rlpost.record import WORDS, MetricsFile
from rlpost.runs.reader import RunRecord, RunState, find_run, find_runs, find_sweep, is_running, read_run
from rlpost.text import counted, printable, readable

if TYPE_CHECKING:
    from rlpost.runs.removal import Removal

LIST_EXAMPLES = """\
  rlpost runs list
  rlpost runs list experiments --json
"""
IN_STEPS = ("accuracy", "tokens", "lag", "ess", "gap", "grad", "rollout", "wait", "idle")  # words of a step's line
SHOW_EXAMPLES = f"""\
  rlpost runs show                   the newest
  rlpost runs show my-run --json
  rlpost runs show my-run -f         its steps, until it ends

\b
Words of a step:
  {f"{chr(10)}  ".join(f"{word:<9} {WORDS[word]}" for word in IN_STEPS)}
"""
GC_EXAMPLES = """\
  rlpost runs gc                     what could go, and how much that is
  rlpost runs gc --yes
  rlpost runs gc --keep-state --keep-rollouts 7 --yes
"""
RUN_HELP = "A run's name or folder; default: the newest in runs/."
NewestRun = Annotated[str | None, typer.Argument(metavar="[RUN]", help=RUN_HELP, autocompletion=complete_run)]
POLL_SECONDS = 0.5
LAST_STEPS = 10  # that are printed before a run is followed
app = App(help="List, show, compare and clean up runs.")


@app.command("list", examples=LIST_EXAMPLES, short_help="List runs, the newest first.")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder that holds the runs.")] = RUNS,
    as_json: AsJson = False,
) -> None:
    """List runs: state, steps, last reward, held-out accuracy before and after; the newest first."""
    records = [read_run(run) for run in ([] if folder == RUNS and not folder.exists() else find_runs(folder))]
    if as_json:
        print_json([record.summary() for record in records])
    elif records:
        print("\n".join(run_list(records, folder)))
    else:
        print(f"no runs in {folder}/ yet: rlpost train grpo begins one", file=sys.stderr)


@app.command("show", examples=SHOW_EXAMPLES, short_help="Show a run's request, results and problems, or follow it.")
def show(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's or sweep's name or folder; default: the newest run.",
            autocompletion=complete_run_or_sweep,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print the steps until the run ends; Ctrl-C leaves.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", metavar="N", min=0, help="Print the last N steps instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's settings, versions, progress, curves, evaluations, problems, checkpoints and size.

    A problem has its steps, the evidence in figures or texts, and one fix. Of a sweep: the mean of each combination of
    settings over its seeds, and whether one is better.
    """
    if follow or lines is not None:
        print_steps(find_run(run), LAST_STEPS if lines is None else lines, follow=follow, as_json=as_json)
    elif run is not None and (sweep := find_sweep(run)):
        from rlpost.evaluation.sweeps import read_sweep

        found = read_sweep(sweep)
        print_json(found.as_dict()) if as_json else print("\n".join(candidate_lines(found, output_width(0) or None)))
    else:
        record = read_run(find_run(run))
        print_json(record.details()) if as_json else print("\n".join(run_page(record)))


@app.command("gc", examples=GC_EXAMPLES, short_help="Remove what runs no longer need; lists it first.")
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only list what would be removed.")] = False,
    keep_unstarted: Annotated[bool, typer.Option(help="Keep runs that never trained a step.")] = False,
    keep_checkpoints: Annotated[bool, typer.Option(help="Keep checkpoints other than the last and the best.")] = False,
    keep_state: Annotated[bool, typer.Option(help="Keep the optimizer state of finished runs.")] = False,
    keep_rollouts: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Keep rollouts of the last DAYS days.", show_default=True)
    ] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Remove from runs/, by rule, what is no longer needed: runs that never trained a step, checkpoints other than

    the last and the best, what finished runs would need to go on, and old rollouts. A run in use is left alone.
    """
    from rlpost.runs.removal import Rule, removals, remove

    kept = {Rule.unstarted: keep_unstarted, Rule.checkpoint: keep_checkpoints, Rule.state: keep_state}
    found = removals(RUNS, frozenset(rule for rule in Rule if not kept.get(rule, False)), keep_rollouts)
    listed = [removal for removal in found if remove(removal)] if yes else found
    total = sum(removal.bytes for removal in listed)
    if as_json:
        print_json({"bytes": total, "removed": yes, "items": [removal.as_dict() for removal in listed]})
    elif listed:
        print(f"removed {readable(total)}:" if yes else f"would remove {readable(total)}; add --yes to do it:")
        print("\n".join(_removed(listed)))
    else:
        print(f"nothing to remove in {RUNS}/")


# What the verbs print


def print_steps(folder: Path, last: int, *, follow: bool, as_json: bool) -> None:
    """Print the `last` steps of a run as training prints them, or as in metrics.jsonl; then more until it ends."""
    file = MetricsFile(folder / "metrics.jsonl")
    as_text = json.dumps if as_json else StepText(read_run(folder).total_steps)
    for text in deque((as_text(row) for row in file.new_rows()), maxlen=last):
        print(text)
    sys.stdout.flush()
    while follow:
        running = is_running(folder)  # before reading, so that the last rows are read too
        for row in file.new_rows():
            print(as_text(row), flush=True)
        if not running:
            break
        time.sleep(POLL_SECONDS)
    if remark := _ending(read_run(folder), follow=follow):
        print(printable(remark), file=sys.stderr)


def _ending(record: RunRecord, *, follow: bool) -> str:
    """The line after the steps; empty for a run that is well and not followed."""
    remarks = [] if record.metrics else ["no step is recorded yet"]
    if follow or record.state in (RunState.failed, RunState.killed):
        remarks.append(f"{record.state.value} {record.error}".rstrip())
    return f"{record.folder}: {'; '.join(remarks)}" if remarks else ""


def _removed(listed: Sequence[Removal]) -> list[str]:
    """A line for each removal; the rollouts of a run share one."""
    rows = []
    for (run, why), found in groupby(listed, key=lambda removal: (removal.run, removal.rule.value)):
        group = list(found)
        if group[0].rule.name == "rollouts":
            size = readable(sum(removal.bytes for removal in group))
            rows.append((size, why, printable(f"{run}/rollouts: {counted(len(group), 'file')}")))
        else:
            rows += [(readable(each.bytes), why, printable(str(each.removed))) for each in group]
    return table(rows, output_width(0) or None, right=[0], cuttable=[2])
