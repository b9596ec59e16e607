"""`rlpost report`: writes one HTML page about a run, or about several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlpost.cli.completion import complete_run_or_sweep
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import App, AsJson
from rlpost.config.paths import PAGE
from rlpost.text import counted, printable, readable

EXAMPLES = """\
  rlpost report                    the newest run, in its folder
  rlpost report my-run --out page.html
  rlpost report run-1 run-2        both on one page, in ./report.html
  rlpost report my-sweep           its runs on one page, in its folder
"""

app = App()


@app.command("report", examples=EXAMPLES)
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or folders of runs and sweeps; default: the newest run.",
            autocompletion=complete_run_or_sweep,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Where the page is written.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file: verdict, diagnosis, curves, replies before and after, time, settings and commands of runs.

    It makes no request and needs no server: open it in a browser, or send it to somebody.
    """
    from rlpost.report.report import write_report
    from rlpost.runs.reader import find_run, find_sweep, runs_of

    folders = runs_of(runs) if runs else [find_run(None)]
    place = find_sweep(runs[0]) if runs and len(runs) == 1 else None
    file = out or ((place or folders[0]) / PAGE if place or len(folders) == 1 else Path(PAGE))
    found = write_report(folders, file, place)
    if as_json:
        print_json(found)
        return
    shown = f"{found['completions_shown']:,} of {found['completions']:,} completions"
    print(printable(f"{file}: {counted(len(folders), 'run')}, {shown}, {readable(found['bytes'])}"))
